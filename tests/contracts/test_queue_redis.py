"""What only a queue in a real server can get wrong: lost replies, lost data, full memory, other nodes, slots."""

from __future__ import annotations

import asyncio
import os
import random
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Self

import pytest
import structlog
from redis.asyncio.connection import ConnectionPool
from redis.crc import key_slot
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from structlog.testing import CapturingLogger

from gateway.queue import redis_queue
from gateway.queue.base import (
    Claimed,
    Credit,
    Enqueued,
    Expired,
    GrantTaken,
    InFlight,
    Leadership,
    Queue,
    QueueUnavailable,
    Renewed,
    Session,
    SessionLost,
    SessionReport,
    Settled,
    Snapshot,
)
from gateway.queue.keys import SCHEMA, TABLE, pool_channel, schema_key, session_channel
from gateway.queue.redis_client import connect
from gateway.queue.redis_queue import RedisQueue
from policies.vocabulary import BodyAt, Grant, Work
from tests.ports import free_port
from tests.queue_checks import check_keys
from tests.redis_servers import KINDS, Server, binary, serving

NOW = 1_800_000_000_000
ME = Session("gateway-1", 1)
BOUNDS = {"interactive": 100}
CREDITS = {("gpu 0", "interactive"): Credit(InFlight(4, 2_048, 512), 2, NOW + 1_000)}


def work(work_id: str, *, blob: bool = False, attempt: int = 0) -> Work:
    body = BodyAt.BLOB if blob else BodyAt.OWNER
    return Work(work_id, "interactive", "acme", "m", "/v1/completions", 1.0, 2.0, attempt=attempt, body=body)


def grant(work_id: str) -> Grant:
    return Grant(work_id, "gpu 0", 5, 1, NOW / 1000 + 5)


@asynccontextmanager
async def queue_at(url: str, *, pool: str = "default", timeout_s: float = 2.0) -> AsyncIterator[RedisQueue]:
    queue = RedisQueue(
        connect(url), log=structlog.get_logger(), rng=random.Random(1), pool=pool, command_timeout_s=timeout_s
    )
    try:
        yield queue
    finally:
        await queue.close()


async def renew(queue: Queue, session: Session = ME, *, now_ms: int = NOW) -> Renewed | None:
    return await queue.renew_session(session, now_ms=now_ms, valid_for_ms=5_000, report=SessionReport())


async def register(queue: Queue, session: Session = ME) -> bool:
    return await renew(queue, session) is not None


async def claim(queue: Queue, *grants: Grant) -> list[bool]:
    return [one is not None for one in await queue.claim_many(grants, now_ms=NOW)]


async def enqueue(queue: Queue, *works: Work, session: Session = ME) -> list[Enqueued]:
    return await queue.enqueue_many(works, session=session, max_queue=BOUNDS, now_ms=NOW)


async def whole_life(queue: Queue) -> None:
    """Every call once, on works that end."""
    await register(queue)
    led = await queue.lead("gateway-1", now_ms=NOW, valid_for_ms=2_000)
    await enqueue(queue, work("a"), work("b", blob=True), work("c"))
    await queue.peek(bounds={}, default_bound=10, now_ms=NOW)
    grants = [Grant(one, "gpu 0", led.epoch, 1, NOW / 1000) for one in ("a", "b")]
    assert await claim(queue, *grants) == [True, True]
    assert len(await queue.take_grants(ME, after_seq=0)) == 2
    assert await queue.give_credit({ME: CREDITS}, epoch=led.epoch, now_ms=NOW)
    assert await queue.publish(Snapshot(1, b"{}"), epoch=led.epoch, now_ms=NOW)
    assert await renew(queue) == Renewed(CREDITS, led.epoch, 1)
    assert len((await queue.standing(now_ms=NOW)).outstanding) == 2
    assert await queue.snapshot() == Snapshot(1, b"{}")
    assert await queue.requeue_many([work("b", blob=True, attempt=1)], session=ME, now_ms=NOW) == [True]
    assert await queue.settle_many([("a", 1), ("b", 1), ("c", 0)], session=ME, now_ms=NOW) == [Settled.DONE] * 3
    await queue.expire_sessions(now_ms=NOW, after_seq=0)
    await queue.resign("gateway-1", epoch=led.epoch)
    await queue.end_session(ME)
    assert (await queue.hear(now_ms=NOW)).reports == {}


