"""The store behind a network that fails: every process of a simulated world has one in front of the store.

A call may be late, may never arrive, may be done while its answer is lost, or may be done after its caller has given up;
the caller cannot tell them apart. What was sent arrives, also when its sender is stopped or dies meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass
from typing import TypeVar

from gateway.queue.base import (
    Claimed,
    Credit,
    Enqueued,
    Expired,
    GrantTaken,
    Heard,
    Leadership,
    Place,
    Queue,
    QueueUnavailable,
    Renewed,
    Session,
    SessionReport,
    Settled,
    Snapshot,
    Standing,
    Waiting,
)
from policies.vocabulary import Grant, Work
from tests.simulation.faults import Call, CallFault, QueueFaults
from tests.simulation.invariants import InvariantBroken

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Spoiled:
    """A fault of single calls, and how many of them it has met."""

    fault: CallFault
    met: int = 0


class FaultyQueue:
    """A `Queue` in front of another one; see the module header.

    spoiled   calls that go wrong now; the list is its caller's, and outlives a process
    away   while true nothing reaches the store and nothing comes back
    dead   the process that used it was killed: nothing is sent any more
    credits   as the last renewal told them
    """

    def __init__(
        self,
        queue: Queue,
        faults: QueueFaults,
        rng: random.Random,
        *,
        timeout_s: float = 0.5,
        spoiled: list[Spoiled] | None = None,
    ) -> None:
        """timeout_s: how long a caller waits for an answer that does not come. `queue` must never suspend."""
        self.away = self.dead = False
        self.spoiled = [] if spoiled is None else spoiled
        self.credits: Mapping[Place, Credit] = {}
        self._queue = queue
        self._faults = faults
        self._rng = rng
        self._timeout_s = timeout_s
        self._wire = Context()

    def end_faults(self) -> None:
        """From now on the store answers, in time."""
        self.away = False
        self.spoiled.clear()
        self._faults = QueueFaults()

    async def renew_session(
        self, session: Session, *, now_ms: int, valid_for_ms: int, report: SessionReport, ring: bool = False
    ) -> Renewed | None:
        renewed = await self._call(
            Call.RENEW,
            lambda: self._queue.renew_session(
                session, now_ms=now_ms, valid_for_ms=valid_for_ms, report=report, ring=ring
            ),
        )
        self.credits = {} if renewed is None else renewed.credits
        return renewed

    async def hear(self, *, now_ms: int, after_seq: int = 0) -> Heard:
        return await self._call(Call.HEAR, lambda: self._queue.hear(now_ms=now_ms, after_seq=after_seq))

    async def end_session(self, session: Session) -> Expired:
        return await self._call(Call.END, lambda: self._queue.end_session(session))

    async def expire_sessions(self, *, now_ms: int, after_seq: int | None = None) -> Expired:
        return await self._call(Call.SWEEP, lambda: self._queue.expire_sessions(now_ms=now_ms, after_seq=after_seq))

    async def lead(self, candidate: str, *, now_ms: int, valid_for_ms: int) -> Leadership:
        return await self._call(
            Call.LEAD, lambda: self._queue.lead(candidate, now_ms=now_ms, valid_for_ms=valid_for_ms)
        )

    async def resign(self, leader: str, *, epoch: int) -> None:
        await self._call(Call.RESIGN, lambda: self._queue.resign(leader, epoch=epoch))

    async def enqueue_many(
        self, works: Sequence[Work], *, session: Session, max_queue: Mapping[str, int], now_ms: int
    ) -> list[Enqueued]:
        return await self._call(
            Call.ENQUEUE, lambda: self._queue.enqueue_many(works, session=session, max_queue=max_queue, now_ms=now_ms)
        )

    async def peek(self, *, bounds: Mapping[str, int], default_bound: int, now_ms: int) -> Waiting:
        return await self._call(
            Call.PEEK, lambda: self._queue.peek(bounds=bounds, default_bound=default_bound, now_ms=now_ms)
        )

    async def claim_many(self, grants: Sequence[Grant], *, now_ms: int) -> list[Claimed | None]:
        return await self._call(Call.CLAIM, lambda: self._queue.claim_many(grants, now_ms=now_ms))

    async def give_credit(self, credits: Mapping[Session, Mapping[Place, Credit]], *, epoch: int, now_ms: int) -> bool:
        return await self._call(Call.CREDIT, lambda: self._queue.give_credit(credits, epoch=epoch, now_ms=now_ms))

    async def publish(self, snapshot: Snapshot, *, epoch: int, now_ms: int) -> bool:
        return await self._call(Call.PUBLISH, lambda: self._queue.publish(snapshot, epoch=epoch, now_ms=now_ms))

    async def snapshot(self) -> Snapshot | None:
        return await self._call(Call.SNAPSHOT, self._queue.snapshot)

    async def standing(self, *, now_ms: int) -> Standing:
        return await self._call(Call.STANDING, lambda: self._queue.standing(now_ms=now_ms))

    async def take_grants(self, session: Session, *, after_seq: int) -> list[GrantTaken]:
        return await self._call(Call.TAKE, lambda: self._queue.take_grants(session, after_seq=after_seq))

    async def requeue_many(
        self, works: Sequence[Work], *, session: Session, now_ms: int, seqs: Sequence[int] | None = None
    ) -> list[bool]:
        return await self._call(
            Call.REQUEUE, lambda: self._queue.requeue_many(works, session=session, now_ms=now_ms, seqs=seqs)
        )

    async def settle_many(self, ids: Sequence[tuple[str, int]], *, session: Session, now_ms: int) -> list[Settled]:
        return await self._call(Call.SETTLE, lambda: self._queue.settle_many(ids, session=session, now_ms=now_ms))

    async def time_ms(self) -> int:
        return await self._call(Call.TIME, self._queue.time_ms)

    async def bell(self, session: Session | None) -> AsyncIterator[None]:
        rings = self._queue.bell(session)
        assert isinstance(rings, AsyncGenerator), "only a generator can be closed by whoever stops listening"
        async with aclosing(rings):
            async for _ in rings:
                if not self.away and self._rng.random() >= self._faults.bell_lost_p:
                    yield

    async def close(self) -> None:
        """The store belongs to whoever made it."""

    async def _call(self, name: Call, call: Callable[[], Awaitable[Answer]]) -> Answer:
        if self.dead:
            raise QueueUnavailable("the process was killed")
        loop, faults = asyncio.get_running_loop(), self._faults
        answer: asyncio.Future[Answer] = loop.create_future()
        there_s, back_s = self._delay_s(), self._delay_s()
        lost = self._rng.random() < faults.request_lost_p or self.away
        unheard = self._rng.random() < faults.reply_lost_p
        spoilt = self._spoilt(name)
        if spoilt is not None:
            there_s, back_s = there_s + spoilt.late_s, back_s + spoilt.answer_late_s
            lost, unheard = lost or spoilt.lost, unheard or spoilt.unheard

        def arrive() -> None:
            if not lost and not self.away:
                told = _told(call())
                if not unheard:
                    loop.call_later(back_s, return_, told, context=self._wire)

        def return_(told: Callable[[asyncio.Future[Answer]], None]) -> None:
            if not self.away and not answer.done():
                told(answer)

        loop.call_later(there_s, arrive, context=self._wire)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError:
            raise QueueUnavailable("the store did not answer in time") from None

    def _spoilt(self, name: Call) -> CallFault | None:
        for one in self.spoiled:
            if one.fault.call is name and one.met < one.fault.spared + one.fault.times:
                one.met += 1
                return one.fault if one.met > one.fault.spared else None
        return None

    def _delay_s(self) -> float:
        faults = self._faults
        if faults.late_p and self._rng.random() < faults.late_p:
            return self._rng.uniform(0, faults.late_max_s)
        return self._rng.uniform(0, faults.delay_max_s)


def _told(call: Awaitable[Answer]) -> Callable[[asyncio.Future[Answer]], None]:
    """Have a store that never suspends do a call now; returns how to tell a future of what came of it."""
    try:
        next(call.__await__())
    except StopIteration as done:
        result: Answer = done.value
        return lambda answer: answer.set_result(result)
    except InvariantBroken:
        raise  # whether or not anybody would hear of it
    except Exception as error:  # a refusal is an answer too
        failed = error
        return lambda answer: answer.set_exception(failed)
    raise RuntimeError("the store suspended: expected one in memory")
