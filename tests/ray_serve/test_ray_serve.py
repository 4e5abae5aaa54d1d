"""A real Ray Serve app of two replicas, a real model in each, behind the adapter for any server with OpenAI's routes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import APIError, AsyncOpenAI, AsyncStream
from openai.types import Completion

from tests.end_to_end.engine_process import EngineProcess, eventually
from tests.end_to_end.gateway_process import GatewayProcess
from tests.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

ENVIRONMENT = Path(__file__).parents[2] / ".venv" / "ray"
MODEL = "smol"
REPLICAS = 2
CONTEXT_TOKENS = 2048
"""Of one seat of a replica."""
WINDOW = 4
"""Of each class: as many as both replicas have seats."""
FRANCE = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
FREED_WITHIN_S = 20.0
"""A replica of two such streams is busy for minutes: their seats are free in this time only if it stopped."""
BACK_WITHIN_S = 60.0
POLICY = f"""\
version: 1
classes:
  interactive: {{ttft_sla_s: 30, max_wait_s: 60}}
  bulk: {{max_wait_s: 60}}
sizing: {{policy: fixed, fixed: {{total: {WINDOW + 1}, windows: {{interactive: {WINDOW}, bulk: {WINDOW}}}}}}}
"""


@dataclass
class Served:
    """A gateway before one Ray Serve app."""

    gateway: GatewayProcess
    http: httpx.AsyncClient
    client: AsyncOpenAI

    async def ask(self, body: dict[str, Any], class_name: str = "interactive") -> httpx.Response:
        return await self.http.post("/v1/completions", json=body, headers={"x-headrace-class": class_name})

    async def endless(self) -> AsyncStream[Completion]:
        """A stream as long as a replica's context allows."""
        return await self.client.completions.create(
            model=MODEL, prompt="A river", max_tokens=1900, extra_body={"ignore_eos": True}, stream=True
        )

    async def in_flight(self) -> float:
        page = await self.gateway.metrics()
        return sum(value for series, value in page.items() if series.startswith("headrace_in_flight{"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    python = ENVIRONMENT / "bin" / "python"
    assert python.exists(), f"no Ray at {ENVIRONMENT}; run: make test-ray"
    folder = tmp_path_factory.mktemp("ray")
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    start = ("tests.ray_serve.start", str(free_port()), str(REPLICAS))
    async with (
        EngineProcess(folder, *start, python=str(python), patience=4) as ray,
        GatewayProcess(
            folder / "gateway", f"engines: [{{name: ray, url: '{ray.url}'}}]\npoll_s: 0.2\npolicy_file: {policy}\n"
        ) as gateway,
        httpx.AsyncClient(base_url=gateway.public_url, trust_env=False, timeout=90.0) as http,
        AsyncOpenAI(base_url=f"{gateway.public_url}/v1", api_key="none", max_retries=0, timeout=90.0) as client,
    ):
        await gateway.until_ready()
        yield Served(gateway, http, client)


async def test_it_is_spoken_to_as_any_server_and_its_memory_is_unknown_not_empty(served: Served) -> None:
    (engine,) = (await served.gateway.status())["engines"]

    assert (engine["kind"], engine["state"], engine["models"]) == ("openai", "up", [MODEL])
    assert not [series for series in await served.gateway.metrics() if series.startswith("headrace_engine_kv_")]


async def test_real_text_comes_back_whole_and_streamed_alike(served: Served) -> None:
    whole = (await served.ask(FRANCE)).json()
    stream = await served.client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
    )
    text = "".join([chunk.choices[0].text async for chunk in stream])

    assert "Paris" in text
    assert text == whole["choices"][0]["text"]


async def test_what_a_replica_refuses_is_the_clients_error_and_no_fault_of_the_engine(served: Served) -> None:
    refused = await served.ask({"model": MODEL, "prompt": "river " * CONTEXT_TOKENS, "max_tokens": 4})

    assert refused.status_code == 400
    assert "x-replica-pid" in refused.headers
    (engine,) = (await served.gateway.status())["engines"]
    assert engine["state"] == "up"


async def test_bulk_beyond_the_window_waits_with_us_and_both_replicas_work(served: Served) -> None:
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(served.ask({**FRANCE, "max_tokens": 24}, "bulk")) for _ in range(3 * WINDOW)]
        await eventually(lambda: _is(served, WINDOW))
        assert await served.in_flight() <= WINDOW

    answers = [task.result() for task in asked]
    assert {answer.status_code for answer in answers} == {200}
    assert len(Counter(answer.headers["x-replica-pid"] for answer in answers)) == REPLICAS


async def test_clients_that_leave_free_the_seats_of_the_replicas(served: Served) -> None:
    streams = [await served.endless() for _ in range(WINDOW)]
    for stream in streams:
        await anext(aiter(stream))
    assert await served.in_flight() == WINDOW

    for stream in streams:
        await stream.close()

    await eventually(lambda: _is(served, 0))
    async with asyncio.timeout(FREED_WITHIN_S), asyncio.TaskGroup() as group:
        asked = [group.create_task(served.ask(FRANCE)) for _ in range(WINDOW)]
    assert {task.result().status_code for task in asked} == {200}


async def test_a_replica_that_dies_breaks_its_own_stream_aloud_and_is_replaced(served: Served) -> None:
    async with AsyncExitStack() as stack:
        stream = await stack.enter_async_context(await served.endless())
        chunks = aiter(stream)
        await anext(chunks)
        killed = stream.response.headers["x-replica-pid"]

        os.kill(int(killed), signal.SIGKILL)

        with pytest.raises((APIError, httpx.RemoteProtocolError)):
            async for _ in chunks:
                pass

    await eventually(lambda: _replicas_without(served, killed), BACK_WITHIN_S)


async def _is(served: Served, count: int) -> bool:
    return await served.in_flight() == count


async def _replicas_without(served: Served, killed: str) -> bool:
    """True when as many replicas as before answer, none of them the killed one."""
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(served.ask(FRANCE)) for _ in range(2 * WINDOW)]
    answers = [task.result() for task in asked if task.result().status_code == 200]
    found = {answer.headers["x-replica-pid"] for answer in answers}
    return len(found) == REPLICAS and killed not in found
