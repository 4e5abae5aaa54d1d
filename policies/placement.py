"""On which engine: of those that may take a work and have room, the one that suits its class.

*With* a TTFT objective: of the engines that are predicted to show the first token early enough (COMFORT), or nearly as early as
any, a random one of the near-least loaded. Memory and gaps that are short count as time. Where the sizing policy predicts
nothing all are asked for their load alone. Random among near equals keeps deciders that see the same numbers from all
choosing the same engine.
*Without* one: the busiest that still has room, so that bulk is packed and other engines stay free for people; engines on
spot capacity before all others, since bulk can begin anew where people would see an answer break.

What an engine's prefix cache probably holds of a prompt (`policies.estimators.prefix_caches`) need not be taken in again: it
counts for the engine, so that a conversation stays where it is until others are idler by more; also where the engine does not
tell what it finds, and predictions take the prompt as a whole.

A *canary* is offered only the works that are drawn for it, by their ids, so that a retry draws the same; where nothing but
canaries could run a work it goes there all the same.

An engine whose context is too short for a work gets it only where no engine's is long enough.

Load is works, ours by the ledger plus what others were last seen to run there, plus prompts not yet prefilled. *Busiest* is by
that alone; *least loaded* by that over the works that the engine holds: the class's window in requests, or what its window in
KV tokens is enough for, if that is less. An engine that tells neither is taken for as small as the smallest that does. Load
compares engines; it bounds nothing (that is the sizing policy's part).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from policies.estimators.prefix_caches import PrefixCaches
from policies.schema import USUAL_PROMPT_TOKENS_PER_S
from policies.sizing import SizingPolicy
from policies.vocabulary import EngineState, EngineView, Guard, Verdict, Work

NEAR_FRACTION = 0.05
"""Loads within this of the least count as equal."""
NEAR_WORKS = 0.5
"""So do loads within this many works: on a nearly idle engine five per cent is nothing."""
PREFILL_TOKENS_PER_WORK = 2048
"""Pending prompt tokens that delay a first token about as much as one more running work."""
KV_TOKENS_PER_WORK = 2048
"""What a work is taken to hold at its end, where only the window in tokens is told."""
COMFORT = 0.33
"""A score so low is early enough: still earlier would be nobody's gain, at the cost of bulk on the fastest engine."""
LEAST_OBJECTIVE_S = 0.05
_WEIGHTS = {Guard.TPOT: 0.3, Guard.KV: 0.2}
"""Of what an engine may run out of, against the first token."""
LENGTH_DOUBT = 1.25
"""Prompts are estimated from their bytes, and may be so many times as long."""


