"""Processes kept running: real ones, that do nothing but speak the channel (`fake_worker`)."""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.app import Role
from gateway.logs import Logs
from gateway.settings import Settings
from gateway.workers.channel import Report, Start
from gateway.workers.child import Child
from gateway.workers.crew import Crew, CrewTimes, ProcessRefused

FAKE = str(Path(__file__).parent / "fake_worker.py")
WAIT_S = 10.0
NAMES = ["first", "a", "b"]


class Stage:
    """A crew of fakes. `words` says how the next process of a place behaves; what happens is in the lists."""

    def __init__(self, times: CrewTimes) -> None:
        self.words = dict.fromkeys(NAMES, "serve")
        self.started: list[Child] = []
        self.ended: list[Child] = []
        self.replaced: list[tuple[str, str]] = []
        self.reports: list[Report] = []
        self._stream = io.BytesIO()
        self._logs = Logs(self._stream)
        self.crew = Crew(
            NAMES,
            self._make,
            rng=random.Random(1),
            log=self._logs.log,
            on_ended=self._ended,
            on_replaced=lambda name, reason: self.replaced.append((name, reason)),
            times=times,
        )

    def _make(self, name: str) -> Child:
        start = Start.of(Settings(), role=Role.WORKER, name=name, place=len(self.started))
        command = (sys.executable, "-I", "-S", FAKE, self.words[name])
        child = Child(command, start, on_counts=self.reports.append, monotonic=time.monotonic, log=self._logs.log)
        self.started.append(child)
        return child

    async def _ended(self, child: Child) -> None:
        self.ended.append(child)

    def now(self, name: str) -> Child:
        child = next(place.child for place in self.crew.places if place.name == name)
        assert child is not None
        return child

    async def successor(self, of: Child) -> Child:
        """The next process in the same place, once it serves."""
        await until(lambda: self.now(of.name) is not of)
        await asyncio.wait_for(self.now(of.name).up.wait(), WAIT_S)
        return self.now(of.name)

    def logged(self) -> list[dict[str, Any]]:
        self._logs.close()
        return [orjson.loads(line) for line in self._stream.getvalue().splitlines()]


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until what other processes do has come true."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(stage: Stage) -> AsyncIterator[Stage]:
    async with asyncio.TaskGroup() as group:
        run = group.create_task(stage.crew.run())
        await asyncio.wait_for(stage.crew.served(), WAIT_S)
        yield stage
        await stage.crew.hurry()
        await run


QUICK = CrewTimes(steady_s=60, pause_s=0.05, pause_max_s=0.2, start_s=5, frozen_s=0.6, look_s=0.2, end_s=0.5)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with running(Stage(QUICK)) as stage:
        yield stage


def alive(child: Child) -> bool:
    return Path(f"/proc/{child.pid}").exists()


async def test_a_process_that_dies_is_replaced_and_no_other_is_touched(stage: Stage) -> None:
    dead, other = stage.now("a"), stage.now("b")

    os.kill(dead.pid, signal.SIGKILL)
    await stage.successor(dead)

    assert stage.now("b") is other
    assert dead.exit_code == -signal.SIGKILL
    assert stage.ended == [dead]
    assert stage.replaced == [("a", "died")]


async def test_one_that_lived_long_is_replaced_without_a_pause() -> None:
    async with running(Stage(CrewTimes(steady_s=0, pause_s=60))) as stage:
        dead = stage.now("a")
        os.kill(dead.pid, signal.SIGKILL)

        await stage.successor(dead)


async def test_one_that_dies_young_again_and_again_is_tried_ever_more_slowly(stage: Stage) -> None:
    stage.words["a"] = "short"
    os.kill(stage.now("a").pid, signal.SIGKILL)
    await until(lambda: len([child for child in stage.ended if child.name == "a"]) == 6)

    pauses_s = [line["next_in_s"] for line in stage.logged() if line["event"] == "process died"]
    assert all(0.025 <= pause <= 0.2 for pause in pauses_s), pauses_s
    assert len(set(pauses_s)) > 3, "the pauses are jittered"
    assert min(pauses_s[2:]) >= 0.1
    assert [place.early_deaths >= 6 for place in stage.crew.places] == [False, True, False]


async def test_one_that_says_what_nobody_understands_is_ended_and_replaced(stage: Stage) -> None:
    stage.words["a"] = "garbled"
    os.kill(stage.now("a").pid, signal.SIGKILL)
    await until(lambda: len([child for child in stage.ended if child.name == "a"]) == 2)

    assert stage.ended[1].exit_code == -signal.SIGKILL
    assert not stage.now("b").leaving.is_set()


async def test_a_process_that_does_not_start_ends_the_whole() -> None:
    stage = Stage(QUICK)
    stage.words["b"] = "refuse"

    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(stage.crew.run(), WAIT_S)

    refused = raised.value.subgroup(ProcessRefused)
    assert refused is not None
    assert "process b ended with 2 at its start" in str(refused.exceptions[0])
    assert not any(map(alive, stage.started))


async def test_the_first_place_serves_before_the_others_are_started() -> None:
    stage = Stage(QUICK)
    stage.words["first"] = "refuse"

    with pytest.raises(ExceptionGroup):
        await asyncio.wait_for(stage.crew.run(), WAIT_S)

    assert [child.name for child in stage.started] == ["first"]


