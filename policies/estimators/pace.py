"""How fast engines take prompts in: seconds per token of prefill, over the times in which some prompt was pending.

A token attends to all before it, so a long prompt takes more than its share: `prefill_tokens` counts that in, and a prompt of
ATTENTION_TOKENS costs half as much again as its tokens alone. What is thought to be in an engine's prefix cache is no work,
and counts for nothing: a prompt that is soon taken in because it was there must not teach that prompts are cheap.

A single first token says little: it waited for a step under way and for prompts before it. So tokens are counted from the
moment at which an idle engine is sent a prompt, in stretches of STRETCH_S at least, or until nothing is pending; and a
stretch is believed by its tokens, since a short one is mostly the engine's steps. Independent of the sizing policy in force;
where no client streams and nobody ever sees a first token, what that policy makes of whole answers is taken (`suppose`).

An answer that is told whole shows no first token. Its prompt is pending until one that was sent after it shows its own, since
engines take prompts in as they come; and at most, like any other, for `taken_in_factor` times what was predicted when it was
sent, behind what was pending then. When that time passes nothing was seen: the stretch under way teaches nothing, or the
pace would follow its own predictions. A first token later than that says how slow the engine has become.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heappop, heappush

from policies.vocabulary import Work

ATTENTION_TOKENS = 32_768
"""Tokens before a token at which attention costs what everything else does. By the measured profiles 10,000 to 30,000 for
models of 8 to 32 billion parameters, 100,000 for 70 billion: in between, since no metric tells."""
STRETCH_S = 0.5
LEAST_TOKENS = 512
BELIEVED_TOKENS = 20_000
"""A stretch of so many tokens counts as much as all before it."""

TAKEN_IN_FACTOR = 2.0
"""Predictions are off by less, nearly always."""
STREAMED_FACTOR = 8.0
"""The same for an answer that is streamed: its first token is seen, unless its engine holds tokens back."""

AttemptKey = tuple[str, int]


def taken_in_factor(*, streams: bool) -> float:
    """After how many times the predicted time a prompt counts as taken in though no first token was seen."""
    return STREAMED_FACTOR if streams else TAKEN_IN_FACTOR


def prefill_tokens(prompt_tokens: int, cached_tokens: int = 0) -> float:
    """How many first tokens of a prompt take as long as what is to be computed of this one, behind what is cached of it."""
    tokens = prompt_tokens * (1 + prompt_tokens / (2 * ATTENTION_TOKENS))
    return tokens - cached_tokens * (1 + cached_tokens / (2 * ATTENTION_TOKENS)) if cached_tokens else tokens


@dataclass(slots=True)
class _Prompt:
    """One without a first token. tokens: its `prefill_tokens`; behind: those that were pending when it was sent, its own
    included; taken_in: by the prediction, at least."""

    engine: str
    prompt_tokens: int
    tokens: float
    behind: float
    sent_s: float
    taken_in: bool = False


@dataclass(slots=True)
class _Engine:
    """seconds: a token; told: a first token has said so. since_s, pending, tokens: of the stretch under way; ahead: `prefill_tokens` that are pending; prompt_tokens: of all
    prompts without a first token; due: when a prompt will have been taken in; untold: prompts that show no first token, in the
    order in which they were sent."""

    since_s: float = 0.0
    pending: int = 0
    tokens: float = 0.0
    seconds: float | None = None
    told: bool = False
    ahead: float = 0.0
    prompt_tokens: int = 0
    due: list[tuple[float, AttemptKey]] = field(default_factory=list)
    untold: OrderedDict[AttemptKey, _Prompt] = field(default_factory=OrderedDict)

    def believe(self, passed_s: float, tokens: float) -> None:
        """So many tokens took so long."""
        if passed_s > 0 and tokens >= LEAST_TOKENS:
            seconds, weight = passed_s / tokens, tokens / (tokens + BELIEVED_TOKENS)
            known = self.seconds if self.told else None
            self.seconds, self.told = seconds if known is None else known + weight * (seconds - known), True

    def leaves(self, prompt: _Prompt) -> None:
        """A prompt is pending no more."""
        self.pending -= 1
        self.ahead = self.ahead - prompt.tokens if self.pending else 0.0


class Pace:
    """See the module header. One per pool, its owner is the dispatcher."""

    __slots__ = ("_engines", "_prompts")

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._prompts: dict[AttemptKey, _Prompt] = {}

    def granted(self, engine: str, work: Work, attempt: int, now_s: float) -> None:
        """An attempt was sent."""
        prompt_tokens = work.prompt_tokens
        one = self._engines.get(engine)
        if one is None:
            one = self._engines[engine] = _Engine()
        self._take_in(one, now_s)
        if not one.pending:
            one.since_s, one.tokens = now_s, 0.0
        tokens = prefill_tokens(prompt_tokens, work.cached_tokens)
        one.pending += 1
        one.ahead += tokens
        one.prompt_tokens += prompt_tokens
        key = work.id, attempt
        prompt = self._prompts[key] = _Prompt(engine, prompt_tokens, tokens, one.ahead, now_s)
        if not work.streams:
            one.untold[key] = prompt
        if one.seconds is not None:
            heappush(one.due, (now_s + taken_in_factor(streams=work.streams) * one.seconds * one.ahead, key))

    def first_token(self, work_id: str, attempt: int, now_s: float) -> None:
        """An attempt's prompt has been taken in."""
        prompt = self._pop((work_id, attempt))
        if prompt is None:
            return
        one = self._engines[prompt.engine]
        while one.untold and next(iter(one.untold.values())).sent_s <= prompt.sent_s:
            _, earlier = one.untold.popitem(last=False)
            if not earlier.taken_in:
                earlier.taken_in = True
                one.tokens += earlier.tokens
                one.leaves(earlier)
        if prompt.taken_in:
            one.believe(now_s - prompt.sent_s, prompt.behind)
            return
        one.leaves(prompt)
        if one.since_s == math.inf:  # what was taken in by now was before the stretch that begins
            one.since_s, one.tokens = now_s, 0.0
            return
        one.tokens += prompt.tokens
        passed_s = now_s - one.since_s
        if one.pending and passed_s < STRETCH_S:
            return
        one.believe(passed_s, one.tokens)
        one.since_s, one.tokens = now_s, 0.0

    def ended(self, work_id: str, attempt: int) -> None:
        """An attempt is over. One that showed no first token says nothing, and neither does the stretch it was in."""
        prompt = self._pop((work_id, attempt))
        if prompt is not None and not prompt.taken_in:
            one = self._engines[prompt.engine]
            one.leaves(prompt)
            one.since_s, one.tokens = math.inf, 0.0

    def ahead_tokens(self, engine: str, prompt_tokens: int, now_s: float) -> float:
        """What an engine has still to take in, in `prefill_tokens`. prompt_tokens: of all prompts there without a first token;
        what of them was not told here prompt by prompt counts as it is."""
        one = self._engines.get(engine)
        if one is None:
            return prompt_tokens
        self._take_in(one, now_s)
        return one.ahead + max(0, prompt_tokens - one.prompt_tokens)

    def suppose(self, engine: str, seconds_per_token: float) -> None:
        """What else is known of the engine's speed, for as long as no first token has been seen there."""
        one = self._engines.get(engine)
        if one is not None and not one.told:
            one.seconds = seconds_per_token

    def _take_in(self, one: _Engine, now_s: float) -> None:
        """Count prompts as taken in whose time is over."""
        while one.due and one.due[0][0] <= now_s:
            prompt = self._prompts.get(heappop(one.due)[1])
            if prompt is not None and not prompt.taken_in:
                prompt.taken_in = True
                one.leaves(prompt)
                one.since_s, one.tokens = math.inf, 0.0

    def _pop(self, key: AttemptKey) -> _Prompt | None:
        prompt = self._prompts.pop(key, None)
        if prompt is not None:
            one = self._engines[prompt.engine]
            one.prompt_tokens -= prompt.prompt_tokens
            one.untold.pop(key, None)
        return prompt

    def seconds_per_token(self, engine: str) -> float | None:
        """Of `prefill_tokens`; None while nothing is known of the engine."""
        one = self._engines.get(engine)
        return None if one is None else one.seconds

    def __repr__(self) -> str:
        known = ((name, one.seconds) for name, one in sorted(self._engines.items()) if one.seconds is not None)
        return f"<Pace {' '.join(f'{name}={1000 * seconds:.3f} ms/token' for name, seconds in known)}>"