@dataclass(slots=True)
class Candidate:
    """An engine during one round: its view, moved on with every placement of the round.

    refused   of the last work that found no room here its id, and the verdict; None: all have found room
    context   tokens that a prompt and its answer may have; inf where the engine does not tell
    """

    view: EngineView
    foreign: float = field(init=False)
    context: float = field(init=False)
    refused: tuple[str, Verdict] | None = None
    _holds: dict[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.context = _context(self.view)
        self.foreign = max(0.0, _seen(self.view) - self.view.in_flight_total)

    def refusal(self, work: Work) -> Verdict | None:
        """The verdict on this work, where it was the last that found no room here."""
        return self.refused[1] if self.refused is not None and self.refused[0] == work.id else None

    def take(self, work: Work) -> None:
        """Count a work as placed here."""
        self.view = self.view.with_more(work)

    def holds(self, class_name: str, sizing: SizingPolicy) -> float | None:
        """Works of the class that the engine has room for when it is empty, which stands during a round; None: not known."""
        if class_name not in self._holds:
            window = sizing.window(self.view, class_name)
            by_tokens = None if window.tokens is None else window.tokens / KV_TOKENS_PER_WORK
            told = [one for one in (window.requests, by_tokens) if one is not None]
            self._holds[class_name] = max(1.0, min(told)) if told else None
        return self._holds[class_name]

    def load(self) -> float:
        """Works here, ours and foreign, and pending prefill in works; >= 0."""
        view = self.view
        return view.in_flight_total + self.foreign + view.prefill_tokens / PREFILL_TOKENS_PER_WORK


@dataclass(frozen=True, slots=True)
class Chosen:
    """An engine that has room for a work, and what is known of the two. work: as predictions take it there; cached_tokens: of
    its prompt, probably."""

    candidate: Candidate
    verdict: Verdict
    work: Work
    cached_tokens: int = 0


def eligible(work: Work, engine: EngineView) -> bool:
    """Whether the engine could take the work if it had room: up, has the model, speaks the path, not ruled out."""
    return (
        engine.state is EngineState.UP
        and work.model in engine.models
        and (work.pinned_engine is None or work.pinned_engine == engine.name)
        and engine.name not in work.avoid
        and engine.speaks(work.path)
    )


def passed_over(work: Work, canaries: Iterable[EngineView]) -> frozenset[str]:
    """Those that the work is not drawn for."""
    drawn = zlib.crc32(work.id.encode()) / 2**32
    return frozenset(one.name for one in canaries if drawn >= one.canary)


def able(work: Work, engines: Iterable[EngineView]) -> list[EngineView]:
    """The eligible engines, without the canaries that the work is not drawn for, where there are others."""
    found = [engine for engine in engines if eligible(work, engine)]
    canaries = [engine for engine in found if engine.canary < 1]
    if not canaries:
        return found
    skipped = passed_over(work, canaries)
    return [engine for engine in found if engine.name not in skipped] or found


def suited(work: Work, engines: Iterable[EngineView]) -> list[EngineView]:
    """The engines that may take the work whose context is long enough for it, or as long as any's."""
    found = able(work, engines)
    wanted = _wanted_context(work, max(map(_context, found), default=math.inf))
    return [engine for engine in found if _context(engine) >= wanted]


def choose(
    work: Work,
    candidates: Sequence[Candidate],
    sizing: SizingPolicy,
    now_s: float,
    *,
    spread: bool,
    draw: float,
    caches: PrefixCaches | None = None,
    longest_context: float | None = None,
) -> Chosen | None:
    """The candidate for a work with the sizing policy's verdict on it; None when none has room.

    candidates   eligible engines, in a fixed order (by name)
    spread       True for a class with a TTFT objective: early enough, then least loaded; else the busiest, spot capacity first
    draw         uniform in [0, 1); picks among the nearly best
    caches       what engines have of prompts; None: nothing
    longest_context   of all eligible engines, where some are left out for being full; None: none is
    """
    if longest_context is None:
        longest_context = longest(candidates)
    wanted = _wanted_context(work, longest_context)
    offered = [
        (candidate, *(caches.probable(candidate.view.name, work) if caches is not None and work.prefix else (0, work)))
        for candidate in candidates
        if candidate.context >= wanted
    ]
    if not spread and len(offered) > 1:  # the first with room takes it: a verdict is dear, and most have room
        offered.sort(key=lambda one: _packing(one[0], one[1], work), reverse=True)
    open_now: list[Chosen] = []
    for candidate, cached, there in offered:
        verdict = sizing.admit(there, candidate.view, now_s)
        if not verdict.admitted:
            candidate.refused = work.id, verdict
            continue
        open_now.append(Chosen(candidate, verdict, there, cached))
        if not spread:
            break
    if len(open_now) < 2:
        return open_now[0] if open_now else None
    if all(one.verdict.first_token_s is not None for one in open_now):
        objective_s = _objective_s(work)
        scores = [_score(one, objective_s, sizing) for one in open_now]
        enough = max(COMFORT, min(scores) * (1 + NEAR_FRACTION))
        open_now = [one for one, score in zip(open_now, scores, strict=True) if score <= enough]
    told = [holds for one, *_ in offered if (holds := one.holds(work.class_name, sizing)) is not None]
    least_holds = min(told, default=1.0)
    loads = [_saturation(one.candidate, one.cached_tokens, work, sizing, least_holds) for one in open_now]
    least, margin = min(loads)
    bound = least + max(least * NEAR_FRACTION, margin)
    near = [one for one, (load, _) in zip(open_now, loads, strict=True) if load <= bound]
    return near[min(int(draw * len(near)), len(near) - 1)]


def _packing(candidate: Candidate, cached_tokens: int, work: Work) -> tuple[bool, bool, float]:
    """Where work that can wait goes: spot capacity, then where half of its prompt is cached, then where most is, whatever else
    would fit there: what is free elsewhere is free for people."""
    load = candidate.load() - cached_tokens / PREFILL_TOKENS_PER_WORK
    return candidate.view.spot, 2 * cached_tokens > work.prompt_tokens, load


def _score(one: Chosen, objective_s: float, sizing: SizingPolicy) -> float:
    """The part of its objective that the work's first token will take there, and what the engine is near to running out of:
    memory, and time between tokens. Less is better."""
    first_s = one.verdict.first_token_s or 0.0
    if uncounted := one.cached_tokens - one.work.cached_tokens:
        learned = sizing.learned_step(one.candidate.view.name)
        token_s = 1 / USUAL_PROMPT_TOKENS_PER_S if learned is None else learned.per_prompt_token_s
        first_s = max(0.0, first_s - uncounted * token_s)
    score = first_s / objective_s
    for reading in one.verdict.guards:
        weight = _WEIGHTS.get(reading.guard)
        if weight is not None and reading.threshold > 0:
            score += weight * reading.value / reading.threshold
    return score


def _saturation(
    candidate: Candidate, cached_tokens: int, work: Work, sizing: SizingPolicy, least_holds: float
) -> tuple[float, float]:
    """(load over the works that the engine holds, NEAR_WORKS over them). least_holds: for one that does not tell."""
    holds = candidate.holds(work.class_name, sizing) or least_holds
    spared = cached_tokens / PREFILL_TOKENS_PER_WORK
    return (candidate.load() - spared) / holds, NEAR_WORKS / holds


def _objective_s(work: Work) -> float:
    """Time that the work's first token may take from its acceptance; 1 s where nothing was promised."""
    return 1.0 if work.deadline_s is None else max(LEAST_OBJECTIVE_S, work.deadline_s - work.accepted_s)


def longest(candidates: Iterable[Candidate]) -> float:
    """The most tokens that a prompt and its answer may have on one of them."""
    return max((one.context for one in candidates), default=math.inf)


def _wanted_context(work: Work, longest_context: float) -> float:
    """What the work needs, or the most that there is: whoever is too long for all hears it from an engine."""
    prompt_tokens = LENGTH_DOUBT * work.prompt_tokens / work.sequences
    return min(prompt_tokens + (work.max_tokens or 0), longest_context)


def _context(view: EngineView) -> float:
    told = view.max_model_len
    return told.value if told.known and told.value is not None else math.inf


def _seen(view: EngineView) -> float:
    """Works the engine itself was last seen to hold; 0 where it does not tell."""
    running = view.running.value if view.running.known else None
    waiting = view.waiting.value if view.waiting.known else None
    return (running or 0.0) + (waiting or 0.0)
