"""The batch of the textbooks, for comparison: formed once, padded to the longest, nobody joins until all have ended.

Prompts are padded to the longest prompt, and a row whose answer is done goes on computing padding until the longest
answer is done. How much of the work was padding is in `Totals.padded_tokens`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from backends.simulated.scheduler import Chunk, Plan, Totals
from backends.simulated.seats import Seats
from backends.simulated.sequence import Event, Sequence, SequenceState

BLOCK_TOKENS = 16
"""Size of a KV block; memory is counted in rows here, so it only sets how the batch keeps its sums."""


@dataclass(frozen=True, slots=True)
class StaticLimits:
    """rows: most sequences in a batch; kv_tokens bounds rows x (longest prompt + longest max_tokens)."""

    kv_tokens: int
    rows: int = 32


class StaticScheduler(Seats):
    """See the module header."""

    def __init__(self, limits: StaticLimits, totals: Totals) -> None:
        super().__init__(totals, block_tokens=BLOCK_TOKENS)
        self.limits = limits
        self._queue: deque[Sequence] = deque()
        self._rows = 0
        self._prompt_tokens = 0
        self._answer_tokens = 0
        self._formed_step = 0

    @property
    def decoding(self) -> int:
        return self._rows if self._batch.size else 0

    @property
    def context_tokens(self) -> int:
        return self.decoding * (self._prompt_tokens + self._batch.steps - self._formed_step)

    @property
    def kv_used_fraction(self) -> float:
        if not self._running:
            return 0.0
        return self._rows * (self._prompt_tokens + self._answer_tokens) / self.limits.kv_tokens

    def check(self, sequence: Sequence) -> None:
        total_tokens = sequence.prompt_tokens + sequence.max_tokens
        if total_tokens > self.limits.kv_tokens:
            raise ValueError(
                f"prompt_tokens + max_tokens {total_tokens}: must be <= kv_tokens {self.limits.kv_tokens}; ask for less"
            )

    def add(self, sequence: Sequence) -> None:
        self._queue.append(sequence)
        self._waiting += 1

    def plan(self, now_s: float, events: list[Event]) -> Plan:  # noqa: ARG002 - nobody is preempted here
        if self._running:
            return Plan((), decodes=True)
        rows: list[Sequence] = []
        prompt_tokens = answer_tokens = 0
        while self._queue and len(rows) < self.limits.rows:
            sequence = self._queue[0]
            if sequence.state is not SequenceState.ABORTED:
                prompt_tokens = max(prompt_tokens, sequence.prompt_tokens)
                answer_tokens = max(answer_tokens, sequence.max_tokens)
                if (len(rows) + 1) * (prompt_tokens + answer_tokens) > self.limits.kv_tokens:
                    break
                rows.append(sequence)
                self._prompt_tokens, self._answer_tokens = prompt_tokens, answer_tokens
            self._queue.popleft()
        for sequence in rows:
            self._seat(sequence, now_s)
            self._totals.padded_tokens += self._prompt_tokens - sequence.prompt_tokens
        self._rows = len(rows)
        return Plan(tuple(Chunk(sequence, self._prompt_tokens, 0) for sequence in rows), decodes=False)

    def commit(self, plan: Plan, now_s: float, events: list[Event]) -> None:
        if plan.decodes:
            self.run_steady(1, now_s, events)
        self._formed_step = self._formed_step if plan.decodes else self._batch.steps
        for sequence, _, _ in plan.chunks:
            sequence.hold_kv(sequence.prompt_tokens)
            self._end_prefill(sequence, now_s, events)

    def steady_steps(self) -> int:
        return self._batch.steps_to_end() if self._batch.size else 0

    def run_steady(self, steps: int, now_s: float, events: list[Event]) -> None:
        self._totals.generation_tokens += steps * self._batch.size
        self._totals.padded_tokens += steps * (self._rows - self._batch.size)
        self._finish(self._batch.run(steps), now_s, events)

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence]
        if sequence.decoding:
            self._batch.leave(sequence)

    def __repr__(self) -> str:
        return f"<StaticScheduler rows={self._rows} live={self._batch.size} waiting={self.waiting}>"
