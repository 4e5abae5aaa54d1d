"""Works that wait for leave to start, and a store that is away, slow, or forgets: nothing is lost, nobody waits too long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.clock import PoolClock
from gateway.control.presence import Presence
from gateway.dispatch import owner as owner_module
from gateway.dispatch.owner import RECONCILE_S, STORE_PATIENCE_S, STORE_RETRY_S, TAKE_S, Owner, QueueFull
from gateway.queue.base import Enqueued, QueueUnavailable, Renewed, Session, SessionReport, Settled
from gateway.queue.batcher import BATCH_MAX, Batcher
from gateway.queue.keys import session_part
from gateway.queue.memory_queue import MemoryQueue
from gateway.replay.loop import run
from policies.vocabulary import Grant, Work

BOUNDS = {"chat": 10_000}
START_S = 1000.0


class Store(MemoryQueue):
    """A store without bells that may be away (refused at once), silent (a time-out later), or slow to tell that a work is in."""

    def __init__(self) -> None:
        super().__init__(lambda: int((START_S + asyncio.get_running_loop().time()) * 1000))
        self.away = self.silent = False
        self.answers_after_s = 0.0
        self.renewals = 0
        self.asked: list[str] = []

    async def _pass(self) -> None:
        if self.silent:
            await asyncio.sleep(2.0)  # a command's time-out
        if self.away or self.silent:
            raise QueueUnavailable("queue store is not reachable")

    async def renew_session(self, session: Session, **named: Any) -> Renewed | None:
        self.renewals += 1
        await self._pass()
        return await super().renew_session(session, **named)

    async def enqueue_many(
        self, works: Sequence[Work], *, session: Session, max_queue: Mapping[str, int], now_ms: int
    ) -> list[Enqueued]:
        self.asked += [one.id for one in works]
        await self._pass()
        answers = await super().enqueue_many(works, session=session, max_queue=max_queue, now_ms=now_ms)
        await asyncio.sleep(self.answers_after_s)
        return answers

    async def requeue_many(self, works: Sequence[Work], **named: Any) -> list[bool]:
        await self._pass()
        answers = await super().requeue_many(works, **named)
        await asyncio.sleep(self.answers_after_s)
        return answers

    async def settle_many(self, ids: Sequence[tuple[str, int]], *, session: Session, now_ms: int) -> list[Settled]:
        await self._pass()
        return await super().settle_many(ids, session=session, now_ms=now_ms)

    async def bell(self, session: Session | None) -> AsyncGenerator[None, None]:
        await asyncio.Event().wait()
        yield


class Process:
    """An owner with its presence, beside a dispatcher that grants nothing."""

    def __init__(self, store: Store) -> None:
        self.store = store
        clock = PoolClock(asyncio.get_running_loop().time, offset_s=START_S)
        self.presence = Presence(
            store,
            clock,
            session_id="me",
            sole=False,
            candidate=False,
            rng=random.Random(1),
            report=SessionReport,
            on_renewed=lambda _renewed, _sent_s, _now_ms: None,
            on_registered=lambda: self.owner.registered(),  # noqa: PLW0108 - it comes to be later
            on_expired=lambda _expired: None,
            on_led=lambda: None,
        )
        self.batcher = Batcher(store, session=lambda: self.presence.session, now_ms=self.presence.now_ms)
        self.owner = Owner(store, self.batcher, self.presence, clock)
        self.owner.serve(Follower())  # type: ignore[arg-type]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.presence.beat()
        async with self.batcher:
            tasks = [asyncio.ensure_future(self.presence.run()), asyncio.ensure_future(self.owner.run())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def wait(self, *names: str, attempt: int = 0) -> list[asyncio.Task[Grant]]:
        return [asyncio.ensure_future(self.owner.wait(work(name, attempt), BOUNDS)) for name in names]


class Follower:
    """The dispatcher as an owner sees it where another process leads: it grants nothing, and has no share."""

    queued = SimpleNamespace(seen=10_000)

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args: None

    def has_share(self, _work: Work) -> bool:
        return False

    def honours(self, _grant: Grant) -> bool:
        return True


def work(name: str, attempt: int = 0) -> Work:
    accepted_s = START_S + asyncio.get_running_loop().time()
    return Work(name, "chat", "t", "m", "/v1/completions", accepted_s, rank=0.0, attempt=attempt)


async def leave(tasks: Sequence[asyncio.Task[Grant]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_while_too_much_is_to_be_settled_nothing_new_is_written_and_what_waits_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner_module, "SETTLE_MAX", 3)

    async def main() -> None:
        process = Process(Store())
        store, owner = process.store, process.owner
        async with process.running():
            stays, *leave_soon = process.wait("stays", "a", "b", "c")
            await asyncio.sleep(1.0)
            store.away = True
            await leave(leave_soon)
            store.asked.clear()
            comes = process.wait("comes")
            await asyncio.sleep(2.0)
            kept_back = "comes" not in store.asked and "comes" not in owner._entries

            store.away = False
            await asyncio.sleep(RECONCILE_S + STORE_RETRY_S + 0.1)
            waits = set(store._works)
            await leave([stays, *comes])

        assert kept_back
        assert waits == {"stays", "comes"}
        assert owner._settle == {}

    run(main())


def test_what_was_to_be_settled_in_a_session_that_is_lost_is_not_kept() -> None:
    async def main() -> None:
        process = Process(Store())
        async with process.running():
            tasks = process.wait("a", "b")
            await asyncio.sleep(1.0)
            process.store.away = True
            await leave(tasks)
            await asyncio.sleep(1.0)
            kept = set(process.owner._settle)
            process.store.forget()
            process.owner.registered()

        assert kept == {"a", "b"}
        assert process.owner._settle == {}

    run(main())


def test_what_the_store_forgets_while_it_is_written_again_is_written_once_more() -> None:
    async def main() -> None:
        process = Process(Store())
        store = process.store
        async with process.running():
            tasks = process.wait("w")
            await asyncio.sleep(1.0)
            store.answers_after_s = 0.8
            store.forget()
            while len(store.asked) == 1:  # it is not being written again yet
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.1)
            store.forget()
            await asyncio.sleep(4.0)
            waits = set(store._works)
            await leave(tasks)

        assert waits == {"w"}

    run(main())


def test_a_work_that_a_late_call_wrote_for_an_earlier_session_is_written_again_once_that_is_swept() -> None:
    async def main() -> None:
        process = Process(Store())
        store, presence = process.store, process.presence
        async with process.running():
            tasks = process.wait("w")
            await asyncio.sleep(1.0)
            earlier = presence.session
            presence.session = Session(earlier.id, earlier.epoch + 1)
            await asyncio.sleep(3.0)
            holder = store._works["w"].owner
            await store.end_session(earlier)
            await asyncio.sleep(2.0)
            owner = store._works["w"].owner
            await leave(tasks)

        assert holder == session_part(earlier)
        assert owner == session_part(presence.session)

    run(main())


def test_a_work_that_a_full_class_refuses_is_not_written_again_meanwhile() -> None:
    async def main() -> None:
        process = Process(Store())
        async with process.running():
            process.store.answers_after_s = 3.0
            task = asyncio.ensure_future(process.owner.wait(work("w"), {"chat": 0}))
            await asyncio.sleep(0.1)
            process.presence.outages += 1
            with pytest.raises(QueueFull):
                await task
            await asyncio.sleep(RECONCILE_S + 0.1)

        assert process.store.asked == ["w"]
        assert process.store._works == {}

    run(main())


def test_a_work_that_the_store_forgets_before_its_owner_hears_that_it_took_it_is_written_again() -> None:
    async def main() -> None:
        process = Process(Store())
        async with process.running():
            process.store.answers_after_s = 3.0
            tasks = process.wait("w")
            await asyncio.sleep(0.1)
            process.store.forget()
            process.store.answers_after_s = 0.0
            await asyncio.sleep(4.0)
            waits = set(process.store._works)
            await leave(tasks)

        assert waits == {"w"}

    run(main())


def test_a_work_that_the_store_forgets_before_its_owner_hears_that_it_is_back_is_written_again() -> None:
    async def main() -> None:
        process = Process(Store())
        async with process.running():
            process.owner._entries["w"] = 1
            await process.batcher.enqueue(work("w"), max_queue=BOUNDS)
            process.store.answers_after_s = 3.0
            tasks = process.wait("w", attempt=1)
            await asyncio.sleep(0.1)
            was_back = "w" in process.store._works
            process.store.forget()
            process.store.answers_after_s = 0.0
            await asyncio.sleep(4.0)
            waits = set(process.store._works)
            await leave(tasks)

        assert was_back
        assert waits == {"w"}

    run(main())


@pytest.mark.parametrize(("away_s", "comes_back"), [(STORE_PATIENCE_S - 1.0, True), (STORE_PATIENCE_S + 1.0, False)])
def test_a_work_that_goes_back_after_an_attempt_has_the_same_patience_as_a_new_one(
    away_s: float, comes_back: bool
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        process = Process(Store())
        async with process.running():
            process.owner._entries["w"] = 1
            process.store.away, begun_s = True, loop.time()
            (task,) = process.wait("w", attempt=1)
            loop.call_later(away_s, setattr, process.store, "away", False)
            await asyncio.wait([task], timeout=STORE_PATIENCE_S + 2 * STORE_RETRY_S)
            waits, gave_up = "w" in process.store._works, task.done()
            await leave([task])

        assert (waits, gave_up) == (comes_back, not comes_back)
        assert loop.time() - begun_s < STORE_PATIENCE_S + 1.0

    run(main())


def test_no_work_waits_longer_for_a_silent_store_however_many_wait_before_it() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        process = Process(Store())
        async with process.running():
            process.store.silent = True
            begun_s, ended_s = loop.time(), []
            tasks = process.wait(*(f"w{number}" for number in range(12 * BATCH_MAX)))
            for task in tasks:
                task.add_done_callback(lambda _: ended_s.append(loop.time() - begun_s))
            done, _ = await asyncio.wait(tasks, timeout=60.0)
            assert all(isinstance(task.exception(), QueueUnavailable) for task in done)
        return ended_s

    ended_s = run(main())

    assert len(ended_s) == 12 * BATCH_MAX
    assert max(ended_s) <= STORE_PATIENCE_S + STORE_RETRY_S


def test_a_lost_session_is_registered_anew_once_for_all_that_were_told_so() -> None:
    async def main() -> None:
        process = Process(Store())
        store = process.store
        async with process.running():
            await asyncio.sleep(0.01)
            store.forget()
            store.renewals = 0
            tasks = process.wait(*(f"w{number}" for number in range(100)))
            await asyncio.sleep(2 * STORE_RETRY_S)
            waits, renewals = len(store._works), store.renewals
            await leave(tasks)

        assert waits == 100
        assert renewals <= 4

    run(main())


def test_a_grant_whose_bell_is_lost_is_found_on_a_timer_also_by_a_process_that_was_idle() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        process = Process(Store())
        async with process.running():
            await asyncio.sleep(30.0)  # idle
            (task,) = process.wait("w")
            await asyncio.sleep(0.01)
            now_ms, granted_s = process.presence.now_ms(), loop.time()
            await process.store.claim_many([Grant("w", "e", 1, 1, START_S + granted_s + 5)], now_ms=now_ms)
            await task
        return loop.time() - granted_s

    assert run(main()) <= TAKE_S + 0.01
