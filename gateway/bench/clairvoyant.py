"""A scheduler that knows everything: the upper bound that a simulation can give. No policy, and never behind a gateway.

It is made from the world of a replay (`Plan.privileged`), and reads what no view has: true lengths of answers, the
arrivals to come, the engines' step models and their state at this moment. With that it lets a bulk work start whenever
all of the following hold to the end of that work's life.

1. *Memory.* The KV tokens of what runs, of the work and of every interactive request still to come stay below KV_MARGIN
   of the engine's, at every end of a sequence until the work's own; requests to come are looked at in POINTS times.
2. *First tokens.* Behind the work's prompt every interactive request is in time that arrives until the engine has done
   with the prompts pending by then.
3. *Gaps.* The step with one more sequence is no longer than the objective. Where bursts exceed capacity, it also makes
   the step of a prompt no more than `stretch` times as long: the refusals were computed with that.

Interactive works start by deadline, while those pending fill no more than half a step; those that `bounds.given_up`
names were taken out before the run: a scheduler that knows the future does not start what will be late. It must come out at or above every static window, else it is wrong:
the benchmark checks that.

A round asks it for one bulk work at a time, since its answer holds for the engine as it is now.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

from backends.simulated.sequence import SequenceState
from gateway.bench.baselines import Unlearning
from gateway.bench.cells import BULK, INTERACTIVE
from gateway.replay.host import EngineHost
from gateway.replay.trace import Request
from gateway.replay.world import World
from policies.sizing import Window
from policies.vocabulary import EngineView, Guard, GuardReading, Verdict, Work

POINTS = 24
KV_MARGIN = 0.98
FIRST_POINT_S = 0.25
RATIO = 1.38
"""Between one point and the next: 24 points reach five minutes."""
POINTS_S = [0.0, *(FIRST_POINT_S * RATIO**point for point in range(POINTS - 1))]
FORECAST_REQUESTS = 96
"""Arrivals looked at for first tokens: a burst longer than that is judged by its beginning."""
TTFT_MARGIN = 0.9
HALF_BLOCK_TOKENS = 8
ADMITTED = Verdict(admitted=True, guards=(GuardReading(Guard.NONE, 0.0, 0.0, passed=True),))


class Clairvoyant(Unlearning):
    """See the module header."""

    def __init__(self, world: World, *, tpot_sla_s: float, stretch: float) -> None:
        """stretch: how much longer bulk's decoding may make the step of a prompt; inf where bursts leave room for more."""
        self.tpot_sla_s = tpot_sla_s
        self.stretch = stretch
        self.mean_prompt = max(
            1, sum(one.prompt_tokens for one in world.plan.requests) // max(1, len(world.plan.requests))
        )
        self._world = world
        self._requests = world.plan.requests
        self._arrivals_s = [one.arrival_s for one in self._requests]
        self._longest_output = max((one.output_tokens for one in self._requests), default=0)
        self._share = 1 / len(world.hosts)
        self.coming: dict[str, tuple[int, list[float]]] = {}
        self._pictures: dict[str, tuple[tuple[float, int], _Picture]] = {}

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:  # noqa: ARG002 - the contract's
        host = self._world.hosts[engine.name]
        ledger = self._world.replicas[0].roster[engine.name].ledger
        if work.class_name != BULK:
            pending = sum(one.prefill_tokens for one in ledger.entries.values() if one.work.class_name != BULK)
            room = host.scheduler.limits.max_num_batched_tokens
            return ADMITTED if not pending or pending + work.prompt_tokens <= room else _refused(Guard.STALL)
        if self._world.replicas[0].dispatcher.depth(INTERACTIVE):
            return _refused(Guard.TTFT)
        known = sum(ledger.in_flight.values())
        if engine.in_flight_total != known or known != len(host.sequences):
            return _refused(Guard.STALE)
        course = self._world.courses.get(work.id)
        return _refused(Guard.NONE) if course is None else self._picture(host).judge(course.request)

    def window(self, engine: EngineView, class_name: str) -> Window:  # noqa: ARG002 - the contract's
        return Window()

    def _picture(self, host: EngineHost) -> _Picture:
        key = (self._world.loop.time(), len(host.sequences))
        found = self._pictures.get(host.name)
        if found is None or found[0] != key:
            host.catch_up()
            found = self._pictures[host.name] = (key, _Picture(self, host))
        return found[1]