# -- servers and scripts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_contract_runs_on_every_kind_of_server(kind: str) -> None:
    if binary(kind) is None:
        pytest.skip(f"{kind} is not installed: apt-get install redis-server")

    assert os.access(str(binary(kind)), os.X_OK)


def test_scripts_touch_only_keys_that_they_were_given() -> None:
    allowed = {*(key.name.upper() for key in TABLE), "POOL_SCHEMA"}
    scripts = [
        one for one in resources.files("gateway.queue").joinpath("scripts").iterdir() if one.name.endswith(".lua")
    ]
    assert len(scripts) == 15

    for script in scripts:
        calls = re.findall(r"redis\.p?call\('(\w+)',\s*([^,)]+)", script.read_text())
        assert {key for command, key in calls if command != "PUBLISH"} <= allowed, script.name
        assert not {command for command, _ in calls} & {"TIME", "RANDOMKEY", "SPOP", "SRANDMEMBER", "KEYS", "SCAN"}
        assert "math.random" not in script.read_text()


async def test_all_keys_and_channels_of_a_pool_are_in_one_slot(valkey: Server) -> None:
    async with queue_at(valkey.url, pool="a {b} c/d") as queue:
        calls: list[tuple[Any, ...]] = []
        send = queue._execute

        async def spy(*args: Any) -> Any:
            calls.append(args)
            return await send(*args)

        queue._execute = spy
        await whole_life(queue)

        slots = {key_slot(key.encode()) for call in calls if call[0] == "EVALSHA" for key in call[3 : 3 + call[2]]}
        slots |= {key_slot(pool_channel("a {b} c/d").encode()), key_slot(session_channel("a {b} c/d", ME).encode())}
        assert len(slots) == 1
        await queue._client.flushdb()


@pytest.mark.slow  # a node waits two seconds before it serves
async def test_a_cluster_node_takes_every_call() -> None:
    with serving("valkey-9", "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as server:
        async with queue_at(server.url) as queue:
            await queue._client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)  # type: ignore[no-untyped-call]
            async with asyncio.timeout(10):
                while await cluster_state(queue) != "ok":
                    await asyncio.sleep(0.02)

            await whole_life(queue)


async def cluster_state(queue: RedisQueue) -> str:
    info: dict[str, str] = await queue._client.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
    return info["cluster_state"]


async def test_scripts_are_sent_again_to_a_server_that_dropped_them(valkey: Server) -> None:
    async with queue_at(valkey.url, pool="flushed") as queue:
        await register(queue)

        await queue._client.script_flush()

        assert await enqueue(queue, work("a")) == [Enqueued.QUEUED]
        await queue._client.flushdb()


async def test_names_and_texts_of_clients_are_in_no_key(valkey: Server) -> None:
    async with queue_at(valkey.url, pool="secret keys") as queue:
        await register(queue)
        await enqueue(queue, work("client text"))

        keys = [key async for key in queue._client.scan_iter(match="hr:{secret*")]

        assert keys
        assert not [key for key in keys if b"client" in key or b"acme" in key or b"gateway" in key]
        await queue._client.flushdb()


# -- loss of data and of nodes ---------------------------------------------------------------------------------------


async def test_after_a_flush_under_load_everything_is_there_again() -> None:
    with serving("valkey-9") as server:
        async with queue_at(server.url) as queue:
            await register(queue)
            await enqueue(queue, *(work(f"w{i}") for i in range(50)))
            await queue._client.flushall()
            await queue._client.script_flush()

            with pytest.raises(SessionLost):
                await enqueue(queue, work("new"))
            assert not await register(queue)
            again = Session(ME.id, 2)
            await register(queue, again)
            await enqueue(queue, *(work(f"w{i}") for i in range(50)), session=again)

            assert (await queue.lead("gateway-1", now_ms=NOW, valid_for_ms=2_000)).fresh_record
            assert sum((await queue.peek(bounds={}, default_bound=1, now_ms=NOW)).depths.values()) == 50
            await check_keys(queue._client, "default")


