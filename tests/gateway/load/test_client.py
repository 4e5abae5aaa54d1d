"""A load's client against a server that plays every part: what it sends, times and counts, and how things end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count, repeat

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.load.client import COMPLETIONS, Client, Exchange, Target
from gateway.load.figures import Objectives, Record, figures
from gateway.load.run import ClosedLoop, answered, open_loop
from gateway.replay.trace import Request

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":41,"completion_tokens":7}}\n\n'
DONE = b"data: [DONE]\n\n"


class Played:
    """A server whose answers a test writes. parts: written one after another; None waits for `go`."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, str], dict[str, object]]] = []
        self.parts: list[bytes | None] = [ROLE, EVENT, EVENT, EVENT, USAGE, DONE]
        self.status = 200
        self.go = asyncio.Event()
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(({name.lower(): value for name, value in request.headers.items()}, await request.json()))
        if self.status != 200:
            return web.json_response(
                {"error": {"message": "too much"}}, status=self.status, headers={"Retry-After": "2"}
            )
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for part in self.parts:
            if part is None:
                await self.go.wait()
            else:
                await reply.write(part)
        await reply.write_eof()
        return reply


@pytest.fixture
async def server() -> AsyncIterator[Played]:
    played = Played()
    app = web.Application()
    app.router.add_post("/v1/{any:.*}", played.answer)
    async with TestServer(app) as listening:
        played.url = str(listening.make_url("")).rstrip("/")
        yield played


def record(objectives: Objectives = Objectives()) -> Record:
    return Record(time.monotonic, objectives)


async def one(client: Client, request: Request = Request(0.0, 50, 7)) -> Exchange:
    ended: asyncio.Future[Exchange] = client.loop.create_future()
    client.send(request, client.clock(), ended.set_result)
    async with asyncio.timeout(10):
        return await ended


async def test_tokens_are_counted_from_usage_and_timed_from_the_first_that_says_something(server: Played) -> None:
    server.parts = [ROLE, None, EVENT, EVENT, USAGE, DONE]
    watched = record()
    client = Client(Target(server.url, "m"), {"": watched})
    client.loop.call_later(0.05, server.go.set)

    exchange = await one(client)
    await client.close()

    assert (exchange.failure, exchange.tokens, exchange.prompt_tokens) == ("", 7, 41)
    assert exchange.ttft_s is not None
    assert exchange.ttft_s >= 0.045
    assert watched.score.completed == 1


async def test_a_request_says_its_class_its_lengths_and_its_tenants_key(server: Played) -> None:
    target = Target(
        server.url, 'a "model" of 100 %', keys={"red": "k-red", "": "k-other"}, headers=((b"x-mine", b"1"),)
    )
    watched = record()
    client = Client(target, {"": watched, "bulk": watched})

    await one(client, Request(0.0, 50, 9, tenant="red", class_name="bulk"))
    await one(client, Request(0.0, 50, 8, tenant="blue"))
    await client.close()

    (first, body), (second, other) = server.seen
    assert body["model"] == 'a "model" of 100 %'
    assert (body["max_tokens"], other["max_tokens"]) == (9, 8)
    assert (first["x-headrace-class"], first["x-mine"]) == ("bulk", "1")
    assert (first["authorization"], second["authorization"]) == ("Bearer k-red", "Bearer k-other")
    assert "x-headrace-class" not in second


async def test_completions_are_asked_with_a_prompt_and_no_two_alike(server: Played) -> None:
    client = Client(Target(server.url, "m", path=COMPLETIONS, ignore_eos=False), {"": record()})

    await one(client)
    await one(client)
    await client.close()

    prompts = [str(body["prompt"]) for _, body in server.seen]
    assert prompts[0].split()[0] != prompts[1].split()[0]
    assert all("ignore_eos" not in body for _, body in server.seen)


