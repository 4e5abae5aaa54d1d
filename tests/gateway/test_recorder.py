"""The log of traffic: what is kept of a request and what is not, the ring of files, and that it is a trace."""

from __future__ import annotations

import asyncio
import csv
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway.app import Gateway
from gateway.errors import StartError
from gateway.logs import Log
from gateway.queue.memory_queue import MemoryQueue
from gateway.recorder import COLUMNS, MARK, Recorder, installation_key
from gateway.replay.trace import RECORDED_ID_TOKENS, TraceError, read_trace
from gateway.settings import EngineSettings, RecorderSettings, Settings
from policies.vocabulary import Outcome, Result, Work
from tests.gateway.replay.quiet import QUIET

KEY = bytes(range(32))
SECRET = b"my cat is called Mildred "
BODY = b'{"model":"llama","messages":[{"role":"user","content":"' + SECRET * 200 + b'"}]}'


def recorder(
    folder: Path,
    *,
    file_bytes: int = 1 << 20,
    files: int = 4,
    prefix_hashes: bool = False,
    name: str = "one",
    log: Log = QUIET,
) -> Recorder:
    settings = RecorderSettings(folder, file_bytes, files, prefix_hashes)
    return Recorder(settings, folder, key=KEY, name=name, wall_s=iter_clock(), log=log)


def iter_clock() -> Callable[[], float]:
    now = iter(range(1_764_450_000, 1_764_460_000))
    return lambda: float(next(now))


def ended(
    number: int = 0,
    *,
    result: Result = Result.COMPLETED,
    output_tokens: int = 50,
    engine: str = "e0",
    tenant: str = "acme",
    model: str = "llama",
) -> tuple[Work, Outcome]:
    work = Work(
        f"w{number}", "interactive", tenant, model, "/v1/chat/completions", 1_764_450_000.25 + number, 0.0, 90, 200
    )
    outcome = Outcome(
        work.id, work.class_name, tenant, model, engine, result, "", 200, 1, 100 + number, output_tokens, 1.0
    )
    return work, outcome


def rows_of(folder: Path) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for path in sorted(folder.glob("*.csv")):
        lines = path.read_text().splitlines()
        assert lines[0].startswith(MARK)
        found.extend(csv.DictReader(lines[1:]))
    return found


def keeping(said: list[Any]) -> Log:
    def keep(_logger: object, _level: str, event: Any) -> Any:
        said.append(dict(event))
        raise structlog.DropEvent

    return structlog.wrap_logger(None, processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(20))  # type: ignore[no-any-return]


async def test_rows_beyond_the_bound_are_dropped_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.recorder.ROWS_MAX", 3)
    said: list[Any] = []
    one = recorder(tmp_path, log=keeping(said))

    for number in range(5):
        one.record(*ended(number), BODY)
    await one.close()

    assert len(rows_of(tmp_path)) == 3
    assert [(event["event"], event["rows"]) for event in said] == [("traffic rows dropped", 2)]