async def test_a_server_that_comes_back_empty_needs_no_setting_up(tmp_path: Path) -> None:
    folder = f"/tmp/hrq-{os.getpid()}"  # noqa: S108 - a socket path must be short
    Path(folder).mkdir()
    try:
        with serving("valkey-9", folder=folder) as server:
            queue = RedisQueue(connect(server.url), log=structlog.get_logger(), rng=random.Random(1))
            await register(queue)
            bell = queue.bell(None)
            await anext(bell)
        with pytest.raises(QueueUnavailable, match="not reachable"):
            await register(queue)
        with serving("valkey-9", folder=folder):
            assert not await register(queue)
            assert await register(queue, Session(ME.id, 2))
            async with asyncio.timeout(5):
                await anext(bell)
            await bell.aclose()
            await queue.close()
    finally:
        for file in Path(folder).iterdir():
            file.unlink()
        Path(folder).rmdir()


async def test_a_demoted_node_is_left_for_the_one_behind_the_same_name(tmp_path: Path) -> None:
    name = Path(f"/tmp/hrq-name-{os.getpid()}")  # noqa: S108 - a socket path must be short
    with serving("valkey-9") as old, serving("valkey-9") as new:
        try:
            name.symlink_to(old.url.removeprefix("unix://"))
            async with queue_at(f"unix://{name}") as queue:
                await register(queue)
                await queue._client.execute_command("REPLICAOF", "127.0.0.1", "1")  # type: ignore[no-untyped-call]
                name.unlink()
                name.symlink_to(new.url.removeprefix("unix://"))

                with pytest.raises(QueueUnavailable, match="read-only replica"):
                    await register(queue)

                assert await register(queue, Session(ME.id, 2))
                assert await enqueue(queue, work("a"), session=Session(ME.id, 2)) == [Enqueued.QUEUED]
        finally:
            name.unlink(missing_ok=True)


async def test_a_silent_node_is_left_by_every_connection_at_once(tmp_path: Path) -> None:
    name = Path(f"/tmp/hrq-silent-{os.getpid()}")  # noqa: S108 - a socket path must be short
    with serving("valkey-9") as old, serving("valkey-9") as new:
        try:
            name.symlink_to(old.url.removeprefix("unix://"))
            async with queue_at(f"unix://{name}", timeout_s=1.0) as queue:
                await asyncio.gather(*(register(queue) for _ in range(8)))
                old.freeze()
                name.unlink()
                name.symlink_to(new.url.removeprefix("unix://"))

                with pytest.raises(QueueUnavailable, match="did not answer in time"):
                    await register(queue)

                assert await register(queue, Session(ME.id, 2))
        finally:
            name.unlink(missing_ok=True)


async def test_a_frozen_server_is_told_in_time_and_found_again(valkey: Server) -> None:
    async with queue_at(valkey.url, pool="frozen", timeout_s=0.1) as queue:
        await register(queue)
        valkey.freeze()
        try:
            with pytest.raises(QueueUnavailable, match="did not answer in time"):
                await register(queue)
        finally:
            valkey.thaw()

        assert await register(queue)
        await queue._client.flushdb()


async def test_a_bell_whose_server_froze_is_noticed_and_comes_back(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_queue, "BELL_IDLE_S", 0.02)
    log = CapturingLogger()
    queue = RedisQueue(
        connect(valkey.url), log=structlog.wrap_logger(log, processors=[]), rng=random.Random(1), command_timeout_s=0.05
    )
    bell = queue.bell(None)
    await anext(bell)
    valkey.freeze()
    try:
        waiting = asyncio.ensure_future(_rings(bell))
        async with asyncio.timeout(5):
            while not log.calls:
                await asyncio.sleep(0.01)
    finally:
        valkey.thaw()

    async with asyncio.timeout(5):
        await waiting
    assert log.calls[0].kwargs["repeat_key"] == "queue bell"
    await bell.aclose()
    await queue.close()


async def _rings(bell: AsyncIterator[None]) -> None:
    await anext(bell)


