"""The HTTP face of vLLM, by a real client over loopback; the engine runs 200 times as fast as a real one."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from backends.simulated.config import SimulatedConfig
from backends.simulated.continuous import SchedulingPolicy
from backends.simulated.profiles import EngineOptions
from backends.simulated.server import SimulatedServer

FAST = 200.0
CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
Json = dict[str, Any]


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[SimulatedServer, aiohttp.ClientSession]]:
    defaults: Json = {"model": "sim", "speed": FAST}
    config = SimulatedConfig(**(defaults | settings))
    async with SimulatedServer(config) as server, aiohttp.ClientSession(server.url) as client:
        yield server, client


def chat(**fields: Any) -> Json:
    return {"model": "sim", "messages": [{"role": "user", "content": "tell me about water"}], "max_tokens": 8} | fields


def plain(**fields: Any) -> Json:
    return {"model": "sim", "prompt": "tell me about water", "max_tokens": 8, "ignore_eos": True} | fields


async def post(client: aiohttp.ClientSession, path: str, body: object, **more: Any) -> tuple[int, Json]:
    async with client.post(path, json=body, **more) as reply:
        return reply.status, await reply.json()


async def stream(client: aiohttp.ClientSession, path: str, body: Json) -> list[Json]:
    """The events of a stream, which has to be 200, an event stream, and end with [DONE]."""
    async with client.post(path, json=body | {"stream": True}) as reply:
        assert reply.status == 200
        assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        return events_of(await reply.read())


def events_of(raw: bytes) -> list[Json]:
    pieces = raw.decode().split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-2]]


async def metric(client: aiohttp.ClientSession, name: str) -> float:
    async with client.get("/metrics") as reply:
        text = await reply.text()
    match = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert match is not None, name
    return float(match[1])


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until a condition holds; the test's own time-out bounds it."""
    while not condition():
        await asyncio.sleep(0)


async def test_a_chat_answer_has_the_fields_of_vllms() -> None:
    async with serving() as (_, client):
        status, body = await post(client, CHAT, chat(ignore_eos=True))

    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"]
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 8


async def test_a_stream_says_the_same_as_the_whole_answer() -> None:
    async with serving() as (_, client):
        _, whole = await post(client, CHAT, chat(ignore_eos=True, max_tokens=80))
        events = await stream(client, CHAT, chat(ignore_eos=True, max_tokens=80))

    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text == whole["choices"][0]["message"]["content"]
    assert any(ord(character) > 0x7F for character in text)


async def test_the_role_event_comes_first_and_the_finish_reason_last() -> None:
    async with serving() as (_, client):
        events = await stream(client, CHAT, chat(ignore_eos=True))

    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert events[-1]["system_fingerprint"].startswith("vllm-0.32.0-")


async def test_usage_comes_in_an_event_of_its_own_only_when_asked_for() -> None:
    async with serving() as (_, client):
        without = await stream(client, PLAIN, plain())
        with_usage = await stream(client, PLAIN, plain(stream_options={"include_usage": True}))

    assert all("usage" not in event for event in without)
    assert with_usage[-1]["choices"] == []
    assert with_usage[-1]["usage"]["completion_tokens"] == 8


async def test_continuous_usage_grows_with_every_event() -> None:
    async with serving() as (_, client):
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await stream(client, CHAT, chat(ignore_eos=True, stream_options=options))

    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 8)


async def test_prompt_arrays_and_n_give_one_choice_each_and_usage_over_all() -> None:
    async with serving() as (_, client):
        _, body = await post(client, PLAIN, plain(prompt=["water", [5, 6, 7]], n=2, temperature=1))
        events = await stream(client, PLAIN, plain(prompt=["water", [5, 6, 7]], n=2, temperature=1))

    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in body["choices"]}) == 4
    assert body["usage"]["completion_tokens"] == 32
    assert body["usage"]["prompt_tokens"] == 4
    for index, choice in enumerate(body["choices"]):
        told = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(piece["text"] for piece in told) == choice["text"]


async def test_an_answer_cut_short_is_resumed_exactly_from_its_token_ids() -> None:
    async with serving() as (_, client):
        events = await stream(client, PLAIN, plain(max_tokens=60, return_token_ids=True))
        prompt_ids = events[0]["choices"][0]["prompt_token_ids"]
        ids = [token for event in events for token in event["choices"][0]["token_ids"]]
        resumed = await stream(client, PLAIN, plain(prompt=prompt_ids + ids[:25], max_tokens=35, return_token_ids=True))

    assert [token for event in resumed for token in event["choices"][0]["token_ids"]] == ids[25:]


