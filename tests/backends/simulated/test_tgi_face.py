"""The HTTP face of TGI, by a real client over loopback."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from backends.simulated.config import Dialect, SimulatedConfig
from backends.simulated.profiles import EngineOptions
from backends.simulated.server import SimulatedServer

Json = dict[str, Any]


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[SimulatedServer, aiohttp.ClientSession]]:
    defaults: Json = {"model": "sim", "dialect": Dialect.TGI, "speed": 200.0}
    config = SimulatedConfig(**(defaults | settings))
    async with SimulatedServer(config) as server, aiohttp.ClientSession(server.url) as client:
        yield server, client


def ask(inputs: str = "tell me about water", **parameters: Any) -> Json:
    return {"inputs": inputs, "parameters": {"max_new_tokens": 12, "details": True} | parameters}


def events_of(raw: bytes) -> list[Json]:
    pieces = [piece for piece in raw.decode().split("\n\n") if piece and not piece.startswith(":")]
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces if piece != "data: [DONE]"]


async def test_generate_answers_with_text_details_and_timing_headers() -> None:
    async with serving() as (_, client), client.post("/generate", json=ask(do_sample=True)) as reply:
        body = await reply.json()

    assert reply.status == 200
    assert body["generated_text"]
    assert body["details"]["generated_tokens"] == len(body["details"]["tokens"]) <= 12
    assert int(reply.headers["x-generated-tokens"]) == body["details"]["generated_tokens"]
    assert {"x-queue-time", "x-inference-time", "x-time-per-token", "x-compute-type"} <= set(reply.headers)


async def test_generate_stream_gives_one_event_a_token_and_no_done() -> None:
    async with serving() as (_, client):
        async with client.post("/generate", json=ask()) as whole:
            text = (await whole.json())["generated_text"]
        async with client.post("/generate_stream", json=ask()) as reply:
            raw = await reply.read()

    events = events_of(raw)
    assert b"[DONE]" not in raw
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert "".join(event["token"]["text"] for event in events) == text == events[-1]["generated_text"]
    assert all(event["generated_text"] is None for event in events[:-1])
    assert events[-1]["details"]["input_length"] == 4
    assert reply.headers["X-Accel-Buffering"] == "no"


async def test_the_root_route_streams_or_answers_with_a_list() -> None:
    async with (
        serving() as (_, client),
        client.post("/", json=ask()) as whole,
        client.post("/", json=ask() | {"stream": True}) as streamed,
    ):
        answers = [await whole.json(), events_of(await streamed.read())]

    assert answers[0][0]["generated_text"] == answers[1][-1]["generated_text"]


@pytest.mark.parametrize(
    ("length", "parameters", "reason"),
    [(5, {}, "eos_token"), (None, {"max_new_tokens": 1}, "length")],
)
async def test_the_finish_reason_tells_why_it_ended(length: int | None, parameters: Json, reason: str) -> None:
    body = ask(**parameters) | ({"x_simulated_output_tokens": length} if length else {})
    async with serving() as (_, client), client.post("/generate", json=body) as reply:
        details = (await reply.json())["details"]

    assert details["finish_reason"] == reason


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (ask(max_new_tokens=500), "must be <= 300. Given: 4 `inputs` tokens and 500 `max_new_tokens`"),
        (ask(temperature=0), "`temperature` must be strictly positive"),
        (ask(inputs=""), "`inputs` cannot be empty"),
        (ask(max_new_tokens=0), "`max_new_tokens` must be strictly positive"),
    ],
)
async def test_a_bad_request_is_422_whole_and_an_event_in_a_200_stream(body: Json, message: str) -> None:
    async with (
        serving(options=EngineOptions(max_model_len=300)) as (_, client),
        client.post("/generate", json=body) as whole,
        client.post("/generate_stream", json=body) as streamed,
    ):
        answer, events = await whole.json(), events_of(await streamed.read())

    assert (whole.status, answer["error_type"]) == (422, "validation")
    assert message in answer["error"]
    assert (streamed.status, events) == (200, [answer])


async def test_beyond_its_permits_it_is_overloaded_in_three_shapes() -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": True}

    async with (
        serving(max_concurrent_requests=0) as (_, client),
        client.post("/generate", json=ask()) as whole,
        client.post("/generate_stream", json=ask()) as streamed,
        client.post("/v1/chat/completions", json=chat) as openai,
    ):
        answer, events, raw = await whole.json(), events_of(await streamed.read()), await openai.read()

    assert (whole.status, answer) == (429, {"error": "Model is overloaded", "error_type": "overloaded"})
    assert events == [answer]
    assert events_of(raw) == [{"error": {"message": "Model is overloaded", "http_status_code": 422}}]
    assert raw.endswith(b"data: [DONE]\n\n")


async def test_chat_streams_chunks_with_empty_ids_and_usage_when_asked_for() -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 20,
        "x_simulated_output_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with serving() as (_, client), client.post("/v1/chat/completions", json=body) as reply:
        raw = await reply.read()

    events = events_of(raw)
    assert raw.endswith(b"data: [DONE]\n\n")
    assert {event["id"] for event in events} == {""}
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == 9


async def test_completions_keep_tgis_own_finish_reason() -> None:
    body = {"model": "tgi", "prompt": "hello", "max_tokens": 20, "x_simulated_output_tokens": 3}
    async with serving() as (_, client):
        async with client.post("/v1/completions", json=body) as whole:
            answer = await whole.json()
        async with client.post("/v1/completions", json=body | {"stream": True}) as streamed:
            events = events_of(await streamed.read())

    assert answer["choices"][0]["finish_reason"] == "eos_token"
    assert [event["choices"][0]["finish_reason"] for event in events] == ["", "", "eos_token"]


async def test_more_prompts_than_a_client_batch_are_refused() -> None:
    body = {"prompt": ["a"] * 5, "max_tokens": 3}

    async with serving() as (_, client), client.post("/v1/completions", json=body) as reply:
        answer = await reply.json()

    assert (reply.status, answer["error_type"]) == (422, "validation")


async def test_info_and_metrics_tell_limits_and_use() -> None:
    options = EngineOptions(kv_tokens=5000, max_model_len=400)
    async with serving(options=options, speed=1.0) as (server, client):
        async with client.get("/metrics") as reply:
            idle = await reply.text()
        asking = asyncio.ensure_future(client.post("/generate_stream", json=ask(max_new_tokens=300, stop=[])))
        while not server.engine.totals.steps:
            await asyncio.sleep(0)
        async with client.get("/metrics") as reply:
            busy = await reply.text()
        async with client.get("/info") as reply:
            info = await reply.json()
        (await asking).close()

    assert info["max_total_tokens"] == 400
    assert "tgi_batch_current_max_tokens" not in idle
    assert re.search(r"^tgi_batch_max_total_tokens 5000\.0$", idle, re.MULTILINE)
    assert re.search(r"^tgi_batch_current_size 1\.0$", busy, re.MULTILINE)
