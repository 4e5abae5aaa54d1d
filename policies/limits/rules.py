"""Sizing policy `rules`: the table by which an operator would turn the knob, every threshold in the policy.

What it does: once in `change_every_s` each row of the table votes on each engine's limit. Any vote to shrink wins over
any to hold, and that over any to grow; with no vote it holds.

|                  | grow                           | hold                                     | shrink                        |
|------------------|--------------------------------|------------------------------------------|-------------------------------|
| GPU, backlog     | GPU idle at times, works queue | GPU busy, arrivals and completions agree |                               |
| memory           | plenty of KV memory free       | KV memory used as it should be           | about to run out              |
| latency          | TTFT kept, queue not growing   |                                          | queue growing and TTFT missed |
| heat, power      |                                |                                          | at its limit                  |
| queue and memory | short queue and plenty free    | between, and the forecast does not fit   | long queue and memory tight   |

An engine step cannot be seen from outside; it is taken to be the mean gap between the tokens of answers. A row whose
readings are unknown does not vote: unknown is not zero.

Inputs: polled KV memory, GPU load, power and heat; our queue; first tokens against their deadlines. Trade-off: each
row is reasonable and knows nothing of the others; thresholds on levels react when the level is reached, which under
long prompts is too late, and hold where there is room.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

from policies.limits.heat import Heat, heat, known
from policies.limits.shared import SharedLimit
from policies.schema import Policy, RulesSizing
from policies.sizing import Finished, FirstToken, Granted, LearnedStep, Progressed, Sampled, SizingEvent, Window
from policies.vocabulary import EngineView, Result, Verdict, Work

TTFT_KEPT_S = 10.0
"""First tokens of the last so many seconds say whether the objective is kept: nine in ten must be in time."""
MISSED_SHARE = 0.1
STEP_WEIGHT = 0.1

Noted = TypeVar("Noted", bool, int, float)


class Vote(IntEnum):
    """What a row says; the highest vote wins."""

    GROW = 1
    HOLD = 2
    SHRINK = 3


@dataclass(frozen=True, slots=True)
class Readings:
    """What the table looks at. None: unknown.

    queued              works waiting in our queue, of all classes
    queue_grows         of those with an objective more wait than a dead time ago
    ttft_missed         more than a tenth of the recent first tokens came late; None: none came
    arrivals            works that came over agree_over_s; None before that time has passed
    kv_soon_fraction    KV memory used at the horizon, as it grows now
    """

    queued: int = 0
    queue_grows: bool = False
    ttft_missed: bool | None = None
    gpu_busy_fraction: float | None = None
    arrivals: int | None = None
    completions: int = 0
    kv_used_fraction: float | None = None
    kv_soon_fraction: float | None = None
    heat_margin_c: float | None = None
    power_fraction: float | None = None
    slowed: float | None = None


def gpu_row(seen: Readings, fields: RulesSizing) -> Vote | None:
    """Row 1."""
    busy = seen.gpu_busy_fraction
    if busy is None:
        return None
    if busy < fields.gpu_busy_below:
        return Vote.GROW if seen.queued else None
    if seen.arrivals is None:
        return None
    apart = abs(seen.arrivals - seen.completions)
    return Vote.HOLD if apart <= fields.agree_within * max(seen.arrivals, seen.completions) else None


def memory_row(seen: Readings, fields: RulesSizing) -> Vote | None:
    """Row 2."""
    used = seen.kv_used_fraction
    if used is None:
        return None
    if seen.kv_soon_fraction is not None and seen.kv_soon_fraction >= 1:
        return Vote.SHRINK
    if fields.kv_hold_from <= used <= fields.kv_hold_to:
        return Vote.HOLD
    return Vote.GROW if 1 - used > fields.kv_free_above else None


def latency_row(seen: Readings, fields: RulesSizing) -> Vote | None:  # noqa: ARG001 - one form for all rows
    """Row 3."""
    if seen.queue_grows and seen.ttft_missed:
        return Vote.SHRINK
    return Vote.GROW if seen.ttft_missed is False and not seen.queue_grows else None


def heat_row(seen: Readings, fields: RulesSizing) -> Vote | None:
    """Row 4."""
    found = heat(
        seen.heat_margin_c,
        seen.power_fraction,
        seen.slowed,
        heat_margin_c=fields.heat_margin_c,
        power_at=fields.power_at,
    )
    return Vote.SHRINK if found is Heat.HOT else None


def queue_row(seen: Readings, fields: RulesSizing) -> Vote | None:
    """Row 5."""
    used = seen.kv_used_fraction
    if used is None or not seen.queued:
        return None
    if seen.queued <= fields.queue_short:
        return Vote.GROW if 1 - used > fields.kv_free_above else None
    if seen.queued > fields.queue_long and 1 - used < fields.kv_free_below:
        return Vote.SHRINK
    fits = seen.kv_soon_fraction is None or 1 - seen.kv_soon_fraction > fields.kv_free_below
    return Vote.GROW if fits else Vote.HOLD


ROWS = (gpu_row, memory_row, latency_row, heat_row, queue_row)


def decide(seen: Readings, fields: RulesSizing) -> Vote:
    """The table's word; HOLD when no row has one."""
    return max((vote for row in ROWS if (vote := row(seen, fields)) is not None), default=Vote.HOLD)


