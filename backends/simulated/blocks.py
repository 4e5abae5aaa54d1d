"""The KV blocks of an engine that no sequence holds: a count, or with a prefix cache a queue of what lies in them.

`FreeBlocks` is the count. `PrefixCache` is vLLM's: a full block of a prompt has an id that stands for its tokens and all
before them, so that equal ids mean equal prefixes. Sequences with the same prefix hold the same blocks, counted once and
by reference. A block that nobody holds any more is free, but what lies in it is found until the block is given to
somebody else, the longest unused first; of one sequence's blocks those at its end go first.

A sequence's blocks are entered when its prefill is planned, not when it is done, so that two of one step share already.
A second copy of a block that is known stays its holder's own. Blocks of answers get no id here: a trace does not tell
what was answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BLOCK_TOKENS = 16
"""Tokens of one block, as vLLM has it unless told otherwise."""


class FreeBlocks:
    """Blocks without a memory.

    free   blocks that can be taken, whatever lies in them
    """

    __slots__ = ("free",)

    def __init__(self, blocks: int) -> None:
        self.free = blocks

    def take(self, blocks: int) -> None:
        """Hand out blocks; <= free."""
        self.free -= blocks

    def give(self, blocks: int, ids: Sequence[int] = ()) -> None:  # noqa: ARG002 - the contract's
        """Take back a sequence's own blocks; ids: of those that it shared."""
        self.free += blocks

    def hits(self, ids: Sequence[int], *, at_most: int) -> int:  # noqa: ARG002 - the contract's
        """How many leading ids are found."""
        return 0

    def idle(self, ids: Sequence[int]) -> int:  # noqa: ARG002 - the contract's
        """How many of these, all found, nobody holds: they count as free."""
        return 0

    def holders(self, block_id: int) -> int:  # noqa: ARG002 - the contract's
        """Sequences that hold a block; 0 also of one that is not known."""
        return 0

    def share(self, ids: Sequence[int]) -> None:
        """Hold these, all found."""

    def enter(self, ids: Sequence[int]) -> list[int]:  # noqa: ARG002 - the contract's
        """Name blocks just taken; returns the ids that are theirs now, the others being known already."""
        return []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} free={self.free}>"


class PrefixCache(FreeBlocks):
    """See the module header. Every call costs O(blocks that it concerns).

    _free      free blocks, longest unused first: an id and 1, or a key < 0 and so many blocks with nothing to be found
    _holders   sequences that hold a block, by id; 0 while it is in _free
    """

    __slots__ = ("_blanks", "_free", "_holders")

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self._blanks = -1
        self._free: dict[int, int] = {self._blanks: blocks} if blocks else {}
        self._holders: dict[int, int] = {}

    @property
    def known(self) -> int:
        """Blocks that can be found, held or not."""
        return len(self._holders)

    def holders(self, block_id: int) -> int:
        return self._holders.get(block_id, 0)

    def take(self, blocks: int) -> None:
        super().take(blocks)
        while blocks:
            oldest = next(iter(self._free))
            lying = self._free[oldest]
            if lying > blocks:
                self._free[oldest] = lying - blocks
                return
            del self._free[oldest]
            if oldest >= 0:
                del self._holders[oldest]
            blocks -= lying

    def give(self, blocks: int, ids: Sequence[int] = ()) -> None:
        if blocks:
            self._blanks -= 1
            self._free[self._blanks] = blocks
        freed = [block_id for block_id in reversed(ids) if self._let_go(block_id)]
        self._free.update((block_id, 1) for block_id in freed)
        super().give(blocks + len(freed))

    def hits(self, ids: Sequence[int], *, at_most: int) -> int:
        for number, block_id in enumerate(ids):
            if number == at_most or block_id not in self._holders:
                return number
        return len(ids)

    def idle(self, ids: Sequence[int]) -> int:
        return sum(self._holders[block_id] == 0 for block_id in ids)

    def share(self, ids: Sequence[int]) -> None:
        for block_id in ids:
            if self._holders[block_id] == 0:
                del self._free[block_id]
                self.free -= 1
            self._holders[block_id] += 1

    def enter(self, ids: Sequence[int]) -> list[int]:
        named = [block_id for block_id in ids if block_id not in self._holders]
        self._holders.update(dict.fromkeys(named, 1))
        return named

    def _let_go(self, block_id: int) -> bool:
        self._holders[block_id] -= 1
        return self._holders[block_id] == 0


def block_ids(token_ids: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """Ids of the full blocks of a prompt: each from its tokens and the id before it. The same in every process."""
    return tuple(_chained(token_ids, block_tokens))


def _chained(token_ids: Sequence[int], block_tokens: int) -> Iterable[int]:
    before = 0
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        before = hash((before, *token_ids[start : start + block_tokens])) & 0x7FFF_FFFF_FFFF_FFFF
        yield before
