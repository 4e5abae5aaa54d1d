"""A client that is gone holds nothing: no engine's generation, no place in the queue, no counter, no memory.

The kind of fault: an engine's reply that is not closed with its client, queue entries that outlive who asked, and books
that are only balanced on success. The engine must see its connection close within GONE_S, whatever it was doing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import orjson
import pytest
import pytest_asyncio
import redis.asyncio

from gateway.queue.keys import prefix
from tests.end_to_end.conftest import Stage, StartGateway, engines_yaml
from tests.end_to_end.counts import counts
from tests.end_to_end.dialects import CHAT, WAYS, Way
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import (
    DONE,
    MODEL,
    Asked,
    Script,
    ScriptedEngine,
    Wire,
    delta,
    event,
    hello,
    stream,
)
from tests.gateway.ingress.raw_client import RawClient, request, until
from tests.redis_servers import binary, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

GONE_S = 2.0
every_way = pytest.mark.parametrize("way", WAYS, ids=repr)

POLICY = """\
version: 1
classes:
  interactive: {ttft_sla_s: 1, max_queue: 5000, max_wait_s: 60}
  bulk: {max_queue: 5000}
sizing:
  policy: fixed
  fixed: {total: 4, windows: {interactive: 4, bulk: 3}}
"""


async def leave_by_close(client: RawClient) -> None:
    await client.__aexit__()


async def leave_by_reset(client: RawClient) -> None:
    client.reset()


Leave = Callable[[RawClient], Awaitable[None]]
either_way_out = pytest.mark.parametrize("leave", [leave_by_close, leave_by_reset], ids=["fin", "rst"])


# -- works that run --------------------------------------------------------------------------------------------------


async def trickle(way: Way, _asked: Asked, wire: Wire) -> None:
    """200 events, 0.1 s apart."""
    await wire.head()
    for piece in (*way.opening, *(way.token("t") for _ in range(200))):
        await wire.part(piece)
        await asyncio.sleep(0.1 if piece not in way.opening else 0)


async def silent_after_tokens(way: Way, asked: Asked, wire: Wire) -> None:
    await stream(*way.opening, way.token("a"), way.token("b"), end="hang")(asked, wire)


async def silent_before_its_head(_way: Way, _asked: Asked, wire: Wire) -> None:
    await wire.gone.wait()


async def silent_after_its_head(_way: Way, asked: Asked, wire: Wire) -> None:
    await stream(end="hang")(asked, wire)


async def silent_with_its_first_events_held(way: Way, asked: Asked, wire: Wire) -> None:
    await stream(*way.opening, way.token("held")[:-4], end="hang")(asked, wire)


async def silent_within_an_error(_way: Way, _asked: Asked, wire: Wire) -> None:
    await wire.head(500, content_type="application/json", length=1000)
    await wire.raw(b'{"error":')
    await wire.gone.wait()


async def silent_within_a_whole_answer(_way: Way, _asked: Asked, wire: Wire) -> None:
    await wire.head(content_type="application/json", length=1_000_000)
    await wire.raw(b'{"choices":' + b" " * 10_000)
    await wire.gone.wait()


async def flooding(way: Way, _asked: Asked, wire: Wire) -> None:
    await wire.head()
    for piece in way.opening:
        await wire.part(piece)
    while not wire.gone.is_set():
        await wire.part(way.token("x" * 10_000))


Play = Callable[[Way, Asked, Wire], Awaitable[None]]
STREAMED: tuple[tuple[Play, bytes], ...] = (
    (trickle, b"t"),
    (silent_after_tokens, b"b"),
    (silent_before_its_head, b""),
    (silent_after_its_head, b""),
    (silent_with_its_first_events_held, b""),
    (silent_within_an_error, b""),
    (flooding, b""),
)


async def assert_engine_lets_go(stage: Stage, way: Way, before: Counter[str]) -> None:
    """The engine saw its connection close in time, and the gateway counts a client that left and no engine's fault."""
    engine = stage.engine_for(way)
    left_s = time.monotonic()
    await until(lambda: not engine.active)
    assert time.monotonic() - left_s < GONE_S
    async with asyncio.timeout(GONE_S):
        while not (grown := await counts(stage.gateway, way.model) - before)["cancelled"]:
            await asyncio.sleep(0.01)
    assert grown["cancelled"] == 1
    assert not grown["engine_failed"] + grown["timed_out"] + grown["completed"]


