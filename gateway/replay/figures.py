"""What the rows of a replay come to: attainment, goodput, first tokens, bulk, fairness, energy.

Every figure can be computed again from the rows file and the policy, but for those of the engines (preemptions, energy)
and of this machine (decision times). A request that was refused, failed or came late is a miss, and so is one with longer gaps
between its tokens than its class may have; attainment counts all requests of classes with a TTFT objective. One that never had a first token waited for ever: percentiles of TTFT that fall
among those are infinite. Tokens count as far as they were served within the run's duration, like energy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from gateway.replay.rows import COMPLETED, UNFINISHED, Row
from gateway.replay.world import Played
from policies.schema import Policy
from policies.vocabulary import Result

Alone = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Figures:
    """See the module header. None: there was nothing to measure it by.

    goodput_rps          requests with an objective, completed inside it, per second
    bulk_tokens_per_s    prompt and output tokens served to classes without an objective
    bulk_completed       works of these classes that were completed within the duration
    shed                 works of any class that were refused, or given up after their longest wait
    failed               works of any class that ended in any other way without a whole answer
    aborted_tokens       thrown away by attempts that were given up or failed
    joules_per_token     over all served tokens; None where a profile has no power curve
    jain                 Jain's index over the tenants of classes without an objective, those never served included; 1 is
                         even, None with fewer than two
    window_oscillation   95th less 5th percentile of the bulk window over its mean, in a minute of the second half of the run:
                         the median of all minutes, of the engine where that is largest. A window that swings by itself swings
                         in every minute; one that follows the traffic, or is cut once, does not
    """

    attainment: float | None
    goodput_rps: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    bulk_tokens_per_s: float
    bulk_completed: int
    shed: int
    failed: int
    preemptions: int
    recomputed_tokens: int
    aborted_tokens: int
    joules_per_token: float | None
    jain: float | None
    window_oscillation: float | None
    decision_p50_us: float | None
    decision_p99_us: float | None

    def plain(self) -> dict[str, float | None]:
        """By name, for a JSON document; an infinite TTFT is math.inf."""
        return asdict(self)


def figures(played: Played, policy: Policy, *, duration_s: float, alone: Alone | None = None) -> Figures:
    """The figures of one run of duration_s.

    alone   prompt tokens -> seconds to the first token on an idle engine, the measure of `ttft_slowdown`
    """
    urgent = [row for row in played.rows if policy.class_policy(row.class_name).has_ttft_objective]
    patient = [row for row in played.rows if not policy.class_policy(row.class_name).has_ttft_objective]
    met = sum(met_objective(row, policy, alone) for row in urgent)
    ttft_s = sorted(math.inf if row.ttft_s is None else row.ttft_s for row in urgent or patient)
    tpot_s = sorted(one for row in urgent or patient if (one := tpot(row)) is not None)
    tokens = sum(row.served_by(played.end_s) for row in played.rows)
    ends = [row.outcome for row in played.rows]
    decision_s = sorted(played.decision_s)
    return Figures(
        attainment=met / len(urgent) if urgent else None,
        goodput_rps=met / duration_s,
        ttft_p50_s=quantile(ttft_s, 0.5),
        ttft_p95_s=quantile(ttft_s, 0.95),
        ttft_p99_s=quantile(ttft_s, 0.99),
        tpot_p99_s=quantile(tpot_s, 0.99),
        bulk_tokens_per_s=sum(row.served_by(duration_s) for row in patient) / duration_s,
        bulk_completed=sum(row.outcome == COMPLETED and row.end_s <= duration_s for row in patient),
        shed=ends.count(Result.SHED),
        failed=len(ends) - ends.count(COMPLETED) - ends.count(UNFINISHED) - ends.count(Result.SHED),
        preemptions=played.preemptions,
        recomputed_tokens=played.recomputed_tokens,
        aborted_tokens=sum(row.wasted_tokens for row in played.rows),
        joules_per_token=None if played.energy_j is None or not tokens else played.energy_j / tokens,
        jain=jain(by_tenant(patient, duration_s)),
        window_oscillation=_oscillation(played, policy),
        decision_p50_us=_micros(quantile(decision_s, 0.5)),
        decision_p99_us=_micros(quantile(decision_s, 0.99)),
    )


def met_objective(row: Row, policy: Policy, alone: Alone | None = None) -> bool:
    """Completed, with its first token inside its class's objective, and the mean gap between its tokens where there is one."""
    of_class = policy.class_policy(row.class_name)
    objective_s = of_class.ttft_objective_s(row.prompt_tokens, None if alone is None else alone(row.prompt_tokens))
    if row.outcome != COMPLETED or objective_s is None or row.ttft_s is None or row.ttft_s > objective_s:
        return False
    gap_s = tpot(row)
    return of_class.tpot_sla_s is None or gap_s is None or gap_s <= of_class.tpot_sla_s


def tpot(row: Row) -> float | None:
    """Mean gap between the tokens of a completed answer; None for one of a single token."""
    if row.outcome != COMPLETED or row.first_token_s is None or row.output_tokens < 2:
        return None
    return (row.end_s - row.first_token_s) / (row.output_tokens - 1)


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the sorted values do not exceed; None of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def by_tenant(rows: Sequence[Row], until_s: float) -> Mapping[str, float]:
    """Tokens served by then."""
    served: dict[str, float] = {}
    for row in rows:
        served[row.tenant] = served.get(row.tenant, 0.0) + row.served_by(until_s)
    return served


def jain(served: Mapping[str, float]) -> float | None:
    """(sum x)^2 / (n · sum x^2); None of fewer than two, or where nobody was served."""
    squares = sum(one * one for one in served.values())
    return sum(served.values()) ** 2 / (len(served) * squares) if squares and len(served) > 1 else None


def _oscillation(played: Played, policy: Policy) -> float | None:
    names = [name for name, one in policy.classes.items() if not one.has_ttft_objective]
    minutes: dict[tuple[str, str, int], list[float]] = {}
    for seen in played.seen:
        if played.end_s / 2 <= seen.at_s <= played.end_s:
            for name in names:
                window = seen.windows.get(name)
                if window is not None:
                    minutes.setdefault((seen.engine, name, int(seen.at_s / 60)), []).append(float(window))
    swings: dict[tuple[str, str], list[float]] = {}
    for (engine, name, _), windows in minutes.items():
        windows.sort()
        low, high, mean = quantile(windows, 0.05), quantile(windows, 0.95), sum(windows) / len(windows)
        if low is not None and high is not None and mean:
            swings.setdefault((engine, name), []).append((high - low) / mean)
    return max((median(one) for one in swings.values()), default=None)


def _micros(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6
