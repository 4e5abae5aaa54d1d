"""Continuous batching as vLLM's V1 scheduler does it: chunked prefill, paged KV, preemption by recomputing.

Each step has a budget of tokens. Running sequences come first, one token each and the rest of a prefill that did not
fit before; what is left of the budget admits waiting sequences, head of the line only, while there are seats and free
blocks for their whole prompt. When a running sequence needs a block and none is free, a victim loses all its KV and
waits again: the newest (policy fcfs), or the one with the worst priority, newest among equals (policy priority). One
that is its own victim ends the round: those behind it in the order of admission keep their KV and sit the step out,
which happens under the priority policy only. In a step that preempted nobody is admitted.

Two facts keep it cheap. A prefill is cut only by the end of the budget, so at most one sequence is ever part way
through, and it is the newest. And all others are decoding, so `DecodeBatch` knows them by sums.

One block is reserved, as in vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from backends.simulated.blocks import FreeBlocks, PrefixCache
from backends.simulated.scheduler import Chunk, Plan, Totals
from backends.simulated.seats import Seats
from backends.simulated.sequence import Event, EventKind, Sequence, SequenceState
from backends.simulated.waiting import ArrivalQueue, PriorityQueue, WaitingQueue


class SchedulingPolicy(StrEnum):
    """Order of waiting and choice of victims."""

    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class ContinuousLimits:
    """What vLLM is started with.

    kv_tokens               KV memory in tokens, the reserved block included
    max_num_seqs            seats
    max_num_batched_tokens  budget of one step, >= max_num_seqs
    max_model_len           longest prompt plus answer; must fit the KV memory alone
    reserve_full_prompt     admit only when the whole prompt fits, not just its first chunk (vLLM's default)
    prefix_caching          find the leading blocks of prompts again, by their ids (see `blocks`)
    """

    kv_tokens: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    block_tokens: int = 16
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    reserve_full_prompt: bool = True
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.block_tokens, self.max_model_len) < 1:
            raise ValueError("max_num_seqs, block_tokens and max_model_len: must be >= 1; fix the engine's options")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens}: must be >= max_num_seqs {self.max_num_seqs}; "
                "raise it or lower max_num_seqs"
            )
        if self.usable_blocks * self.block_tokens < self.max_model_len:
            raise ValueError(
                f"max_model_len {self.max_model_len}: one sequence of this length needs more than the "
                f"{self.usable_blocks} usable blocks of {self.block_tokens}; lower it or raise kv_tokens"
            )

    @property
    def usable_blocks(self) -> int:
        """Blocks that sequences can hold."""
        return self.kv_tokens // self.block_tokens - 1


class ContinuousScheduler(Seats):
    """See the module header."""

    def __init__(self, limits: ContinuousLimits, totals: Totals) -> None:
        super().__init__(totals, block_tokens=limits.block_tokens)
        self.limits = limits
        self._blocks_left = (PrefixCache if limits.prefix_caching else FreeBlocks)(limits.usable_blocks)
        self._prefilling: Sequence | None = None
        self._sitting_out: list[Sequence] = []
        self._queue: WaitingQueue = (
            PriorityQueue() if limits.scheduling_policy is SchedulingPolicy.PRIORITY else ArrivalQueue()
        )
        self._arrivals = 0

    @property
    def decoding(self) -> int:
        return self._batch.size

    @property
    def context_tokens(self) -> int:
        return self._batch.context_tokens

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._blocks_left.free

    def cached_holders(self, block_id: int) -> int:
        """Sequences that hold a block of the prefix cache; 0 also of one that is not in it."""
        return self._blocks_left.holders(block_id)

    @property
    def kv_used_fraction(self) -> float:
        return 1 - self.free_blocks / self.limits.usable_blocks

    def check(self, sequence: Sequence) -> None:
        if sequence.prompt_tokens >= self.limits.max_model_len:
            raise ValueError(
                f"prompt_tokens {sequence.prompt_tokens}: must be < max_model_len {self.limits.max_model_len}; "
                "shorten the prompt"
            )

    def add(self, sequence: Sequence) -> None:
        sequence.output_tokens = min(sequence.output_tokens, self.limits.max_model_len - sequence.prompt_tokens)
        self._arrivals += 1
        sequence.number = self._arrivals
        self._waiting += 1
        self._queue.push(sequence)

    # A step ---------------------------------------------------------------------------------------------------

    def plan(self, now_s: float, events: list[Event]) -> Plan:
        chunks = self._round(now_s, events)
        while not chunks and not self._batch.size:
            # The first in the order was its own victim: vLLM's step is empty and takes no time, and the next begins.
            self._bring_back()
            chunks = self._round(now_s, events)
        return Plan(tuple(chunks), decodes=True)

    def _round(self, now_s: float, events: list[Event]) -> list[Chunk]:
        preempted, ended = self._claim_decode_blocks(now_s, events)
        budget = self.limits.max_num_batched_tokens - self._batch.size
        chunks: list[Chunk] = []
        tail = self._prefilling
        if tail is not None and budget > 0 and not ended:
            chunk = min(tail.prefill_target_tokens - tail.kv_tokens, budget)
            need = self._blocks(tail.kv_tokens + chunk) - self._blocks(tail.kv_tokens)
            claimed, victims = self._claim(tail, need, None, now_s, events)
            preempted |= victims
            if claimed:
                self._name_blocks(tail, tail.kv_tokens, chunk)
                chunks.append(Chunk(tail, chunk, tail.kv_tokens))
                budget -= chunk
        if not preempted:
            self._admit(chunks, budget, now_s)
        return chunks

    def commit(self, plan: Plan, now_s: float, events: list[Event]) -> None:
        self._totals.generation_tokens += self._batch.size
        self._finish(self._batch.run(1), now_s, events)
        for sequence, tokens, before in plan.chunks:
            sequence.hold_kv(before + tokens)
            done = before + tokens == sequence.prefill_target_tokens
            self._prefilling = None if done else sequence
            if done:
                self._end_prefill(sequence, now_s, events)
        self._bring_back()

    def steady_steps(self) -> int:
        if self._prefilling is not None or not self._batch.size:
            return 0
        steps = min(self._batch.steps_to_end(), self._batch.steps_within_blocks(self.free_blocks))
        return 0 if steps and self._head_fits(self._batch.blocks_over(1)) else steps

    def run_steady(self, steps: int, now_s: float, events: list[Event]) -> None:
        self._blocks_left.take(self._batch.blocks_over(steps))
        self._totals.generation_tokens += steps * self._batch.size
        self._finish(self._batch.run(steps), now_s, events)

    # Admission ------------------------------------------------------------------------------------------------

    def _head_fits(self, decode_blocks: int) -> bool:
        """May the head be let in once this step's decoding has its blocks?

        Then no later step of a steady run lets it in either: the blocks of its prefix that others hold stay held, and
        one that nobody holds saves no block. But it saves tokens, and by that the size of a first chunk that is all
        that has to fit: there the answer is yes.
        """
        head = self._queue.head()
        if head is None or len(self._running) >= self.limits.max_num_seqs:
            return False
        budget = self.limits.max_num_batched_tokens - self._batch.size
        if budget > 0 and self.limits.prefix_caching and not self.limits.reserve_full_prompt:
            return True
        return budget > 0 and self._blocks_to_admit(head, budget) <= self.free_blocks - decode_blocks

    def _blocks_to_admit(self, head: Sequence, budget: int) -> int:
        target = head.prefill_target_tokens
        found = self._found(head)
        if not self.limits.reserve_full_prompt:
            target = min(target, self._cached(head, found) + budget)
        return self._blocks(target) - len(found) + self._blocks_left.idle(found)

    def _admit(self, chunks: list[Chunk], budget: int, now_s: float) -> None:
        while budget > 0 and len(self._running) < self.limits.max_num_seqs and (head := self._queue.head()):
            if self._blocks_to_admit(head, budget) > self.free_blocks:
                break
            self._seat(self._queue.pop(), now_s)
            found = self._found(head)
            cached = self._cached(head, found)
            chunk = min(head.prefill_target_tokens - cached, budget)
            self._blocks_left.share(found)
            head.shared_ids.extend(found)
            self._blocks_left.take(self._blocks(cached + chunk) - len(found))
            self._name_blocks(head, cached, chunk)
            budget -= chunk
            head.hold_kv(cached)
            if head.preemptions == 0:
                self._totals.queried_prompt_tokens += head.prompt_tokens if self.limits.prefix_caching else 0
                self._totals.cached_prompt_tokens += cached
            chunks.append(Chunk(head, chunk, cached))

    def _found(self, sequence: Sequence) -> tuple[int, ...]:
        """Leading blocks that are in the prefix cache; never all of what is to be computed."""
        most = (sequence.prefill_target_tokens - 1) // self.limits.block_tokens
        return sequence.block_ids[: self._blocks_left.hits(sequence.block_ids, at_most=most)]

    def _cached(self, sequence: Sequence, found: tuple[int, ...]) -> int:
        """Tokens that need not be computed: those found, or without a cache what the sequence says was found."""
        if self.limits.prefix_caching and sequence.block_ids:
            return len(found) * self.limits.block_tokens
        cached = min(sequence.cached_prompt_tokens, sequence.prompt_tokens - 1)
        return cached - cached % self.limits.block_tokens

    def _name_blocks(self, sequence: Sequence, before: int, tokens: int) -> None:
        """Enter the blocks that a piece of prefill fills into the prefix cache."""
        size = self.limits.block_tokens
        filled = sequence.block_ids[before // size : (before + tokens) // size]
        sequence.shared_ids.extend(self._blocks_left.enter(filled))

    # Memory ---------------------------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)

    def _crosses(self, sequence: Sequence) -> bool:
        """True when its next token needs a new block."""
        return sequence.decoding and sequence.kv_tokens % self.limits.block_tokens == 0

    def _claim_decode_blocks(self, now_s: float, events: list[Event]) -> tuple[bool, bool]:
        """Take the blocks that this step's decoding needs: (somebody had to give way, the round ended with that).

        Constant work while blocks last; else the running set is walked, oldest first, as vLLM does.
        """
        need = self._batch.blocks_over(1)
        if need <= self.free_blocks:
            self._blocks_left.take(need)
            return False, False
        preempted = False
        served: set[Sequence] = set()
        order = list(self._running)
        for place, sequence in enumerate(order):
            if self._crosses(sequence):
                claimed, victims = self._claim(sequence, 1, served, now_s, events)
                preempted |= victims
                if not claimed:
                    self._sit_out(order[place + 1 :])
                    return True, True
                served.add(sequence)
        return preempted, False

    def _sit_out(self, behind: list[Sequence]) -> None:
        """Leave these out of the step under way, but in their seats."""
        for sequence in behind:
            if sequence.decoding:
                self._batch.leave(sequence)
                self._sitting_out.append(sequence)

    def _bring_back(self) -> None:
        for sequence in self._sitting_out:
            self._batch.join(sequence)
        self._sitting_out.clear()

    def _claim(
        self,
        sequence: Sequence,
        blocks: int,
        served: set[Sequence] | None,
        now_s: float,
        events: list[Event],
    ) -> tuple[bool, bool]:
        """Take blocks for a running sequence, preempting until there are enough: (taken, somebody was preempted).

        served  the decoding ones that have taken their blocks of this step, which a victim gives back too; None: all
        """
        preempted = False
        while self.free_blocks < blocks:
            victim = self._victim()
            if self._crosses(victim) and (served is None or victim in served):
                self._blocks_left.give(1)
            self._preempt(victim, now_s, events)
            preempted = True
            if victim is sequence:
                return False, True
        self._blocks_left.take(blocks)
        return True, preempted

    def _victim(self) -> Sequence:
        if self.limits.scheduling_policy is SchedulingPolicy.PRIORITY:
            return max(self._running, key=lambda sequence: (sequence.priority, sequence.arrival_s, sequence.number))
        return next(reversed(self._running))

    def _preempt(self, sequence: Sequence, now_s: float, events: list[Event]) -> None:
        self._totals.preemptions += 1
        self._totals.recomputed_tokens += sequence.kv_tokens
        sequence.preemptions += 1
        self._release(sequence)
        sequence.hold_kv(0)
        sequence.state = SequenceState.WAITING
        self._waiting += 1
        self._queue.push_back_preempted(sequence)
        events.append(Event(now_s, EventKind.PREEMPTED, sequence))

    def _release(self, sequence: Sequence) -> None:
        """Take away seat and memory. Between steps, or for one whose block of this step was given back."""
        del self._running[sequence]
        self._blocks_left.give(self._blocks(sequence.kv_tokens) - len(sequence.shared_ids), sequence.shared_ids)
        sequence.shared_ids.clear()
        if sequence.decoding:
            self._batch.leave(sequence)
        if sequence is self._prefilling:
            self._prefilling = None

    def __repr__(self) -> str:
        return (
            f"<ContinuousScheduler running={self.running} waiting={self.waiting} "
            f"free_blocks={self.free_blocks}/{self.limits.usable_blocks}>"
        )
