"""Both sides of a cut together stay inside the window, and a process that is cut off at a bad moment still has a share.

A leader's steward, two holders of credit and the store between them, driven by drawn steps: calls and replies get lost,
processes are cut off and come back. What a cut-off process ran before and runs on longer than its share lasts is beside
the window (docs/decisions/0013); here every work ends before that, so nothing may ever exceed it.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Measured, ModelCard, Probe, Sample, Signal
from gateway.clock import PoolClock
from gateway.control.presence import SESSION_VALID_S
from gateway.control.roster import Engine, Roster
from gateway.dispatch.credit import CreditBook, share_left
from gateway.dispatch.ledger import Ledger
from gateway.dispatch.steward import Steward
from gateway.queue.base import InFlight, Session, SessionReport
from gateway.queue.memory_queue import MemoryQueue
from gateway.settings import EngineSettings
from policies.limits import build
from policies.vocabulary import Work
from tests.policies.worlds import policy

PLACE = ("e", "chat")
WINDOW = 6
POLICY = policy(
    "version: 1\nclasses: {chat: {ttft_sla_s: 1}, night: {}}\n"
    f"sizing: {{policy: fixed, fixed: {{total: {WINDOW}, windows: {{chat: {WINDOW}, night: 3}}}}}}\n"
)
LEADER = Session("leader", 1)
BEGIN_S = 1000.0
T = TypeVar("T")


def work(number: int) -> Work:
    return Work(f"w{number}", "chat", "t", "m", "/v1/completions", 0.0, 0.0, prompt_tokens=10)


class Holder:
    """A process without its network: what it runs, its credit, and how its renewals fare."""

    def __init__(self, pool: Pool, name: str) -> None:
        self.pool = pool
        self.session = Session(name, 1)
        self.book = CreditBook()
        self.running = 0
        self.failing = False

    @property
    def sums(self) -> dict[tuple[str, str], InFlight]:
        return {PLACE: InFlight(self.running, 10 * self.running, 0)} if self.running else {}

    def start(self) -> bool:
        """Start one work if anything allows it."""
        one = work(next(self.pool.numbers))
        started = self.book.spend(one, ["e"], self.pool.now_s)
        if started is None and self.failing:
            started = self.book.spend_share(one, ["e"], self.sums, self.pool.now_s)
        self.running += started is not None
        return started is not None

    def renew(self, *, arrives: bool = True, answered: bool = True) -> None:
        self.failing = not (arrives and answered)
        sent_s, now_ms = self.pool.now_s, int(self.pool.now_s * 1000)
        self.book.reporting(self.sums, sent_s)
        report = SessionReport(self.sums, dict(self.book.started), floors=dict(self.book.floors))
        if not arrives:
            return
        renewed = now(self.pool.queue.renew_session(self.session, now_ms=now_ms, valid_for_ms=5_000, report=report))
        if renewed is None:
            self.session = Session(self.session.id, self.session.epoch + 1)
            self.book.lost()
            self.renew(answered=answered)
        elif answered:
            self.book.renewed(renewed, sent_s=sent_s, now_ms=now_ms)

    def end_what_outlasts_its_share(self) -> None:
        if self.failing or self.pool.now_s - self.book._renewed_s > SESSION_VALID_S:
            self.running = min(
                self.running, max(self.book.share(PLACE, self.pool.now_s), self.book.unspent(PLACE, self.pool.now_s))
            )


class Pool:
    """One engine, one leader, holders."""

    def __init__(self, names: Sequence[str]) -> None:
        self.now_s = BEGIN_S
        self.numbers = iter(range(10**6))
        self.queue = MemoryQueue(lambda: int(self.now_s * 1000))
        self.waiting: dict[str, int] = {}
        ledger = Ledger()
        self.engine = Engine(EngineSettings("e", "http://e"), ledger["e"], 0.5, backend=_speaks_all())
        self.engine.heard(Probe(ready=True, models=(ModelCard("m", {}, None),)), 0.0)
        clock = PoolClock(lambda: self.now_s, offset_s=0.0)
        presence: Any = SimpleNamespace(session=LEADER, epoch=7, now_ms=lambda: int(self.now_s * 1000))
        self.steward = Steward(
            queue=self.queue,
            presence=presence,
            store=SimpleNamespace(current=POLICY),  # type: ignore[arg-type]
            sizing=build(POLICY),
            roster=Roster([self.engine]),
            ledger=ledger,
            clock=clock,
        )
        self.holders = [Holder(self, name) for name in names]

    def tick(self) -> None:
        """The leader's: sweep, hear, give."""
        now(self.queue.expire_sessions(now_ms=int(self.now_s * 1000), after_seq=0))
        now(self.steward.hear())
        now(self.steward.give(self.waiting, {}))

    def beat(self) -> None:
        for holder in self.holders:
            holder.renew()
        self.tick()
        for holder in self.holders:
            holder.renew()

    def act(self, step: str, holder: Holder) -> None:
        match step:
            case "start":
                holder.start()
            case "end":
                holder.running = max(0, holder.running - 1)
            case "renew":
                holder.renew()
            case "lose the call":
                holder.renew(arrives=False)
            case "lose the answer":
                holder.renew(answered=False)
            case "tick":
                self.tick()
            case "busy":
                self.waiting["chat"] = 3
            case "idle":
                self.waiting.clear()
            case "wait":
                self.now_s += 0.3
            case "long":
                self.now_s += 3.0

    @property
    def running(self) -> int:
        return sum(holder.running for holder in self.holders)

    @property
    def counted(self) -> int:
        return self.engine.view(self.now_s).in_flight.get("chat", 0)


