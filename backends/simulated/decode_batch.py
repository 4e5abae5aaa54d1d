"""The sequences that decode together, kept as sums so that a step costs the same whatever their number.

Every member gains one token per step. So nothing is stored per step: the context is one sum that grows by the batch
size, the sequence that ends next is the top of a heap keyed by the step number of its end, and the KV blocks that a
step needs are a count per residue, since a member crosses a block boundary once every `block_tokens` steps. Leaving
early (preemption, abort) leaves a stale heap entry behind, which is recognised by its membership number.
"""

from __future__ import annotations

import heapq

from backends.simulated.sequence import Sequence


class DecodeBatch:
    """See the module header.

    steps           decode steps taken by the batch since it exists; never goes back
    size            members now
    context_tokens  KV tokens held by all members
    """

    __slots__ = ("_crossings", "_ends", "_joins", "block_tokens", "context_tokens", "size", "steps")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.steps = 0
        self.size = 0
        self.context_tokens = 0
        self._joins = 0
        self._ends: list[tuple[int, int, Sequence]] = []
        self._crossings = [0] * block_tokens

    def join(self, sequence: Sequence) -> None:
        """Take in a sequence whose prefill is done and that has tokens left to make. O(log size)."""
        self._joins += 1
        self.size += 1
        self.context_tokens += sequence.kv_tokens
        self._crossings[self._residue(sequence)] += 1
        ends_at = self.steps + sequence.output_tokens - sequence.generated_tokens
        sequence.attach(self, self._joins)
        heapq.heappush(self._ends, (ends_at, self._joins, sequence))

    def leave(self, sequence: Sequence) -> None:
        """Let a member go; its progress is frozen where it stands. O(1)."""
        self._crossings[self._residue(sequence)] -= 1
        self.context_tokens -= sequence.kv_tokens
        self.size -= 1
        sequence.detach()

    def run(self, steps: int) -> list[Sequence]:
        """Take `steps` steps, no further than the first end; return those that have now made all their tokens.

        They have left the batch. Order: as they joined.
        """
        self.steps += steps
        self.context_tokens += steps * self.size
        ended: list[Sequence] = []
        while self._ends and self._ends[0][0] <= self.steps:
            _, number, sequence = heapq.heappop(self._ends)
            if sequence.join_number == number:
                self.leave(sequence)
                ended.append(sequence)
        return ended

    def steps_to_end(self) -> int:
        """Steps until the next member ends, >= 1. Only for a batch that is not empty."""
        while self._ends[0][2].join_number != self._ends[0][1]:
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.steps

    def blocks_over(self, steps: int) -> int:
        """New KV blocks that the next `steps` steps need. O(block_tokens)."""
        cycles, rest = divmod(steps, self.block_tokens)
        first = self.steps
        return cycles * self.size + sum(self._crossings[(first + i) % self.block_tokens] for i in range(rest))

    def steps_within_blocks(self, free_blocks: int) -> int:
        """Most steps that need no more than free_blocks new ones. Only for a batch that is not empty."""
        cycles, left = divmod(free_blocks, self.size)
        steps = cycles * self.block_tokens
        while (need := self._crossings[(self.steps + steps) % self.block_tokens]) <= left:
            left -= need
            steps += 1
        return steps

    def _residue(self, sequence: Sequence) -> int:
        """The step number modulo block size at which the sequence needs a new block."""
        return (self.steps - sequence.kv_tokens) % self.block_tokens

    def __repr__(self) -> str:
        return f"<DecodeBatch size={self.size} context={self.context_tokens} steps={self.steps}>"
