"""What nothing says to be interactive or bulk: a program that keeps requests in flight shows itself, and it is told why."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.end_to_end.conftest import SHORT_TIMEOUTS, StartGateway, engines_yaml
from tests.end_to_end.scripted_engine import MODEL, Asked, ScriptedEngine, Wire, hello

pytestmark = pytest.mark.slow

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
IN_FLIGHT = 6
TOLD = 50
MOST = 1500
"""Requests that it may take on a machine whose load hides the pattern for a while."""


async def soon(asked: Asked, wire: Wire) -> None:
    await asyncio.sleep(0.08)
    await hello(asked, wire)


async def test_a_program_becomes_bulk_and_its_streams_and_its_word_do_not(start_gateway: StartGateway) -> None:
    async with ScriptedEngine(play=soon) as engine, start_gateway(f"{engines_yaml(engine)}{SHORT_TIMEOUTS}") as gateway:
        async with httpx.AsyncClient(trust_env=False, base_url=gateway.public_url, timeout=30) as http:
            got: list[httpx.Response] = []

            async def loop() -> None:
                while len(got) < MOST and sum(one.headers["x-headrace-class"] == "bulk" for one in got) < TOLD:
                    got.append(await http.post("/v1/chat/completions", json=CHAT))

            async with asyncio.TaskGroup() as group:
                for _ in range(IN_FLIGHT):
                    group.create_task(loop())
            named = await http.post("/v1/chat/completions", json=CHAT, headers={"X-Headrace-Class": "interactive"})
            streamed = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        metrics = await gateway.metrics()
        decisions = (await gateway.status())["decisions"]

    classes = [one.headers["x-headrace-class"] for one in got]
    assert classes[:64] == ["interactive"] * 64
    assert classes.count("bulk") >= TOLD
    assert got[0].headers["x-headrace-class-reason"] == "shape: small"
    assert (
        next(one for one in got if one.headers["x-headrace-class"] == "bulk")
        .headers["x-headrace-class-reason"]
        .startswith("learned: a program")
    )
    assert (named.headers["x-headrace-class"], streamed.headers["x-headrace-class"]) == ("interactive", "interactive")
    counted = 'headrace_classified_total{class="bulk",reason="learned_loop"}'
    assert metrics[counted] == classes.count("bulk")
    assert any(one["action"] == "classify" and one["class_name"] == "bulk" for one in decisions)