async def test_a_stop_string_ends_the_answer_before_it() -> None:
    async with serving() as (_, client):
        _, whole = await post(client, PLAIN, plain(max_tokens=40))
        stop = whole["choices"][0]["text"].split()[7]
        _, body = await post(client, PLAIN, plain(max_tokens=40, stop=[stop]))
        events = await stream(client, PLAIN, plain(max_tokens=40, stop=stop))

    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == whole["choices"][0]["text"].split(stop)[0]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    assert events[-1]["choices"][0]["stop_reason"] == stop


async def test_the_true_length_can_be_fixed_by_field_or_header() -> None:
    async with serving() as (_, client):
        _, by_field = await post(client, CHAT, chat(max_tokens=50, x_simulated_output_tokens=7))
        _, by_header = await post(client, CHAT, chat(max_tokens=50), headers={"x-simulated-output-tokens": "9"})

    assert (by_field["usage"]["completion_tokens"], by_header["usage"]["completion_tokens"]) == (7, 9)
    assert by_field["choices"][0]["finish_reason"] == "stop"


async def test_a_required_tool_call_is_streamed_as_valid_json() -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    async with serving() as (_, client):
        events = await stream(
            client, CHAT, chat(tools=[tool], tool_choice="required", x_simulated_output_tokens=12, max_tokens=40)
        )

    calls = [event["choices"][0]["delta"]["tool_calls"][0] for event in events[1:]]
    assert calls[0]["function"]["name"] == "look_up"
    assert json.loads("".join(call["function"]["arguments"] for call in calls))["text"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_the_request_id_names_the_answer() -> None:
    async with serving() as (_, client):
        _, body = await post(client, CHAT, chat(), headers={"X-Request-Id": "mine"})

    assert body["id"] == "chatcmpl-mine"


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "message"),
    [
        (CHAT, chat(model="nope"), 404, "NotFoundError", "The model `nope` does not exist. Valid aliases: sim."),
        (CHAT, {"model": "sim"}, 400, "Bad Request", "'loc': 'body.messages', 'msg': 'Field required'"),
        (CHAT, chat(temperature=-3), 400, "BadRequestError", "temperature must be non-negative, got -3.0."),
        (CHAT, chat(max_tokens=0), 400, "BadRequestError", "max_tokens must be at least 1, got 0."),
        (CHAT, chat(max_tokens=9000), 400, "BadRequestError", "cannot be greater than max_model_len=512"),
        (CHAT, chat(max_tokens=510), 400, "BadRequestError", "maximum context length is 512 tokens"),
        (CHAT, chat(priority="high"), 400, "Bad Request", "body.priority"),
        (CHAT, chat(n=0), 400, "BadRequestError", "n must be at least 1, got 0."),
        (PLAIN, plain(n=0), 400, "BadRequestError", "n must be at least 1, got 0."),
        (
            CHAT,
            chat(n=10**9),
            400,
            "BadRequestError",
            "n must be at most 16384, got 1000000000. To increase this limit,",
        ),
        (PLAIN, plain(n="16385"), 400, "BadRequestError", "n must be at most 16384, got 16385."),
        (CHAT, chat(messages=[]), 400, "BadRequestError", "Cannot apply chat template to an empty conversation."),
        (CHAT, chat(n=2, temperature=0), 400, "BadRequestError", "n must be 1 when using greedy sampling, got 2."),
        (CHAT, chat(stream_options={"include_usage": True}), 400, "BadRequestError", "Stream options can only be"),
        (PLAIN, plain(prompt=""), 400, "BadRequestError", "Either prompt or prompt_embeds must be provided"),
        (PLAIN, plain(prompt=[]), 400, "BadRequestError", "You must pass at least one prompt"),
        (PLAIN, plain(prompt=[10**12]), 400, "BadRequestError", "Token id 1000000000000 is out of vocabulary"),
        (PLAIN, plain(prompt="word " * 600, stream=True), 400, "BadRequestError", "maximum context length is 512"),
    ],
)
async def test_a_bad_request_is_refused_in_vllms_words(
    path: str, body: Json, status: int, kind: str, message: str
) -> None:
    async with serving(options=EngineOptions(max_model_len=512)) as (_, client):
        got, answer = await post(client, path, body)

    assert (got, answer["error"]["type"], answer["error"]["code"]) == (status, kind, status)
    assert message in answer["error"]["message"]


