"""A claim of which nobody knows whether it was made: what its owner has found in the store meanwhile is not in doubt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.queue.base import Claimed, QueueUnavailable
from gateway.queue.memory_queue import MemoryQueue
from policies.vocabulary import Grant, Work
from tests.gateway.members import member as made
from tests.policies.worlds import policy

POLICY = policy("version: 1\nclasses: {chat: {ttft_sla_s: 1}}\nsizing: {fixed: {total: 4, windows: {chat: 4}}}\n")
WORK = Work("w", "chat", "t", "m", "/v1/completions", 0.0, 0.0, prompt_tokens=10)
BOUNDS = {"chat": 9}


class Losing(MemoryQueue):
    """A store whose answers to claims get lost; meanwhile: what happens while the second one is waited for; refuses: that
    one, since another process leads by then."""

    meanwhile: Any = None
    refuses = False
    calls = 0

    async def claim_many(self, grants: Sequence[Grant], *, now_ms: int) -> list[Claimed | None]:
        self.calls += 1
        if self.calls == 1:
            await super().claim_many(grants, now_ms=now_ms)
        else:
            await self.meanwhile()
            if self.refuses:
                return [None] * len(grants)
        raise QueueUnavailable("the answer was lost")


@pytest.mark.parametrize("refuses", [False, True], ids=["lost", "refused"])
async def test_an_attempt_that_runs_stays_in_the_ledger_of_a_leader_that_was_unsure_of_it(*, refuses: bool) -> None:
    queue = Losing(lambda: 100_000)
    queue.refuses = refuses
    member = made(queue, "a", POLICY, candidate=True, now_s=lambda: 100.0)
    ledger = member.dispatcher._ledger
    queue.meanwhile = member.owner._take_grants
    for now_ms in (1, 5_000):
        await queue.lead("nobody", now_ms=now_ms, valid_for_ms=5_000)
    await member.presence.beat()
    assert member.presence.leads
    async with member.batcher, asyncio.TaskGroup() as group:
        waiting = group.create_task(member.owner.wait(WORK, BOUNDS))
        await asyncio.sleep(0)
        while not queue._works:
            await asyncio.sleep(0)
        with contextlib.suppress(QueueUnavailable):
            await member.dispatcher.round()
        grant = await waiting

        member.dispatcher._step_down()

        assert queue.calls == 2
        assert ("w", 1) in ledger["e"].entries
        member.owner.finished(WORK, grant, None)
    assert not ledger["e"].entries
