"""On which engine: of those that may take a work and have room, the one that suits its class.

*With* a TTFT objective: a random one of the near-least loaded. Least loaded keeps the first token early; random among
near equals keeps deciders that see the same numbers from all choosing the same engine. *Without* one: the busiest that
still has room, so that bulk is packed and other engines stay free for people; engines on spot capacity before all others,
since bulk can begin anew where people would see an answer break.

An engine whose context is too short for a work gets it only where no engine's is long enough.

Load is works, ours by the ledger plus what others were last seen to run there, plus prompts not yet prefilled, over
the class's window. It compares engines; it bounds nothing (that is the sizing policy's part).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from policies.sizing import SizingPolicy
from policies.vocabulary import EngineState, EngineView, Guard, Verdict, Work

NEAR_FRACTION = 0.05
"""Loads within this of the least count as equal."""
NEAR_WORKS = 0.5
"""So do loads within this many works: on a nearly idle engine five per cent is nothing."""
PREFILL_TOKENS_PER_WORK = 2048
"""Pending prompt tokens that delay a first token about as much as one more running work."""
LENGTH_DOUBT = 1.25
"""Prompts are estimated from their bytes, and may be so many times as long."""


@dataclass(slots=True)
class Candidate:
    """An engine during one round: its view, moved on with every placement of the round.

    bound     the guard that refused the last work that found no room here
    context   tokens that a prompt and its answer may have; inf where the engine does not tell
    """

    view: EngineView
    foreign: float = field(init=False)
    context: float = field(init=False)
    bound: Guard = Guard.NONE

    def __post_init__(self) -> None:
        self.context = _context(self.view)
        self.foreign = max(0.0, _seen(self.view) - self.view.in_flight_total)

    def take(self, work: Work, now_s: float) -> None:
        """Count a work as placed here, before anything is sent."""
        view = self.view
        in_flight = {**view.in_flight, work.class_name: view.in_flight.get(work.class_name, 0) + 1}
        extra = view.extra_sequences
        if work.sequences > 1:
            extra = {**extra, work.class_name: extra.get(work.class_name, 0) + work.sequences - 1}
        self.view = replace(
            view,
            in_flight=in_flight,
            extra_sequences=extra,
            kv_tokens=view.kv_tokens + work.prompt_tokens,
            prefill_tokens=view.prefill_tokens + work.prompt_tokens,
            last_grant_s=now_s,
        )

    def load(self) -> float:
        """Works here, ours and foreign, and pending prefill in works; >= 0."""
        view = self.view
        return view.in_flight_total + self.foreign + view.prefill_tokens / PREFILL_TOKENS_PER_WORK


def eligible(work: Work, engine: EngineView) -> bool:
    """Whether the engine could take the work if it had room: up, has the model, speaks the path, not ruled out."""
    return (
        engine.state is EngineState.UP
        and work.model in engine.models
        and (work.pinned_engine is None or work.pinned_engine == engine.name)
        and engine.name not in work.avoid
        and engine.speaks(work.path)
    )


def suited(work: Work, engines: Iterable[EngineView]) -> list[EngineView]:
    """The eligible engines whose context is long enough for the work, or as long as any's."""
    able = [engine for engine in engines if eligible(work, engine)]
    wanted = _wanted_context(work, map(_context, able))
    return [engine for engine in able if _context(engine) >= wanted]


def choose(
    work: Work, candidates: Sequence[Candidate], sizing: SizingPolicy, now_s: float, *, spread: bool, draw: float
) -> tuple[Candidate, Verdict] | None:
    """The candidate for a work with the sizing policy's verdict on it; None when none has room.

    candidates   eligible engines, in a fixed order (by name)
    spread       True for a class with a TTFT objective: the least loaded, else the busiest, spot capacity first
    draw         uniform in [0, 1); picks among the near-least loaded
    """
    wanted = _wanted_context(work, (candidate.context for candidate in candidates))
    candidates = [candidate for candidate in candidates if candidate.context >= wanted]
    verdicts = [(candidate, sizing.admit(work, candidate.view, now_s)) for candidate in candidates]
    open_now = []
    for pair in verdicts:
        if pair[1].admitted:
            open_now.append(pair)
        else:
            pair[0].bound = pair[1].binding
    if len(open_now) < 2:
        return open_now[0] if open_now else None
    loads = [_saturation(candidate, work, sizing) for candidate, _ in open_now]
    if not spread:
        keys = [(pair[0].view.spot, load[0]) for pair, load in zip(open_now, loads, strict=True)]
        return open_now[keys.index(max(keys))]
    least, margin = min(loads)
    bound = least + max(least * NEAR_FRACTION, margin)
    near = [pair for pair, load in zip(open_now, loads, strict=True) if load[0] <= bound]
    return near[min(int(draw * len(near)), len(near) - 1)]


def _saturation(candidate: Candidate, work: Work, sizing: SizingPolicy) -> tuple[float, float]:
    """(load over the class's window, NEAR_WORKS over it). Without a window in requests the window counts as 1."""
    window = sizing.window(candidate.view, work.class_name).requests or 1
    return candidate.load() / window, NEAR_WORKS / window


def _wanted_context(work: Work, contexts: Iterable[float]) -> float:
    """What the work needs, or the most that there is: whoever is too long for all hears it from an engine."""
    prompt_tokens = LENGTH_DOUBT * work.prompt_tokens / work.sequences
    return min(prompt_tokens + (work.max_tokens or 0), max(contexts, default=math.inf))


def _context(view: EngineView) -> float:
    told = view.max_model_len
    return told.value if told.known and told.value is not None else math.inf


def _seen(view: EngineView) -> float:
    """Works the engine itself was last seen to hold; 0 where it does not tell."""
    running = view.running.value if view.running.known else None
    waiting = view.waiting.value if view.waiting.known else None
    return (running or 0.0) + (waiting or 0.0)