def now(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call that has nothing to wait for."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("the call waited: expected a store in memory")


def _speaks_all() -> Any:
    return SimpleNamespace(speaks=lambda _path: True)


class Sweeping(MemoryQueue):
    """A store that is swept while credit is written."""

    meanwhile: Any = None

    async def give_credit(self, *args: Any, **kwargs: Any) -> bool:
        given = await super().give_credit(*args, **kwargs)
        self.meanwhile()
        return given


def test_a_session_that_ends_while_its_credit_is_written_does_not_end_the_leader() -> None:
    pool = Pool(["a", "b"])
    queue = pool.queue = pool.steward._queue = Sweeping(lambda: int(pool.now_s * 1000))
    queue.meanwhile = lambda: pool.steward.ended(["a"])
    for holder in pool.holders:
        holder.renew()

    pool.tick()

    assert {session.id: other.told for session, other in pool.steward._others.items()} == {"b": True}


class EndingSessions(MemoryQueue):
    """A store in which a session ends after a leader's look at all of them, and before the leader has the answer."""

    ends: Any = None

    async def hear(self, *args: Any, **kwargs: Any) -> Any:
        heard = await super().hear(*args, **kwargs)
        if self.ends is not None:
            ends, self.ends = self.ends, None
            await self.end_session(ends.session)
            ends.pool.steward.ended([ends.session.id])
        return heard


def test_a_process_that_is_over_is_not_counted_again_for_an_answer_from_before() -> None:
    pool = Pool(["dead", "other"])
    queue = pool.queue = pool.steward._queue = EndingSessions(lambda: int(pool.now_s * 1000))
    dead, other = pool.holders
    dead.running = 4
    dead.renew()
    other.renew()
    pool.tick()

    queue.ends = dead
    pool.tick()
    pool.tick()

    assert dead.session not in {**pool.steward._others, **pool.steward._lost}
    assert {session.id for session in pool.engine.ledger.sessions_elsewhere()} <= {"other"}


def test_a_floor_counts_until_its_holder_has_heard_that_it_is_taken_back() -> None:
    pool = Pool(["a", "b", "c"])
    *_, deaf = pool.holders
    for _ in range(20):
        pool.waiting = {"chat": 5}
        pool.now_s += 0.25
        pool.beat()
    ledger = pool.engine.ledger
    for number in range(3):  # by now there is no room for floors
        ledger.add(replace(work(number), class_name="night"), 1, pool.now_s)
    for _ in range(16):
        pool.now_s += 0.25
        for holder in pool.holders:
            holder.renew(answered=holder is not deaf)
        pool.tick()
        assert sum(holder.book.share(PLACE, pool.now_s) for holder in pool.holders) + 3 <= WINDOW
        assert pool.counted >= sum(holder.book.share(PLACE, pool.now_s) for holder in pool.holders)


def test_a_process_that_is_over_while_another_takes_over_is_not_counted() -> None:
    pool = Pool(["dead", "other"])
    queue = pool.queue = pool.steward._queue = EndingSessions(lambda: int(pool.now_s * 1000))
    dead, other = pool.holders
    dead.running = 4
    dead.renew()
    other.renew()

    queue.ends = dead
    now(pool.steward.take_over())
    pool.tick()

    assert {session.id for session in {**pool.steward._others, **pool.steward._lost}} == {"other"}
    assert {session.id for session in pool.engine.ledger.sessions_elsewhere()} <= {"other"}


def test_a_process_that_is_idle_in_a_busy_moment_has_a_floor_to_start_on_once_it_is_cut_off() -> None:
    pool = Pool(["busy", "idle"])
    pool.beat()
    busy, idle = pool.holders
    busy.running = 4  # by grants
    for _ in range(20):  # the credit that both had for a while runs out
        pool.waiting = {"chat": 5}
        pool.now_s += 0.25
        pool.beat()

    idle.renew(arrives=False)

    assert idle.start()
    assert not idle.start()
    assert pool.running <= pool.counted <= WINDOW


def test_a_busy_process_may_keep_what_it_last_reported() -> None:
    pool = Pool(["busy"])
    pool.beat()
    (busy,) = pool.holders
    busy.running = had = 5  # by grants
    for _ in range(20):
        pool.waiting = {"chat": 5}
        pool.now_s += 0.25
        pool.beat()

    busy.running -= 2
    busy.renew(arrives=False)
    started = [busy.start() for _ in range(2)]

    assert started == [False, False]  # the report that there were two less may have arrived
    assert busy.book.share(PLACE, pool.now_s) == had - 2


def test_floors_end_while_more_runs_than_the_window_allows_and_come_again() -> None:
    pool = Pool(["busy", "idle"])
    pool.beat()
    busy, idle = pool.holders
    has: list[bool] = []
    for busy.running in (WINDOW + 2, WINDOW - 1):  # as after the window was made smaller
        for _ in range(20):
            pool.waiting = {"chat": 5}
            pool.now_s += 0.25
            pool.beat()
        has.append(idle.book.share(PLACE, pool.now_s) > 0)

    assert has == [False, True]


def test_a_floor_is_on_a_canary_only_where_there_is_nothing_else() -> None:
    def floors(canary: float) -> set[str]:
        pool = Pool(["a", "b"])
        ledger = pool.steward._ledger
        canaries = [
            Engine(EngineSettings(name, "http://c", canary=part), ledger[name], 0.5, backend=_speaks_all())
            for name, part in (("e", canary), ("c", 0.1))
        ]
        for engine in canaries:
            engine.heard(Probe(ready=True, models=(ModelCard("m", {}, None),)), 0.0)
        pool.steward._roster = Roster(canaries)
        pool.beat()
        return {engine for holder in pool.holders for engine, _ in holder.book.floors}

    assert floors(1.0) == {"e"}
    assert floors(0.1) == {"c", "e"}


def test_floors_leave_half_of_an_engine_to_those_that_have_none() -> None:
    pool = Pool([f"p{number}" for number in range(10)])

    for _ in range(40):
        pool.waiting = {"night": 5}
        pool.now_s += 0.25
        pool.beat()

    assert pool.counted == WINDOW / 2


def test_an_engine_on_which_the_others_only_hold_credit_is_idle() -> None:
    pool = Pool(["a", "b"])
    pool.beat()
    with_credit = pool.engine.view(pool.now_s)
    pool.holders[0].start()
    pool.beat()

    assert (with_credit.in_flight_total > 0, with_credit.idle) == (True, True)
    assert not pool.engine.view(pool.now_s).idle


def test_a_process_that_serves_nobody_holds_no_place() -> None:
    pool = Pool([])
    report = SessionReport(serves=False)
    for _ in range(8):
        pool.now_s += 0.25
        now(
            pool.queue.renew_session(
                Session("decider", 1), now_ms=int(pool.now_s * 1000), valid_for_ms=5_000, report=report
            )
        )
        pool.tick()

    assert pool.counted == 0


def test_a_leader_s_own_floor_is_kept_free_again_from_the_moment_that_its_work_ends() -> None:
    pool = Pool([])
    ledger, one = pool.engine.ledger, work(0)
    for _ in range(2):
        report = SessionReport(serves=True)
        now(pool.queue.renew_session(LEADER, now_ms=int(pool.now_s * 1000), valid_for_ms=5_000, report=report))
        pool.waiting = {"chat": 5}
        pool.tick()
        pool.now_s += 3.0
    ledger.add(one, 1, pool.now_s)
    entry = ledger.entries[one.id, 1]
    entry.taken_s = pool.now_s
    pool.tick()
    while_it_runs = pool.counted

    ledger.remove(one.id, 1)
    pool.steward.finished("e", entry)

    assert (while_it_runs, pool.counted) == (1, 1)


def test_a_leader_has_no_floor_where_the_work_that_it_reported_has_ended_and_its_place_is_given_away() -> None:
    pool = Pool([])
    report = SessionReport({PLACE: InFlight(1, 10, 0)})
    now(pool.queue.renew_session(LEADER, now_ms=int(pool.now_s * 1000), valid_for_ms=5_000, report=report))
    for number in range(WINDOW):
        pool.engine.ledger.add(work(number), 1, pool.now_s)

    pool.tick()

    assert pool.counted == WINDOW


def test_a_process_that_came_back_between_two_reigns_of_a_leader_counts_by_what_it_reports() -> None:
    pool = Pool(["a"])
    (back,) = pool.holders
    back.renew()
    pool.tick()
    pool.now_s += SESSION_VALID_S + 0.1
    now(pool.steward.hear())
    lost = set(pool.steward._lost)
    back.running = 5
    back.renew()  # nobody has swept it: its session goes on

    now(pool.steward.take_over())
    now(pool.steward.hear())

    assert lost == {back.session}
    assert pool.counted == 5


STEPS = ("start", "start", "end", "renew", "lose the call", "lose the answer", "tick", "busy", "idle", "wait", "long")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2)), max_size=80))
def test_whoever_is_cut_off_all_together_stay_inside_the_window(steps: list[tuple[str, int]]) -> None:
    pool = Pool(["a", "b", "c"])
    pool.beat()
    for step, number in steps:
        pool.act(step, pool.holders[number])
        for one in pool.holders:
            one.end_what_outlasts_its_share()
        assert pool.running <= WINDOW
        if step == "tick":
            assert pool.running <= pool.counted <= WINDOW


