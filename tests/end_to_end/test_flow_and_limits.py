"""The size or the speed of one party costs the others no memory, no latency and no wrong error.

The kind of fault: line readers with a fixed limit, no backpressure from client to engine, streams that are buffered or
compressed on the way, a framework's default limits, a client pool's hidden cap, and header bounds that turn into 500.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import orjson
import pytest
import pytest_asyncio

from gateway.commands.serve import allow_open_files
from tests.end_to_end.conftest import SHORT_TIMEOUTS, Stage, StartGateway, engines_yaml
from tests.end_to_end.counts import counts
from tests.end_to_end.dialects import CHAT, TGI_MODEL, WAYS, Way
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import (
    DONE,
    MODEL,
    Asked,
    ScriptedEngine,
    Wire,
    answer,
    delta,
    event,
    hello,
    stream,
)
from tests.gateway.ingress.raw_client import Answer, RawClient, request, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1024 * 1024
BODY_MAX_BYTES = 16 * MIB
STALLED_S = 1.0
every_way = pytest.mark.parametrize("way", WAYS, ids=repr)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """This file's stage: a body limit that can be passed quickly, and short patience with stalled clients."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(ScriptedEngine(models=[MODEL, "only-first"]))
        second = await stack.enter_async_context(ScriptedEngine(models=[MODEL, "only-second"]))
        tgi = await stack.enter_async_context(ScriptedEngine(models=[TGI_MODEL], metrics="tgi_queue_size 0\n"))
        timeouts = SHORT_TIMEOUTS.replace("stalled_client_s: 5", f"stalled_client_s: {STALLED_S}")
        limits = f"tgi_default_model: {TGI_MODEL}\nlimits: {{body_max_bytes: {BODY_MAX_BYTES}}}\n"
        config = engines_yaml(first, second, tgi) + timeouts + limits
        gateway = await stack.enter_async_context(GatewayProcess(tmp_path_factory.mktemp("gateway"), config))
        yield Stage(gateway, first, second, tgi)


class Flood:
    """An engine's answer of very many bytes. sent_bytes counts what the engine could write."""

    def __init__(self, *, offered_bytes: int = 200 * MIB, whole: bool = False) -> None:
        self.sent_bytes = 0
        self.offered_bytes = offered_bytes
        self._whole = whole

    async def __call__(self, _asked: Asked, wire: Wire) -> None:
        chunk = event(delta("x" * 16_000))
        if self._whole:
            await wire.head(content_type="application/json", length=self.offered_bytes)
        else:
            await wire.head()
        while self.sent_bytes < self.offered_bytes and not wire.gone.is_set():
            await wire.part(chunk)
            self.sent_bytes += len(chunk)
        if not self._whole:
            await wire.part(event(delta(finish="stop")) + DONE)
            await wire.end()