async def test_one_that_is_told_to_leave_has_a_successor_while_it_finishes(stage: Stage) -> None:
    stage.words["a"] = "serve:30"
    os.kill(stage.now("a").pid, signal.SIGKILL)
    await until(lambda: stage.replaced == [("a", "died")])
    lingering = await stage.successor(stage.started[1])

    os.kill(lingering.pid, signal.SIGTERM)
    await stage.successor(lingering)

    assert alive(lingering)
    assert stage.replaced[1:] == [("a", "left")]
    assert lingering in stage.crew.children


async def test_a_roll_replaces_every_process_and_the_new_one_serves_first(stage: Stage) -> None:
    old = [stage.now(name) for name in NAMES]

    assert await stage.crew.roll()

    new = [stage.now(name) for name in NAMES]
    await until(lambda: all(child.ended.is_set() for child in old))
    assert [child.name for child in stage.started[3:]] == NAMES
    assert all(child.up.is_set() and not child.leaving.is_set() for child in new)
    assert [child.exit_code for child in old] == [0, 0, 0]
    assert stage.replaced == [(name, "reload") for name in NAMES]


async def test_a_roll_whose_process_does_not_come_up_leaves_the_old_one(stage: Stage) -> None:
    old = stage.now("a")
    stage.words["a"] = "refuse"

    assert not await stage.crew.roll()

    assert stage.now("a") is old
    assert not old.leaving.is_set()
    assert stage.now("b") is stage.started[2]


async def test_a_death_in_the_midst_of_a_roll_leaves_one_process_in_the_place(stage: Stage) -> None:
    roll = asyncio.ensure_future(stage.crew.roll())
    await until(lambda: len(stage.started) == 5)
    os.kill(stage.started[1].pid, signal.SIGKILL)

    assert await roll

    await until(lambda: len(stage.crew.children) == 3)
    assert {child.name for child in stage.crew.children} == set(NAMES)
    assert all(stage.now(child.name) is child for child in stage.crew.children)


async def test_a_drain_lets_all_finish_the_first_place_last() -> None:
    stage = Stage(QUICK)
    async with asyncio.TaskGroup() as group:
        run = group.create_task(stage.crew.run())
        await stage.crew.served()

        await stage.crew.drain(5)
        await run

    assert [child.exit_code for child in stage.ended] == [0, 0, 0]
    assert stage.ended[-1].name == "first"


async def test_a_drain_that_takes_too_long_ends_all_the_same() -> None:
    stage = Stage(QUICK)
    stage.words.update(a="stubborn", b="serve:60")
    async with asyncio.TaskGroup() as group:
        run = group.create_task(stage.crew.run())
        await stage.crew.served()

        await stage.crew.drain(0.1)
        await run

    assert not any(map(alive, stage.started))
    assert {child.name: child.exit_code for child in stage.ended}["a"] == -signal.SIGKILL


async def test_a_drain_in_the_midst_of_the_start_ends_what_has_been_started() -> None:
    stage = Stage(QUICK)
    async with asyncio.TaskGroup() as group:
        run = group.create_task(stage.crew.run())
        await until(lambda: stage.started)

        await stage.crew.drain(5)
        await run

    assert [(child.name, child.exit_code) for child in stage.started] == [("first", 0)]


async def test_a_frozen_process_is_killed_and_replaced(stage: Stage) -> None:
    frozen = stage.now("a")
    os.kill(frozen.pid, signal.SIGSTOP)

    await stage.successor(frozen)

    assert frozen.exit_code == -signal.SIGKILL


async def test_all_report_when_asked_and_a_frozen_one_costs_no_more_than_its_bound(stage: Stage) -> None:
    os.kill(stage.now("b").pid, signal.SIGSTOP)

    started_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(stage.crew.tell(0.1))
    took_s = time.monotonic() - started_s

    assert took_s < 0.3
    assert stage.now("b").silent_for_s() > 0.09
    answered = [stage.now("first"), stage.now("a")]
    assert [child.silent_for_s() for child in answered] == [0, 0]
    assert [child.gauges for child in answered] == [{"headrace_client_connections": {(): 2}}] * 2
    assert sum(1 for report in stage.reports if report.answers) == 2, "those who ask together share one answer"


async def test_nobody_waits_for_a_process_that_has_only_begun_to_start(stage: Stage) -> None:
    stage.words["a"] = "slow"
    os.kill(stage.now("a").pid, signal.SIGKILL)
    await until(lambda: len(stage.started) > len(NAMES) and stage.started[-1].pid)

    async with asyncio.timeout(2):
        await stage.crew.tell(30)

    assert not stage.started[-1].up.is_set()


async def test_counts_are_handed_on_as_they_come(stage: Stage) -> None:
    assert [report.counts for report in stage.reports if report.counts] == [
        {"headrace_sheds_total": [[["bulk", "queue_full"], 1]]}
    ] * 3


async def test_cancelling_a_crew_leaves_no_process() -> None:
    stage = Stage(QUICK)
    run = asyncio.ensure_future(stage.crew.run())
    await asyncio.wait_for(stage.crew.served(), WAIT_S)

    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run

    assert not any(map(alive, stage.started))


async def test_a_command_that_cannot_be_started_is_told() -> None:
    stage = Stage(QUICK)
    stage.crew._make = lambda name: Child(
        ("/nowhere/worker",), Start.of(Settings(), role=Role.WORKER, name=name),
        on_counts=stage.reports.append, monotonic=time.monotonic, log=stage._logs.log,
    )  # fmt: skip

    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(stage.crew.run(), WAIT_S)

    assert raised.value.subgroup(ProcessRefused) is not None
    assert any("No such file" in line.get("reason", "") for line in stage.logged())
