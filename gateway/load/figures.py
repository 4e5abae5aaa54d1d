"""What a load came to: percentiles by class, attainment, goodput, errors by kind. Everything follows from the rows.

First tokens and whole answers count from when a request was due. TPOT is the mean gap of one answer, ITL every gap by
itself, kept in bins of 2 per cent, so that a long run costs no memory for it. A refused or failed request has missed
its objective; only whole answers count for latency, as is usual, so read it beside the errors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from gateway.load.client import Exchange
from gateway.load.score import Score
from gateway.replay.figures import quantile
from gateway.replay.rows import COMPLETED, Row

BIN: Final = math.log(1.02)
LEAST_S: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a class promises, in seconds. None: nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of one kind of time. count 0: nothing was seen, and the others are None."""

    count: int = 0
    mean_s: float | None = None
    p50_s: float | None = None
    p90_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    max_s: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """One class, or all of them.

    attainment     share of requests inside their class's objectives; None without any
    goodput_rps    completed inside every objective that the class has, per second
    late_p99_s     how late the generator was: above a few milliseconds it was the bottleneck
    errors         by kind; examples: what one of each said
    """

    sent: int
    completed: int
    errors: Mapping[str, int]
    examples: Mapping[str, str]
    duration_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    attainment: float | None
    goodput_rps: float | None
    ttft: Spread
    itl: Spread
    tpot: Spread
    total: Spread
    late_p99_s: float | None

    def plain(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


@dataclass(slots=True)
class Gaps:
    """Gaps between tokens, in bins of 2 per cent."""

    bins: Counter[int] = field(default_factory=Counter)
    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, gap_s: float) -> None:
        """Count one."""
        self.bins[math.floor(math.log(max(LEAST_S, gap_s)) / BIN)] += 1
        self.count += 1
        self.total_s += gap_s
        self.max_s = max(self.max_s, gap_s)

    def joined(self, other: Gaps) -> Gaps:
        """Both together."""
        return Gaps(
            self.bins + other.bins,
            self.count + other.count,
            self.total_s + other.total_s,
            max(self.max_s, other.max_s),
        )

    def spread(self) -> Spread:
        """Quantiles are the middles of their bins."""
        if not self.count:
            return Spread()
        ordered = sorted(self.bins.items())

        def at(share: float) -> float:
            left = share * self.count
            for number, count in ordered:
                left -= count
                if left <= 0:
                    return min(math.exp((number + 0.5) * BIN), self.max_s)
            return self.max_s

        return Spread(self.count, self.total_s / self.count, at(0.5), at(0.9), at(0.95), at(0.99), self.max_s)


class Record:
    """Everything of one class: a `Watch` that keeps a row a request, and the score for the live view.

    origin_s   what the rows' times count from, on the same clock; now, if not given
    """

    def __init__(self, clock: Callable[[], float], objectives: Objectives, *, origin_s: float | None = None) -> None:
        self.objectives = objectives
        self.score = Score(clock, ttft_sla_s=objectives.ttft_s)
        self.gaps = Gaps()
        self.rows: list[Row] = []
        self.late_s: list[float] = []
        self.tpot_s: list[float] = []
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.met = 0
        self._origin_s = clock() if origin_s is None else origin_s
        self.start = self.score.start
        self.first_token = self.score.first_token

    def tokens(self, count: int, gap_s: float | None) -> None:
        """Tokens came."""
        self.score.tokens(count)
        if gap_s is not None:
            self.gaps.add(gap_s)

    def ended(self, exchange: Exchange) -> None:
        """Keep what became of it."""
        self.score.ended(exchange)
        origin_s, request = self._origin_s, exchange.request
        failure = exchange.failure
        self.late_s.append(exchange.sent_s - exchange.due_s)
        self.rows.append(
            Row(
                arrival_s=exchange.due_s - origin_s,
                class_name=request.class_name,
                tenant=request.tenant,
                prompt_tokens=exchange.prompt_tokens,
                output_tokens=exchange.tokens,
                engine="",
                sent_s=exchange.sent_s - origin_s,
                first_token_s=None if exchange.first_s is None else exchange.first_s - origin_s,
                end_s=exchange.end_s - origin_s,
                outcome=failure or COMPLETED,
            )
        )
        if failure:
            self.errors[failure] += 1
            self.examples.setdefault(failure, exchange.detail[:200])
            return
        tpot_s = exchange.tpot_s
        if tpot_s is not None:
            self.tpot_s.append(tpot_s)
        self.met += _within(exchange.ttft_s, self.objectives.ttft_s) and _within(tpot_s, self.objectives.tpot_s)

    def __repr__(self) -> str:
        return f"<Record {len(self.rows)} ended, {sum(self.errors.values())} not well>"