class _Picture:
    """One engine at one moment, as far into the future as anything known reaches."""

    def __init__(self, oracle: Clairvoyant, host: EngineHost) -> None:
        self._oracle = oracle
        self._host = host
        self._model = host.spec.profile.step_model
        self._now_s = oracle._world.now_s
        self._limits = host.scheduler.limits
        self._capacity = KV_MARGIN * self._limits.usable_blocks * self._limits.block_tokens
        plan = oracle._world.plan
        self._sla = plan.policy.class_policy("interactive")
        ends: list[tuple[int, int]] = []
        self._pending: list[tuple[int, int]] = []
        for sequence in host.sequences:
            left = sequence.output_tokens - sequence.generated_tokens
            held = sequence.kv_tokens
            if not sequence.decoding:
                target = sequence.prefill_target_tokens
                if sequence.state is SequenceState.WAITING or held < target:
                    self._pending.append((target - held, held))
                held = target
            ends.append((left, held + HALF_BLOCK_TOKENS))
        ends.sort()
        self._left = [left for left, _ in ends]
        # held_from[i]: tokens held by those that end i-th or later
        self._held_from = [*accumulate((held for _, held in reversed(ends)), initial=0)][::-1]
        self._decoding = len(ends)
        self._context = self._held_from[0]
        self.step_s = self._mean_step_s()
        self._peaks: tuple[list[int], list[float]] | None = None

    def judge(self, request: Request) -> Verdict:
        """May this bulk request start now?"""
        if self._decoding + 1 >= self._limits.max_num_seqs:
            return _refused(Guard.SEATS)
        step_s = self._model.step_s(self._decoding + 1, self._context + request.prompt_tokens)
        if step_s > self._oracle.tpot_sla_s:
            return _refused(Guard.TPOT)
        chunk = ((min(self._oracle.mean_prompt, self._limits.max_num_batched_tokens // 2), 0),)
        beside_s = self._model.step_s(self._decoding + 1, self._context + request.prompt_tokens, chunk)
        if beside_s > self._oracle.stretch * self._model.step_s(0, 0, chunk):
            return _refused(Guard.STALL)
        if not self._memory_lasts(request):
            return _refused(Guard.KV)
        if not self._first_tokens_stay(request):
            return _refused(Guard.TTFT)
        return ADMITTED

    # -- memory --------------------------------------------------------------------------------------------------------

    def _mean_step_s(self) -> float:
        """A decode step, stretched by the time that prompts take: those of the next seconds, at their rate."""
        model, oracle = self._model, self._oracle
        decode_s = model.step_s(max(1, self._decoding), self._context)
        first = bisect_left(oracle._arrivals_s, self._now_s)
        last = min(len(oracle._requests), first + 32)
        if last - first < 2:
            return decode_s
        prompts = sum(one.prompt_tokens - one.cached_prompt_tokens for one in oracle._requests[first:last])
        over_s = max(1.0, oracle._arrivals_s[last - 1] - self._now_s)
        busy = min(0.8, oracle._share * prompts * model.e / 1000 / over_s)
        return decode_s / (1 - busy)

    def _memory_lasts(self, request: Request) -> bool:
        """Memory peaks where a sequence ends, since all grow until then: those ends are looked at, and the work's own."""
        output, mine = request.output_tokens, request.prompt_tokens + HALF_BLOCK_TOKENS
        if self._peaks is None:
            self._peaks = self._highest_so_far()
        steps, highest = self._peaks
        before = bisect_right(steps, output) - 1
        if before >= 0 and highest[before] + mine > self._capacity:
            return False
        return output > self._steps_left or self._others_at(output) + mine + output <= self._capacity

    def _highest_so_far(self) -> tuple[list[int], list[float]]:
        """(steps from now, the most that all others and one token a step for a newcomer have held by then)."""
        steps = [0, *(left for left in self._left if left <= self._steps_left)]
        return steps, list(accumulate((self._others_at(one) + one for one in steps), max))

    @property
    def _steps_left(self) -> float:
        """Until the run is over."""
        duration_s = self._oracle._world.plan.duration_s
        return math.inf if duration_s is None else (duration_s - self._now_s) / self.step_s

    def _others_at(self, steps: float) -> float:
        """Tokens that all but a newcomer hold after so many steps. Requests to come are looked at in POINTS times."""
        held = self._coming()
        after = min(bisect_left(POINTS_S, steps * self.step_s), POINTS - 1)
        return self._held_at(steps) + max(held[max(0, after - 1)], held[after])

    def _held_at(self, steps: float) -> float:
        """Tokens that those running now hold after so many steps, before those that end then have left."""
        first = bisect_left(self._left, steps)
        return self._held_from[first] + (len(self._left) - first) * steps

    def _coming(self) -> list[float]:
        """Tokens that requests yet to arrive hold at each of POINTS_S; looked at anew every FIRST_POINT_S."""
        key = int(self._now_s / FIRST_POINT_S)
        found = self._oracle.coming.get(self._host.name)
        if found is None or found[0] != key:
            found = self._oracle.coming[self._host.name] = (key, [self._coming_at(at_s) for at_s in POINTS_S])
        return found[1]

    def _coming_at(self, at_s: float) -> float:
        """Tokens that requests yet to arrive hold at a time from now."""
        oracle = self._oracle
        then_s = self._now_s + at_s
        first = bisect_right(oracle._arrivals_s, max(self._now_s, then_s - oracle._longest_output * self.step_s))
        held = 0.0
        for index in range(first, bisect_right(oracle._arrivals_s, then_s)):
            one = oracle._requests[index]
            made = (then_s - one.arrival_s) / self.step_s
            if made < one.output_tokens:
                held += one.prompt_tokens + made + HALF_BLOCK_TOKENS
        return held * oracle._share

    # -- first tokens --------------------------------------------------------------------------------------------------

    def _first_tokens_stay(self, request: Request) -> bool:
        """Every request that comes before the engine has caught up is in time behind the work."""
        oracle = self._oracle
        free_s = self._now_s + self._host.step_left_s()
        for tokens, before in self._pending:
            free_s += self._prefill_s(tokens, before)
        free_s += self._prefill_s(request.prompt_tokens, 0)
        first = bisect_right(oracle._arrivals_s, self._now_s)
        for index in range(first, min(first + FORECAST_REQUESTS, len(oracle._requests))):
            if index % len(oracle._world.hosts):
                continue  # the pool's others get their part
            one = oracle._requests[index]
            earliest_s = one.arrival_s + self.step_s / 2
            if earliest_s >= free_s:
                return True
            free_s += self._prefill_s(one.prompt_tokens - one.cached_prompt_tokens, one.cached_prompt_tokens)
            objective_s = self._sla.ttft_objective_s(one.prompt_tokens)
            if objective_s is not None and free_s > one.arrival_s + TTFT_MARGIN * objective_s:
                return False
        return True

    def _prefill_s(self, tokens: int, before: int) -> float:
        """A prompt in chunks beside the decoding sequences."""
        budget = max(1, self._limits.max_num_batched_tokens - self._decoding)
        model, total_s = self._model, 0.0
        while tokens > 0:
            chunk = min(tokens, budget)
            total_s += model.step_s(self._decoding, self._context, ((chunk, before),))
            tokens -= chunk
            before += chunk
        return total_s


def _refused(guard: Guard) -> Verdict:
    return Verdict(admitted=False, guards=(GuardReading(guard, 1.0, 0.0, passed=False),))