@pytest.mark.parametrize(("play", "seen"), STREAMED, ids=[play.__name__ for play, _ in STREAMED])
@either_way_out
@every_way
async def test_the_engine_stops_within_two_seconds_of_a_streams_client_leaving(
    stage: Stage, way: Way, leave: Leave, play: Play, seen: bytes
) -> None:
    before = await counts(stage.gateway, way.model)
    stage.engine_for(way).play = _played(way, play)
    client = await RawClient(stage.port).__aenter__()
    await client.send(way.ask())
    await until(lambda: stage.engine_for(way).active)
    if seen:
        got = await client.read_some()
        while seen not in got:
            got += await client.read_some()

    await leave(client)

    await assert_engine_lets_go(stage, way, before)


def _played(way: Way, play: Play) -> Script:
    async def script(asked: Asked, wire: Wire) -> None:
        await play(way, asked, wire)

    return script


@pytest.mark.parametrize("play", [silent_before_its_head, silent_within_a_whole_answer, silent_within_an_error])
@either_way_out
@every_way
async def test_the_engine_stops_within_two_seconds_of_a_whole_answers_client_leaving(
    stage: Stage, way: Way, leave: Leave, play: Play
) -> None:
    before = await counts(stage.gateway, way.model)
    stage.engine_for(way).play = _played(way, play)
    client = await RawClient(stage.port).__aenter__()
    await client.send(way.ask_whole())
    await until(lambda: stage.engine_for(way).active)

    await leave(client)

    await assert_engine_lets_go(stage, way, before)


async def test_a_client_that_leaves_with_further_requests_on_its_way_is_noticed(stage: Stage) -> None:
    before = await counts(stage.gateway, CHAT.model)
    stage.first.play = _played(CHAT, silent_before_its_head)
    async with RawClient(stage.port) as client:
        await client.send(CHAT.ask() * 3)
        await until(lambda: stage.first.active)

    await assert_engine_lets_go(stage, CHAT, before)
    assert len(stage.first.requests) == 1


async def test_a_client_that_leaves_before_its_body_is_whole_reaches_no_engine(stage: Stage) -> None:
    asked = CHAT.ask()
    async with RawClient(stage.port) as client:
        await client.send(asked[:-10])
    async with RawClient(stage.port) as client:
        assert (await client.ask(CHAT.ask())).whole

    assert len(stage.first.requests) == 1
    await assert_quiet(stage.gateway)


@pytest.mark.parametrize("headers", [("Connection: close",), ("X-Headrace-Class: bulk",)])
async def test_neither_class_nor_connection_field_changes_that(stage: Stage, headers: tuple[str, ...]) -> None:
    before = await counts(stage.gateway, CHAT.model)
    stage.first.play = _played(CHAT, silent_after_tokens)
    async with RawClient(stage.port) as client:
        await client.send(CHAT.ask(*headers))
        await client.read_some()

    await assert_engine_lets_go(stage, CHAT, before)


async def test_an_engine_keeps_its_standing_when_clients_leave(stage: Stage) -> None:
    stage.first.play = _played(CHAT, silent_before_its_head)
    for _ in range(20):
        async with RawClient(stage.port) as client:
            await client.send(CHAT.ask())
            await until(lambda: stage.first.active)
        await until(lambda: not stage.first.active)
    stage.first.play = hello

    assert (await stage.ask(CHAT.ask())).whole
    states = {engine["name"]: engine["state"] for engine in (await stage.gateway.status())["engines"]}
    assert states["e0"] == "up"


# -- works that wait -------------------------------------------------------------------------------------------------

QUEUES = ("embedded", *(kind for kind in ("valkey-9",) if binary(kind)))


@contextmanager
def queue_settings(kind: str) -> Iterator[str]:
    """Settings for the gateway's own queue server, or for one that it shares."""
    if kind == "embedded":
        yield ""
    else:
        with serving(kind) as server:
            yield f"redis_url: {server.url}\n"


WAITS = (("interactive", False, leave_by_close), ("bulk", True, leave_by_reset))
WAIT_IDS = ("interactive-stream-fin", "bulk-whole-rst")


class Queue:
    """What stands in a gateway's Redis."""

    def __init__(self, gateway: GatewayProcess, settings: str) -> None:
        url = settings.partition(": ")[2].strip()
        if not url:
            record = orjson.loads(next((gateway.log_path.parent / "state").glob("*.json")).read_bytes())
            url = f"unix://{record['socket']}"
        self.client = redis.asyncio.Redis.from_url(url)

    async def works(self) -> int:
        """Entries of works, in all the keys that hold some; fails where they disagree."""
        name = prefix("default")
        held = await self.client.hlen(f"{name}works")
        assert await self.client.zcard(f"{name}owned") == held
        return int(held)

    async def waiting(self) -> int:
        return int(await self.client.zcard(f"{prefix('default')}waiting"))

    async def keys(self) -> set[str]:
        """Keys that works leave. Credit and the snapshot come and go with the leader, whatever works do."""
        found = {str(key) for key in await self.client.keys()}
        return {key for key in found if not key.rstrip("'").endswith((":credits", ":snapshot"))}


