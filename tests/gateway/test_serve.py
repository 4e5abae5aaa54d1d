"""`headrace serve` as a process: how it starts, drains and hurries."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gateway.commands.serve import SPARE_FILES
from gateway.demo.engines import engine_process, simulated

pytestmark = pytest.mark.slow

SERVING = re.compile(rb"serving on (http://\S+), metrics on (http://\S+)/metrics")
STREAM = {"model": "m", "prompt": "water", "max_tokens": 400, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def serving(*args: str, folder: Path, open_files: int | None = None) -> AsyncIterator[tuple[Process, str]]:
    """A gateway process and its public URL; ended by pid when the context ends."""
    listen = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--state-dir", str(folder / "state"))
    process = await asyncio.create_subprocess_exec(
        *(() if open_files is None else ("sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh")),
        sys.executable, "-m", "gateway.cli", "serve", *listen, *args, stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            found = SERVING.search(await process.stdout.readline())
        assert found is not None, (await process.communicate())[1].decode()
        yield process, found[1].decode()
    finally:
        if process.returncode is None:
            process.terminate()  # not killed: its private Valkey would be left for a successor to adopt
        await process.communicate()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[str]:
    command = simulated(model="m", profile="h100_llama31_8b_tp1")
    async with engine_process("e", command, tmp_path) as url:
        yield url


@asynccontextmanager
async def streaming(url: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream of about three seconds that has begun."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=STREAM) as reply:
        assert reply.status == 200
        await reply.content.readuntil(b"data: ")
        yield reply


async def test_a_stop_signal_lets_a_running_stream_finish(engine: str, tmp_path: Path) -> None:
    async with serving("--engine", engine, folder=tmp_path) as (process, url), streaming(url) as reply:
        process.send_signal(signal.SIGTERM)

        rest = await reply.read()
        assert process.stderr is not None
        last = (await asyncio.wait_for(process.stderr.read(), 20)).splitlines()[-1]
        code = await process.wait()

    assert json.loads(last)["event"] == "stopped"
    assert json.loads(last)["requests_cut"] == 0
    assert rest.endswith(b"data: [DONE]\n\n")
    assert code == 0


async def test_a_second_stop_signal_ends_at_once(engine: str, tmp_path: Path) -> None:
    async with serving("--engine", engine, folder=tmp_path) as (process, url), streaming(url) as reply:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while b"draining" not in await process.stderr.readline():
            pass

        process.send_signal(signal.SIGTERM)
        last = (await asyncio.wait_for(process.stderr.read(), 5)).splitlines()[-1]
        code = await process.wait()
        with pytest.raises(aiohttp.ClientError):
            await reply.read()

    assert json.loads(last)["requests_cut"] == 1
    assert code == 1


async def test_a_single_process_that_is_told_to_reload_says_what_it_cannot_and_goes_on(
    engine: str, tmp_path: Path
) -> None:
    async with serving("--engine", engine, folder=tmp_path) as (process, url), streaming(url) as reply:
        process.send_signal(signal.SIGHUP)

        rest = await reply.read()
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        events = [json.loads(line)["event"] for line in (await process.stderr.read()).splitlines()]
        code = await process.wait()

    assert rest.endswith(b"data: [DONE]\n\n")
    assert "settings not read again" in events
    assert code == 0


async def test_the_settings_in_force_are_logged_without_secrets(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(f"engines: [{{url: '{engine}/v1/', name: e1, api_key: hunter2}}]\nlog_format: json\n")
    async with serving("--config", str(file), folder=tmp_path) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        log = (await process.stderr.read()).decode()

    (starting,) = [line for line in map(json.loads, log.splitlines()) if line["event"] == "starting"]
    assert starting["settings"]["engines"] == [f"e1=auto+{engine}"]
    assert "hunter2" not in log


async def test_a_taken_port_is_told_with_the_remedy(engine: str, tmp_path: Path) -> None:
    async with serving("--engine", engine, folder=tmp_path) as (_, url):
        again = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "gateway.cli",
                "serve",
                "--engine",
                engine,
                "--listen",
                url.removeprefix("http://"),
            ),
            *("--admin-listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "other")),
            stderr=PIPE,
        )
        async with asyncio.timeout(30):
            _, told = await again.communicate()

    assert again.returncode == 2
    last = told.decode().splitlines()[-1]
    assert last.startswith(f"headrace: listen {url.removeprefix('http://')}: ")
    assert "choose another address" in last


async def test_past_what_the_open_files_allow_a_client_is_told_so_and_the_log_says_why(
    engine: str, tmp_path: Path
) -> None:
    async with serving("--engine", engine, folder=tmp_path, open_files=SPARE_FILES + 20) as (process, url):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            host, port = url.removeprefix("http://").split(":")
            held = [await asyncio.open_connection(host, int(port)) for _ in range(10)]
            async with session.get(f"{url}/health") as answer:
                refused = answer.status, (await answer.json())["error"]["code"]
            for _, writer in held:
                writer.close()
        process.send_signal(signal.SIGTERM)
        _, log = await process.communicate()

    assert refused == (503, "connections_full")
    (told,) = [line for line in map(json.loads, log.splitlines()) if line["event"] == "few open files are allowed"]
    assert (told["files"], told["connections_max"]) == (SPARE_FILES + 20, 10)
