"""Gathers the enqueues of one loop turn into one plural call of the queue, so that load makes batches, not traffic.

At most one call is under way; what comes meanwhile goes with the next. There is no delay: an idle batcher sends at the
next turn of the loop. (Settles are gathered by whoever owes them: they are retried, and nobody waits for them.)

Cancelling a caller takes nothing from the others, whose works travel in the same script. It leaves open whether the
cancelled caller's own call was done, so the rule is: **whoever cancels an enqueue settles the work**. The settle removes
it, or, when it overtook the enqueue, makes the store refuse it; both orders end with the work outside (base.Queue).

Nothing is repeated here. A call that failed raises the same error in each caller that it was made for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

from gateway.background import leave
from gateway.queue.base import Enqueued, Queue, QueueUnavailable, Session
from policies.vocabulary import Work

BATCH_MAX = 256

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


class Batcher:
    """See the module header. An async context manager: on exit it sends what is left, then refuses further calls.

    session   the session in force, asked for with each call
    now_ms    the pool clock, read when a batch is sent
    """

    __slots__ = ("_enqueues", "_group", "_now_ms", "_queue", "_session")

    def __init__(self, queue: Queue, *, session: Callable[[], Session], now_ms: Callable[[], int]) -> None:
        self._queue = queue
        self._session = session
        self._now_ms = now_ms
        self._enqueues: _Lane[tuple[Work, int], Enqueued] = _Lane(self._send_enqueues)
        self._group = asyncio.TaskGroup()

    async def enqueue(self, work: Work, *, max_queue: Mapping[str, int]) -> Enqueued:
        """Let one work wait; max_queue by class name. Who cancels this call owes a settle."""
        return await self._enqueues.ask((work, max_queue[work.class_name]), self._session())

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._group.create_task(self._enqueues.run(), name="enqueue lane")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._enqueues.close()
        await leave(self._group, kind, error, trace)

    async def _send_enqueues(self, asks: Sequence[tuple[Work, int]], session: Session) -> list[Enqueued]:
        works = [work for work, _ in asks]
        bounds = {work.class_name: bound for work, bound in asks}
        return await self._queue.enqueue_many(works, session=session, max_queue=bounds, now_ms=self._now_ms())

    def __repr__(self) -> str:
        return f"<Batcher enqueues={self._enqueues!r}>"


class _Lane(Generic[Ask, Answer]):
    """One kind of call: what waits to be sent, and the one task that sends."""

    __slots__ = ("_asked", "_closed", "_send", "_some")

    def __init__(self, send: Callable[[Sequence[Ask], Session], Awaitable[list[Answer]]]) -> None:
        self._send = send
        self._asked: deque[tuple[Ask, Session, asyncio.Future[Answer]]] = deque()
        self._some = asyncio.Event()
        self._closed = False

    async def ask(self, ask: Ask, session: Session) -> Answer:
        if self._closed:
            raise _closed()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked.append((ask, session, answer))
        self._some.set()
        return await answer

    def close(self) -> None:
        self._closed = True
        self._some.set()

    async def run(self) -> None:
        """Send until closed and empty. A lane that is cancelled leaves no caller waiting."""
        try:
            while self._asked or not self._closed:
                await self._some.wait()
                if not self._closed:
                    self._some.clear()
                while self._asked:
                    await self._send_some(*self._next())
        finally:
            self._closed = True
            _fail([answer for _, _, answer in self._asked], _closed())

    def _next(self) -> tuple[list[Ask], list[asyncio.Future[Answer]], Session]:
        """What goes together: the oldest asks, of one session, less those whose callers left."""
        session = self._asked[0][1]
        asks: list[Ask] = []
        answers: list[asyncio.Future[Answer]] = []
        while self._asked and self._asked[0][1] == session and len(asks) < BATCH_MAX:
            ask, _, answer = self._asked.popleft()
            if not answer.done():
                asks.append(ask)
                answers.append(answer)
        return asks, answers, session

    async def _send_some(self, asks: list[Ask], answers: list[asyncio.Future[Answer]], session: Session) -> None:
        if not asks:
            return
        try:
            results = await self._send(asks, session)
        except Exception as error:  # each caller is told; the lane goes on for the others
            _fail(answers, error)
        except BaseException:
            _fail(answers, _closed())
            raise
        else:
            for answer, result in zip(answers, results, strict=True):
                if not answer.done():
                    answer.set_result(result)

    def __repr__(self) -> str:
        return f"{len(self._asked)}{' closed' if self._closed else ''}"


def _fail(answers: Sequence[asyncio.Future[Answer]], error: Exception) -> None:
    """Give each caller an instance of its own, since raising one adds to its traceback."""
    for answer in answers:
        if not answer.done():
            own = type(error)(*error.args)
            own.__cause__ = error.__cause__ or error
            answer.set_exception(own)
            answer.exception()  # a caller that is cancelled at this moment will not look


def _closed() -> QueueUnavailable:
    return QueueUnavailable("queue batcher is closed: expected no call after its end; stop the callers first")
