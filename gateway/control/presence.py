"""This process's presence in its pool: session, leadership, clock; renewed on one beat.

Validity is judged by this process's monotonic clock, counted from *before* the renewal was sent, minus a tenth: a
process that was paused, or whose reply was late, believes itself invalid before anybody else may take over. That tenth
is also what two clocks may differ by: a process whose estimate of the pool clock may be wrong by more than half of the
tenth of the shortest validity does not lead, and one that never heard the store's clock tells it nothing.

A leader that was itself cut off for longer than its session was valid gives the others, which may have been cut off with
it, RETURN_S to report what they run before it decides, and sweeps none of them until then.

`sole` says that nobody else can reach this pool's store (an embedded server whose state directory is locked by us):
then leadership cannot be contested, and neither a missing record nor an unreachable store takes it away. A process
that is no `candidate` (a worker, whose supervisor decides) never asks for leadership.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable

from gateway.clock import CLOCK_ERROR_MAX_S, PoolClock
from gateway.queue.base import Expired, Leadership, Queue, QueueUnavailable, Renewed, Session, SessionReport

BEAT_S = 0.5
HURRY_S = 0.05
SESSION_VALID_S = 5.0
LEADER_VALID_S = 2.0
CLOCK_EVERY_S = 5.0
RETURN_S = 1.5
"""A command's time-out, a beat, and as much again."""
_SAFETY = 0.9