@pytest.mark.parametrize(
    ("status", "parts", "failure"),
    [
        (429, [], "http_429"),
        (500, [], "http_500"),
        (200, [ROLE, EVENT], "unfinished"),
        (200, [EVENT, b'data: {"error":{"message":"engine lost","code":500}}\n\n', DONE], "error_event"),
        (200, [b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n', DONE], "error_event"),
    ],
)
async def test_whatever_is_no_whole_answer_has_a_kind(
    server: Played, status: int, parts: list[bytes | None], failure: str
) -> None:
    server.status, server.parts = status, parts
    watched = record(Objectives(ttft_s=10.0))
    client = Client(Target(server.url, "m"), {"": watched})

    exchange = await one(client)
    await client.close()

    assert exchange.failure == failure
    assert dict(watched.errors) == {failure: 1}
    assert figures([watched], 1.0).attainment == 0.0


async def test_a_whole_answer_is_read_where_no_stream_is_wanted(server: Played) -> None:
    server.parts = [b'{"choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":5,"completion_tokens":3}}']
    client = Client(Target(server.url, "m", stream=False), {"": record()})

    exchange = await one(client)
    await client.close()

    assert (exchange.failure, exchange.tokens, exchange.prompt_tokens, exchange.ttft_s) == ("", 3, 5, None)
    assert "stream" not in server.seen[0][1]


async def test_a_server_that_is_not_there_is_an_error_of_the_connection() -> None:
    client = Client(Target("http://127.0.0.1:9", "m"), {"": record()})

    exchange = await one(client)
    await client.close()

    assert exchange.failure == "connect_refused"


async def test_an_answer_that_does_not_come_is_given_up_after_its_time(
    server: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.load.client.LOOK_EVERY_S", 0.02)
    server.parts = [EVENT, None]
    client = Client(Target(server.url, "m", timeout_s=0.05), {"": record()})

    exchange = await one(client)
    server.go.set()
    await client.close()

    assert (exchange.failure, exchange.tokens) == ("timeout", 1)


async def test_an_open_loop_that_is_late_counts_from_when_a_request_was_due(server: Played) -> None:
    watched = record()
    client = Client(Target(server.url, "m"), {"": watched})
    requests = [Request(0.0, 20, 3), Request(0.001, 20, 3)]

    def slow() -> Iterator[Request]:
        yield requests[0]
        blocked_until_s = client.clock() + 0.1
        while client.clock() < blocked_until_s:
            pass
        yield requests[1]

    await open_loop(client, slow())
    assert await answered(client, within_s=5.0)
    await client.close()

    assert figures([watched], 1.0).late_p99_s == pytest.approx(0.1, abs=0.05)
    assert max(row.end_s - row.arrival_s for row in watched.rows) >= 0.095


async def test_a_closed_loop_keeps_so_many_under_way_and_ends_with_its_requests(server: Played) -> None:
    watched = record()
    client = Client(Target(server.url, "m"), {"": watched})
    highest = 0

    def requests() -> Iterator[Request]:
        nonlocal highest
        for _ in range(30):
            highest = max(highest, client.under_way)
            yield Request(0.0, 20, 3)

    async with asyncio.timeout(10):
        await ClosedLoop(client, requests(), clients=4).run()
    await client.close()

    assert (highest, len(watched.rows), watched.errors) == (3, 30, {})


async def test_a_refused_client_waits_as_it_was_told(server: Played) -> None:
    server.status = 429
    client = Client(Target(server.url, "m"), {"": record()})
    loop = asyncio.get_running_loop()
    running = loop.create_task(ClosedLoop(client, repeat(Request(0.0, 20, 3)), clients=3).run())

    for _ in count():
        if len(server.seen) == 3 and not client.under_way:
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait([running])
    await client.close()

    assert len(server.seen) == 3


async def test_figures_tell_attainment_goodput_and_gaps(server: Played) -> None:
    server.parts = [EVENT, None, EVENT, DONE]
    watched = record(Objectives(ttft_s=5.0, tpot_s=0.01))
    client = Client(Target(server.url, "m"), {"": watched})
    client.loop.call_later(0.08, server.go.set)

    await one(client)
    await one(client)
    await client.close()

    found = figures([watched], 2.0)
    assert (found.completed, found.attainment, found.goodput_rps) == (2, 0.5, 0.5)
    assert found.itl.count >= 1
    assert found.itl.max_s is not None
    assert found.itl.max_s >= 0.03
    assert found.itl.p99_s == pytest.approx(found.itl.max_s, rel=0.02)