class Crowd:
    """An engine that holds every request until told otherwise, behind a gateway with four places."""

    def __init__(self, gateway: GatewayProcess, engine: ScriptedEngine, queue: Queue) -> None:
        self.gateway = gateway
        self.engine = engine
        self.queue = queue
        self.go_on = asyncio.Event()
        self.clients: list[RawClient] = []
        engine.play = self._hold

    async def _hold(self, asked: Asked, wire: Wire) -> None:
        await self.go_on.wait()
        await hello(asked, wire)

    async def send(self, count: int, *headers: str, whole: bool = False) -> list[RawClient]:
        clients = [await RawClient(self.gateway.port, wait_s=20).__aenter__() for _ in range(count)]
        self.clients += clients
        for client in clients:
            await client.send((CHAT.ask_whole if whole else CHAT.ask)(*headers, model=MODEL))
        return clients

    async def close(self) -> None:
        for client in self.clients:
            await leave_by_close(client)
        await self.queue.client.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def crowd_for(start_gateway: StartGateway, tmp_path: Path) -> AsyncIterator[Callable[[str], Awaitable[Crowd]]]:
    async with AsyncExitStack() as stack:

        async def crowd(kind: str) -> Crowd:
            (tmp_path / "policy.yaml").write_text(POLICY)
            settings = stack.enter_context(queue_settings(kind))
            engine = await stack.enter_async_context(ScriptedEngine())
            config = f"{engines_yaml(engine)}policy_file: {tmp_path / 'policy.yaml'}\n{settings}poll_s: 0.2\n"
            gateway = await stack.enter_async_context(start_gateway(config))
            await gateway.until_ready()
            found = Crowd(gateway, engine, Queue(gateway, settings))
            stack.push_async_callback(found.close)
            return found

        yield crowd


GAUGES = ("headrace_in_flight{", "headrace_queued{", "headrace_client_connections", "headrace_bodies_held_bytes")
LEDGER = ("headrace_ledger_kv_tokens{", "headrace_ledger_prefill_tokens{")
"""0 too, but behind a shared Redis unspent credit stands in them."""


async def assert_quiet(gateway: GatewayProcess, names: tuple[str, ...] = (*GAUGES, *LEDGER)) -> None:
    """Every gauge that must be 0 while nobody asks for anything falls to 0 soon."""
    held: dict[str, float] = {}
    try:
        async with asyncio.timeout(5):
            while True:
                metrics = await gateway.metrics()
                assert all(any(series.startswith(name) for series in metrics) for name in names)
                held = {series: value for series, value in metrics.items() if series.startswith(names) and value}
                if not held:
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"still held: {held}") from None


async def queued(gateway: GatewayProcess) -> float:
    return sum(value for series, value in (await gateway.metrics()).items() if series.startswith("headrace_queued{"))


