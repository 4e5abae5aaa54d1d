"""Which works the simulation counts against a window: what stays free for a process that is out of contact."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from gateway.dispatch.ledger import Ledger
from gateway.queue.base import InFlight, Session, SessionReport
from policies.vocabulary import Work
from tests.simulation.hosts import WALL_OFFSET_S, GatewayHost
from tests.simulation.invariants import Invariants
from tests.simulation.reach import AFTER_FLUSH_S, Reach
from tests.simulation.store import WatchedStore

PLACE = ("engine-1", "bulk")
WINDOWS = {"bulk": 4}


@dataclass
class Runs:
    """An attempt's progress, as far as a ledger asks."""

    output_tokens: int = 0
    recallable: bool = False

    def recall(self) -> None: ...


@dataclass
class Process:
    """A gateway's host, as far as is looked at here. epoch: it leads under this; 0: it does not."""

    name: str
    epoch: int = 0
    session: Session = field(init=False)
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        self.register()

    def register(self, epoch: int = 1) -> None:
        self.session = Session(self.name, epoch)

    def run(self, work_id: str) -> None:
        work = Work(work_id, "bulk", "t", "m", "/v1/completions", accepted_s=0.0, rank=0.0)
        self.ledger[PLACE[0]].add(work, 1, 0.0)
        self.ledger[PLACE[0]].attach(work_id, 1, Runs())

    @property
    def host(self) -> GatewayHost:
        return cast(
            GatewayHost,
            SimpleNamespace(
                name=self.name,
                session_id=self.name,
                presence=SimpleNamespace(session=self.session, leads=self.epoch > 0, epoch=self.epoch),
                gateway=SimpleNamespace(ledger=self.ledger),
                host=SimpleNamespace(frozen=False),
                on_credit=set(),
                thawed_s=0.0,
            ),
        )


class Pool:
    """A process with one work, a leader, and a successor that has yet to lead."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.store = WatchedStore(lambda: self.now_s, WALL_OFFSET_S, Invariants())
        self.reach = Reach(self.store, {})
        self.cut, self.leader, self.successor = Process("cut"), Process("leader", epoch=1), Process("successor")
        self.cut.run("w")

    async def renew(self) -> None:
        now_ms = int((WALL_OFFSET_S + self.now_s) * 1000)
        for one in (self.cut, self.leader, self.successor):
            report = SessionReport({PLACE: InFlight(works=1)} if one is self.cut else {})
            await self.store.renew_session(one.session, now_ms=now_ms, valid_for_ms=5000, report=report)

    def succeed(self) -> None:
        self.leader.epoch, self.successor.epoch = 0, 2

    def kept(self) -> int:
        """Places that must be free for the process at this moment, or are taken by it."""
        hosts = [one.host for one in (self.successor, self.cut, self.leader)]
        return self.reach.count(hosts, WINDOWS, self.now_s).get(PLACE, 0)


@pytest.fixture
async def pool() -> Pool:
    pool = Pool()
    await pool.renew()
    assert pool.kept() == 1
    return pool


async def test_the_leader_that_lost_a_process_keeps_its_places_free_and_a_successor_does_not(pool: Pool) -> None:
    pool.now_s += 5.0
    by_its_leader = pool.kept()
    pool.succeed()

    assert (by_its_leader, pool.kept()) == (1, 0)


async def test_a_successor_that_is_first_seen_when_a_flushed_process_is_missed_keeps_nothing_for_it(pool: Pool) -> None:
    pool.store.flush()
    while_it_may_come_back = pool.kept()
    pool.now_s += AFTER_FLUSH_S + 0.01
    pool.succeed()

    assert (while_it_may_come_back, pool.kept()) == (1, 0)


async def test_a_leader_that_heard_a_process_after_a_flush_keeps_its_places_free(pool: Pool) -> None:
    pool.store.flush()
    pool.kept()
    pool.now_s += AFTER_FLUSH_S
    pool.cut.register(epoch=2)
    await pool.renew()
    pool.succeed()
    pool.kept()
    pool.now_s += 5.0

    assert pool.kept() == 1
