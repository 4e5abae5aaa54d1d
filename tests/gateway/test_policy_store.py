"""The policy in force: edits are seen however they are made, wrong ones change nothing, starts refuse them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.clock import PoolClock
from gateway.control.policy_store import POLL_S, PolicyStore
from gateway.logs import Log
from policies import presets
from policies.schema import Policy
from policies.yaml_source import DocumentError

GOOD = "version: 1\nclasses:\n  chat: {ttft_sla_s: 0.5}\n"
BETTER = GOOD.replace("0.5", "0.25")
WRONG = GOOD.replace("0.5", "-3")


class Lines:
    """A log that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append(("info", event, fields))

    def error(self, event: str, **fields: Any) -> None:
        self.lines.append(("error", event, fields))


class Ticks:
    """A clock that is set by hand."""

    at_s = 100.0

    def __call__(self) -> float:
        return self.at_s


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(GOOD)
    return path


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


Opened = Callable[[Path | None], PolicyStore]


@pytest.fixture
def opened(lines: Lines, ticks: Ticks) -> Opened:
    def make(path: Path | None) -> PolicyStore:
        return PolicyStore(path, log=cast(Log, lines), clock=PoolClock(ticks, offset_s=0.0), engines=["gpu0"])

    return make


def sla(store: PolicyStore) -> float | None:
    return store.current.classes["chat"].ttft_sla_s


async def settled(store: PolicyStore) -> None:
    """Two looks: a change is taken at the second that reads it the same."""
    await store.poll()
    await store.poll()


async def test_without_a_file_the_balanced_preset_is_in_force_and_nothing_is_watched(opened: Opened) -> None:
    store = opened(None)

    await store.run()

    assert store.current == presets.load("balanced")
    assert (store.generation, store.failed) == (1, False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (WRONG, r"policy\.yaml:3: classes\.chat\.ttft_sla_s is -3; must be > 0"),
        ("", "the document is empty"),
        ("version: [", "not YAML"),
        (GOOD + "limit: 0\n", "limit is unknown"),
        (GOOD + "sizing: {fixed: {total: 0}}\n", r"sizing\.fixed\.total is 0"),
        (GOOD + "sizing: {fixed: {engines: {gpu7: {total: 1}}}}\n", "gpu7 is an unknown engine; must be one of gpu0"),
        (GOOD + "  chat: {}\n", "classes.chat is written twice"),
    ],
)
def test_a_wrong_document_refuses_to_start(opened: Opened, file: Path, text: str, reason: str) -> None:
    file.write_text(text)

    with pytest.raises(DocumentError, match=reason):
        opened(file)


def test_a_file_that_cannot_be_read_refuses_to_start(opened: Opened, tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"absent\.yaml:1: cannot be read: No such file"):
        opened(tmp_path / "absent.yaml")


def test_a_file_that_is_not_utf8_refuses_to_start_with_the_line(opened: Opened, file: Path) -> None:
    file.write_bytes(b"version: 1\n# caf\xe9\n")

    with pytest.raises(DocumentError, match=r"policy\.yaml:2: byte 16 is not UTF-8"):
        opened(file)


async def test_an_edit_in_place_is_taken(opened: Opened, file: Path, lines: Lines) -> None:
    store = opened(file)
    file.write_text(BETTER)

    await settled(store)

    assert (sla(store), store.generation, store.failed) == (0.25, 2, False)
    assert lines.lines[-1][1] == "policy taken"
    assert lines.lines[-1][2]["version"] == store.current.version


async def test_an_editor_that_renames_over_is_seen(opened: Opened, file: Path) -> None:
    store = opened(file)
    (file.parent / ".policy.yaml.swp").write_text(BETTER)
    (file.parent / ".policy.yaml.swp").replace(file)

    await settled(store)

    assert sla(store) == 0.25


