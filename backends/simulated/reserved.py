"""Continuous batching as TGI does it: every sequence reserves all it may ever need, and nobody is preempted.

A sequence is let in when prompt + max_new_tokens of all in the batch stay within a token budget, so a small
max_new_tokens matters and the true length does not. A prefill is a step of its own, during which the others stand
still; so new work is only let in when enough of it waits (`waiting_served_ratio` of the batch), or after
`max_waiting_tokens` decode steps, or when nothing runs.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from backends.simulated.scheduler import Chunk, Plan, Totals
from backends.simulated.seats import Seats
from backends.simulated.sequence import Event, Sequence, SequenceState

BLOCK_TOKENS = 16
"""Size of a KV block; memory is counted in tokens here, so it only sets how the batch keeps its sums."""


@dataclass(frozen=True, slots=True)
class ReservedLimits:
    """What TGI is started with, under its own names; max_total_tokens bounds prompt + answer of one sequence."""

    max_batch_total_tokens: int
    max_batch_prefill_tokens: int = 4096
    max_total_tokens: int = 8192
    max_batch_size: int = 256
    max_waiting_tokens: int = 20
    waiting_served_ratio: float = 0.3

    def __post_init__(self) -> None:
        if self.max_total_tokens > self.max_batch_total_tokens:
            raise ValueError(
                f"max_total_tokens {self.max_total_tokens}: must be <= max_batch_total_tokens "
                f"{self.max_batch_total_tokens}; lower it or raise kv_tokens"
            )


class ReservedScheduler(Seats):
    """See the module header."""

    def __init__(self, limits: ReservedLimits, totals: Totals) -> None:
        super().__init__(totals, block_tokens=BLOCK_TOKENS)
        self.limits = limits
        self._queue: deque[Sequence] = deque()
        self._steps_waited = 0
        self.reserved_tokens = 0

    @property
    def decoding(self) -> int:
        return self._batch.size

    @property
    def context_tokens(self) -> int:
        return self._batch.context_tokens

    @property
    def kv_used_fraction(self) -> float:
        return self.reserved_tokens / self.limits.max_batch_total_tokens

    def check(self, sequence: Sequence) -> None:
        total_tokens = sequence.prompt_tokens + sequence.max_tokens
        if total_tokens > self.limits.max_total_tokens:
            raise ValueError(
                f"prompt_tokens + max_new_tokens {total_tokens}: must be <= max_total_tokens "
                f"{self.limits.max_total_tokens}; ask for less"
            )

    def add(self, sequence: Sequence) -> None:
        self._queue.append(sequence)
        self._waiting += 1

    def plan(self, now_s: float, events: list[Event]) -> Plan:  # noqa: ARG002 - nobody is preempted here
        admitted = self._admissible()
        for sequence in admitted:
            self._queue.popleft()
            self._seat(sequence, now_s)
            self.reserved_tokens += sequence.prompt_tokens + sequence.max_tokens
        if admitted:
            self._steps_waited = 0
        return Plan(tuple(Chunk(sequence, sequence.prompt_tokens, 0) for sequence in admitted), decodes=not admitted)

    def commit(self, plan: Plan, now_s: float, events: list[Event]) -> None:
        if plan.decodes:
            self.run_steady(1, now_s, events)
        for sequence, tokens, _ in plan.chunks:
            sequence.hold_kv(tokens)
            self._end_prefill(sequence, now_s, events)

    def steady_steps(self) -> int:
        if not self._batch.size or self._admissible():
            return 0
        steps = self._batch.steps_to_end()
        if self._waiting and self._steps_waited < self.limits.max_waiting_tokens:
            steps = min(steps, self.limits.max_waiting_tokens - self._steps_waited)
        return steps

    def run_steady(self, steps: int, now_s: float, events: list[Event]) -> None:
        self._totals.generation_tokens += steps * self._batch.size
        if self._waiting:
            self._steps_waited += steps
        self._finish(self._batch.run(steps), now_s, events)

    def _admissible(self) -> list[Sequence]:
        """Who would be let in now, in order of arrival; [] also when too few wait to interrupt the batch for."""
        while self._queue and self._queue[0].state is SequenceState.ABORTED:
            self._queue.popleft()
        least = 1
        if self._running and self._steps_waited < self.limits.max_waiting_tokens:
            least = max(1, math.floor(len(self._running) * self.limits.waiting_served_ratio))
        if self._waiting < least:
            return []
        admitted: list[Sequence] = []
        prefill_tokens, reserved_tokens = 0, self.reserved_tokens
        for sequence in self._queue:
            if sequence.state is SequenceState.ABORTED:
                break
            prefill_tokens += sequence.prompt_tokens
            reserved_tokens += sequence.prompt_tokens + sequence.max_tokens
            over_prefill = admitted and prefill_tokens > self.limits.max_batch_prefill_tokens
            full = len(self._running) + len(admitted) >= self.limits.max_batch_size
            if over_prefill or full or reserved_tokens > self.limits.max_batch_total_tokens:
                break
            admitted.append(sequence)
        return admitted if len(admitted) >= least else []

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self.reserved_tokens -= sequence.prompt_tokens + sequence.max_tokens
        if sequence.decoding:
            self._batch.leave(sequence)

    def __repr__(self) -> str:
        return (
            f"<ReservedScheduler running={self.running} waiting={self.waiting} "
            f"reserved={self.reserved_tokens}/{self.limits.max_batch_total_tokens}>"
        )