@pytest.mark.parametrize("silent_s", [0.0, 1.0, SESSION_VALID_S, 9.0, 11.0, 30.0, 70.0])
def test_the_leader_keeps_at_least_what_the_cut_off_process_may_use(silent_s: float) -> None:
    pool = Pool(["a", "b"])
    pool.beat()
    off, on = pool.holders
    for _ in range(2):
        off.start()
    for _ in range(12):
        pool.now_s += 0.25
        pool.beat()
    off.renew(arrives=False)

    passed_s = 0.0
    while passed_s < silent_s:
        passed_s += 0.25
        pool.now_s += 0.25
        on.renew()
        pool.tick()

    kept = pool.counted - max(on.running + on.book.unspent(PLACE, pool.now_s), on.book.share(PLACE, pool.now_s))
    assert off.book.share(PLACE, pool.now_s) <= kept


def silent_with(pool: Pool, *, chat: int, night: int, engine_shows: int | None, for_s: float) -> tuple[int, int]:
    """One process reports once what it runs and is heard of no more: what the leader counts by class at the end."""
    sums = {("e", "chat"): InFlight(chat, 10 * chat, 0), ("e", "night"): InFlight(night, 10 * night, 0)}
    now(
        pool.queue.renew_session(
            Session("gone", 1),
            now_ms=int(pool.now_s * 1000),
            valid_for_ms=5_000,
            report=SessionReport(sums, serves=False),
        )
    )
    began_s = pool.now_s
    while pool.now_s - began_s < for_s:
        pool.now_s += 0.25
        if engine_shows is not None:
            values = {Signal.RUNNING: Measured(engine_shows, "test"), Signal.WAITING: Measured(0, "test")}
            pool.engine.sample, pool.engine.asked_s = Sample(pool.now_s, values), pool.now_s
        pool.tick()
    in_flight = pool.engine.view(pool.now_s).in_flight
    return in_flight.get("chat", 0), in_flight.get("night", 0)


def test_a_dead_process_s_places_are_free_as_soon_as_its_engine_shows_it() -> None:
    counted = silent_with(Pool([]), chat=0, night=3, engine_shows=0, for_s=2.0)

    assert counted == (0, 0)


def test_of_a_dead_process_s_urgent_places_its_share_is_kept_since_it_may_be_cut_off() -> None:
    chat, night = silent_with(Pool([]), chat=2, night=1, engine_shows=0, for_s=5.0)

    assert (chat, night) == (share_left(2, 5.0), 0)


def test_works_of_a_silent_process_count_for_as_long_as_its_engine_shows_them() -> None:
    counted = silent_with(Pool([]), chat=0, night=3, engine_shows=3, for_s=30.0)

    assert counted == (0, 3)


def test_without_a_word_of_the_engine_all_counts_until_the_session_is_over_and_decays_then() -> None:
    assert silent_with(Pool([]), chat=0, night=4, engine_shows=None, for_s=4.5) == (0, 4)
    assert silent_with(Pool([]), chat=0, night=4, engine_shows=None, for_s=12.0) == (0, share_left(4, 12.0))