@pytest.mark.parametrize("raw", [b'{"model": "sim", ', b"nonsense", b"[" * 100_000, b"\xff\xfe", b"[]"])
async def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    async with serving() as (_, client), client.post(CHAT, data=raw) as reply:
        answer = await reply.json()

    assert (reply.status, answer["error"]["type"]) == (400, "Bad Request")


async def test_unknown_routes_and_wrong_methods_have_the_other_error_shape() -> None:
    async with serving() as (_, client), client.get("/nope") as missing, client.get(CHAT) as wrong:
        answers = [(missing.status, await missing.json()), (wrong.status, await wrong.json())]

    assert answers == [(404, {"detail": "Not Found"}), (405, {"detail": "Method Not Allowed"})]


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Basic secret-1", "Bearer "])
async def test_with_a_key_v1_routes_need_it_and_the_others_do_not(given: str | None) -> None:
    headers = {"Authorization": given} if given else {}
    async with (
        serving(api_key="secret-1") as (_, client),
        client.get("/v1/models", headers=headers) as models,
        client.get("/metrics") as metrics,
    ):
        answer = await models.json()

    assert (models.status, answer, metrics.status) == (401, {"error": "Unauthorized"}, 200)


async def test_the_right_key_opens_v1() -> None:
    headers = {"Authorization": "Bearer secret-1"}

    async with serving(api_key="secret-1") as (_, client), client.get("/v1/models", headers=headers) as reply:
        card = (await reply.json())["data"][0]

    assert (card["id"], card["max_model_len"]) == ("sim", 131072)


async def test_a_queued_stream_is_answered_at_once_and_says_nothing() -> None:
    async with serving() as (server, client):
        server.freeze()
        async with client.post(CHAT, json=chat(stream=True)) as reply:
            assert reply.status == 200
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.005):
                    await reply.content.readany()
            server.thaw()
            raw = await reply.read()

    assert events_of(raw)[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_frees_the_engine(streamed: bool) -> None:
    async with serving(speed=1.0) as (server, client):
        async with aiohttp.ClientSession(server.url) as leaving:
            asking = asyncio.ensure_future(leaving.post(PLAIN, json=plain(max_tokens=5000, stream=streamed)))
            await until(lambda: server.engine.scheduler.running == 1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                (await asking).close()
        await until(lambda: server.engine.scheduler.running == 0)

        assert server.engine.totals.finished == 0
        assert await metric(client, "vllm:num_requests_running") == 0


async def test_priority_counts_only_under_the_priority_policy() -> None:
    async def order(policy: SchedulingPolicy) -> list[int]:
        ended: list[int] = []
        options = EngineOptions(max_num_seqs=1, scheduling_policy=policy)
        async with serving(options=options) as (server, client):
            server.freeze()

            async def ask(priority: int) -> None:
                await post(client, PLAIN, plain(priority=priority))
                ended.append(priority)

            async with asyncio.TaskGroup() as tasks:
                for number, priority in enumerate([10, 5, 0]):
                    tasks.create_task(ask(priority))
                    await until(lambda count=number + 1: server.driver.held == count)  # type: ignore[misc]
                server.thaw()
        return ended

    assert await order(SchedulingPolicy.PRIORITY) == [0, 5, 10]
    assert await order(SchedulingPolicy.FCFS) == [10, 5, 0]


async def test_beyond_its_queue_limit_the_engine_is_busy() -> None:
    options = EngineOptions(max_num_seqs=1)
    async with serving(options=options, max_num_queued_reqs=2, speed=0.001) as (server, client):
        asked = [asyncio.ensure_future(client.post(PLAIN, json=plain(stream=True))) for _ in range(3)]
        await asyncio.wait(asked)
        await until(lambda: server.engine.scheduler.waiting == 2)
        status, answer = await post(client, PLAIN, plain())
        rejected = await metric(client, "vllm:admission_rejections_total")
        for reply in asked:
            (await reply).close()

    assert (status, answer["error"]["type"]) == (503, "Service Unavailable")
    assert "currently busy" in answer["error"]["message"]
    assert rejected == 1


async def test_a_prompt_array_that_does_not_fit_is_an_error_event_when_streamed() -> None:
    async with serving(max_num_queued_reqs=20) as (_, client):
        status, answer = await post(client, PLAIN, plain(prompt=["a"] * 25))
        events = await stream(client, PLAIN, plain(prompt=["a"] * 25))

    assert (status, answer["error"]["code"]) == (503, 503)
    assert events == [{"error": answer["error"]}]


async def test_metrics_tell_what_the_engine_did() -> None:
    async with serving() as (_, client):
        await stream(client, CHAT, chat(ignore_eos=True, max_tokens=30))
        values = {
            name: await metric(client, f"vllm:{name}")
            for name in (
                "generation_tokens_total",
                "num_requests_running",
                "num_requests_waiting",
                "kv_cache_usage_perc",
                "time_to_first_token_seconds_count",
                "inter_token_latency_seconds_count",
                "e2e_request_latency_seconds_count",
            )
        }

    assert list(values.values()) == [30, 0, 0, 0, 1, 29, 1]


async def test_every_metric_family_has_help_type_and_the_labels_in_order() -> None:
    async with serving() as (_, client), client.get("/metrics") as reply:
        lines = (await reply.text()).splitlines()

    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="sim"} 0.0' in lines
    assert any(line.startswith('vllm:cache_config_info{block_size="16"') for line in lines)
    described = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    samples = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in samples if name not in described} <= described