class Rules:
    """See the module header."""

    __slots__ = ("_fields", "_histories", "_limit")

    def __init__(self, policy: Policy) -> None:
        self._fields = fields = policy.sizing.rules
        self._limit = SharedLimit(policy, start=fields.start, least=fields.least, most=fields.most)
        self._histories: dict[str, _History] = {}

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:  # noqa: ARG002 - the contract's
        return self._limit.verdict(work, engine)

    def window(self, engine: EngineView, class_name: str) -> Window:
        return self._limit.window(engine, class_name)

    def on_event(self, event: SizingEvent, now_s: float) -> None:
        """Remember, and at a control tick let the table decide."""
        if isinstance(event, Granted | Progressed):
            return
        name = event.view.name if isinstance(event, Sampled) else event.engine
        history = self._histories.get(name)
        if history is None:
            history = self._histories[name] = _History(self._fields)
        if isinstance(event, FirstToken):
            history.first_token(event.work, now_s)
        elif isinstance(event, Finished):
            history.finished(event, now_s)
        else:
            urgent = sum(count for class_name, count in event.queued.items() if self._limit.urgent(class_name))
            seen = history.sampled(event, urgent, now_s)
            if seen is not None:
                self._turn(name, decide(seen, self._fields))

    def _turn(self, engine: str, vote: Vote) -> None:
        limit = self._limit.of(engine)
        if vote is Vote.GROW:
            self._limit.move(engine, limit + max(1.0, limit * self._fields.grow_by))
        elif vote is Vote.SHRINK:
            self._limit.move(engine, limit * self._fields.shrink_to)

    def learned_step(self, engine: str) -> LearnedStep | None:  # noqa: ARG002, the contract's
        """This policy does not look."""
        return None

    def snapshot(self) -> Mapping[str, object]:
        return self._limit.snapshot()

    def restore(self, state: Mapping[str, object]) -> None:
        self._limit.restore(state)

    def __repr__(self) -> str:
        return f"<Rules {self._limit!r}>"


@dataclass(slots=True)
class _History:
    """What one engine's readings are made of."""

    fields: RulesSizing
    judged_s: float = -math.inf
    step_s: float | None = None
    first_tokens: deque[tuple[float, bool]] = field(default_factory=deque)
    ends: deque[tuple[float, bool]] = field(default_factory=deque)
    present: deque[tuple[float, int]] = field(default_factory=deque)
    urgent: deque[tuple[float, int]] = field(default_factory=deque)
    kv: deque[tuple[float, float]] = field(default_factory=deque)

    def first_token(self, work: Work, now_s: float) -> None:
        if work.deadline_s is not None:
            self.first_tokens.append((now_s, now_s > work.deadline_s))

    def finished(self, event: Finished, now_s: float) -> None:
        self.ends.append((now_s, event.outcome is not None))
        outcome = event.outcome
        if outcome is None or outcome.result is not Result.COMPLETED or outcome.ttft_s is None:
            return
        if outcome.output_tokens > 1:
            gap_s = (outcome.total_s - outcome.ttft_s) / (outcome.output_tokens - 1)
            self.step_s = gap_s if self.step_s is None else self.step_s + STEP_WEIGHT * (gap_s - self.step_s)

    def sampled(self, event: Sampled, urgent: int, now_s: float) -> Readings | None:
        """Take in a control tick; the readings when it is time to judge."""
        view, fields = event.view, self.fields
        queued = sum(event.queued.values())
        used = known(view.kv_used_fraction)
        self.present.append((now_s, view.in_flight_total + queued))
        self.urgent.append((now_s, urgent))
        if used is not None:
            self.kv.append((now_s, used))
        self._forget(now_s)
        if now_s - self.judged_s < fields.change_every_s:
            return None
        self.judged_s = now_s
        return Readings(
            queued=queued,
            queue_grows=urgent > self.urgent[0][1],
            ttft_missed=self._missed(),
            gpu_busy_fraction=known(view.gpu_busy_fraction),
            arrivals=self._arrivals(now_s),
            completions=len(self.ends),
            kv_used_fraction=used,
            kv_soon_fraction=self._kv_soon(),
            heat_margin_c=known(view.gpu_heat_margin_c),
            power_fraction=known(view.gpu_power_fraction),
            slowed=known(view.gpu_slowed),
        )

    def _missed(self) -> bool | None:
        if not self.first_tokens:
            return None
        late = sum(late for _, late in self.first_tokens)
        return late > MISSED_SHARE * len(self.first_tokens)

    def _arrivals(self, now_s: float) -> int | None:
        """What ended plus what is more than before. None before the history is as long as it is to be."""
        begun_s, before = self.present[0]
        if now_s - begun_s < 0.9 * self.fields.agree_over_s:
            return None
        return max(0, len(self.ends) + self.present[-1][1] - before)

    def _kv_soon(self) -> float | None:
        if len(self.kv) < 2 or self.kv[-1][0] <= self.kv[0][0]:
            return None
        (from_s, before), (to_s, used) = self.kv[0], self.kv[-1]
        horizon_s = max(self.fields.dead_time_s, self.fields.runout_steps * (self.step_s or 0.0))
        return used + (used - before) / (to_s - from_s) * horizon_s

    def _forget(self, now_s: float) -> None:
        fields = self.fields
        _drop_before(self.present, now_s - fields.agree_over_s)
        _drop_before(self.ends, now_s - fields.agree_over_s)
        _drop_before(self.urgent, now_s - fields.dead_time_s)
        _drop_before(self.kv, now_s - fields.dead_time_s)
        _drop_before(self.first_tokens, now_s - TTFT_KEPT_S)


def _drop_before(history: deque[tuple[float, Noted]], oldest_s: float) -> None:
    while history and history[0][0] < oldest_s:
        history.popleft()
