"""The works whose sockets are in this process: who waits for leave to start, and what the queue still knows of them.

A work that the dispatcher can start at once never touches the queue. Any other is enqueued, waits here on a future, and
is removed from the queue when it ends, however it ends. The queue is an index that its owners rebuild: when a session
was lost or the store was away (a flush, a failover, a restart that lost its last second), every work that waits here is
written again.

Grants reach it in two ways: straight from the dispatcher when this process leads, else from the store, read on the bell
and on a timer. An epoch below the highest seen and a grant that has expired are refused and given back. While the store
cannot be reached nobody grants: then what waits here starts on the share that this process keeps, earliest rank first.

One writer: the process itself. Removals are gathered and retried until the store has taken them or the session that
wrote them is gone, so that a cancelled client never leaves an entry behind. While SETTLE_MAX of them wait, nothing new is
written: what waits already, or runs, is kept, and what comes is kept back until the store answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gateway.clock import Clock
from gateway.control.presence import Presence
from gateway.dispatch.dispatcher import Dispatcher
from gateway.queue.base import Enqueued, Queue, QueueUnavailable, Session, SessionLost, SessionReport
from gateway.queue.batcher import Batcher
from policies.ordering.shedding import Infeasible
from policies.vocabulary import Grant, Outcome, Work

RECONCILE_S = 1.0
TAKE_S = 0.25
SETTLE_BATCH = 512
SETTLE_MAX = 65_536
"""Works that have ended and that the store has not been told of; some 10 MB, written within seconds once it answers."""
STORE_PATIENCE_S = 5.0
STORE_RETRY_S = 0.2


class QueueFull(Exception):
    """The class already has as many works waiting as its policy allows."""


class TooLate(Exception):
    """The pool's decider predicts that the work cannot be in time, and its class asks for a refusal then."""

    def __init__(self, infeasible: Infeasible) -> None:
        super().__init__(infeasible.work.id)
        self.infeasible = infeasible


@dataclass(slots=True)
class _Waiter:
    work: Work
    refusable: bool
    granted: asyncio.Future[Grant] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    entering: asyncio.Timeout | None = None

    def start(self, grant: Grant) -> None:
        """Wait no longer, neither for the store to take the work."""
        self.granted.set_result(grant)
        if self.entering is not None:
            self.entering.reschedule(0.0)

    def refuse(self, infeasible: Infeasible) -> None:
        """Wait no longer, since it would be in vain."""
        self.granted.set_exception(TooLate(infeasible))
        if self.entering is not None:
            self.entering.reschedule(0.0)


