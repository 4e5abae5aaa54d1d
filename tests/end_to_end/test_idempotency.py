"""A request with an Idempotency-Key runs once, whatever its client repeats and wherever the repetition arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from gateway.ingress.auth import digest
from tests.end_to_end.conftest import SHORT_TIMEOUTS, engines_yaml
from tests.end_to_end.engine_process import eventually
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import DONE, MODEL, Asked, ScriptedEngine, Wire, answer, delta, event, hello
from tests.redis_servers import serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Served:
    """A gateway of two workers on a shared Valkey, with two tenants, before one engine."""

    gateway: GatewayProcess
    engine: ScriptedEngine
    http: httpx.AsyncClient
    store: str

    async def ask(self, key: str, *, tenant: str = "one", **more: object) -> httpx.Response:
        """One request on a connection of its own, so that either worker may get it."""
        headers = {"Idempotency-Key": key, "Authorization": f"Bearer key-of-{tenant}", "Connection": "close"}
        return await self.http.post("/v1/chat/completions", json={**CHAT, **more}, headers=headers)

    async def replayed(self, key: str, *, tenant: str = "one", **more: object) -> httpx.Response:
        """Ask again until the answer is there: it is written a moment after its client has it."""
        async with asyncio.timeout(10):
            while (found := await self.ask(key, tenant=tenant, **more)).status_code == 409:
                await asyncio.sleep(0.01)
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder: Path = tmp_path_factory.mktemp("idempotency")
    keys = folder / "keys.yaml"
    keys.write_text(
        "".join(f"- {{tenant: {tenant}, sha256: {digest(f'key-of-{tenant}')}}}\n" for tenant in ("one", "two"))
    )
    async with AsyncExitStack() as stack:
        store = stack.enter_context(serving("valkey-9"))
        engine = await stack.enter_async_context(ScriptedEngine())
        config = f"{engines_yaml(engine)}redis_url: {store.url}\nkeys_file: {keys}\nworkers: 2\n{SHORT_TIMEOUTS}"
        gateway = await stack.enter_async_context(GatewayProcess(folder / "gateway", config))
        await gateway.until_ready()
        http = httpx.AsyncClient(trust_env=False, base_url=gateway.public_url, timeout=20)
        yield Served(gateway, engine, await stack.enter_async_context(http), store.url)


@pytest_asyncio.fixture(loop_scope="module")
async def served(shared: Served) -> Served:
    shared.engine.play = hello
    shared.engine.requests.clear()
    shared.engine.aborted = 0
    return shared


async def test_a_repetition_gets_the_first_answer_and_does_not_run(served: Served) -> None:
    first = await served.ask("a")
    again = await served.replayed("a")

    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert len(served.engine.requests) == 1


async def test_the_openai_client_streams_a_repeated_answer(served: Served) -> None:
    client = AsyncOpenAI(base_url=f"{served.gateway.public_url}/v1", api_key="key-of-one")
    texts = []
    for _ in range(2):
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            extra_headers={"Idempotency-Key": "s"},
        )
        texts.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))
    await client.close()

    assert texts == ["Hello", "Hello"]
    assert len(served.engine.requests) == 1


async def test_while_it_runs_a_repetition_is_a_conflict_with_a_time_to_come_back(served: Served) -> None:
    held = asyncio.Event()

    async def wait(asked: Asked, wire: Wire) -> None:
        await held.wait()
        await hello(asked, wire)

    served.engine.play = wait
    first = asyncio.ensure_future(served.ask("b"))
    await eventually(lambda: served.engine.active == 1)

    conflicts = [await served.ask("b") for _ in range(4)]
    held.set()

    assert {one.status_code for one in conflicts} == {409}
    assert {one.headers["retry-after"] for one in conflicts} == {"1"}
    assert conflicts[0].json()["error"]["code"] == "idempotency_key_in_use"
    assert (await first).status_code == 200
    assert (await served.replayed("b")).content == (await first).content
    assert len(served.engine.requests) == 1


async def test_a_key_names_one_request_of_one_tenant(served: Served) -> None:
    await served.ask("c")

    assert (await served.ask("c", temperature=0.5)).status_code == 422
    other = await served.ask("c", tenant="two")

    assert other.status_code == 200
    assert "idempotent-replayed" not in other.headers
    assert len(served.engine.requests) == 2


async def test_a_request_that_failed_leaves_its_key_free(served: Served) -> None:
    served.engine.play = answer(400, {"error": {"message": "bad", "type": "BadRequestError", "code": 400}})
    failed = await served.ask("d")
    served.engine.play = hello

    assert failed.status_code == 400
    assert (await served.replayed("d")).status_code == 200
    assert len(served.engine.requests) == 2


async def test_a_stream_that_only_told_an_error_leaves_its_key_free(served: Served) -> None:
    async def late_error(_asked: Asked, wire: Wire) -> None:
        await asyncio.sleep(1.5)  # past queue_headers_after_s, so that the status is sent
        await wire.head()
        await wire.part(event({"error": {"message": "out of memory", "code": 500}}) + DONE)
        await wire.end()

    served.engine.play = late_error
    failed = await served.ask("e", stream=True)
    served.engine.play = hello

    assert failed.status_code == 200
    assert b"out of memory" in failed.content
    assert b"out of memory" not in (await served.replayed("e", stream=True)).content


async def test_a_client_that_leaves_ends_the_run_and_its_repetition_runs(served: Served) -> None:
    async def endless(_asked: Asked, wire: Wire) -> None:
        await wire.head()
        while not wire.gone.is_set():
            await wire.part(event(delta("x")))
            await asyncio.sleep(0.01)

    served.engine.play = endless
    headers = {"Idempotency-Key": "f", "Authorization": "Bearer key-of-one"}
    async with served.http.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers
    ) as one:
        async for _ in one.aiter_raw():
            break
    await eventually(lambda: served.engine.aborted == 1)
    served.engine.play = hello

    again = await served.replayed("f", stream=True)

    assert b"Hel" in again.content
    assert "idempotent-replayed" not in again.headers


async def test_an_answer_too_large_to_keep_is_not_run_again_unasked(served: Served) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "x" * 300_000}, "finish_reason": "stop"}
    served.engine.play = answer(200, {"id": "c", "object": "chat.completion", "choices": [choice]})
    await served.ask("g")

    async def told() -> bool:
        error = (await served.ask("g")).json()["error"]
        return bool(error["code"] == "idempotency_answer_not_kept")

    await eventually(told)
    assert len(served.engine.requests) == 1


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_a_key_that_is_none_is_refused(served: Served, key: str) -> None:
    assert (await served.ask(key)).status_code == 400


async def test_no_key_of_a_client_and_no_prompt_is_in_a_key_of_the_store(served: Served) -> None:
    from gateway.queue.redis_client import connect

    await served.ask("very-secret-key")
    client = connect(served.store)
    names = [name async for name in client.scan_iter(match="hr:*answer*")]
    lifetimes = [await client.pttl(name) for name in names]
    await client.aclose()

    assert names
    assert not [name for name in names if b"secret" in name or b"one" in name]
    assert all(0 < lifetime_ms <= 600_000 for lifetime_ms in lifetimes)


async def test_outcomes_are_counted(served: Served) -> None:
    before = await served.gateway.metrics()
    await served.ask("h")
    await served.replayed("h")
    after = await served.gateway.metrics()

    for outcome in ("first", "replayed"):
        series = f'headrace_idempotent_requests_total{{outcome="{outcome}"}}'
        assert after[series] - before.get(series, 0) == 1


async def test_a_request_batch_is_repeated_whole(served: Served) -> None:
    async def complete(asked: Asked, wire: Wire) -> None:
        prompts = asked.json()["prompt"]
        choices = [{"index": n, "text": text, "finish_reason": "stop"} for n, text in enumerate(prompts)]
        await wire.reply(200, {"id": "c", "choices": choices})

    served.engine.play = complete
    body = {"model": MODEL, "prompt": [str(number) for number in range(20)]}
    headers = {"Idempotency-Key": "i", "Authorization": "Bearer key-of-one", "X-Headrace-Class": "interactive"}
    got = [await served.http.post("/v1/completions", json=body, headers=headers) for _ in range(2)]

    assert got[0].content == got[1].content
    assert [choice["index"] for choice in orjson.loads(got[1].content)["choices"]] == list(range(20))
    assert len(served.engine.requests) == 3
