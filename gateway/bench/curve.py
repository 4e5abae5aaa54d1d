"""What batching gains and costs on one engine: a closed loop of 1 to 512 clients, continuous and static.

Each client sends its next request when its last is answered, so that the batch is as large as there are clients, if the
memory lets it. Lengths are drawn lognormal, the same ones for every point. The loop begins with answers of every age,
and is measured after every seat has changed hands once.

A *useful* token is one that a client got: padding of a static batch and tokens computed again after a preemption cost
energy and are not counted.

The *knee* is where throughput over latency is greatest (Kleinrock's power): before it a larger batch gains more tokens
per second than it costs latency, in proportion, past it less. For a step of a + b·B that is at B = a/b.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from backends.simulated import sequence as simulated
from backends.simulated.engine import Engine
from backends.simulated.profiles import EngineOptions, Profile, build_engine, build_static_engine
from backends.simulated.sequence import EventKind
from gateway.load.lengths import Workload
from gateway.replay.chart import Line, Panel, svg
from gateway.replay.figures import quantile

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
CONTINUOUS, STATIC = "continuous", "static"
MODES = (CONTINUOUS, STATIC)
ROUNDS = 6
"""Answers a seat gives while it is measured."""
REQUESTS_MIN = 128
NO_GAIN = 0.05
"""Less than this in tokens per second is called no gain."""
NO_POWER = "the profile has no power curve"
RULES = (
    "energy per token is best at a batch of 2 or 4",
    "energy per token at 16 is a quarter more than at 2 or 4",
    "no more tokens per second past a batch of 64",
)


WORKLOADS = {
    "chat": Workload(),
    "long prompts": Workload(prompt_tokens=2000, output_tokens=100),
    "long, uneven prompts": Workload(prompt_tokens=3000, output_tokens=60, cv=1.0),
}
"""Where the rules of thumb are looked for."""
RULES_BATCHES = tuple(batch for batch in BATCHES if batch <= 128)


@dataclass(frozen=True, slots=True)
class Point:
    """One engine with `batch` clients. itl: gaps between the tokens of a decoding answer.

    tokens_per_s            useful output tokens
    running                 mean sequences with a seat; less than batch where the memory is short
    joules_per_token        None where the profile has no power curve
    padded_share            of all rows computed, those for nobody
    """

    mode: str
    batch: int
    running: float
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    joules_per_token: float | None
    padded_share: float
    preemptions: int

    @property
    def power(self) -> float:
        """Throughput over latency."""
        return self.tokens_per_s / self.itl_p50_s

    def plain(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Rule:
    """A published rule of thumb, and what is true of it here. holds: within a tenth; None where it cannot be told."""

    rule: str
    workload: str
    mode: str
    holds: bool | None
    measured: str

    def plain(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


def curve(profile: Profile, workload: Workload, batches: Sequence[int] = BATCHES) -> list[Point]:
    """All points, by mode and batch. Raises ValueError for a workload that the engine cannot hold."""
    return [_point(profile, workload, mode, batch) for mode in MODES for batch in batches]


def knee(points: Sequence[Point], mode: str) -> int:
    """The batch with the greatest throughput over latency."""
    return max((point for point in points if point.mode == mode), key=lambda point: point.power).batch


def rules(profile: Profile) -> list[Rule]:
    """The published rules of thumb, in every mode and for every workload of WORKLOADS that the engine can hold."""
    found: list[Rule] = []
    for name, workload in WORKLOADS.items():
        for mode in MODES:
            at = {batch: _point(profile, workload, mode, batch) for batch in RULES_BATCHES}
            found.extend(Rule(rule, name, mode, holds, measured) for rule, holds, measured in judge(at))
    return sorted(found, key=lambda one: RULES.index(one.rule))


def judge(at: Mapping[int, Point]) -> Iterator[tuple[str, bool | None, str]]:
    """(rule, whether it holds, what was measured) of one curve, by batch; 2, 4, 16, 64 and a larger one among them."""
    best_at_few, more_at_16, no_gain = RULES
    joules = {batch: point.joules_per_token for batch, point in at.items() if point.joules_per_token is not None}
    if joules:
        best = min(joules, key=lambda batch: joules[batch])
        few = min(joules[2], joules[4])
        yield best_at_few, best in {2, 4}, f"best at {best}: {joules[best]:.3g} J; {few:.3g} J at 2 or 4"
        yield more_at_16, abs(joules[16] / few - 1.25) <= 0.1, f"{joules[16] / few - 1:+.0%}"
    else:
        yield best_at_few, None, NO_POWER
        yield more_at_16, None, NO_POWER
    best = max(at, key=lambda batch: at[batch].tokens_per_s)
    up_to, beyond = (max(at[batch].tokens_per_s for batch in at if (batch > 64) is far) for far in (False, True))
    past = beyond / up_to - 1
    yield no_gain, past < NO_GAIN, f"{past:+.0%} past 64; most at {best}"


def picture(title: str, points: Sequence[Point]) -> str:
    """Throughput, latency and energy over the batch, as SVG."""
    figures: tuple[tuple[str, str, Callable[[Point], float]], ...] = (
        ("output tokens per second", "", lambda point: point.tokens_per_s),
        ("time to first token, median", "s", lambda point: point.ttft_p50_s),
        ("gap between tokens, median", "ms", lambda point: 1000 * point.itl_p50_s),
        ("energy per useful token", "J", lambda point: point.joules_per_token or 0.0),
    )
    panels = [
        Panel(
            name,
            [
                Line(
                    mode, [(point.batch, value(point)) for point in points if point.mode == mode], dashed=mode == STATIC
                )
                for mode in MODES
            ],
            unit=unit,
            x_unit="",
            log_x=True,
            log_y=True,
        )
        for name, unit, value in figures
        if unit != "J" or any(point.joules_per_token is not None for point in points)
    ]
    return svg(title, panels)


def _point(profile: Profile, workload: Workload, mode: str, batch: int) -> Point:
    if mode == STATIC:
        engine = build_static_engine(profile, rows=batch)
    else:
        budget = max(profile.max_num_batched_tokens, batch)
        engine = build_engine(profile, EngineOptions(max_num_seqs=batch, max_num_batched_tokens=budget))
    return _Loop(engine, workload, mode, batch).run()


class _Loop:
    """One closed loop, step by step."""

    def __init__(self, engine: Engine, workload: Workload, mode: str, batch: int) -> None:
        self._engine = engine
        self._mode = mode
        self._batch = batch
        self._lengths = workload.lengths()
        self._dice = random.Random(workload.seed)
        self._sent = 0
        self._gaps: dict[float, int] = {}
        self._ttft_s: list[float] = []
        self._running_s = 0.0

    def run(self) -> Point:
        engine, totals = self._engine, self._engine.totals
        for _ in range(self._batch):
            self._send(0.0, young=True)
        self._play(self._batch, measured=False)
        begun_s, tokens, energy_j = engine.clock_s, totals.generation_tokens, totals.energy_j
        padded, preemptions = totals.padded_tokens, totals.preemptions
        self._play(max(ROUNDS * self._batch, REQUESTS_MIN), measured=True)
        lasted_s, useful = engine.clock_s - begun_s, totals.generation_tokens - tokens
        padded = totals.padded_tokens - padded
        gaps = sorted(self._gaps.items())
        ttft_s = sorted(self._ttft_s)
        return Point(
            mode=self._mode,
            batch=self._batch,
            running=self._running_s / lasted_s,
            tokens_per_s=useful / lasted_s,
            ttft_p50_s=quantile(ttft_s, 0.5) or math.nan,
            ttft_p99_s=quantile(ttft_s, 0.99) or math.nan,
            itl_p50_s=_weighted(gaps, 0.5),
            itl_p99_s=_weighted(gaps, 0.99),
            joules_per_token=(totals.energy_j - energy_j) / useful if totals.energy_j else None,
            padded_share=padded / (padded + useful),
            preemptions=totals.preemptions - preemptions,
        )

    def _play(self, answers: int, *, measured: bool) -> None:
        """Step until so many answers have ended."""
        engine = self._engine
        while answers > 0:
            began_s, decoding = engine.clock_s, engine.scheduler.decoding
            ends_s = engine.next_step_s()
            if measured and decoding:
                gap_s = ends_s - began_s
                self._gaps[gap_s] = self._gaps.get(gap_s, 0) + decoding
            if measured:
                self._running_s += (ends_s - began_s) * engine.scheduler.running
            for event in engine.advance(ends_s):
                if measured and event.kind is EventKind.FIRST_TOKEN:
                    self._ttft_s.append(event.time_s - event.sequence.arrival_s)
                elif event.kind is EventKind.FINISHED:
                    answers -= 1
                    self._send(event.time_s)

    def _send(self, now_s: float, *, young: bool = False) -> None:
        prompt_tokens, output_tokens = next(self._lengths)
        if young:
            output_tokens = self._dice.randint(1, output_tokens)
        self._sent += 1
        one = simulated.Sequence(str(self._sent), prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        self._engine.submit(one, now_s)


def _weighted(gaps: Sequence[tuple[float, int]], share: float) -> float:
    """The smallest gap that at least `share` of all do not exceed; gaps: sorted, each with how often it came."""
    left = share * sum(count for _, count in gaps)
    for gap_s, count in gaps:
        left -= count
        if left <= 0:
            return gap_s
    return math.nan
