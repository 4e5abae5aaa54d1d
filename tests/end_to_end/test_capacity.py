"""What a client is told would fit: at GET /v1/headrace/capacity, and in every 429."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI, RateLimitError

from gateway.ingress.auth import digest
from tests.end_to_end.conftest import SHORT_TIMEOUTS, StartGateway, engines_yaml
from tests.end_to_end.engine_process import eventually
from tests.end_to_end.scripted_engine import MODEL, Asked, ScriptedEngine, Wire, answer, event

pytestmark = pytest.mark.slow

POLICY = """\
version: 1
classes:
  interactive: {ttft_sla_s: 5, max_queue: 2}
  bulk: {max_queue: 3}
sizing:
  policy: fixed
  fixed: {total: 4, windows: {interactive: 4, bulk: 2}}
"""


async def endless(_asked: Asked, wire: Wire) -> None:
    """An answer that goes on: an engine that shows nothing would be taken out of rotation."""
    await wire.head()
    while not wire.gone.is_set():
        await wire.part(event({"id": "c", "choices": [{"index": 0, "text": "x", "finish_reason": None}]}))
        await asyncio.sleep(0.02)


async def test_capacity_and_429_say_what_fits_now(start_gateway: StartGateway, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    async with ScriptedEngine() as engine:
        config = f"{engines_yaml(engine)}policy_file: {policy}\n{SHORT_TIMEOUTS}"
        async with start_gateway(config) as gateway, httpx.AsyncClient(trust_env=False) as http:
            client = AsyncOpenAI(base_url=f"{gateway.public_url}/v1", api_key="none", max_retries=0)
            capacity = f"{gateway.public_url}/v1/headrace/capacity"
            await gateway.until_ready()
            engine.play = endless
            empty = (await http.get(capacity)).json()
            long = (await http.get(f"{capacity}?prompt_tokens=1000000")).json()
            asking = [asyncio.ensure_future(_read(client)) for _ in range(5)]
            await eventually(lambda: engine.active == 2)
            await eventually(lambda: _waiting(http, capacity, 3))
            full = (await http.get(f"{capacity}?prompt_tokens=64")).json()
            with pytest.raises(RateLimitError) as refused:
                await client.completions.create(
                    model=MODEL, prompt=["x"] * 65, extra_headers={"X-Headrace-Class": "bulk"}
                )
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            await client.close()

    assert empty["classes"]["interactive"]["models"][MODEL]["starts_now"] == 4
    assert empty["classes"]["bulk"]["models"][MODEL] == {"starts_now": 2, "bound_by": "window"}
    assert empty["classes"]["bulk"]["accepted_inputs"] == 65_536
    assert empty["classes"]["bulk"]["max_request_batch"] == 64
    assert long["prompt_tokens"] == 1_000_000
    assert long["classes"]["bulk"]["models"][MODEL] == {"starts_now": 0, "bound_by": "context"}
    assert full["prompt_tokens"] == 64
    assert full["classes"]["bulk"]["waiting"] == 3
    assert full["classes"]["bulk"]["accepted_inputs"] == 0
    assert full["classes"]["bulk"]["models"][MODEL]["starts_now"] == 0
    assert full["classes"]["interactive"]["models"][MODEL]["starts_now"] == 2
    assert refused.value.response.headers["x-headrace-batch-fits"] == "0"
    assert "class bulk has 3 requests waiting: at most 3 may; retry in" in refused.value.message
    assert "inputs" not in refused.value.message
    assert int(refused.value.response.headers["retry-after"]) <= 8


async def _read(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt="x", stream=True, extra_headers={"X-Headrace-Class": "bulk"}
    )
    async for _ in stream:
        pass


async def _waiting(http: httpx.AsyncClient, capacity: str, count: int) -> bool:
    return bool((await http.get(capacity)).json()["classes"]["bulk"]["waiting"] == count)


async def test_capacity_asks_for_a_key_where_one_is_needed_and_refuses_nonsense(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    key = "hr-" + "k" * 40
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{tenant: t, sha256: {digest(key)}}}\n")
    async with ScriptedEngine(play=answer(429, {"error": {"message": "busy", "type": "overloaded"}})) as engine:
        async with start_gateway(f"{engines_yaml(engine)}keys_file: {keys}\n{SHORT_TIMEOUTS}") as gateway:
            async with httpx.AsyncClient(trust_env=False, base_url=gateway.public_url) as http:
                without = await http.get("/v1/headrace/capacity")
                odd = await http.get(
                    "/v1/headrace/capacity?prompt_tokens=-1", headers={"Authorization": f"Bearer {key}"}
                )
                client = AsyncOpenAI(base_url=f"{gateway.public_url}/v1", api_key=key, max_retries=0)
                with pytest.raises(APIStatusError) as busy:
                    await client.completions.create(model=MODEL, prompt="x")
                await client.close()

    assert without.status_code == 401
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "prompt_tokens")
    assert busy.value.status_code == 429
    assert busy.value.response.headers["x-headrace-batch-fits"].isdecimal()
    assert "inputs" not in busy.value.message


@pytest.mark.many
async def test_workers_tell_what_the_deciding_process_published(start_gateway: StartGateway, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    async with ScriptedEngine() as engine:
        config = f"{engines_yaml(engine)}policy_file: {policy}\nworkers: 2\n{SHORT_TIMEOUTS}"
        async with start_gateway(config) as gateway:
            async with httpx.AsyncClient(trust_env=False, base_url=gateway.public_url) as http:

                async def told() -> bool:
                    found = (await http.get("/v1/headrace/capacity")).json()
                    starts = {
                        name: one["models"].get(MODEL, {"starts_now": None})["starts_now"]
                        for name, one in found["classes"].items()
                    }
                    age_s = found["age_s"]
                    return age_s is not None and age_s < 10 and starts == {"interactive": 4, "bulk": 2}

                await eventually(told, 20)
                large = (await http.get("/v1/headrace/capacity?prompt_tokens=3000")).json()
                long = (await http.get("/v1/headrace/capacity?prompt_tokens=30000")).json()

    assert large["prompt_tokens"] == 4096
    assert long["prompt_tokens"] == 32_768
    assert long["classes"]["bulk"]["models"][MODEL] == {"starts_now": 0, "bound_by": "context"}
