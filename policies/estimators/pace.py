"""How fast engines take prompts in: seconds per token of prefill, over the times in which some prompt was pending.

A token attends to all before it, so a long prompt takes more than its share: `prefill_tokens` counts that in, and a prompt of
ATTENTION_TOKENS costs half as much again as its tokens alone.

A single first token says little: it waited for a step under way and for prompts before it. So tokens are counted from the
moment at which an idle engine is sent a prompt, in stretches of STRETCH_S at least, or until nothing is pending; and a
stretch is believed by its tokens, since a short one is mostly the engine's steps. Independent of the sizing policy in force.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ATTENTION_TOKENS = 32_768
"""Tokens before a token at which attention costs what everything else does. By the measured profiles 10,000 to 30,000 for
models of 8 to 32 billion parameters, 100,000 for 70 billion: in between, since no metric tells."""
STRETCH_S = 0.5
LEAST_TOKENS = 512
BELIEVED_TOKENS = 20_000
"""A stretch of so many tokens counts as much as all before it."""


def prefill_tokens(prompt_tokens: int) -> float:
    """How many first tokens of a prompt take as long as all of this one."""
    return prompt_tokens * (1 + prompt_tokens / (2 * ATTENTION_TOKENS))


@dataclass(slots=True)
class _Engine:
    since_s: float = 0.0
    pending: int = 0
    tokens: float = 0.0
    seconds: float | None = None


class Pace:
    """See the module header. One per pool, its owner is the dispatcher."""

    __slots__ = ("_engines", "_pending")

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._pending: dict[tuple[str, int], tuple[str, float]] = {}

    def granted(self, engine: str, work_id: str, attempt: int, prompt_tokens: int, now_s: float) -> None:
        """An attempt was sent."""
        one = self._engines.get(engine)
        if one is None:
            one = self._engines[engine] = _Engine()
        if not one.pending:
            one.since_s, one.tokens = now_s, 0.0
        one.pending += 1
        self._pending[work_id, attempt] = engine, prefill_tokens(prompt_tokens)

    def first_token(self, work_id: str, attempt: int, now_s: float) -> None:
        """An attempt's prompt has been taken in."""
        engine, tokens = self._pending.pop((work_id, attempt), ("", 0.0))
        if not engine:
            return
        one = self._engines[engine]
        one.pending -= 1
        if one.since_s == math.inf:
            one.since_s = now_s
            return
        one.tokens += tokens
        passed_s = now_s - one.since_s
        if one.pending and passed_s < STRETCH_S:
            return
        if passed_s > 0 and one.tokens >= LEAST_TOKENS:
            seconds = passed_s / one.tokens
            weight = one.tokens / (one.tokens + BELIEVED_TOKENS)
            one.seconds = seconds if one.seconds is None else one.seconds + weight * (seconds - one.seconds)
        one.since_s, one.tokens = now_s, 0.0

    def ended(self, work_id: str, attempt: int) -> None:
        """An attempt is over. One that showed no first token says nothing, and neither does the stretch it was in."""
        engine, _ = self._pending.pop((work_id, attempt), ("", 0.0))
        if engine:
            one = self._engines[engine]
            one.pending -= 1
            one.since_s, one.tokens = math.inf, 0.0

    def seconds_per_token(self, engine: str) -> float | None:
        """Of `prefill_tokens`; None while nothing is known of the engine."""
        one = self._engines.get(engine)
        return None if one is None else one.seconds

    def __repr__(self) -> str:
        known = ((name, one.seconds) for name, one in sorted(self._engines.items()) if one.seconds is not None)
        return f"<Pace {' '.join(f'{name}={1000 * seconds:.3f} ms/token' for name, seconds in known)}>"