async def test_text_and_token_ids_turn_into_each_other() -> None:
    async with serving() as (_, client):
        _, tokens = await post(client, "/tokenize", {"model": "sim", "prompt": "the Zürich water"})
        _, text = await post(client, "/detokenize", {"model": "sim", "tokens": tokens["tokens"]})

    assert tokens["count"] == len(tokens["tokens"])
    assert text == {"prompt": "the Zürich water"}


async def test_embeddings_are_the_same_for_the_same_text_in_both_encodings() -> None:
    async with serving() as (_, client):
        _, floats = await post(client, "/v1/embeddings", {"model": "sim", "input": ["water", "fire"]})
        _, packed = await post(
            client, "/v1/embeddings", {"model": "sim", "input": "water", "encoding_format": "base64"}
        )

    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(floats["data"][0]["embedding"])
    assert floats["data"][0]["embedding"] != floats["data"][1]["embedding"]


async def test_draining_lets_running_answers_finish_and_refuses_new_ones() -> None:
    async with serving(shutdown_timeout_s=30.0) as (server, client):
        server.freeze()
        asking = asyncio.ensure_future(client.post(PLAIN, json=plain(stream=True)))
        await until(lambda: server.driver.held == 1)
        draining = asyncio.ensure_future(server.drain())
        await asyncio.sleep(0)
        status, answer = await post(client, PLAIN, plain())
        async with client.get("/health") as health:
            healthy = health.status
        server.thaw()
        raw = await (await asking).read()
        await draining

    assert (status, answer["error"]["message"]) == (500, "cannot schedule new futures after shutdown")
    assert healthy == 200
    assert events_of(raw)[-1]["choices"][0]["finish_reason"] == "length"


async def test_stopping_without_a_timeout_ends_streams_with_abort() -> None:
    async with serving(speed=1.0) as (server, client):
        asking = asyncio.ensure_future(client.post(PLAIN, json=plain(max_tokens=5000, stream=True)))
        await until(lambda: server.engine.totals.generation_tokens > 3)
        await server.drain()
        raw = await (await asking).read()

    events = events_of(raw)
    assert events[-1]["choices"][0]["finish_reason"] == "abort"
    assert len(events) < 5000


async def test_closing_cuts_streams_without_an_end_and_does_not_wait_for_them() -> None:
    async with serving(speed=1.0) as (server, client):
        async with client.post(PLAIN, json=plain(max_tokens=5000, stream=True)) as reply:
            await until(lambda: server.engine.totals.generation_tokens > 3)

            async with asyncio.timeout(5):
                await server.close()

            with pytest.raises(aiohttp.ClientError):
                await reply.read()
        assert server.in_flight == 0


@pytest.mark.slow
async def test_a_slow_reader_gets_several_tokens_in_one_event_and_loses_none() -> None:
    async with serving() as (server, _):
        body = json.dumps(plain(max_tokens=20_000, stream=True, return_token_ids=True)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), limit=1024)
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: server.engine.totals.finished == 1)
        raw = await reader.read()
        while more := await reader.read(1 << 20):
            raw += more
        writer.close()

    events = events_of(raw.split(b"\r\n\r\n", 1)[1])
    ids = [event["choices"][0]["token_ids"] for event in events]
    assert sum(map(len, ids)) == 20_000
    assert max(map(len, ids)) > 1
