"""A process's presence in its pool, and what its owner does once the store is back."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.clock import PoolClock
from gateway.control.presence import LEADER_VALID_S, SESSION_VALID_S, Presence
from gateway.dispatch.owner import Owner
from gateway.queue.base import QueueUnavailable, Session, SessionReport
from gateway.queue.memory_queue import MemoryQueue
from policies.vocabulary import Work

WORK = Work("w", "chat", "t", "m", "/v1/completions", 0.0, 0.0)


class Store(MemoryQueue):
    """A store on a clock that the test moves, and that can be away."""

    now_s = 1000.0
    away = False

    def __init__(self) -> None:
        super().__init__(lambda: int(self.now_s * 1000))

    async def renew_session(self, session: Session, **named: Any) -> Any:
        if self.away:
            raise QueueUnavailable("queue store is not reachable")
        return await super().renew_session(session, **named)


def presence_in(
    store: Store,
    name: str = "me",
    *,
    sole: bool = False,
    led: list[str] | None = None,
    registered: list[str] | None = None,
) -> Presence:
    clock = PoolClock(lambda: store.now_s, offset_s=0.0)
    return Presence(
        store,
        clock,
        session_id=name,
        sole=sole,
        candidate=True,
        rng=random.Random(1),
        report=SessionReport,
        on_renewed=lambda _renewed, _sent_s, _now_ms: None,
        on_registered=lambda: None if registered is None else registered.append(name),
        on_expired=lambda _expired: None,
        on_led=lambda: None if led is None else led.append(name),
    )


async def led_by_a_dead_process() -> Store:
    store = Store()
    dead = presence_in(store, "dead", sole=True)
    await dead.beat()
    for _ in range(2):  # past the mark of a record that was made of nothing
        store.now_s += 1.5
        await dead.beat()
    assert dead.leads
    store.now_s += 0.3
    return store


async def test_where_nobody_else_can_reach_the_store_a_new_process_leads_at_once() -> None:
    store = await led_by_a_dead_process()
    successor = presence_in(store, sole=True)

    await successor.beat()

    assert successor.leads


async def test_where_others_can_reach_the_store_a_leader_is_waited_for() -> None:
    store = await led_by_a_dead_process()
    candidate = presence_in(store)

    await candidate.beat()
    led_at_once = candidate.leads
    store.now_s += LEADER_VALID_S
    await candidate.beat()

    assert not led_at_once
    assert candidate.leads


async def test_whoever_leaves_leads_no_more_from_the_moment_at_which_another_may() -> None:
    store = Store()
    one, other = presence_in(store), presence_in(store, "other")
    for _ in range(3):
        await one.beat()
        store.now_s += 1.5
    led = one.leads

    async def end_session(session: Session) -> Any:
        await other.beat()
        seen.append((one.leads, other.leads))
        raise QueueUnavailable("the answer is late")

    seen: list[tuple[bool, bool]] = []
    store.end_session = end_session  # type: ignore[method-assign]
    await one.leave()

    assert led
    assert seen == [(False, True)]


async def test_whoever_begins_to_lead_is_told_so_once_and_not_before_it_may_decide() -> None:
    store = Store()
    led: list[str] = []
    one = presence_in(store, led=led)

    await one.beat()  # a record made of nothing is waited on
    assert led == []
    for _ in range(3):
        store.now_s += 1.5
        await one.beat()

    assert one.leads
    assert led == ["me"]


async def test_a_session_that_the_store_has_lost_is_registered_anew_and_its_owner_is_told() -> None:
    store, registered = Store(), list[str]()
    presence = presence_in(store, registered=registered)
    await presence.beat()
    first = presence.session
    told_of_the_first = list(registered)
    await store.expire_sessions(now_ms=int((store.now_s + 2 * SESSION_VALID_S) * 1000))

    await presence.beat()
    await presence.beat()

    assert told_of_the_first == []
    assert registered == ["me"]
    assert presence.session == Session("me", first.epoch + 1)
    assert presence.connected


async def test_an_outage_counts_once_however_long_it_lasts() -> None:
    store = Store()
    presence = presence_in(store)
    for away in (False, True, True, False, True, False):
        store.away = away
        await presence.beat()
        assert presence.failing == away

    assert presence.outages == 2


@pytest.mark.parametrize("outages", [0, 1])
async def test_what_waits_is_written_again_after_each_outage_whether_or_not_the_session_was_lost(outages: int) -> None:
    store = Store()
    presence = presence_in(store)
    await presence.beat()
    owner = Owner(store, _never(), presence, PoolClock(lambda: store.now_s, offset_s=0.0))
    owner.serve(_follower())
    owner._waiting["w"] = _waiter()

    for _ in range(outages):
        store.away = True
        await presence.beat()
        store.away = False
        await presence.beat()
    await owner._rewrite()

    assert len(store._works) == outages


def _never() -> Any:
    return None


def _follower() -> Any:
    return SimpleNamespace(depth_seen=99)


def _waiter() -> Any:
    return SimpleNamespace(work=WORK, entering=None, granted=SimpleNamespace(done=lambda: False))
