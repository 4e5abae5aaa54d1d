"""The memory queue and a real Valkey, call by call: every answer and everything visible must be the same."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from gateway.queue.base import (
    SETTLED_KEEP_MS,
    Answered,
    Began,
    Credit,
    Ended,
    Grew,
    InFlight,
    Place,
    Queue,
    QueueUnavailable,
    Session,
    SessionReport,
    Snapshot,
    Told,
)
from gateway.queue.memory_queue import MemoryQueue
from gateway.queue.redis_client import connect
from gateway.queue.redis_queue import RedisQueue
from policies.vocabulary import BodyAt, Grant, Outcome, Result, Work
from tests.queue_checks import check_keys
from tests.redis_servers import Server

START_MS = 1_800_000_000_000

OWNERS = (Session("p", 1), Session("p q/r", 10))
SESSIONS = st.sampled_from([*OWNERS, *OWNERS, Session("p", 2)])
IDS = st.sampled_from([f"w{i}" for i in range(5)])
RANKS = st.sampled_from([-1.5, 0.0, 1.0, 1e9])
WORKS = st.builds(
    Work,
    id=IDS,
    class_name=st.sampled_from(["interactive", "bulk"]),
    tenant=st.sampled_from(["a", "b/c", "ü"]),
    model=st.just("m"),
    path=st.just("/v1/completions"),
    accepted_s=st.just(1.5),
    rank=RANKS,
    attempt=st.integers(0, 2),
    body=st.sampled_from(BodyAt),
)
EPOCHS = st.sampled_from([START_MS + 10**9, START_MS + 10**9, START_MS + 10**9 + 1, 1])
"""Mostly above what `lead` makes, so that claims are not all fenced."""
GRANTS = st.builds(
    Grant,
    work_id=IDS,
    engine=st.sampled_from(["g", "h/i"]),
    epoch=EPOCHS,
    attempt=st.integers(1, 3),
    expires_s=st.just(9.25),
)
PLACES = st.tuples(st.just("g"), st.sampled_from(["interactive", "bulk"]))
SUMS = st.builds(InFlight, st.integers(0, 9), st.integers(0, 99), st.integers(0, 99))
OUTCOMES = st.builds(
    Outcome,
    **dict.fromkeys(("work_id", "class_name", "tenant", "model", "engine"), st.just("")),
    result=st.sampled_from(Result),
    reason=st.just("client_gone"),
    status=st.just(200),
    attempts=st.integers(1, 2),
    prompt_tokens=st.integers(0, 9),
    output_tokens=st.integers(0, 9),
    total_s=st.floats(0, 9),
    queued_s=st.none() | st.floats(0, 9),
)
EVENTS = st.one_of(
    st.builds(
        Began,
        WORKS.map(lambda work: replace(work, rank=0.0, body=BodyAt.OWNER)),
        st.sampled_from(["g", "h/i"]),
        st.just(1),
        st.integers(0, 3),
        st.booleans(),
    ).map(lambda event: replace(event, attempt=event.work.attempt + 1)),
    st.builds(Answered, st.integers(1, 9), st.floats(0, 9)),
    st.builds(
        Grew, st.integers(1, 9), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=2).map(tuple)
    ),
    st.builds(Ended, st.integers(1, 9), st.none() | OUTCOMES),
)
REPORTS = st.builds(
    SessionReport,
    in_flight=st.dictionaries(PLACES, SUMS, max_size=2),
    started=st.dictionaries(PLACES, SUMS, max_size=1),
    grants_seq=st.sampled_from([0, START_MS * 1024]),
    events=st.lists(EVENTS, max_size=2).map(
        lambda events: tuple(Told(number, START_MS, event) for number, event in enumerate(events, 3))
    ),
)
CREDITS = st.dictionaries(
    SESSIONS,
    st.dictionaries(
        PLACES,
        st.builds(
            Credit,
            allowed=SUMS,
            share=st.integers(0, 3),
            expires_ms=st.integers(START_MS, START_MS + 5_000),
        ),
        max_size=2,
    ),
    max_size=3,
)

Call = Callable[[Queue], Coroutine[Any, Any, Any]]


class SameQueues(RuleBasedStateMachine):
    """Drives both with the same calls; time moves on by steps that reach every validity and memory."""

    url: str
    runner: asyncio.Runner
    pools: Iterator[int]

    @initialize()
    def make(self) -> None:
        self.now_ms = START_MS
        self.pool = f"model-{next(self.pools)}"
        self.memory = MemoryQueue(lambda: self.now_ms)
        self.redis = RedisQueue(connect(self.url), log=structlog.get_logger(), rng=random.Random(1), pool=self.pool)
        for session in OWNERS:
            self.renew(session=session, report=SessionReport(), late_ms=0, ring=False)

    def teardown(self) -> None:
        async def leave() -> None:
            await self.redis._client.delete(*self.redis._keys)
            await self.redis.close()

        if hasattr(self, "redis"):
            self.runner.run(leave())

    def same(self, call: Call) -> None:
        async def both() -> tuple[Any, Any]:
            return await _answer(call, self.memory), await _answer(call, self.redis)

        memory, redis = self.runner.run(both())
        assert memory == redis

    @rule(step_ms=st.sampled_from([0, 0, 1, 1, 500, 5_000, SETTLED_KEEP_MS]))
    def wait(self, step_ms: int) -> None:
        self.now_ms += step_ms

    @rule(chance=st.integers(0, 19))
    def lose_everything(self, chance: int) -> None:
        async def flush() -> None:
            await self.redis._client.delete(*self.redis._keys)

        if chance == 0:
            self.memory.forget()
            self.runner.run(flush())

    @rule(session=SESSIONS, report=REPORTS, late_ms=st.sampled_from([0, 0, 700]), ring=st.booleans())
    def renew(self, session: Session, report: SessionReport, late_ms: int, ring: bool) -> None:
        now_ms = self.now_ms - late_ms
        self.same(
            lambda queue: queue.renew_session(session, now_ms=now_ms, valid_for_ms=5_000, report=report, ring=ring)
        )

    @rule(credits=CREDITS, epoch=EPOCHS, late_ms=st.sampled_from([0, 0, 1, 700]))
    def give(self, credits: dict[Session, dict[Place, Credit]], epoch: int, late_ms: int) -> None:
        self.same(lambda queue: queue.give_credit(credits, epoch=epoch, now_ms=self.now_ms - late_ms))

    @rule(version=st.integers(0, 3), content=st.binary(max_size=3), epoch=EPOCHS)
    def publish(self, version: int, content: bytes, epoch: int) -> None:
        self.same(lambda queue: queue.publish(Snapshot(version, content), epoch=epoch, now_ms=self.now_ms))

    @rule(session=SESSIONS)
    def end(self, session: Session) -> None:
        self.same(lambda queue: queue.end_session(session))

    @rule(after=st.sampled_from([None, 0, START_MS * 1024 + 500 * 1024]))
    def expire(self, after: int | None) -> None:
        self.same(lambda queue: queue.expire_sessions(now_ms=self.now_ms, after_seq=after))

    @rule(candidate=st.sampled_from(["a", "b"]))
    def lead(self, candidate: str) -> None:
        self.same(lambda queue: queue.lead(candidate, now_ms=self.now_ms, valid_for_ms=2_000))

    @rule(leader=st.sampled_from(["a", "b"]), epoch=st.integers(0, 2))
    def resign(self, leader: str, epoch: int) -> None:
        self.same(lambda queue: queue.resign(leader, epoch=START_MS + epoch))

    @rule(works=st.lists(WORKS, max_size=4), session=SESSIONS, bound=st.integers(0, 5))
    def enqueue(self, works: list[Work], session: Session, bound: int) -> None:
        bounds = {"interactive": bound, "bulk": 3}
        self.same(lambda queue: queue.enqueue_many(works, session=session, max_queue=bounds, now_ms=self.now_ms))

    @rule(grants=st.lists(GRANTS, max_size=4))
    def claim(self, grants: list[Grant]) -> None:
        self.same(lambda queue: queue.claim_many(grants, now_ms=self.now_ms))

    @rule(places=st.integers(1, 3), epoch=EPOCHS, tries=st.sampled_from([1, 1, 1, 0, 2]))
    def dispatch(self, places: int, epoch: int, tries: int) -> None:
        waiting = self.runner.run(self.memory.peek(bounds={}, default_bound=places, now_ms=self.now_ms)).works
        grants = [Grant(work.id, "g", epoch, work.attempt + tries, 9.25) for work in waiting]
        self.same(lambda queue: queue.claim_many(grants, now_ms=self.now_ms))

    @rule(works=st.lists(WORKS, max_size=3), session=SESSIONS)
    def requeue(self, works: list[Work], session: Session) -> None:
        known = {work_id: held.work for work_id, held in self.memory._works.items()}
        works = [replace(known.get(work.id, work), attempt=work.attempt, rank=work.rank) for work in works]
        self.same(lambda queue: queue.requeue_many(works, session=session, now_ms=self.now_ms))

    @rule(session=st.sampled_from(OWNERS), less=st.integers(0, 2), numbered=st.booleans())
    def give_back(self, session: Session, less: int, numbered: bool) -> None:
        taken = self.runner.run(self.memory.take_grants(session, after_seq=0))
        held = [self.memory._works[one.grant.work_id].work for one in taken]
        works = [replace(work, attempt=max(0, work.attempt - less)) for work in held]
        seqs = [one.seq for one in taken] if numbered else None
        self.same(lambda queue: queue.requeue_many(works, session=session, now_ms=self.now_ms, seqs=seqs))

    @rule(ids=st.lists(st.tuples(IDS, st.integers(0, 2)), max_size=3), session=SESSIONS)
    def settle(self, ids: list[tuple[str, int]], session: Session) -> None:
        self.same(lambda queue: queue.settle_many(ids, session=session, now_ms=self.now_ms))

    @rule(session=st.sampled_from(OWNERS), which=st.integers(0, 2))
    def take(self, session: Session, which: int) -> None:
        seqs = [0] + [one.seq for one in self.runner.run(self.memory.take_grants(session, after_seq=0))]
        after_seq = seqs[min(which, len(seqs) - 1)]
        self.same(lambda queue: queue.take_grants(session, after_seq=after_seq))

    @rule(which=st.integers(0, 2))
    def hear(self, which: int) -> None:
        seqs = [0, self.runner.run(self.memory.hear(now_ms=self.now_ms)).seq]
        self.same(lambda queue: queue.hear(now_ms=self.now_ms, after_seq=seqs[which % 2]))

    @rule(bound=st.integers(0, 6), bulk=st.integers(0, 6))
    def peek(self, bound: int, bulk: int) -> None:
        self.same(lambda queue: queue.peek(bounds={"bulk": bulk}, default_bound=bound, now_ms=self.now_ms))

    @invariant()
    def looks_the_same(self) -> None:
        if hasattr(self, "redis"):
            self.same(lambda queue: queue.peek(bounds={}, default_bound=99, now_ms=self.now_ms))
            self.same(lambda queue: queue.hear(now_ms=self.now_ms))
            self.same(lambda queue: queue.standing(now_ms=self.now_ms))
            self.same(lambda queue: queue.snapshot())
            self.runner.run(check_keys(self.redis._client, self.pool))


async def _answer(call: Call, queue: Queue) -> object:
    try:
        return await call(queue)
    except QueueUnavailable as error:
        return repr(error)


@pytest.mark.slow
def test_memory_and_valkey_answer_every_call_alike(servers: dict[str, Server]) -> None:
    with asyncio.Runner() as runner:
        machine = type(
            "Machine", (SameQueues,), {"url": servers["valkey-9"].url, "runner": runner, "pools": itertools.count()}
        )
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=15,
                stateful_step_count=50,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            ),
        )
