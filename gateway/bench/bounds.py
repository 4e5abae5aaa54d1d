"""What cannot be beaten: the fluid bound on bulk, and the ceiling on attainment. Arithmetic, no simulation.

**Fluid bound.** An engine whose steps take tau spends a'/tau of its time on what a step costs whatever is in it. The rest
is work: w = b'·o + c·o·ctx + e·p a request, of o output tokens over a mean context ctx, and p prompt tokens. What
interactive work leaves is bulk's: X(tau) = (1 - a'/tau - lambda_i·w_i) / w_b requests a second. Long steps are cheap,
but requests then stay for longer, and memory holds lambda·o·tau·(p + o/2) tokens of them by Little's law. The bound is
the best over tau up to the objective on the gap between tokens. Real steps are whole and arrivals come in bunches, so
a scheduler that takes bulk as it comes does not reach it. One that leaves long items lying serves a cheaper mix than the
mean, and one that lets interactive work wait has its time for bulk: both may pass it.

**Ceiling.** With bursts beyond capacity some first tokens must be late. Interactive work alone, prompts one after
another on the engine, by deadline; whenever what waits cannot all be on time the largest of those before the first late
one is given up (Moore and Hodgson), which keeps the most on time. A request that is kept also takes its decoding time,
after its own first token and before the next one's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from backends.simulated.profiles import Profile
from backends.simulated.step_model import StepModel
from gateway.replay.trace import Request

BAR = 0.99
"""Part of the urgent requests whose first token has to be in time."""
CEILING_SHARE = 0.97
"""Where bursts exceed capacity, the bar is this part of what can be attained at all."""
SLOWDOWNS = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)
TAUS = 400
BLOCK_TOKENS = 16


def fluid_tokens_per_s(
    profiles: Sequence[Profile],
    interactive: Sequence[Request],
    lengths: Sequence[tuple[int, int]],
    *,
    duration_s: float,
    tpot_sla_s: float,
) -> float:
    """Bulk tokens (prompt and output) per second that the pool has room for beside all interactive requests.

    Interactive work is spread over the engines so that each spends the same part of its time on it.
    """
    sizes = [
        (one.prompt_tokens - one.cached_prompt_tokens, one.output_tokens, one.prompt_tokens) for one in interactive
    ]
    work_ms = [_work_ms(profile.step_model, sizes) for profile in profiles]
    inverse = sum(1 / one for one in work_ms) if sizes else 1.0
    shares = [1 / one / inverse if sizes else 0.0 for one in work_ms]
    return sum(
        _engine_bound(profile, sizes, lengths, rate=share / duration_s, tpot_sla_s=tpot_sla_s)
        for profile, share in zip(profiles, shares, strict=True)
    )


def _engine_bound(
    profile: Profile,
    sizes: Sequence[tuple[int, int, int]],
    lengths: Sequence[tuple[int, int]],
    *,
    rate: float,
    tpot_sla_s: float,
) -> float:
    """rate: of one request of `sizes`, per second, so that sums over them are per-second sums."""
    model = profile.step_model
    bulk = [(prompt, output, prompt) for prompt, output in lengths]
    busy = rate * _work_ms(model, sizes) / 1000
    bulk_ms = _work_ms(model, bulk) / len(bulk)
    tokens = sum(prompt + output for prompt, output in lengths) / len(lengths)
    held = rate * _token_steps(sizes)
    bulk_held = _token_steps(bulk) / len(bulk)
    kv_tokens = profile.kv_tokens - BLOCK_TOKENS
    floor_ms = model.a + model.h0
    best = 0.0
    longest_ms = min(tpot_sla_s, 1e3) * 1000
    for number in range(1, TAUS + 1):
        tau_ms = floor_ms + (longest_ms - floor_ms) * number / TAUS
        by_time = (1 - floor_ms / tau_ms - busy) / bulk_ms * 1000
        by_memory = (kv_tokens / (tau_ms / 1000) - held) / bulk_held
        best = max(best, min(by_time, by_memory))
    return best * tokens


def ceiling(requests: Sequence[Request], profiles: Sequence[Profile], objective: Callable[[Request], float]) -> float:
    """Part of the requests that can be in time when they have the engines for themselves.

    The best of a few schedules: giving up the largest is optimal only for requests that are all there, and one who
    leaves room, as for a slower engine, sometimes does better. What a slower engine can do, this one can.
    """
    if not requests:
        return 1.0
    late = min(len(given_up(requests, profiles, objective=objective, slowdown=slowdown)) for slowdown in SLOWDOWNS[:6])
    return 1 - late / len(requests)


def bar(attainment_ceiling: float) -> float:
    """Attainment that a scheduler has to reach."""
    return BAR if attainment_ceiling >= BAR else CEILING_SHARE * attainment_ceiling


def _work_ms(model: StepModel, sizes: Sequence[tuple[int, int, int]]) -> float:
    """Milliseconds of engine time of all requests together, (computed prompt, output, whole prompt) tokens each."""
    return sum(
        (model.b + model.h1) * output + model.c * output * (prompt + output / 2) + model.e * computed
        for computed, output, prompt in sizes
    )


def _token_steps(sizes: Sequence[tuple[int, int, int]]) -> float:
    """KV tokens held, summed over the steps of all requests together."""
    return sum(output * (prompt + output / 2) for _, output, prompt in sizes)


def given_up(
    requests: Sequence[Request],
    profiles: Sequence[Profile],
    *,
    objective: Callable[[Request], float],
    slowdown: float = 1.0,
) -> dict[int, float]:
    """The requests that Moore and Hodgson give up: index -> when the busy stretch began in which that was.

    A pool counts as one engine with the sum of its speeds.

    objective  seconds that a request's first token may take
    slowdown   >= 1: the engine does other things as well
    """
    waiting: list[tuple[float, int]] = []
    lost: dict[int, float] = {}
    free_s = busy_since_s = 0.0
    arrived = 0
    work_s = [slowdown * prefill_s(profiles, one) for one in requests]
    after_s = [slowdown * decode_s(profiles, one) for one in requests]
    latency_s = min((profile.step_model.a + profile.step_model.h0) / 1000 for profile in profiles)
    due_s = [one.arrival_s + objective(one) - latency_s for one in requests]
    while arrived < len(requests) or waiting:
        if not waiting and requests[arrived].arrival_s > free_s:
            free_s = busy_since_s = requests[arrived].arrival_s
        while arrived < len(requests) and requests[arrived].arrival_s <= free_s:
            heapq.heappush(waiting, (due_s[arrived], arrived))
            arrived += 1
        waiting, dropped = _feasible(waiting, work_s, after_s, free_s)
        lost.update(dict.fromkeys(dropped, busy_since_s))
        if waiting:
            _, index = heapq.heappop(waiting)
            free_s += work_s[index] + after_s[index]
    return lost


def _feasible(
    waiting: list[tuple[float, int]],
    work_s: Sequence[float],
    after_s: Sequence[float],
    free_s: float,
) -> tuple[list[tuple[float, int]], list[int]]:
    """(those waiting that can all be in time, by deadline; those given up for that)."""
    end_s = free_s
    largest: list[tuple[float, int]] = []
    kept: dict[int, float] = {}
    lost: list[int] = []
    for due, index in sorted(waiting):
        end_s += work_s[index]
        kept[index] = due
        heapq.heappush(largest, (-work_s[index] - after_s[index], index))
        if end_s > due:
            negative_s, dropped = heapq.heappop(largest)
            end_s += negative_s if dropped != index else -work_s[index]
            del kept[dropped]
            lost.append(dropped)
        if index in kept:
            end_s += after_s[index]
    return [(due, index) for index, due in kept.items()], lost


def decode_s(profiles: Sequence[Profile], request: Request) -> float:
    """Engine time that an answer takes at least, as part of the steps of a full batch."""
    output, context = request.output_tokens, request.prompt_tokens + request.output_tokens / 2
    models = [profile.step_model for profile in profiles]
    return 1 / sum(1000 / (output * (one.b + one.h1 + one.c * context)) for one in models)


def prefill_s(profiles: Sequence[Profile], request: Request) -> float:
    """Engine time that a prompt takes at least: its part of full steps."""
    computed = request.prompt_tokens - request.cached_prompt_tokens
    speeds = []
    for profile in profiles:
        model = profile.step_model
        whole_ms = model.e * computed + model.f * computed * (request.cached_prompt_tokens + computed / 2)
        speeds.append(1000 / max(whole_ms, 1e-6))
    return 1 / sum(speeds)