async def test_a_configmap_swap_is_seen(opened: Opened, tmp_path: Path) -> None:
    for version, text in (("..v1", GOOD), ("..v2", BETTER)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "policy.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("..v1")
    (tmp_path / "policy.yaml").symlink_to("..data/policy.yaml")
    store = opened(tmp_path / "policy.yaml")
    (tmp_path / "..data_tmp").symlink_to("..v2")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")

    await settled(store)

    assert sla(store) == 0.25


async def test_an_edit_with_the_same_size_and_date_is_seen(opened: Opened, file: Path) -> None:
    store = opened(file)
    before = file.stat()
    file.write_text(GOOD.replace("0.5", "0.6"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    await settled(store)

    assert sla(store) == 0.6


async def test_a_file_caught_half_written_is_not_taken(opened: Opened, file: Path) -> None:
    store = opened(file)
    file.write_text(BETTER)
    await store.poll()
    file.write_text(BETTER + "  night: {}\n")

    await store.poll()
    at_first = store.generation
    await store.poll()

    assert (at_first, store.generation) == (1, 2)
    assert "night" in store.current.classes


async def test_a_wrong_edit_keeps_the_last_good_one_and_says_why(opened: Opened, file: Path, lines: Lines) -> None:
    store = opened(file)
    before = store.current
    file.write_text(WRONG)

    for _ in range(5):
        await store.poll()

    assert store.current is before
    assert store.failed
    assert [problem.key for problem in store.problems] == ["classes.chat.ttft_sla_s"]
    assert [line[:2] for line in lines.lines] == [("error", "policy refused, the last good one stays")]


async def test_undoing_a_wrong_edit_ends_the_failure_without_a_new_generation(opened: Opened, file: Path) -> None:
    store = opened(file)
    file.write_text(WRONG)
    await settled(store)
    file.write_text(GOOD)

    await settled(store)

    assert (store.failed, store.generation) == (False, 1)


async def test_a_right_edit_after_a_wrong_one_is_taken(opened: Opened, file: Path) -> None:
    store = opened(file)
    file.write_text(WRONG)
    await settled(store)
    file.write_text(BETTER)

    await settled(store)

    assert (store.failed, store.generation, sla(store)) == (False, 2, 0.25)


async def test_a_file_that_goes_away_keeps_the_policy_and_may_come_back(opened: Opened, file: Path) -> None:
    store = opened(file)
    file.unlink()
    await store.poll()
    while_away = store.failed
    file.write_text(GOOD)

    await settled(store)

    assert (while_away, store.failed, store.generation) == (True, False, 1)


async def test_a_pipe_in_the_file_s_place_is_told_and_does_not_end_the_watch(
    opened: Opened, file: Path, lines: Lines
) -> None:
    store = opened(file)
    file.unlink()
    os.mkfifo(file)
    async with asyncio.timeout(5.0):
        await store.poll()
    file.unlink()
    file.write_text(BETTER)
    await settled(store)

    assert "it is no regular file" in lines.lines[0][2]["reason"]
    assert sla(store) == 0.25


async def test_the_loop_turns_while_a_document_is_read_that_takes_long(opened: Opened, file: Path) -> None:
    store = opened(file)
    file.write_text("[" * 2_000)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    turning = asyncio.create_task(turn())
    await store.poll()
    before = turns
    await store.poll()
    turning.cancel()

    assert store.failed
    assert turns > before + 10


async def test_a_wrong_file_that_went_away_and_came_back_is_judged_again(opened: Opened, file: Path) -> None:
    store = opened(file)
    file.write_text(WRONG)
    await settled(store)
    file.unlink()
    await store.poll()
    file.write_text(WRONG)

    await settled(store)

    assert [problem.key for problem in store.problems] == ["classes.chat.ttft_sla_s"]


async def test_the_last_success_is_when_the_file_was_last_found_good(opened: Opened, file: Path, ticks: Ticks) -> None:
    store = opened(file)
    ticks.at_s = 200.0
    await store.poll()
    file.write_text(WRONG)
    ticks.at_s = 300.0

    await settled(store)

    assert store.last_success_s == 200.0


async def test_subscribers_are_told_the_old_and_the_new_after_the_swap(opened: Opened, file: Path) -> None:
    store = opened(file)
    told: list[tuple[Policy, Policy, bool]] = []
    store.subscribe(lambda old, new: told.append((old, new, store.current is new)))
    before = store.current
    file.write_text(BETTER)

    await settled(store)

    assert told == [(before, store.current, True)]


async def test_the_watch_takes_an_edit_within_two_polls_and_ends_when_cancelled(
    opened: Opened, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    wake = asyncio.Event()

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) > 2:
            wake.set()
            await asyncio.Event().wait()

    monkeypatch.setattr("gateway.control.policy_store.asyncio.sleep", nap)
    store = opened(file)
    file.write_text(BETTER)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(store.run())
        await wake.wait()
        watch.cancel()

    assert naps == [POLL_S] * 3
    assert sla(store) == 0.25


def test_a_store_says_what_is_in_force(opened: Opened, file: Path) -> None:
    store = opened(file)

    assert repr(store) == f"<PolicyStore {store.current.version} generation=1 good>"
