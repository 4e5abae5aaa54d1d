"""One real process of the supervisor, spoken to through its channel by the test."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.app import Role
from gateway.settings import EngineSettings, Settings
from gateway.workers.accepting import Board, listening_sockets, new_board
from gateway.workers.channel import Channel, Do, Order, Report, Start
from tests.gateway.ingress.raw_client import RawClient, request

pytestmark = pytest.mark.slow
WAIT_S = 30.0


class Spoken:
    """A worker before an engine that is not there, with a private Valkey of its own."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel, board: Board, port: int) -> None:
        self.process = process
        self.channel = channel
        self.board = board
        self.port = port

    async def report(self, *, answers: int = 0, **fields: object) -> Report:
        """The next report with these fields."""
        async with asyncio.timeout(WAIT_S):
            while (report := await self.channel.receive(Report)) is not None:
                if report.answers == answers and all(getattr(report, name) == value for name, value in fields.items()):
                    return report
        raise AssertionError("the channel has ended")

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), WAIT_S)


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Spoken]:
    with ExitStack() as stack:
        (sock,) = [stack.enter_context(sock) for sock in listening_sockets("127.0.0.1", 0, backlog=16)]
        board, port = new_board(2), sock.getsockname()[1]
        ours, theirs = socket.socketpair()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway.workers.worker",
            stdin=theirs.fileno(),
            stderr=asyncio.subprocess.PIPE,
            pass_fds=[sock.fileno(), board.fd],
        )
        theirs.close()
        channel = await Channel.on(ours)
        settings = Settings(engines=(EngineSettings("e", "http://127.0.0.1:9", "vllm"),), state_dir=tmp_path)
        channel.send(
            Start.of(settings, role=Role.WORKER, name="0", public_fds=(sock.fileno(),), board_fd=board.fd, place=1)
        )
        yield Spoken(process, channel, board, port)
        channel.close()
        if process.returncode is None:
            process.terminate()
        assert b"Traceback" not in (await process.communicate())[1]


async def test_a_worker_says_what_it_is_and_answers_when_asked(worker: Spoken) -> None:
    up = await worker.report(up=True)
    async with RawClient(worker.port, wait_s=WAIT_S) as client:
        assert (await client.ask(request("GET", "/health"), "GET")).status == 200
        worker.channel.send(Order(Do.TELL, 7))
        told = await worker.report(answers=7)

    assert up.session[1] == 1
    assert (told.connections, told.in_flight) == (1, 0)
    assert told.gauges["headrace_client_connections"] == [[[], 1]]
    assert repr(worker.board) == "<Board - 1>"
    assert "no engine" in told.unready


async def test_a_worker_that_is_drained_closes_its_place_and_ends_well(worker: Spoken) -> None:
    await worker.report(up=True)

    worker.channel.send(Order(Do.DRAIN))
    await worker.report(leaving=True)

    assert repr(worker.board) == "<Board - ->"
    assert await worker.exit_code() == 0


async def test_a_worker_that_retires_answers_once_more_on_connections_that_are_kept(worker: Spoken) -> None:
    await worker.report(up=True)
    async with RawClient(worker.port, wait_s=WAIT_S) as client:
        await client.ask(request("GET", "/health"), "GET")
        worker.channel.send(Order(Do.RETIRE))
        await worker.report(leaving=True)

        answer = await client.ask(request("GET", "/health"), "GET")

    assert (answer.status, answer.one("connection")) == (200, "close")
    assert await worker.exit_code() == 0


async def test_a_worker_ends_with_the_channel_also_in_the_midst_of_a_request(worker: Spoken) -> None:
    await worker.report(up=True)
    async with RawClient(worker.port) as client:
        await client.send(request("POST", "/v1/completions", None, "Content-Length: 100", "Expect: 100-continue"))
        await worker.report(in_flight=1)

        worker.channel.close()

        assert await worker.exit_code() == 1