class Presence:
    """See the module header.

    session   our session in force; its epoch changes when a lost session is registered anew
    epoch     the leader epoch we hold; 0 when we do not lead
    outages   how often the store stopped answering: each time it may have lost what it had taken
    """

    __slots__ = (
        "_beating",
        "_candidate",
        "_changed",
        "_clock",
        "_clock_due_s",
        "_decide_from_s",
        "_leader_until_s",
        "_led",
        "_on_expired",
        "_on_led",
        "_on_registered",
        "_on_renewed",
        "_queue",
        "_report",
        "_rng",
        "_session_until_s",
        "_swept_seq",
        "epoch",
        "last_error",
        "outages",
        "round_trip_s",
        "session",
        "sole",
    )

    def __init__(
        self,
        queue: Queue,
        clock: PoolClock,
        *,
        session_id: str,
        sole: bool,
        candidate: bool,
        rng: random.Random,
        report: Callable[[], SessionReport],
        on_renewed: Callable[[Renewed, float, int], None],
        on_registered: Callable[[], None],
        on_expired: Callable[[Expired], None],
        on_led: Callable[[], None],
    ) -> None:
        """Prepare; nothing is sent before the first beat.

        report          what our session tells
        on_renewed      told of each renewal's answer, with our monotonic clock and the pool clock (ms) before it was sent
        on_registered   called after each new registration, so that owners write their works again
        on_expired      told what a sweep of dead sessions did
        on_led          called when this process begins to lead, once an epoch
        """
        self._queue = queue
        self._clock = clock
        self.sole = sole
        self._candidate = candidate
        self._rng = rng
        self._report = report
        self._on_renewed = on_renewed
        self._on_registered = on_registered
        self._on_expired = on_expired
        self._on_led = on_led
        self.session = Session(session_id, 1)
        self.epoch = 0
        self.last_error = ""
        self.outages = 0
        self.round_trip_s = 0.0
        self._session_until_s = self._leader_until_s = -1.0
        self._decide_from_s = 0.0
        self._clock_due_s = 0.0
        self._swept_seq = 0
        self._led = 0
        self._changed = asyncio.Event()
        # One at a time: two that find the session lost would register two, and what waits would be split among them.
        self._beating = asyncio.Lock()

    def now_ms(self) -> int:
        """The pool clock in Redis's unit."""
        return int(self._clock.pool_s() * 1000)

    @property
    def connected(self) -> bool:
        """Our session is certainly still valid in the store."""
        return self._clock.now_s() < self._session_until_s

    @property
    def leads(self) -> bool:
        """We may decide for the pool at this moment."""
        if not self.epoch:
            return False
        now_s = self._clock.now_s()
        return now_s >= self._decide_from_s and (self.sole or now_s < self._leader_until_s)

    def surely_before(self, pool_s: float) -> bool:
        """That instant has come on nobody's clock yet, a leader's included."""
        return self.sole or self._clock.pool_s() + self._clock.error_s + CLOCK_ERROR_MAX_S < pool_s

    @property
    def failing(self) -> bool:
        """The store did not answer our last beat: we may be cut off."""
        return bool(self.last_error)

    def hurry(self) -> None:
        """Something that we report has changed: renew soon, at most every HURRY_S."""
        self._changed.set()

    async def run(self) -> None:
        """Beat until cancelled, and renew the session in between when what it reports has changed."""
        due_s = self._clock.now_s() + BEAT_S
        while True:
            await asyncio.sleep(HURRY_S)
            try:
                async with asyncio.timeout(max(0.0, due_s - self._clock.now_s())):
                    await self._changed.wait()
            except TimeoutError:
                pass
            if self._clock.now_s() < due_s:
                await self.renew()
            else:
                due_s = self._clock.now_s() + BEAT_S * self._rng.uniform(0.9, 1.0)
                await self.beat()

    async def beat(self) -> None:
        """Renew everything once. A store that does not answer is noted, never raised: validity runs out by itself."""
        await self._bear(self._beat)

    async def renew(self) -> None:
        """Renew the session only, and ring for the room that its report shows."""
        await self._bear(lambda: self._renew_session(ring=True))

    async def _bear(self, calls: Callable[[], Awaitable[None]]) -> None:
        try:
            async with self._beating:
                await calls()
        except QueueUnavailable as error:
            self.outages += not self.failing
            self.last_error = str(error)
        else:
            self.last_error = ""

    async def _beat(self) -> None:
        await self._correct_clock()
        lapsed = self._session_until_s >= 0 and not self.connected
        await self._renew_session(ring=False)
        if self._candidate and (self.sole or self._clock.error_s <= CLOCK_ERROR_MAX_S):
            await self._lead(lapsed=lapsed)

    async def leave(self) -> None:
        """Give up leadership and session, so that a successor need not wait for them to expire."""
        # First of all: with the record gone another one may lead before we have heard that it is.
        epoch, self.epoch = self.epoch, 0
        try:
            if epoch:
                await self._queue.resign(self.session.id, epoch=epoch)
            await self._queue.end_session(self.session)
        except QueueUnavailable as error:
            self.last_error = str(error)

    async def _correct_clock(self) -> None:
        now_s = self._clock.now_s()
        if now_s < self._clock_due_s and self._clock.error_s <= CLOCK_ERROR_MAX_S:
            return
        redis_ms = await self._queue.time_ms()
        received_s = self._clock.now_s()
        self._clock.correct(redis_s=redis_ms / 1000, sent_s=now_s, received_s=received_s)
        self._clock_due_s = now_s + CLOCK_EVERY_S

    async def _renew_session(self, *, ring: bool) -> None:
        if self._clock.error_s == math.inf:
            await self._correct_clock()
        self._changed.clear()
        if not await self._renewed(ring=ring):
            self.session = Session(self.session.id, self.session.epoch + 1)
            self._on_registered()
            await self._renewed(ring=False)

    async def _renewed(self, *, ring: bool) -> bool:
        """Renew the session in force, or register a new one; False: the store has swept or forgotten it."""
        sent_s, now_ms = self._clock.now_s(), self.now_ms()
        renewed = await self._queue.renew_session(
            self.session, now_ms=now_ms, valid_for_ms=int(SESSION_VALID_S * 1000), report=self._report(), ring=ring
        )
        self.round_trip_s = self._clock.now_s() - sent_s
        if renewed is None:
            return False
        self._session_until_s = sent_s + SESSION_VALID_S * _SAFETY
        self._on_renewed(renewed, sent_s, now_ms)
        return True

    async def _lead(self, *, lapsed: bool) -> None:
        sent_s, sent_ms = self._clock.now_s(), self.now_ms()
        record = await self._ask_to_lead()
        if self.sole and record.leader != self.session.id:
            # Nobody else can reach the store: whoever leads by its record died with our predecessor.
            await self._queue.resign(record.leader, epoch=record.epoch)
            record = await self._ask_to_lead()
        if record.leader != self.session.id:
            self.epoch = 0
            return
        if record.epoch != self.epoch:
            # Made by calls of ours that came late: if there was no record then, its mark may have gone by unseen.
            unseen = sent_ms - record.epoch >= LEADER_VALID_S * 1000
            wait_s = LEADER_VALID_S if record.fresh_record or unseen else RETURN_S if lapsed else 0.0
            # From the answer on: whoever led before may have renewed until the store lost its record, just before this.
            self._decide_from_s = 0.0 if self.sole or not wait_s else self._clock.now_s() + wait_s
            self._swept_seq = 0
        self.epoch = record.epoch
        self._leader_until_s = sent_s + LEADER_VALID_S * _SAFETY
        if not self.leads:
            return
        if self._led != self.epoch:
            self._led = self.epoch
            self._on_led()
        expired = await self._queue.expire_sessions(now_ms=self.now_ms(), after_seq=self._swept_seq)
        self._swept_seq = expired.seq
        self._on_expired(expired)

    async def _ask_to_lead(self) -> Leadership:
        return await self._queue.lead(self.session.id, now_ms=self.now_ms(), valid_for_ms=int(LEADER_VALID_S * 1000))

    def __repr__(self) -> str:
        role = f"leads epoch {self.epoch}" if self.leads else "follows"
        return f"<Presence {self.session.id}/{self.session.epoch} {role}{' ' + self.last_error if self.last_error else ''}>"