async def until_queued(gateway: GatewayProcess, count: int, within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while await queued(gateway) != count:
            await asyncio.sleep(0.02)


async def until_works(queue: Queue, most: int) -> int:
    """Wait until the queue holds no more works than that; how many it does hold."""
    async with asyncio.timeout(GONE_S):
        while (held := await queue.works()) > most:
            await asyncio.sleep(0.02)
    return held


@pytest.mark.parametrize(("class_name", "whole", "leave"), WAITS, ids=WAIT_IDS)
@pytest.mark.parametrize("kind", QUEUES)
async def test_works_whose_clients_left_the_queue_never_run(
    crowd_for: Callable[[str], Awaitable[Crowd]], kind: str, whole: bool, class_name: str, leave: Leave
) -> None:
    """Four run, fifty wait, forty-five of these leave: five reach the engine, and the queue is as it was before."""
    crowd = await crowd_for(kind)
    running = await crowd.send(4)
    await until(lambda: crowd.engine.active == 4)
    warm = await crowd.send(1)
    await until_queued(crowd.gateway, 1)
    await leave(warm[0])
    await until_queued(crowd.gateway, 0)
    keys_before = await crowd.queue.keys()
    running_entries = await until_works(
        crowd.queue, 4
    )  # works that run keep theirs, if they had to wait for their place

    waiting = await crowd.send(50, f"X-Headrace-Class: {class_name}", whole=whole)
    await until_queued(crowd.gateway, 50)
    for client in waiting[5:]:
        await leave(client)
    await until_queued(crowd.gateway, 5, within_s=GONE_S)
    await until_works(crowd.queue, running_entries + 5)
    assert await crowd.queue.waiting() == 5
    crowd.go_on.set()
    answers = [await client.answer() for client in (*running, *waiting[:5])]
    for client in (*running, *waiting[:5]):
        await leave(client)

    assert all(answer.status == 200 and answer.whole for answer in answers)
    assert (len(crowd.engine.requests), crowd.engine.most_active) == (4 + 5, 4)
    await assert_quiet(crowd.gateway, GAUGES if kind != "embedded" else (*GAUGES, *LEDGER))
    await until_works(crowd.queue, 0)
    assert await crowd.queue.keys() <= keys_before
    grown = await counts(crowd.gateway, MODEL)
    assert (grown["completed"], grown["cancelled"], grown["engine_failed"]) == (9, 46, 0)


async def test_clients_that_leave_while_places_get_free_leak_none(
    crowd_for: Callable[[str], Awaitable[Crowd]],
) -> None:
    """Leaving races with being granted: afterwards all four places serve again."""
    crowd = await crowd_for(QUEUES[-1])

    async def brief(asked: Asked, wire: Wire) -> None:
        await asyncio.sleep(0.005)
        await hello(asked, wire)

    crowd.engine.play = brief

    async def one(number: int) -> None:
        async with RawClient(crowd.gateway.port) as client:
            await client.send(CHAT.ask(model=MODEL))
            await asyncio.sleep(0.002 * (number % 40))

    for start in range(0, 400, 80):
        await asyncio.gather(*(one(start + number) for number in range(80)))
    await assert_quiet(crowd.gateway, GAUGES)
    crowd.engine.play = crowd._hold
    clients = await crowd.send(4)
    await until(lambda: crowd.engine.active == 4)
    crowd.go_on.set()

    assert [(await client.answer()).whole for client in clients] == [True] * 4
    for client in clients:
        await leave_by_close(client)
    await assert_quiet(crowd.gateway, GAUGES)
    await until_works(crowd.queue, 0)


# -- nothing is left -------------------------------------------------------------------------------------------------

MIB = 1024 * 1024
CYCLES = 2_000


async def cycle(gateway: GatewayProcess, count: int) -> None:
    """Connect, send something, close; no answer is read. Every sixth leaves in another way."""
    whole, partial = CHAT.ask(model=MODEL), CHAT.ask(model=MODEL)[:-7]
    sent = (whole, whole, CHAT.ask_whole(model=MODEL), partial, request("GET", "/v1/models"), b"")
    for number in range(count):
        async with RawClient(gateway.port) as client:
            await client.send(sent[number % len(sent)])
            if number % 7 == 0:
                client.reset()
            elif number % 3 == 0:
                await asyncio.sleep(0.002)


@pytest.mark.slow
async def test_two_thousand_clients_that_send_and_leave_leave_nothing(
    crowd_for: Callable[[str], Awaitable[Crowd]],
) -> None:
    """Four places for them all, so that cancellation meets works that run, wait, or are about to do either."""
    crowd = await crowd_for("embedded")
    crowd.engine.play = _answer_or_hold
    await cycle(crowd.gateway, CYCLES // 4)  # what the allocator keeps for good is no growth
    await assert_quiet(crowd.gateway)
    await until_works(crowd.queue, 0)
    keys_before, rss_before = await crowd.queue.keys(), crowd.gateway.rss_bytes()
    before = await counts(crowd.gateway, MODEL)

    await cycle(crowd.gateway, CYCLES)

    await assert_quiet(crowd.gateway)
    await until_works(crowd.queue, 0)
    assert await crowd.queue.keys() <= keys_before
    assert crowd.gateway.rss_bytes() - rss_before < 10 * MIB
    assert (await counts(crowd.gateway, MODEL) - before)["cancelled"] > CYCLES // 10
    assert not crowd.engine.active
    assert "Traceback" not in crowd.gateway.log


async def _answer_or_hold(asked: Asked, wire: Wire) -> None:
    """Every other request is held until its client is gone."""
    if int(asked.one("x-request-id"), 16) % 2:
        await wire.gone.wait()
    else:
        await stream(event(delta("a")), event(delta(finish="stop")), DONE)(asked, wire)
