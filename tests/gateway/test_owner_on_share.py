"""Works that wait while the store cannot be reached: they start on the process's share, one for each place it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from backends.base import ModelCard, Probe
from gateway.clock import PoolClock
from gateway.control.roster import Engine, Roster
from gateway.dispatch import owner as owner_module
from gateway.dispatch.owner import STORE_PATIENCE_S, Owner
from gateway.queue.base import QueueUnavailable, Session
from gateway.queue.memory_queue import MemoryQueue
from gateway.settings import EngineSettings
from policies.vocabulary import Grant, Outcome, Work
from tests.gateway.members import member
from tests.policies.worlds import policy

BOUNDS = {"chat": 100}


class Share:
    """The dispatcher as an owner sees it when cut off: so many places, and nobody who grants."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.started: list[str] = []
        self.shares = True

    def start_on_share(self, work: Work) -> Grant | None:
        if not self.places:
            return None
        self.places -= 1
        self.started.append(work.id)
        return Grant(work.id, "e0", 1, work.attempt + 1, 5.0)

    def has_share(self, _work: Work) -> bool:
        return self.shares

    def finished(self, _work: Work, _grant: Grant, _outcome: Outcome | None) -> None:
        self.places += 1

    def accept(self, _work: Work, _grant: Grant) -> None: ...

    def entered(self, _work: Work) -> None: ...

    def left(self, _work: Work) -> None: ...

    def wake(self) -> None: ...


class Unreachable:
    """A store that answers no enqueue."""

    async def enqueue(self, _work: Work, *, max_queue: object) -> object:
        return await asyncio.Event().wait()


def owner_with(share: Share, *, failing: bool = True) -> tuple[Owner, SimpleNamespace]:
    session = Session("me", 1)
    presence = SimpleNamespace(failing=failing, leads=False, sole=False, outages=0, session=session)
    batcher: Any = Unreachable()
    queue: Any = None
    dispatcher: Any = share
    owner = Owner(queue, batcher, presence, PoolClock(lambda: 0.0, offset_s=0.0))  # type: ignore[arg-type]
    owner.serve(dispatcher)
    return owner, presence


@asynccontextmanager
async def waiting(owner: Owner, *works: Work) -> AsyncIterator[list[asyncio.Task[Grant]]]:
    """All of them wait, as long as the context lasts."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(owner.wait(work, BOUNDS)) for work in works]
        for _ in range(5):
            await asyncio.sleep(0)
        yield tasks
        for task in tasks:
            task.cancel()


def work(name: str, rank: float) -> Work:
    return Work(name, "chat", "t", "m", "/v1/completions", accepted_s=0.0, rank=rank)


async def test_a_work_does_not_wait_for_a_store_that_cannot_take_it() -> None:
    owner, _ = owner_with(Share(1))

    async with asyncio.timeout(1):
        grant = await owner.wait(work("w1", 1.0), BOUNDS)

    assert grant.engine == "e0"
    assert owner.waiting == 0


async def test_works_that_a_place_is_free_for_again_start_in_the_order_of_their_ranks() -> None:
    share = Share(1)
    owner, _ = owner_with(share)
    first = work("first", 0.0)
    grant = await owner.wait(first, BOUNDS)

    async with waiting(owner, work("late", 9.0), work("early", 1.0)) as (late, early):
        assert share.started == ["first"]
        owner.finished(first, grant, None)

        assert (await early).work_id == "early"
        assert not late.done()


async def test_a_work_that_began_to_enter_the_store_before_the_cut_starts_when_the_cut_shows() -> None:
    share = Share(1)
    owner, presence = owner_with(share, failing=False)
    async with waiting(owner, work("w1", 1.0)) as (task,):
        assert share.started == []
        presence.failing = True
        owner._start_on_share()

        assert (await task).work_id == "w1"


async def test_a_work_that_is_granted_does_not_wait_for_the_store_to_say_that_it_took_it() -> None:
    owner, _ = owner_with(Share(0), failing=False)
    async with waiting(owner, work("w1", 1.0)) as (task,):
        taken = owner.granted(Grant("w1", "e1", 1, 1, 5.0))

        async with asyncio.timeout(1):
            assert (await task).engine == "e1"
    assert taken


@pytest.mark.parametrize("places", [0, 1])
async def test_a_client_that_leaves_as_its_work_starts_gives_the_place_back(places: int) -> None:
    share = Share(places)
    owner, presence = owner_with(share, failing=False)
    async with waiting(owner, work("w1", 1.0)) as (task,):
        presence.failing = True
        owner._start_on_share()
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(share.started) == places
    assert share.places == places
    assert owner.waiting == 0


class Failing:
    """A store that takes no work, and time that passes with each call."""

    def __init__(self) -> None:
        self.now_s = 0.0

    async def enqueue(self, _work: Work, *, max_queue: object) -> object:
        self.now_s += STORE_PATIENCE_S
        raise QueueUnavailable("queue store did not answer in time")


async def test_a_work_whose_turn_on_the_share_may_come_is_not_refused_for_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner_module, "STORE_RETRY_S", 0.0)
    share, store = Share(0), Failing()
    owner, _ = owner_with(share)
    owner._batcher, owner._clock = store, PoolClock(lambda: store.now_s, offset_s=0.0)  # type: ignore[assignment]
    task = asyncio.ensure_future(owner.wait(work("w1", 1.0), BOUNDS))
    while store.now_s < 4 * STORE_PATIENCE_S:
        await asyncio.sleep(0)
    waits = not task.done()

    share.shares = False

    with pytest.raises(QueueUnavailable):
        await task
    assert waits


async def test_a_share_on_a_canary_that_a_work_is_not_drawn_for_is_no_reason_to_wait() -> None:
    cut_off = member(MemoryQueue(lambda: 100_000), "a", policy(), candidate=False, now_s=lambda: 100.0)
    cut_off.presence.last_error = "queue store did not answer in time"
    dispatcher = cut_off.dispatcher
    (plain,) = dispatcher._roster
    canary = Engine(EngineSettings("c", "http://c", canary=1e-9), dispatcher._ledger["c"], 0.5, backend=plain.backend)
    canary.heard(Probe(ready=True, models=(ModelCard("m", {}, None),)), 100.0)
    dispatcher._roster = Roster([plain, canary])
    one = Work("w", "chat", "t", "m", "/v1/completions", 100.0, 100.0, prompt_tokens=10)
    has: list[bool] = []
    for engine in ("c", "e"):
        cut_off.credit._floors = {(engine, "chat"): 1}
        cut_off.credit._renewed_s = 100.0
        has.append(dispatcher.has_share(one))

    assert has == [False, True]
    assert dispatcher.start_on_share(one) is not None
