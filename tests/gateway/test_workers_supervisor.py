"""What a supervisor leaves in a store that only its own processes can reach."""

from __future__ import annotations

from gateway.queue.memory_queue import MemoryQueue
from gateway.workers.supervisor import _begin_leadership

NOW = 1_800_000_000_000


async def test_the_first_decider_of_a_private_store_waits_for_no_leader_that_the_store_forgot() -> None:
    queue = MemoryQueue(lambda: NOW)

    await _begin_leadership(queue)
    record = await queue.lead("decider", now_ms=NOW + 10, valid_for_ms=2_000)

    assert record.leader == "decider"
    assert not record.fresh_record


async def test_a_leader_that_is_there_already_is_left_alone() -> None:
    queue = MemoryQueue(lambda: NOW)
    there = await queue.lead("orphan", now_ms=NOW, valid_for_ms=2_000)

    await _begin_leadership(queue)

    assert await queue.lead("decider", now_ms=NOW + 10, valid_for_ms=2_000) == there