# -- long lines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [60_000, 600_000, 8_000_000])
@every_way
async def test_an_event_of_any_length_is_relayed_whole(stage: Stage, way: Way, size: int) -> None:
    text = "0123456789abcdef" * (size // 16)
    pieces = way.stream("a", text, "b")
    before = await counts(stage.gateway, way.model)
    stage.engine_for(way).play = stream(*pieces)

    got = await stage.ask(way.ask())

    assert (got.status, got.whole) == (200, True)
    assert got.body == b"".join(pieces)
    grown = await counts(stage.gateway, way.model) - before
    assert (grown["completed"], grown["engine_failed"]) == (1, 0)


@every_way
async def test_a_long_event_may_be_the_first(stage: Stage, way: Way) -> None:
    pieces = way.stream("x" * 600_000)
    stage.engine_for(way).play = stream(*pieces)

    got = await stage.ask(way.ask())

    assert (got.body, got.whole) == (b"".join(pieces), True)


@every_way
async def test_a_long_whole_answer_is_relayed_whole(stage: Stage, way: Way) -> None:
    body = orjson.dumps(way.whole("x" * 5 * MIB))
    stage.engine_for(way).play = answer(200, body)

    got = await stage.ask(way.ask_whole())

    assert (got.status, got.whole, got.one("content-length")) == (200, True, str(len(body)))
    assert got.body == body


async def test_a_long_stream_is_not_kept_in_memory(stage: Stage) -> None:
    flood = stage.first.play = Flood(offered_bytes=32 * MIB)
    async with RawClient(stage.port) as client:
        await client.send(CHAT.ask())
        await until(lambda: flood.sent_bytes > MIB)
        before = stage.gateway.rss_bytes()
        while not (await client.read_some()).endswith(b"0\r\n\r\n"):
            pass

    assert flood.sent_bytes >= flood.offered_bytes
    assert stage.gateway.rss_bytes() - before < 2 * MIB


# -- slow clients ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["stream", "whole"])
async def test_slow_clients_slow_the_engine_and_fill_no_memory(stage: Stage, whole: bool) -> None:
    """Five clients read 15 KB/s each for longer than a stalled client is borne with: none is cut."""
    clients = 5
    floods: list[Flood] = []

    async def play(asked: Asked, wire: Wire) -> None:
        floods.append(Flood(whole=whole))
        await floods[-1](asked, wire)

    stage.first.play = play
    before = stage.gateway.rss_bytes()
    async with AsyncExitStack() as stack:
        readers = [
            await stack.enter_async_context(RawClient(stage.port, receive_buffer_bytes=4096)) for _ in range(clients)
        ]
        for reader in readers:
            await reader.send(CHAT.ask_whole() if whole else CHAT.ask())
        await until(lambda: len(floods) == clients)
        until_s = time.monotonic() + 4 * STALLED_S
        while time.monotonic() < until_s:
            got = [await reader.read_some(1_500) for reader in readers]
            assert all(got)
            await asyncio.sleep(0.1)
        grown = stage.gateway.rss_bytes() - before
        sent = [flood.sent_bytes for flood in floods]
        assert stage.first.active == clients

    assert grown < clients * 400 * 1024
    assert max(sent) < 64 * MIB
    await until(lambda: not stage.first.active)


@pytest.mark.parametrize("whole", [False, True], ids=["stream", "whole"])
async def test_a_client_that_takes_nothing_is_cut_and_its_engine_work_aborted(stage: Stage, whole: bool) -> None:
    flood = stage.first.play = Flood(whole=whole)
    before = await counts(stage.gateway, CHAT.model)
    async with RawClient(stage.port, receive_buffer_bytes=4096) as client:
        await client.send(CHAT.ask_whole() if whole else CHAT.ask())
        await until(lambda: flood.sent_bytes > 0)
        asked_s = time.monotonic()
        await until(lambda: not stage.first.active)
        took_s = time.monotonic() - asked_s

    assert STALLED_S * 0.9 < took_s < STALLED_S + 2
    grown = await counts(stage.gateway, CHAT.model) - before
    assert (grown["cancelled"], grown["engine_failed"]) == (1, 0)


async def test_a_slow_client_does_not_slow_another(stage: Stage) -> None:
    slow = Flood()

    async def play(asked: Asked, wire: Wire) -> None:
        await (slow if asked.json().get("user") == "slow" else hello)(asked, wire)

    stage.first.play = play
    async with RawClient(stage.port, receive_buffer_bytes=4096) as stalled, RawClient(stage.port) as quick:
        await stalled.send(CHAT.ask(user="slow"))
        await until(lambda: slow.sent_bytes > MIB)
        took_s = []
        for _ in range(20):
            asked_s = time.monotonic()
            assert (await quick.ask(CHAT.ask())).whole
            took_s.append(time.monotonic() - asked_s)

    assert sorted(took_s)[10] < 0.1
    await until(lambda: not stage.first.active)


# -- latency ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["gzip", "gzip, deflate, br, zstd", "identity", ""])
@every_way
async def test_each_event_arrives_at_once_and_says_that_nobody_may_buffer_it(
    stage: Stage, way: Way, accept: str
) -> None:
    """In lock step: the engine writes an event only after the client has read the one before."""
    events = way.stream(*"abcdef")
    opening = len(way.opening)
    written_s: list[float] = []
    seen = asyncio.Event()

    async def trickle(_asked: Asked, wire: Wire) -> None:
        await wire.head(200, "X-Accel-Buffering: yes", "Cache-Control: public, max-age=60")
        for piece in events[:opening]:
            await wire.part(piece)
        for piece in events[opening:]:
            written_s.append(time.monotonic())
            await wire.part(piece)
            await seen.wait()
            seen.clear()
        await wire.end()

    stage.engine_for(way).play = trickle
    late_s = []
    async with RawClient(stage.port) as client:
        await client.send(way.ask(*([f"Accept-Encoding: {accept}"] if accept else [])))
        head = await client.read_head()
        got = b""
        for number, piece in enumerate(events[opening:]):
            while piece not in got:
                got += await client.read_some()
            late_s.append(time.monotonic() - written_s[number])
            seen.set()

    assert sorted(late_s)[len(late_s) // 2] < 0.05
    assert (head.all("x-accel-buffering"), head.all("cache-control")) == (["no"], ["no-cache"])
    assert (head.one("content-length"), head.one("content-encoding")) == ("", "")
    assert head.one("content-type").startswith("text/event-stream")


@every_way
async def test_a_stream_that_the_engine_measures_is_still_sent_without_a_length(stage: Stage, way: Way) -> None:
    body = b"".join(way.stream("a", "b"))

    async def measured(_asked: Asked, wire: Wire) -> None:
        await wire.head(length=len(body))
        await wire.raw(body)

    stage.engine_for(way).play = measured
    got = await stage.ask(way.ask("Accept-Encoding: gzip"))

    assert (got.body, got.one("content-length"), got.one("x-accel-buffering")) == (body, "", "no")


# -- large requests --------------------------------------------------------------------------------------------------


def with_image(way: Way, size: int, *headers: str) -> bytes:
    """A request whose whole body has `size` bytes, most of them a data: URL."""
    body: dict[str, object] = {"model": way.model, **way.body}
    start = orjson.dumps({**body, "image_url": "data:image/png;base64,"})
    whole = start[:-2] + b"A" * (size - len(start)) + b'"}'
    assert len(whole) == size
    return request("POST", way.whole_path or way.path, whole, "Content-Type: application/json", *headers)


@every_way
async def test_a_large_body_passes_byte_for_byte(stage: Stage, way: Way) -> None:
    asked = with_image(way, 15 * MIB)
    stage.engine_for(way).play = answer(200, way.whole("seen"))

    got = await stage.ask(asked)

    assert got.status == 200
    assert stage.engine_for(way).requests[-1].body == asked.partition(b"\r\n\r\n")[2]


async def test_a_body_of_exactly_the_limit_passes(stage: Stage) -> None:
    assert (await stage.ask(with_image(CHAT, BODY_MAX_BYTES))).status == 200


def assert_too_large(got: Answer) -> None:
    assert (got.status, got.one("content-type"), got.whole) == (413, "application/json", True)
    assert str(BODY_MAX_BYTES) in got.body.decode()


@every_way
async def test_a_body_over_the_limit_is_a_413_that_names_it_also_for_who_sends_all_before_reading(
    stage: Stage, way: Way
) -> None:
    got = await stage.ask(with_image(way, BODY_MAX_BYTES + 1))

    assert_too_large(got)
    assert "error" in got.json()
    assert not stage.engine_for(way).requests


async def test_a_413_is_sent_before_the_body(stage: Stage) -> None:
    asked = with_image(CHAT, BODY_MAX_BYTES + 1)
    async with RawClient(stage.port) as client:
        got = await client.ask(asked[: asked.index(b"\r\n\r\n") + 4])

    assert_too_large(got)


async def test_a_body_over_the_limit_is_found_without_a_length_too(stage: Stage) -> None:
    head, _, body = with_image(CHAT, BODY_MAX_BYTES + 1, "Transfer-Encoding: chunked").partition(b"\r\n\r\n")
    chunks = [body[start : start + MIB] for start in range(0, len(body), MIB)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)

    assert_too_large(await stage.ask(head + b"\r\n\r\n" + framed + b"0\r\n\r\n"))


async def test_a_connection_serves_on_after_a_413_or_closes_whole(stage: Stage) -> None:
    async with RawClient(stage.port) as client:
        got = await client.ask(with_image(CHAT, BODY_MAX_BYTES + 1))
        assert_too_large(got)
        closing = got.one("connection") == "close"
        rest = await client.read_to_end() if closing else b""

    assert (closing, rest) == (True, b"")


# -- many streams ----------------------------------------------------------------------------------------------------


POLICY = """\
version: 1
classes:
  interactive: {ttft_sla_s: 1, max_queue: 100, max_wait_s: 60}
sizing:
  policy: fixed
  fixed: {total: 1000, windows: {interactive: 1000}}
"""


@pytest.mark.slow
async def test_as_many_streams_run_as_the_policy_says_and_what_is_beyond_is_told_so(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    """1,200 clients, 1,000 places, 100 in the queue: 100 are shed at once and every other stream is whole."""
    allow_open_files(8192)
    go_on = asyncio.Event()

    async def slow(_asked: Asked, wire: Wire) -> None:
        await wire.head()
        await wire.part(event(delta("a")))
        await go_on.wait()
        await wire.part(event(delta(finish="stop")) + DONE)
        await wire.end()

    (tmp_path / "policy.yaml").write_text(POLICY)
    async with ScriptedEngine(play=slow) as engine:
        config = f"{engines_yaml(engine)}policy_file: {tmp_path / 'policy.yaml'}\n"
        async with start_gateway(config) as gateway:

            async def ask() -> Answer:
                async with RawClient(gateway.port, wait_s=60) as client:
                    return await client.ask(CHAT.ask(model=MODEL))

            async with asyncio.TaskGroup() as group:
                clients = [group.create_task(ask()) for _ in range(1200)]
                async with asyncio.timeout(30):
                    while engine.active < 1000 or sum(one.done() for one in clients) < 100:
                        await asyncio.sleep(0.05)
                metrics = await gateway.metrics()
                go_on.set()

            answers = [one.result() for one in clients]
            assert "EMFILE" not in gateway.log
            assert "Too many open files" not in gateway.log

    shed = [one for one in answers if one.status == 429]
    served = [one for one in answers if one.status == 200]
    assert (len(served), len(shed), engine.most_active) == (1100, 100, 1000)
    assert all(one.whole and one.body.endswith(DONE) for one in served)
    assert all(1 <= int(one.one("retry-after")) <= 60 and one.error()["type"] == "rate_limit_error" for one in shed)
    assert metrics['headrace_in_flight{class="interactive",engine="e0"}'] == 1000
    assert metrics['headrace_queued{class="interactive"}'] == 100


# -- header fields ---------------------------------------------------------------------------------------------------


@every_way
async def test_long_header_fields_of_a_client_are_accepted(stage: Stage, way: Way) -> None:
    fields = [f"Authorization: Bearer {'k' * 12_288}", f"Cookie: c={'v' * 10_240}", f"X-Trace: {'t' * 12_288}"]
    stage.engine_for(way).play = stream(*way.stream("hi"))

    got = await stage.ask(way.ask(*fields))

    assert (got.status, got.whole) == (200, True)
    assert stage.engine_for(way).requests[-1].one("x-trace") == "t" * 12_288


@pytest.mark.parametrize(
    "asked",
    [
        CHAT.ask(f"Authorization: Bearer {'k' * 70_000}"),
        CHAT.ask(f"X-Long: {'x' * 300_000}"),
        CHAT.ask(*(f"X-Field-{number}: {'x' * 60_000}" for number in range(8))),
        CHAT.ask(*(f"X-Field-{number}: x" for number in range(2_000))),
        request("GET", "/v1/models?" + "q" * 100_000),
    ],
    ids=["one_field", "one_huge_field", "long_fields", "many_fields", "target"],
)
async def test_a_head_beyond_the_limit_is_a_431_with_an_error_object(stage: Stage, asked: bytes) -> None:
    got = await stage.ask(asked)

    assert (got.status, got.one("content-type"), got.whole) == (431, "application/json", True)
    assert got.error()["message"]
    assert "Traceback" not in stage.gateway.log


@pytest.mark.parametrize("size", [9_000, 12_288, 60_000])
@every_way
async def test_a_long_header_field_of_an_engine_is_passed_on(stage: Stage, way: Way, size: int) -> None:
    async def long_field(_asked: Asked, wire: Wire) -> None:
        await wire.reply(200, way.whole("hi"), f"X-Usage: {'u' * size}")

    stage.engine_for(way).play = long_field
    got = await stage.ask(way.ask_whole())

    assert (got.status, got.one("x-usage")) == (200, "u" * size)


@pytest.mark.parametrize("stream_asked", [False, True])
async def test_a_boundless_head_of_an_engine_is_a_502_and_no_500(stage: Stage, stream_asked: bool) -> None:
    async def boundless(_asked: Asked, wire: Wire) -> None:
        await wire.reply(200, CHAT.whole("hi"), f"X-Usage: {'u' * 1_000_000}")

    stage.first.play = boundless
    got = await stage.ask(CHAT.ask() if stream_asked else CHAT.ask_whole())

    assert (got.status, got.error()["type"]) == (502, "server_error")