async def test_a_full_server_refuses_new_work_and_loses_nothing_that_it_took() -> None:
    with serving("valkey-9") as server:
        async with queue_at(server.url) as queue:
            await register(queue)
            led = await queue.lead("gateway-1", now_ms=NOW, valid_for_ms=2_000)
            await enqueue(queue, work("a"), work("b", blob=True), work("c"))
            await queue._client.config_set("maxmemory", "1")

            with pytest.raises(QueueUnavailable, match="out of memory"):
                await enqueue(queue, work("d"))

            later = NOW + 400
            assert await renew(queue, now_ms=later)
            assert (await queue.lead("gateway-1", now_ms=later, valid_for_ms=2_000)).expires_ms == later + 2_000
            grants = [Grant(one, "gpu 0", led.epoch, 1, NOW / 1000) for one in ("a", "b")]
            assert await claim(queue, *grants) == [True, True]
            assert await queue.give_credit({ME: CREDITS}, epoch=led.epoch + 1, now_ms=NOW)
            assert await queue.publish(Snapshot(1, b"{}"), epoch=led.epoch + 1, now_ms=NOW)
            led = replace(led, epoch=led.epoch + 1)
            assert await queue.requeue_many([work("b", blob=True)], session=ME, now_ms=NOW) == [True]
            unknown_first = [("unknown", 0), ("a", 1)]
            assert await queue.settle_many(unknown_first, session=ME, now_ms=NOW) == [Settled.GONE, Settled.DONE]
            assert await queue.settle_many([("a", 1)], session=ME, now_ms=NOW) == [Settled.DONE]
            assert (await queue.end_session(ME)).requeued == ("b",)


async def test_an_evicting_server_is_warned_of() -> None:
    with serving("valkey-9") as server:
        async with queue_at(server.url) as queue:
            before = await queue.eviction_warning()
            await queue._client.config_set("maxmemory", "20mb")
            await queue._client.config_set("maxmemory-policy", "allkeys-lru")

            assert before is None
            assert "allkeys-lru: expected noeviction" in str(await queue.eviction_warning())


async def test_works_whose_session_record_was_lost_are_swept() -> None:
    with serving("valkey-9") as server:
        async with queue_at(server.url) as queue:
            await register(queue)
            await register(queue, Session("alive", 1))
            await enqueue(queue, work("a"))
            await enqueue(queue, work("b"), session=Session("alive", 1))
            for session in (ME, Session("alive", 1), Session("idle", 1)):
                await register(queue, session)
                await queue.give_credit({session: CREDITS}, epoch=5, now_ms=NOW)
            await queue._client.hdel(queue._keys[0], "gateway-1/1", "idle/1")

            expired = await queue.expire_sessions(now_ms=NOW)

            assert (expired.owner_gone, expired.sessions) == (("a",), ("gateway-1", "idle"))
            assert set((await queue.standing(now_ms=NOW)).credits) == {Session("alive", 1)}
            await check_keys(queue._client, "default")


async def test_a_store_that_is_not_there_is_told_without_the_password() -> None:
    async with queue_at("redis://user:hunter2@127.0.0.1:9/0") as queue:
        with pytest.raises(QueueUnavailable, match="not reachable") as caught:
            await register(queue)

        assert "hunter2" not in f"{caught.value!r} {queue!r} {caught.value.__cause__!r}"