async def test_a_row_has_sizes_and_times_and_no_text(tmp_path: Path) -> None:
    one = recorder(tmp_path / "traffic", prefix_hashes=True)

    one.record(*ended(), BODY)
    await one.close()

    (row,) = rows_of(tmp_path / "traffic")
    assert tuple(row) == COLUMNS
    assert row["arrival_s"] == "1764450000.250"
    assert (row["class"], row["model"], row["result"]) == ("interactive", "llama", "completed")
    assert (row["prompt_tokens"], row["output_tokens"], row["max_tokens"]) == ("100", "50", "200")
    (path,) = (tmp_path / "traffic").iterdir()
    assert b"Mildred" not in path.read_bytes()
    assert b"acme" not in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_tenant_has_one_hash_in_an_installation_and_another_in_the_next(tmp_path: Path) -> None:
    keys = [installation_key(tmp_path / name) for name in ("a", "a", "b")]
    for number, key in enumerate(keys):
        folder = tmp_path / f"traffic-{number}"
        one = Recorder(RecorderSettings(folder), folder, key=key, name="p", wall_s=iter_clock(), log=QUIET)
        for tenant in ("acme", "acme", "zenith"):
            one.record(*ended(tenant=tenant), BODY)
        await one.close()

    hashes = [[row["tenant"] for row in rows_of(tmp_path / f"traffic-{number}")] for number in range(3)]
    assert hashes[0] == hashes[1]
    assert hashes[0][0] == hashes[0][1] != hashes[0][2]
    assert not set(hashes[0]) & set(hashes[2])
    assert stat.S_IMODE((tmp_path / "a" / "recorder.key").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["recorder.key"]


async def test_prefix_hashes_are_equal_as_far_as_bodies_are(tmp_path: Path) -> None:
    one = recorder(tmp_path, prefix_hashes=True)

    for body in (BODY, BODY[:2100] + b"something else" * 300, b'{"max_tokens":9,' + BODY[1:], BODY[:900]):
        one.record(*ended(), body)
    await one.close()

    first, second, shifted, short = (row["prefix_hashes"].split() for row in rows_of(tmp_path))
    assert len(first) == (len(BODY) - BODY.index(b'"messages"')) // 1024
    assert shifted == first
    assert [mine == other for mine, other in zip(first, second, strict=False)] == [True, True, False, False]
    assert short == []


async def test_what_a_client_calls_a_model_is_not_kept_unless_an_engine_knew_it(tmp_path: Path) -> None:
    one = recorder(tmp_path)

    one.record(*ended(result=Result.UNAVAILABLE, engine="", model=SECRET.decode()), BODY)
    await one.close()

    (row,) = rows_of(tmp_path)
    assert row["model"] == ""


async def test_files_are_bounded_in_size_and_number_over_all_processes(tmp_path: Path) -> None:
    two = [recorder(tmp_path, file_bytes=2000, files=5, name=name) for name in ("one", "two")]

    for number in range(200):
        one = two[number % 2]
        one.record(*ended(number), BODY)
        await one.flush()
    for one in two:
        await one.close()

    files = list(tmp_path.iterdir())
    assert len(files) == 5
    assert all(path.stat().st_size <= 2000 for path in files)
    assert max(row["prompt_tokens"] for row in rows_of(tmp_path)) == "299"


async def test_a_file_that_is_taken_away_is_followed_by_a_new_one(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    one.record(*ended(1), BODY)
    await one.flush()
    for path in tmp_path.iterdir():
        path.unlink()

    one.record(*ended(2), BODY)
    await one.close()

    assert [row["prompt_tokens"] for row in rows_of(tmp_path)] == ["102"]


async def test_a_folder_that_cannot_be_written_costs_rows_and_no_request(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    said: list[Any] = []
    one = recorder(blocked / "traffic", log=keeping(said))

    one.record(*ended(1), BODY)
    await one.flush()
    blocked.unlink()
    one.record(*ended(2), BODY)
    await one.close()

    assert [event["event"] for event in said] == ["traffic not recorded", "traffic rows dropped"]
    assert [row["prompt_tokens"] for row in rows_of(blocked / "traffic")] == ["102"]


async def test_it_flushes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.recorder.FLUSH_S", 0.01)
    one = recorder(tmp_path)
    one.record(*ended(), BODY)

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        running = group.create_task(one.run())
        # It is made in a thread, and empty at first.
        while not any(path.stat().st_size for path in tmp_path.glob("*.csv")) or not rows_of(tmp_path):
            await asyncio.sleep(0.005)
        running.cancel()

    await one.close()
    assert len(rows_of(tmp_path)) == 1


def test_processes_that_start_together_agree_on_the_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        keys = set(threads.map(installation_key, [tmp_path / "state"] * 64))

    assert len(keys) == 1
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["recorder.key"]


# -- as a trace


async def test_the_ring_is_one_trace_that_begins_with_its_first_request(tmp_path: Path) -> None:
    two = [recorder(tmp_path, prefix_hashes=True, name=name) for name in ("one", "two")]
    for number in (3, 1, 2):
        two[number % 2].record(*ended(number), BODY)
    for one in two:
        await one.close()

    requests = read_trace(tmp_path)

    assert [request.arrival_s for request in requests] == [0.0, 1.0, 2.0]
    assert [request.prompt_tokens for request in requests] == [101, 102, 103]
    assert {request.class_name for request in requests} == {"interactive"}
    assert len({request.tenant for request in requests}) == 1
    (file, _) = sorted(tmp_path.iterdir())
    assert len(read_trace(file)) < 3


async def test_requests_that_got_no_answer_are_given_the_median_and_faulty_ones_are_left_out(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    for number, (result, output_tokens) in enumerate(
        [
            (Result.COMPLETED, 10),
            (Result.COMPLETED, 30),
            (Result.COMPLETED, 90),
            (Result.SHED, 0),
            (Result.CLIENT_ERROR, 0),
            (Result.ENGINE_FAILED, 40),
            (Result.CANCELLED, 5),
        ]
    ):
        one.record(*ended(number, result=result, output_tokens=output_tokens), BODY)
    await one.close()

    assert [request.output_tokens for request in read_trace(tmp_path)] == [10, 30, 90, 20, 40, 5]


async def test_prefixes_become_the_blocks_of_an_engine(tmp_path: Path) -> None:
    one = recorder(tmp_path, prefix_hashes=True)
    for body in (BODY, BODY[:2100] + b"something else" * 300):
        work, outcome = ended()
        one.record(work, outcome, body)
    await one.close()

    first, second = read_trace(tmp_path)

    assert first.id_tokens == RECORDED_ID_TOKENS == 256
    assert len(first.block_ids(16)) == first.prompt_tokens // 16
    long = [request.prefix_ids for request in (first, second)]
    assert long[0][:2] == long[1][:2]
    assert long[0][2] != long[1][2]


def test_an_empty_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no requests in it"):
        read_trace(tmp_path)


async def test_a_start_whose_recorder_can_have_no_key_says_why(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    settings = Settings(
        engines=(EngineSettings("e", "http://127.0.0.1:1"),),
        state_dir=tmp_path / "taken",
        recorder=RecorderSettings(tmp_path / "traffic"),
    )

    with pytest.raises(StartError, match=r"taken: cannot be used \(Not a directory\)"):
        await Gateway(settings, log=QUIET, queue=MemoryQueue(lambda: 0)).__aenter__()