def figures(records: Sequence[Record], duration_s: float) -> Figures:
    """Of one class, or of several together."""
    rows = [row for record in records for row in record.rows]
    whole = [row for row in rows if row.outcome == COMPLETED]
    judged = [one for one in records if one.objectives.ttft_s is not None or one.objectives.tpot_s is not None]
    errors: Counter[str] = sum((record.errors for record in records), Counter())
    gaps = Gaps()
    for record in records:
        gaps = gaps.joined(record.gaps)
    met, due = sum(one.met for one in judged), sum(len(one.rows) for one in judged)
    return Figures(
        sent=len(rows),
        completed=len(whole),
        errors=dict(errors.most_common()),
        examples={kind: text for record in records for kind, text in record.examples.items()},
        duration_s=duration_s,
        requests_per_s=len(whole) / duration_s,
        prompt_tokens_per_s=sum(row.prompt_tokens for row in whole) / duration_s,
        output_tokens_per_s=sum(row.output_tokens for row in rows) / duration_s,
        attainment=met / due if due else None,
        goodput_rps=met / duration_s if judged else None,
        ttft=spread([row.ttft_s for row in whole if row.ttft_s is not None]),
        itl=gaps.spread(),
        tpot=spread([one for record in records for one in record.tpot_s]),
        total=spread([row.end_s - row.arrival_s for row in whole]),
        late_p99_s=quantile(sorted(one for record in records for one in record.late_s), 0.99),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One rate of a staircase: what became of the requests that were due while it lasted."""

    rate_rps: float
    sent: int
    completed: int
    attainment: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    total_p99_s: float | None


def steps(records: Mapping[str, Record], rates_rps: Sequence[float], step_s: float) -> list[Step]:
    """The staircase, rate by rate."""
    found: list[Step] = []
    for number, rate_rps in enumerate(rates_rps):
        due = [
            (row, record.objectives)
            for record in records.values()
            for row in record.rows
            if number * step_s <= row.arrival_s < (number + 1) * step_s
        ]
        whole = [row for row, _ in due if row.outcome == COMPLETED]
        judged = [(row, of.ttft_s) for row, of in due if of.ttft_s is not None]
        met = sum(row.outcome == COMPLETED and _within(row.ttft_s, sla_s) for row, sla_s in judged)
        ttft, total = (
            spread([row.ttft_s for row in whole if row.ttft_s is not None]),
            spread([row.end_s - row.arrival_s for row in whole]),
        )
        found.append(
            Step(
                rate_rps,
                len(due),
                len(whole),
                met / len(judged) if judged else None,
                ttft.p50_s,
                ttft.p99_s,
                total.p99_s,
            )
        )
    return found


def spread(values: Sequence[float]) -> Spread:
    """Of exact values."""
    if not values:
        return Spread()
    ordered = sorted(values)
    p50, p90, p95, p99 = (quantile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
    return Spread(len(ordered), sum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


def _within(value: float | None, bound: float | None) -> bool:
    return bound is None or (value is not None and value <= bound)
