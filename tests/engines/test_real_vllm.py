"""Headrace before a real vLLM on the CPU, with a simulated engine of the same model beside it: what vLLM does when it is
full, paused, frozen, told to stop or killed, and what a client sees of it. Run by `make test-engines`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.end_to_end.engine_process import eventually, simulated
from tests.end_to_end.gateway_process import GatewayProcess
from tests.engines.real_vllm import MODEL, SEATS, RealVllm

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.engines, pytest.mark.timeout(900)]

DONE = b"data: [DONE]"
POLICY = """\
version: 1
classes:
  interactive: {ttft_sla_s: 30, max_queue: 100, max_wait_s: 300}
  bulk: {max_queue: 100, max_wait_s: 300}
sizing:
  policy: fixed
  fixed: {total: 32, windows: {interactive: 32, bulk: 24}}
"""


@dataclass
class Stand:
    """A gateway before a vLLM ("real") and a simulated engine ("other") of the same model."""

    gateway: GatewayProcess
    vllm: RealVllm
    client: httpx.AsyncClient

    async def engine(self, name: str = "real") -> dict[str, Any]:
        found: dict[str, Any] = next(one for one in (await self.gateway.status())["engines"] if one["name"] == name)
        return found

    async def is_out(self, why: str | None) -> bool:
        return bool((await self.engine())["out_of_rotation"] == why)

    async def has_state(self, state: str) -> bool:
        return bool((await self.engine())["state"] == state)


@asynccontextmanager
async def stand(folder: Path, *flags: str, alone: bool = False) -> AsyncIterator[Stand]:
    """alone: without the simulated engine."""
    folder.mkdir(exist_ok=True)
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    async with AsyncExitStack() as stack:
        vllm = await stack.enter_async_context(RealVllm(folder, *flags))
        engines = [f"{{name: real, url: '{vllm.url}'}}"]
        if not alone:
            other = await stack.enter_async_context(simulated(folder, model=MODEL))
            engines.append(f"{{name: other, url: '{other.url}'}}")
        config = f"engines: [{', '.join(engines)}]\npoll_s: 0.3\npolicy_file: {policy}\nhealth: {{silence_s: 3}}\n"
        gateway = await stack.enter_async_context(GatewayProcess(folder / "gateway", config))
        client = httpx.AsyncClient(base_url=gateway.public_url, trust_env=False, timeout=120)
        await stack.enter_async_context(client)
        one = Stand(gateway, vllm, client)
        await eventually(lambda: one.has_state("up"), within_s=60)
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    flags = ("--max-model-len", "2048", "--max-num-seqs", str(SEATS), "--scheduling-policy", "priority")
    async with stand(tmp_path_factory.mktemp("vllm") / "a", *flags, "--max-num-queued-reqs", "20") as one:
        yield one


def body(tokens: int, **more: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "def", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


async def read(client: httpx.AsyncClient, tokens: int, **headers: str) -> tuple[bytes, float]:
    """A stream, whole, and when it ended. Broken off: what came until then."""
    said = b""
    try:
        async with client.stream("POST", "/v1/completions", json=body(tokens, stream=True), headers=headers) as answer:
            async for part in answer.aiter_raw():
                said += part
    except httpx.HTTPError:
        said += b"<broken off>"
    return said, time.monotonic()


async def until_on_vllm(one: Stand, tasks: list[asyncio.Task[tuple[bytes, float]]], running: int = 1) -> None:
    """Wait until vLLM itself runs some of them."""

    async def runs() -> bool:
        assert not all(task.done() for task in tasks), [task.result() for task in tasks]
        return await one.vllm.metric("vllm:num_requests_running") >= running

    await eventually(runs, within_s=60)


async def has_waiting(one: Stand, count: int) -> bool:
    """Whether vLLM itself says so; its gauges are a step behind what it has taken."""
    return await one.vllm.metric("vllm:num_requests_waiting") == count


def streams(one: Stand, count: int, tokens: int, **headers: str) -> list[asyncio.Task[tuple[bytes, float]]]:
    return [asyncio.create_task(read(one.client, tokens, **headers)) for _ in range(count)]


async def test_its_seats_and_its_order_are_found_where_it_tells_them(served: Stand) -> None:
    engine = await served.engine()

    assert (engine["kind"], engine["models"]) == ("vllm", [MODEL])
    assert engine["version"].startswith("0.")
    assert await served.vllm.metric("vllm:num_requests_running") == 0


async def test_a_stream_that_waits_in_vllm_gets_its_head_at_once_and_its_first_token_late(served: Stand) -> None:
    busy = [asyncio.create_task(read(served.vllm.http, 1900)) for _ in range(SEATS)]
    await until_on_vllm(served, busy, SEATS)

    async with served.vllm.http.stream("POST", "/v1/completions", json=body(2, stream=True)) as answer:
        await eventually(lambda: has_waiting(served, 1), within_s=30)
        said = await anext(answer.aiter_raw())
    await asyncio.gather(*busy)

    assert (answer.status_code, said.startswith(b"data: ")) == (200, True)


async def test_what_does_not_fit_vllm_s_queue_is_an_error_inside_a_200(served: Stand) -> None:
    answer = await served.vllm.post("/v1/completions", body(16, prompt=["def"] * 25, stream=True))

    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert answer.status_code == 200
    assert [event["error"]["code"] for event in events if "error" in event] == [503]


async def test_later_urgent_requests_go_before_earlier_bulk_inside_vllm(served: Stand, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        policy = tmp_path / "policy.yaml"
        policy.write_text(POLICY)
        config = f"engines: [{{name: real, url: '{served.vllm.url}'}}]\npolicy_file: {policy}\n"
        gateway = await stack.enter_async_context(GatewayProcess(tmp_path / "gateway", config))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.public_url, timeout=120))
        alone = Stand(gateway, served.vllm, client)
        await eventually(lambda: alone.has_state("up"), within_s=60)
        # Seats that we do not know to be taken, so that ours wait inside vLLM; the first of them is free long before the others.
        foreign = [asyncio.create_task(read(served.vllm.http, tokens)) for tokens in (1000, 1900, 1900, 1900)]
        await until_on_vllm(served, foreign, SEATS)
        bulk = streams(alone, SEATS - 1, 200, **{"x-headrace-class": "bulk"})
        await eventually(lambda: has_waiting(served, SEATS - 1), within_s=60)
        (urgent,) = streams(alone, 1, 20, **{"x-headrace-class": "interactive"})

        _, urgent_end_s = await urgent
        bulk_ends_s = [end_s for _, end_s in await asyncio.gather(*bulk)]
        await asyncio.gather(*foreign)

    assert urgent_end_s < min(bulk_ends_s)


async def test_a_paused_vllm_gets_no_work_and_goes_on_where_it_was(served: Stand) -> None:
    held = streams(served, 8, 1200)
    await until_on_vllm(served, held)

    assert (await served.vllm.post("/pause?mode=keep")).status_code == 200
    paused_s = time.monotonic()
    health = (await served.vllm.http.get("/health")).status_code
    await eventually(lambda: served.has_state("down"), within_s=30)
    took_s = time.monotonic() - paused_s
    meanwhile = [said for said, _ in await asyncio.gather(*streams(served, 6, 4))]
    await served.vllm.post("/resume")
    await eventually(lambda: served.has_state("up"), within_s=60)
    ended = [said for said, _ in await asyncio.gather(*held)]

    assert health == 200
    assert took_s < 20
    assert all(DONE in said and b'"error"' not in said for said in meanwhile)
    assert all(DONE in said and b'"error"' not in said for said in ended)


async def test_a_frozen_engine_behind_a_living_web_server_leaves_in_seconds_and_returns(served: Stand) -> None:
    held = streams(served, 8, 1200)
    await until_on_vllm(served, held)

    served.vllm.freeze(signal.SIGSTOP)
    frozen_s = time.monotonic()
    try:
        await eventually(lambda: served.is_out("stalled"), within_s=30)
        took_s = time.monotonic() - frozen_s
        pages = [(await served.vllm.http.get(path)).status_code for path in ("/health", "/metrics", "/v1/models")]
        meanwhile = [said for said, _ in await asyncio.gather(*streams(served, 6, 4))]
    finally:
        served.vllm.freeze(signal.SIGCONT)
    await eventually(lambda: served.has_state("up"), within_s=60)
    ended = [said for said, _ in await asyncio.gather(*held)]

    assert pages == [200, 200, 200]
    assert took_s < 15
    assert all(DONE in said and b'"error"' not in said for said in meanwhile)
    assert all(DONE in said and b'"error"' not in said for said in ended)


async def test_told_to_stop_it_may_leave_its_streams_open_and_nobody_waits_for_them(served: Stand) -> None:
    held = streams(served, 8, 1500)
    await until_on_vllm(served, held)

    served.vllm.terminate()
    told_s = time.monotonic()
    ends = await asyncio.gather(*held)
    took_s = max(end for _, end in ends) - told_s
    await eventually(lambda: served.has_state("down"), within_s=30)
    later = [said for said, _ in await asyncio.gather(*streams(served, 6, 4))]

    whole = [said for said, _ in ends if DONE in said and b'"error"' not in said]
    assert all(b'"error"' in said for said, _ in ends if said not in whole)
    assert not any(b'"finish_reason":"abort"' in said for said, _ in ends)
    assert took_s < 45
    assert all(DONE in said and b'"error"' not in said for said in later)


async def test_preempted_streams_only_pause_and_a_draining_server_ends_what_runs(tmp_path: Path) -> None:
    memory = ("--max-model-len", "512", "--num-gpu-blocks-override", "24", "--block-size", "32")
    async with stand(tmp_path / "b", *memory, "--max-num-seqs", "8", "--shutdown-timeout", "60", alone=True) as one:
        preempted = [said for said, _ in await asyncio.gather(*streams(one, 6, 470))]
        preemptions = await one.vllm.metric("vllm:num_preemptions_total")
        state = await one.engine()

        running = streams(one, 2, 480)
        await until_on_vllm(one, running)
        one.vllm.terminate()
        refused = [said for said, _ in await asyncio.gather(*streams(one, 3, 4))]
        ended = [said for said, _ in await asyncio.gather(*running)]

    assert all(DONE in said and b'"error"' not in said for said in preempted)
    assert preemptions > 0
    assert (state["state"], state["out_of_rotation"]) == ("up", None)
    assert all(DONE in said and b'"error"' not in said for said in ended)
    assert all(b'"error"' in said for said in refused)


async def test_a_killed_server_breaks_its_streams_at_once_and_is_back_with_a_token(tmp_path: Path) -> None:
    async with stand(tmp_path / "c", "--max-model-len", "2048", "--max-num-seqs", str(SEATS)) as one:
        held = streams(one, 8, 1500)
        await until_on_vllm(one, held)

        assert one.vllm.process is not None
        one.vllm.process.kill()
        killed_s = time.monotonic()
        ends = await asyncio.gather(*held)
        later = [said for said, _ in await asyncio.gather(*streams(one, 6, 4))]
        await eventually(lambda: one.has_state("down"), within_s=30)
        orphans = one.vllm.pids("VLLM")
        await one.vllm.end()
        await one.vllm.start()
        await eventually(lambda: one.has_state("up"), within_s=60)

    broken = [end - killed_s for said, end in ends if b'"error"' in said]
    assert broken
    assert min(broken) < 5
    assert all(DONE in said and b'"error"' not in said for said in later)
    assert orphans