class Owner:
    """See the module header."""

    __slots__ = (
        "_batcher",
        "_bell",
        "_clock",
        "_dispatcher",
        "_entries",
        "_grants_seen",
        "_held_before",
        "_presence",
        "_queue",
        "_refused",
        "_registered_anew",
        "_settle",
        "_settle_soon",
        "_waiting",
        "_written_at",
    )

    def __init__(self, queue: Queue, batcher: Batcher, presence: Presence, clock: Clock) -> None:
        self._queue = queue
        self._batcher = batcher
        self._presence = presence
        self._clock = clock
        self._dispatcher: Dispatcher | None = None
        self._waiting: dict[str, _Waiter] = {}
        self._entries: dict[str, int] = {}
        self._settle: dict[str, int] = {}
        self._settle_soon = asyncio.Event()
        self._bell = asyncio.Event()
        self._grants_seen = 0
        self._held_before: frozenset[str] = frozenset()
        self._written_at = self._losses()
        self._refused: dict[str, tuple[Work, int]] = {}
        self._registered_anew = asyncio.Event()

    def serve(self, dispatcher: Dispatcher) -> None:
        """The dispatcher in this process (set once, at composition: each knows the other)."""
        self._dispatcher = dispatcher

    @property
    def waiting(self) -> int:
        """Works of this process that wait for a grant."""
        return len(self._waiting)

    def start_now(self, work: Work) -> Grant | None:
        """Leave to start at once, without a round trip; None: it has to `wait`. The caller owes `finished`."""
        assert self._dispatcher is not None
        return self._dispatcher.start_now(work)

    async def wait(self, work: Work, max_queue: Mapping[str, int], *, refusable: bool = True) -> Grant:
        """Leave to start, when there is room; cancel to stop waiting. The caller owes one `finished` per grant.

        Raises QueueFull, TooLate if `refusable`, and QueueUnavailable when the store could not take the work for STORE_PATIENCE_S.
        """
        dispatcher = self._dispatcher
        assert dispatcher is not None
        waiter = _Waiter(work, refusable)
        self._waiting[work.id] = waiter
        dispatcher.entered(work)
        try:
            self._start_on_share()
            if not waiter.granted.done():
                await self._entered(waiter, max_queue)
                dispatcher.wake()
            return await waiter.granted
        except BaseException:
            if waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
                dispatcher.finished(work, waiter.granted.result(), None)
            self._forget(work.id)
            raise
        finally:
            self._waiting.pop(work.id, None)
            dispatcher.left(work)

    def refused(self, infeasible: Infeasible) -> bool:
        """The decider refuses a work; False when it does not wait here, or is not to be refused."""
        waiter = self._waiting.get(infeasible.work.id)
        if waiter is None or waiter.granted.done() or not waiter.refusable:
            return False
        waiter.refuse(infeasible)
        return True

    def finished(self, work: Work, grant: Grant, outcome: Outcome | None) -> None:
        """An attempt ended. With its outcome the work is over; with None it goes on elsewhere and keeps its entry."""
        assert self._dispatcher is not None
        self._dispatcher.finished(work, grant, outcome)
        if outcome is not None:
            self._forget(work.id)
        self._start_on_share()

    def ended(self, work: Work) -> None:
        """A work is over without a grant in force; whatever the queue still holds of it goes."""
        self._forget(work.id)

    def granted(self, grant: Grant) -> bool:
        """Take a grant for a work that waits here, or has taken it up already; False when it is not wanted any more."""
        waiter = self._waiting.get(grant.work_id)
        if waiter is None or waiter.granted.done():
            return self._entries.get(grant.work_id) == grant.attempt
        if waiter.work.attempt + 1 != grant.attempt:
            return False
        assert self._dispatcher is not None
        self._dispatcher.accept(waiter.work, grant)
        self._entries[grant.work_id] = grant.attempt
        waiter.start(grant)
        return True

    def report(self) -> SessionReport:
        """What this process tells with each renewal of its session."""
        assert self._dispatcher is not None
        return self._dispatcher.report(self._grants_seen)

    def registered(self) -> None:
        """Our session is a new one: the store has swept or forgotten what the old one wrote, also what was to be removed."""
        self._grants_seen = 0
        self._refused.clear()
        self._settle.clear()
        self._registered_anew.set()

    async def run(self) -> None:
        """Remove what ended, take what was granted and rebuild what was lost, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._settle_forever(), name="settle")
            group.create_task(self._reconcile_forever(), name="reconcile")
            if not self._presence.sole:
                group.create_task(self._take_forever(), name="take grants")
                group.create_task(self._listen(), name="session bell")
                group.create_task(self._share_forever(), name="start on share")

    async def close(self) -> None:
        """Take what has ended out of the queue, once more; what cannot be told ends with the session."""
        with contextlib.suppress(QueueUnavailable):
            await self.flush()

    async def flush(self) -> None:
        """Settle everything that has ended. Raises QueueUnavailable."""
        while self._settle:
            await self._settle_some()

    def _start_on_share(self) -> None:
        """Cut off from the store: start what fits our share. Works alike are passed over once one of them did not fit."""
        dispatcher = self._dispatcher
        assert dispatcher is not None
        if not self._presence.failing or not self._waiting:
            return
        full: set[tuple[str, str]] = set()
        for waiter in sorted(self._waiting.values(), key=lambda one: one.work.rank):
            work = waiter.work
            if waiter.granted.done() or (work.class_name, work.model) in full:
                continue
            grant = dispatcher.start_on_share(work)
            if grant is None:
                full.add((work.class_name, work.model))
                continue
            if work.id in self._entries:
                self._entries[work.id] = grant.attempt
            waiter.start(grant)

    async def _share_forever(self) -> None:
        """A share is free again when a work ends; that we are cut off shows at no work's end."""
        while True:
            await asyncio.sleep(TAKE_S)
            self._start_on_share()

    async def _entered(self, waiter: _Waiter, max_queue: Mapping[str, int]) -> None:
        """Write a work into the store, unless it is granted before the store answers."""
        try:
            async with asyncio.timeout(None) as waiter.entering:
                await self._enter(waiter.work, max_queue)
        except TimeoutError:
            if not waiter.granted.done():
                raise
        finally:
            waiter.entering = None

    async def _enter(self, work: Work, max_queue: Mapping[str, int]) -> None:
        """Write a work, with patience for a store that is being restarted or replaced; without end while its turn on our
        share may come. Raises QueueFull, and QueueUnavailable when the patience is over."""
        assert self._dispatcher is not None
        give_up_s = self._clock.now_s() + STORE_PATIENCE_S
        while True:
            try:
                async with asyncio.timeout(give_up_s - self._clock.now_s()):
                    return await self._write(work, max_queue)
            except QueueUnavailable as error:
                reason = str(error)
                if isinstance(error, SessionLost):
                    self._presence.hurry()  # it registers another, once for all that were told so
            except TimeoutError:
                reason = f"queue store did not take the work within {STORE_PATIENCE_S:g} s"
            if self._clock.now_s() >= give_up_s:
                if not self._dispatcher.has_share(work):
                    raise QueueUnavailable(reason)
                give_up_s = self._clock.now_s() + STORE_PATIENCE_S
            await asyncio.sleep(STORE_RETRY_S)

    async def _write(self, work: Work, max_queue: Mapping[str, int]) -> None:
        """One try to have the work wait in the store: back at its place there after an attempt, or as a new one."""
        known = work.id in self._entries
        losses = self._losses()
        if known and work.attempt:
            (back,) = await self._queue.requeue_many(
                [work], session=self._presence.session, now_ms=self._presence.now_ms()
            )
            if back:
                self._check_kept(work, losses)
                return
        if not known and len(self._settle) >= SETTLE_MAX:
            raise QueueUnavailable(f"queue store is to be told of {SETTLE_MAX} ended works first: it takes no new ones")
        self._entries[work.id] = work.attempt
        losses = self._losses()
        answer = await self._batcher.enqueue(work, max_queue=max_queue)
        if answer is Enqueued.QUEUED:
            self._check_kept(work, losses)
        if answer is not Enqueued.QUEUED and not known:
            del self._entries[work.id]  # else it is settled: an earlier call may arrive late and find room
        if answer is Enqueued.FULL:
            raise QueueFull(work.class_name)
        if answer is Enqueued.TAKEN:
            raise QueueUnavailable(f"work {work.id}: another session holds it; it will be swept, try again")

    def _check_kept(self, work: Work, losses: tuple[int, int]) -> None:
        """A work is in the store, by an answer to what was asked at `losses`. Raises QueueUnavailable where it may be gone again."""
        if losses != self._losses():
            raise QueueUnavailable(
                f"work {work.id}: the queue store may have lost it since it took it; it is written again"
            )

    def _forget(self, work_id: str) -> None:
        attempt = self._entries.pop(work_id, None)
        if attempt is not None:
            self._settle[work_id] = attempt
            self._settle_soon.set()

    async def _settle_forever(self) -> None:
        while True:
            await self._settle_soon.wait()
            self._settle_soon.clear()
            try:
                await self.flush()
            except QueueUnavailable:
                await asyncio.sleep(RECONCILE_S)
                self._settle_soon.set()

    async def _settle_some(self) -> None:
        batch = list(self._settle.items())[:SETTLE_BATCH]
        await self._queue.settle_many(batch, session=self._presence.session, now_ms=self._presence.now_ms())
        for work_id, attempt in batch:
            if self._settle.get(work_id) == attempt:
                del self._settle[work_id]

    async def _reconcile_forever(self) -> None:
        while True:
            await asyncio.sleep(RECONCILE_S)
            if self._waiting:
                try:
                    await self._take_grants()
                    await self._rewrite()
                except QueueUnavailable:
                    continue

    async def _take_forever(self) -> None:
        """Read grants on the bell, and on a timer while something waits, since a bell may be lost."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TAKE_S):
                    await self._bell.wait()
            if not (self._bell.is_set() or self._waiting):
                continue
            self._bell.clear()
            try:
                await self._take_grants()
            except QueueUnavailable:
                await asyncio.sleep(TAKE_S)

    async def _listen(self) -> None:
        """Hear the bell of the session in force, whichever it is by now."""
        while True:
            self._registered_anew.clear()
            async with asyncio.TaskGroup() as group:
                hearing = group.create_task(self._hear(self._presence.session), name="hear the session's bell")
                await self._registered_anew.wait()
                hearing.cancel()

    async def _hear(self, session: Session) -> None:
        async for _ in self._queue.bell(session):
            self._bell.set()

    async def _take_grants(self) -> None:
        """Start what was granted to works that wait here; give back what may not be started."""
        session, dispatcher = self._presence.session, self._dispatcher
        assert dispatcher is not None
        grants = await self._queue.take_grants(session, after_seq=self._grants_seen)
        for taken in grants:
            self._grants_seen = max(self._grants_seen, taken.seq)
            grant = taken.grant
            waiter = self._waiting.get(grant.work_id)
            if waiter is None or waiter.granted.done():
                continue
            held = dispatcher.holds(grant)
            if dispatcher.honours(grant) and (held or not self._presence.leads) and self.granted(grant):
                continue
            if held:
                dispatcher.finished(waiter.work, grant, None)
            self._refused[grant.work_id] = replace(waiter.work, attempt=grant.attempt - 1), taken.seq
        if grants:
            self._presence.hurry()
        await self._give_back()

    async def _give_back(self) -> None:
        """Grants that may not be started go back, however often the store has to be asked: nobody reads them again."""
        refused = list(self._refused.items())
        if not refused:
            return
        await self._queue.requeue_many(
            [work for _, (work, _) in refused],
            session=self._presence.session,
            now_ms=self._presence.now_ms(),
            seqs=[seq for _, (_, seq) in refused],
        )
        for work_id, given in refused:
            if self._refused.get(work_id) == given:
                del self._refused[work_id]

    async def _rewrite(self) -> None:
        """Write again what the store forgot."""
        assert self._dispatcher is not None
        now_s = self._clock.pool_s()
        # What is entering writes itself: written from both sides, a work could be refused and be there.
        waiting = [one.work for one in self._waiting.values() if one.entering is None and not one.granted.done()]
        old = [work for work in waiting if now_s - work.accepted_s > RECONCILE_S]
        losses = self._losses()
        rebuild = losses != self._written_at
        if rebuild or (self._presence.leads and len(old) > self._dispatcher.queued.seen):
            self._held_before = await self._write_again(waiting if rebuild else old)
            self._written_at = losses  # of before: what was lost meanwhile is written again the next time
        elif self._held_before:
            self._held_before = await self._write_again([one for one in waiting if one.id in self._held_before])

    def _losses(self) -> tuple[int, int]:
        """Changes each time the store may have lost what waits: with another session, and after an outage."""
        return self._presence.session.epoch, self._presence.outages

    async def _write_again(self, works: Sequence[Work]) -> frozenset[str]:
        """Enqueue is idempotent: works that the store still has answer QUEUED and change nothing. Returns those that an earlier
        session of ours holds there, by a call that came late: they are written once that one has been swept."""
        held: set[str] = set()
        for start in range(0, len(works), SETTLE_BATCH):
            batch = [work for work in works[start : start + SETTLE_BATCH] if work.id in self._waiting]
            unbounded = {work.class_name: NO_BOUND for work in batch}
            answers = await self._queue.enqueue_many(
                batch, session=self._presence.session, max_queue=unbounded, now_ms=self._presence.now_ms()
            )
            held.update(one.id for one, answer in zip(batch, answers, strict=True) if answer is Enqueued.TAKEN)
        return frozenset(held)

    def __repr__(self) -> str:
        return f"<Owner waiting={len(self._waiting)} entries={len(self._entries)} to settle={len(self._settle)}>"


NO_BOUND = 1 << 30
"""A work that was accepted once is never refused when it is written again."""