@pytest.mark.parametrize(
    "error", [RedisTimeoutError("disconnecting"), ssl.SSLError("application data after close notify")]
)
async def test_a_connection_that_does_not_close_in_good_order_is_no_other_fault_than_its_command_s(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def loading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while await reader.read(65_536):
                writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")

    async def disconnect(_pool: ConnectionPool, inuse_connections: bool = True) -> None:
        raise error

    async with await asyncio.start_server(loading, "127.0.0.1", 0) as server:
        async with queue_at(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}") as queue:
            with monkeypatch.context() as patched:
                patched.setattr(ConnectionPool, "disconnect", disconnect)

                with pytest.raises(QueueUnavailable, match="loading"):
                    await queue.time_ms()


async def test_rights_that_are_taken_away_make_the_store_unavailable_until_they_are_back() -> None:
    with serving("valkey-9") as server:
        async with queue_at(server.url) as queue:
            await register(queue)
            await queue._client.acl_setuser("default", enabled=True, commands=["-evalsha", "-eval"])
            with pytest.raises(QueueUnavailable, match="lacks a right"):
                await renew(queue)
            await queue._client.acl_setuser("default", enabled=True, commands=["+evalsha", "+eval"])

            assert await renew(queue)


async def test_a_store_that_has_come_to_ask_for_a_password_is_unavailable() -> None:
    """To a command of more than ten words it speaks of its protocol, and closes the connection."""

    async def refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while data := await reader.read(65_536):
                introductions = data.count(b"SETINFO")
                writer.write(b"+OK\r\n" * introductions or b"-ERR Protocol error: unauthenticated multibulk length\r\n")

    async with await asyncio.start_server(refusing, "127.0.0.1", 0) as server:
        async with queue_at(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}") as queue:
            with pytest.raises(QueueUnavailable, match="password"):
                await queue.time_ms()


async def test_a_key_that_somebody_else_has_written_makes_the_store_unavailable_until_it_is_gone() -> None:
    with serving("valkey-9") as server:
        async with queue_at(server.url) as queue:
            await queue._client.set(queue._keys[0], "somebody else's")
            with pytest.raises(QueueUnavailable, match="something else under a key"):
                await register(queue)
            await queue._client.delete(queue._keys[0])

            assert await register(queue)


@pytest.mark.parametrize("said", ["ERR upstream failure: hr:{p}:works", "UPSTREAM no healthy host", "ERR Proxy error"])
async def test_an_error_of_a_store_s_own_makes_it_unavailable_and_what_was_sent_is_not_told(said: str) -> None:
    async def refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while data := await reader.read(65_536):
                introductions = data.count(b"SETINFO")
                writer.write(b"+OK\r\n" * introductions or f"-{said}\r\n".encode())

    async with await asyncio.start_server(refusing, "127.0.0.1", 0) as server:
        async with queue_at(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}") as queue:
            with pytest.raises(QueueUnavailable, match=said.partition(":")[0].removeprefix("ERR ")) as caught:
                await register(queue)

    assert "hr:{p}" not in str(caught.value)


async def test_a_fault_of_our_own_is_raised_as_itself(valkey: Server) -> None:
    async with queue_at(valkey.url) as queue:
        with pytest.raises(ResponseError):
            await queue._command("NOSUCHCOMMAND")


# -- lost replies ----------------------------------------------------------------------------------------------------


class Proxy:
    """A unix-socket proxy that, while `losing`, passes a script on, swallows its reply and resets the caller."""

    def __init__(self, target: str, path: str) -> None:
        self._target = target
        self.path = path
        self.losing = False
        self.lost = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()
        Path(self.path).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(self._target)
        with closing(writer), closing(there_writer):
            while data := await reader.read(1 << 20):
                there_writer.write(data)
                reply = await there_reader.read(1 << 20)
                if self.losing and b"EVALSHA" in data and not reply.startswith(b"-NOSCRIPT"):
                    self.losing = False
                    self.lost += 1
                    return
                writer.write(reply)


@asynccontextmanager
async def through_proxy(server: Server, pool: str) -> AsyncIterator[tuple[RedisQueue, Proxy]]:
    path = f"{server.url.removeprefix('unix://')}.{pool}"
    async with Proxy(server.url.removeprefix("unix://"), path) as proxy, queue_at(f"unix://{path}", pool=pool) as queue:
        yield queue, proxy
        await check_keys(queue._client, pool)
        await queue._client.flushdb()


async def prepared(queue: Queue) -> None:
    """A leader, a work that waits and two that are granted, one of them to be requeued."""
    await register(queue)
    await queue.claim_many([], now_ms=NOW)
    await enqueue(queue, work("waits"), work("runs"), work("failed"), work("blob", blob=True))
    await queue.claim_many([grant("runs"), grant("failed")], now_ms=NOW)
    await queue.give_credit({ME: CREDITS}, epoch=5, now_ms=NOW)
    await queue.publish(Snapshot(1, b"1"), epoch=5, now_ms=NOW)


CALLS: dict[str, tuple[Callable[[Queue], Awaitable[Any]], Callable[[Any], bool]]] = {
    "renew": (renew, lambda answer: answer == Renewed(CREDITS, 5, 1)),
    "register": (lambda queue: renew(queue, Session("new", 1)), lambda answer: answer == Renewed({}, 5, 1)),
    "enqueue": (lambda queue: enqueue(queue, work("new")), lambda answer: answer == [Enqueued.QUEUED]),
    "claim": (
        lambda queue: queue.claim_many([grant("waits")], now_ms=NOW),
        lambda answer: answer == [Claimed(ME, NOW * 1024 + 2)],
    ),
    "give": (lambda queue: queue.give_credit({ME: {}}, epoch=5, now_ms=NOW + 1), lambda answer: answer is True),
    "publish": (lambda queue: queue.publish(Snapshot(2, b"2"), epoch=6, now_ms=NOW), lambda answer: answer is True),
    "standing": (
        lambda queue: queue.standing(now_ms=NOW),
        lambda answer: len(answer.outstanding) == 2 and answer.credits == {ME: CREDITS},
    ),
    "take": (
        lambda queue: queue.take_grants(ME, after_seq=0),
        lambda answer: [one.grant.work_id for one in answer if isinstance(one, GrantTaken)] == ["runs", "failed"],
    ),
    "requeue": (
        lambda queue: queue.requeue_many([work("failed", attempt=1)], session=ME, now_ms=NOW),
        lambda answer: answer == [True],
    ),
    "settle": (
        lambda queue: queue.settle_many([("runs", 1), ("waits", 0), ("unknown", 0)], session=ME, now_ms=NOW),
        lambda answer: answer == [Settled.DONE, Settled.DONE, Settled.GONE],
    ),
    "lead": (
        lambda queue: queue.lead("gateway-1", now_ms=NOW, valid_for_ms=2_000),
        lambda answer: answer == Leadership("gateway-1", NOW, NOW + 2_000, fresh_record=True),
    ),
    "expire": (
        lambda queue: queue.expire_sessions(now_ms=NOW + 5_000, after_seq=0),
        lambda answer: (
            isinstance(answer, Expired) and answer.sessions == ("gateway-1",) and answer.requeued == ("blob",)
        ),
    ),
    "end": (
        lambda queue: queue.end_session(ME),
        lambda answer: answer.owner_gone == ("failed", "runs", "waits") and answer.requeued == ("blob",),
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_whose_reply_was_lost_is_repeated_with_the_same_answer_and_effect(
    valkey: Server, name: str
) -> None:
    call, right = CALLS[name]
    async with (
        through_proxy(valkey, f"lost-{name}") as (queue, proxy),
        queue_at(valkey.url, pool="kept") as undisturbed,
    ):
        await prepared(queue)
        await prepared(undisturbed)
        await call(undisturbed)
        proxy.losing = True

        with pytest.raises(QueueUnavailable):
            await call(queue)
        answer = await call(queue)

        assert proxy.lost == 1
        assert right(answer), answer
        assert await contents(queue) == await contents(undisturbed)


async def contents(queue: RedisQueue) -> dict[str, Any]:
    """All that a pool holds, by key name."""
    found: dict[str, Any] = {}
    for name, key in queue._key.items():
        if await queue._client.type(key) == b"hash":
            found[name] = await queue._client.hgetall(key)
        else:
            found[name] = await queue._client.zrange(key, 0, -1, withscores=True)
    return found


async def test_nothing_is_retried_behind_the_caller_s_back(valkey: Server) -> None:
    async with through_proxy(valkey, "retries") as (queue, proxy):
        await register(queue)
        before = (await queue._client.info("commandstats"))["cmdstat_evalsha"]["calls"]
        proxy.losing = True

        with pytest.raises(QueueUnavailable):
            await enqueue(queue, work("a"))

        after = (await queue._client.info("commandstats"))["cmdstat_evalsha"]["calls"]
        assert after - before <= 2
        assert proxy.lost == 1


# -- schemas ---------------------------------------------------------------------------------------------------------


async def test_a_pool_that_moved_on_to_a_newer_schema_is_left_alone(valkey: Server) -> None:
    async with queue_at(valkey.url, pool="newer") as queue:
        await queue._client.set(schema_key("newer"), SCHEMA + 1)

        for call in (register(queue), queue.lead("gateway-1", now_ms=NOW, valid_for_ms=2_000)):
            with pytest.raises(QueueUnavailable, match="speaks schema 2: expected 1; upgrade this process"):
                await call

        assert [key async for key in queue._client.scan_iter(match="hr:{newer}*")] == [b"hr:{newer}:schema"]
        await queue._client.flushdb()


def test_scripts_and_keys_are_of_one_schema() -> None:
    shared = resources.files("gateway.queue").joinpath("scripts", "record.lua").read_text()

    assert f"\nlocal SCHEMA = {SCHEMA}\n" in shared
