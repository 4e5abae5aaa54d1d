"""The official OpenAI client, sync and async, against the whole process: what it sends, reads, raises and retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, AsyncStream, OpenAI
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.responses import ResponseStreamEvent

from gateway.ingress.auth import digest
from tests.end_to_end.conftest import SHORT_TIMEOUTS, StartGateway, engines_yaml
from tests.end_to_end.engine_process import EngineProcess, eventually, simulated
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

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

SIM = "sim-8b"
CONTEXT_TOKENS = 2048
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say something about water."}]
LENGTH = {"x_simulated_output_tokens": 7}
ENDLESS = {"ignore_eos": True}
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}


T = TypeVar("T")


async def collect(asked: Awaitable[AsyncStream[T]], into: list[T]) -> None:
    """Read a stream to its end; what had come stays in `into` when it breaks."""
    async for one in await asked:
        into.append(one)  # noqa: PERF401 - a comprehension would lose what had come


@dataclass
class Served:
    """A gateway before a simulated vLLM (model SIM) and a scripted engine (model MODEL)."""

    gateway: GatewayProcess
    simulated: EngineProcess
    scripted: ScriptedEngine
    client: AsyncOpenAI

    def sync_client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.gateway.public_url}/v1", api_key="none", max_retries=0)

    async def gauge(self, name: str) -> float:
        return await total(self.gateway, name)

    async def counted(self, model: str) -> tuple[float, float]:
        """Prompt and output tokens that the gateway has counted of a model."""
        names = ("headrace_prompt_tokens_total", "headrace_output_tokens_total")
        prompt, output = [await total(self.gateway, name, f'model="{model}"') for name in names]
        return prompt, output


async def streamed_chat(served: Served, **more: object) -> list[ChatCompletionChunk]:
    """The chunks of one streamed answer of LENGTH tokens."""
    chunks: list[ChatCompletionChunk] = []
    asked = served.client.chat.completions.create(model=SIM, messages=HELLO, extra_body={**LENGTH, **more}, stream=True)
    await collect(asked, chunks)
    return chunks


async def total(gateway: GatewayProcess, name: str, label: str = "") -> float:
    """A metric of the gateway over all its series that carry a label."""
    page = await gateway.metrics()
    return sum(value for series, value in page.items() if series.partition("{")[0] == name and label in series)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("openai")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(simulated(folder, "--max-model-len", str(CONTEXT_TOKENS)))
        scripted = await stack.enter_async_context(ScriptedEngine())
        config = f"{engines_yaml(scripted)}  - name: sim\n    url: {engine.url}\n{SHORT_TIMEOUTS}"
        gateway = await stack.enter_async_context(GatewayProcess(folder / "gateway", config))
        client = AsyncOpenAI(base_url=f"{gateway.public_url}/v1", api_key="none", max_retries=0)
        await stack.enter_async_context(client)
        yield Served(gateway, engine, scripted, client)


@pytest_asyncio.fixture(loop_scope="module")
async def served(shared: Served) -> Served:
    shared.scripted.play = hello
    shared.scripted.requests.clear()
    shared.scripted.aborted = 0
    return shared


# -- answers -----------------------------------------------------------------------------------------------------------


async def test_a_whole_chat_answer_has_its_text_and_its_usage(served: Served) -> None:
    said = await served.client.chat.completions.create(model=SIM, messages=HELLO, extra_body=LENGTH)

    assert said.choices[0].finish_reason == "stop"
    assert said.choices[0].message.content
    assert said.usage is not None
    assert said.usage.completion_tokens == 7


async def test_a_streamed_chat_answer_is_the_whole_one_in_pieces(served: Served) -> None:
    whole = await served.client.chat.completions.create(model=SIM, messages=HELLO, extra_body=LENGTH)

    chunks = await streamed_chat(served)

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_the_sync_client_gets_whole_and_streamed_answers(served: Served) -> None:
    def talk() -> tuple[str | None, str]:
        with served.sync_client() as client:
            whole = client.chat.completions.create(model=SIM, messages=HELLO, extra_body=LENGTH)
            streamed = client.chat.completions.create(model=SIM, messages=HELLO, extra_body=LENGTH, stream=True)
            return whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in streamed)

    whole, streamed = await asyncio.to_thread(talk)

    assert whole == streamed != ""


async def test_who_did_not_ask_for_usage_sees_none_and_it_is_counted_exactly(served: Served) -> None:
    whole = await served.client.chat.completions.create(model=SIM, messages=HELLO, extra_body=LENGTH)
    assert whole.usage is not None
    before = await served.counted(SIM)

    chunks = await streamed_chat(served)

    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    after = await served.counted(SIM)
    assert (after[0] - before[0], after[1] - before[1]) == (whole.usage.prompt_tokens, 7)


async def test_who_asked_for_usage_gets_it_once_at_the_end(served: Served) -> None:
    before = await served.counted(SIM)

    chunks = await streamed_chat(served, stream_options={"include_usage": True})

    *rest, last = chunks
    assert [chunk.usage for chunk in rest] == [None] * len(rest)
    assert last.choices == []
    assert last.usage is not None
    after = await served.counted(SIM)
    assert (after[0] - before[0], after[1] - before[1]) == (last.usage.prompt_tokens, last.usage.completion_tokens)


async def test_usage_in_every_chunk_stays_when_it_was_asked_for(served: Served) -> None:
    chunks = await streamed_chat(served, stream_options={"include_usage": True, "continuous_usage_stats": True})

    assert all(chunk.usage is not None for chunk in chunks)


@pytest.mark.parametrize("streamed", [False, True])
async def test_completions_take_lists_of_prompts_and_keep_their_places(served: Served, streamed: bool) -> None:
    prompts = ["one stone", "two stones", "three stones"]
    texts = ["", "", ""]

    if streamed:
        async for chunk in await served.client.completions.create(
            model=SIM, prompt=prompts, max_tokens=5, extra_body=ENDLESS, stream=True
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        said = await served.client.completions.create(model=SIM, prompt=prompts, max_tokens=5, extra_body=ENDLESS)
        for choice in said.choices:
            texts[choice.index] = choice.text

    alone = await served.client.completions.create(model=SIM, prompt=prompts[1], max_tokens=5, extra_body=ENDLESS)
    assert all(texts)
    assert texts[1] == alone.choices[0].text


async def test_completions_take_lists_of_token_ids(served: Served) -> None:
    said = await served.client.completions.create(model=SIM, prompt=[[1, 2, 3], [4, 5]], max_tokens=3)

    assert [choice.index for choice in said.choices] == [0, 1]
    assert said.usage is not None
    assert said.usage.prompt_tokens == 5


async def test_embeddings_come_in_the_clients_own_coding(served: Served) -> None:
    coded = await served.client.embeddings.create(model=SIM, input=["water", "stone"])
    plain = await served.client.embeddings.create(model=SIM, input=["water", "stone"], encoding_format="float")

    assert len(coded.data) == 2
    assert len(coded.data[0].embedding) == len(plain.data[0].embedding) == 64
    assert coded.data[1].embedding == pytest.approx(plain.data[1].embedding, abs=1e-6)


async def test_models_are_listed_and_retrieved(served: Served) -> None:
    listed = await served.client.models.list()
    one = await served.client.models.retrieve(SIM)

    assert {model.id for model in listed.data} == {SIM, MODEL}
    assert (one.id, one.owned_by) == (SIM, "vllm")
    assert one.model_dump()["max_model_len"] == CONTEXT_TOKENS


async def test_answers_carry_the_request_id_and_the_class(served: Served) -> None:
    raw = await served.client.chat.completions.with_raw_response.create(
        model=SIM,
        messages=HELLO,
        extra_body=LENGTH,
        extra_headers={"x-request-id": "mine-1", "x-headrace-class": "bulk"},
    )

    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-headrace-class"] == "bulk"
    assert raw.headers["x-headrace-engine"] == "sim"
    assert raw.parse().choices[0].message.content
    assert raw.parse()._request_id == "mine-1"


async def test_a_service_tier_makes_a_request_bulk(served: Served) -> None:
    raw = await served.client.chat.completions.with_raw_response.create(
        model=SIM, messages=HELLO, service_tier="flex", extra_body=LENGTH
    )

    assert raw.headers["x-headrace-class"] == "bulk"


# -- tools -------------------------------------------------------------------------------------------------------------


async def test_a_tool_call_is_streamed_by_a_simulated_engine_for_every_choice(served: Served) -> None:
    arguments = ["", ""]
    async for chunk in await served.client.chat.completions.create(
        model=SIM, messages=HELLO, tools=[WEATHER], tool_choice="required", n=2, extra_body=LENGTH, stream=True
    ):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                arguments[choice.index] += call.function.arguments or ""

    assert all(text.startswith('{"text":"') and text.endswith('"}') for text in arguments)


async def test_parallel_tool_calls_are_put_together_by_the_clients_own_helper(served: Served) -> None:
    def calls(*deltas: dict[str, object]) -> bytes:
        chunk = delta()
        chunk["choices"] = [{"index": 0, "delta": {"tool_calls": list(deltas)}, "finish_reason": None}]
        return event(chunk)

    def opened(index: int) -> dict[str, object]:
        function = {"name": f"tool_{index}", "arguments": ""}
        return {"index": index, "id": f"call_{index}", "type": "function", "function": function}

    def more(index: int, text: str) -> dict[str, object]:
        return {"index": index, "function": {"arguments": text}}

    served.scripted.play = stream(
        calls(opened(0)),
        calls(opened(1)),
        calls(more(1, '{"b":')),
        calls(more(0, '{"a":'), more(1, "2}")),
        calls(more(0, "1}")),
        event(delta(finish="tool_calls")),
        DONE,
    )

    async with served.client.chat.completions.stream(model=MODEL, messages=HELLO) as streamed:
        said = await streamed.get_final_completion()

    found = [call.function for call in said.choices[0].message.tool_calls or ()]
    assert [(function.name, function.arguments) for function in found] == [("tool_0", '{"a":1}'), ("tool_1", '{"b":2}')]


# -- cancellation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_closing_a_stream_ends_it_at_the_engine(served: Served, route: str) -> None:
    if route == "chat":
        chat = await served.client.chat.completions.create(model=SIM, messages=HELLO, extra_body=ENDLESS, stream=True)
        await anext(aiter(chat))
        close = chat.close
    else:
        text = await served.client.completions.create(
            model=SIM, prompt="water", max_tokens=1500, extra_body=ENDLESS, stream=True
        )
        await anext(aiter(text))
        close = text.close
    assert await served.gauge("headrace_in_flight") == 1

    await close()

    await eventually(lambda: _idle(served), within_s=2.0)


async def test_cancelling_a_whole_request_ends_it_at_the_engine(served: Served) -> None:
    asking = asyncio.ensure_future(served.client.chat.completions.create(model=SIM, messages=HELLO, extra_body=ENDLESS))
    await eventually(lambda: _running(served))

    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    await eventually(lambda: _idle(served), within_s=2.0)


async def test_a_client_that_gives_up_is_counted_as_cancelled(served: Served) -> None:
    before = await total(served.gateway, "headrace_requests_total", 'result="cancelled"')

    with pytest.raises(openai.APITimeoutError):
        await served.client.chat.completions.create(model=SIM, messages=HELLO, extra_body=ENDLESS, timeout=0.4)

    await eventually(lambda: _idle(served), within_s=2.0)
    assert await total(served.gateway, "headrace_requests_total", 'result="cancelled"') - before == 1


async def _running(served: Served) -> bool:
    return await served.simulated.metric("vllm:num_requests_running") == 1


async def _idle(served: Served) -> bool:
    running = await served.simulated.metric("vllm:num_requests_running")
    return running == 0 and await served.gauge("headrace_in_flight") == 0


# -- errors ------------------------------------------------------------------------------------------------------------


async def test_an_unknown_model_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await served.client.chat.completions.create(model="gpt-99", messages=HELLO)

    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await served.client.models.retrieve("gpt-99")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prompt_longer_than_the_context_is_refused_in_the_engines_words(served: Served, streamed: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.completions.create(model=SIM, prompt="water " * 3000, stream=streamed)

    assert "maximum context length is 2048 tokens" in caught.value.message
    assert caught.value.request_id


async def test_an_error_in_the_middle_of_a_stream_is_raised(served: Served) -> None:
    error = {"error": {"message": "CUDA error", "type": "InternalServerError", "code": 500}}
    served.scripted.play = stream(event(delta("Hel")), event(error), DONE)
    chunks: list[ChatCompletionChunk] = []

    with pytest.raises(openai.APIError, match="CUDA error"):
        await collect(served.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True), chunks)

    assert [chunk.choices[0].delta.content for chunk in chunks] == ["Hel"]


@pytest.mark.parametrize("end", ["fin", "rst"])
async def test_a_stream_that_breaks_off_is_raised(served: Served, end: str) -> None:
    served.scripted.play = stream(event(delta("Hel")), end=end)

    with pytest.raises(openai.APIError, match=r"broke off|reset"):
        await collect(served.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True), [])


async def test_a_missing_or_wrong_key_is_an_authentication_error(
    served: Served, start_gateway: StartGateway, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{tenant: team, sha256: {digest('the-right-key')}}}\n")
    async with start_gateway(f"{engines_yaml(served.scripted)}keys_file: {keys}\n") as gateway:
        base_url = f"{gateway.public_url}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError) as caught:
                await stranger.chat.completions.create(model=MODEL, messages=HELLO)
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        async with AsyncOpenAI(base_url=base_url, api_key="the-right-key", max_retries=0) as friend:
            said = await friend.chat.completions.create(model=MODEL, messages=HELLO)

        log = gateway.log
    assert caught.value.type == "authentication_error"
    assert said.choices[0].message.content == "Hello"
    assert "the-right-key" not in log
    assert served.scripted.requests[-1].one("authorization") == "Bearer engine-key-0"


FULL_AT_ONE = """\
version: 1
classes:
  interactive: {ttft_sla_s: 0.5, max_queue: 1, max_wait_s: 30}
  bulk: {max_queue: 1, max_wait_s: 30}
sizing:
  policy: fixed
  fixed: {total: 1, windows: {interactive: 1, bulk: 1}}
"""


async def test_a_full_queue_is_a_rate_limit_and_the_client_returns_when_told(
    served: Served, start_gateway: StartGateway, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(FULL_AT_ONE)
    go_on = asyncio.Event()

    async def held(asked: Asked, wire: Wire) -> None:
        await go_on.wait()
        await hello(asked, wire)

    served.scripted.play = held
    async with start_gateway(f"{engines_yaml(served.scripted)}policy_file: {policy}\n") as gateway:
        async with AsyncOpenAI(base_url=f"{gateway.public_url}/v1", api_key="none", max_retries=0) as client:
            go_on.set()
            started_s = time.monotonic()
            while time.monotonic() - started_s < 1.2:  # until the gateway knows how fast works are served
                await client.chat.completions.create(model=MODEL, messages=HELLO)
            go_on.clear()
            runs = asyncio.ensure_future(client.chat.completions.create(model=MODEL, messages=HELLO))
            await eventually(lambda: served.scripted.active == 1)
            waits = asyncio.ensure_future(client.chat.completions.create(model=MODEL, messages=HELLO))
            await eventually(lambda: _queued(gateway))

            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            patient = client.with_options(max_retries=1)
            started_s = time.monotonic()
            returns = asyncio.ensure_future(patient.chat.completions.create(model=MODEL, messages=HELLO))
            await eventually(lambda: _shed(gateway, 2))
            go_on.set()
            await asyncio.gather(runs, waits)
            said = await returns

    assert caught.value.type == "rate_limit_error"
    told_s = int(caught.value.response.headers["retry-after"])
    assert 1 <= told_s <= 5
    assert said.choices[0].message.content == "Hello"
    assert time.monotonic() - started_s >= 1.0


async def _queued(gateway: GatewayProcess) -> bool:
    return await total(gateway, "headrace_queued") == 1


async def _shed(gateway: GatewayProcess, times: int) -> bool:
    return await total(gateway, "headrace_sheds_total") == times


async def test_without_an_engine_the_client_is_told_to_return(start_gateway: StartGateway) -> None:
    config = f"engines: [{{name: away, url: 'http://127.0.0.1:9'}}]\n{SHORT_TIMEOUTS}"
    async with start_gateway(config) as gateway:
        async with AsyncOpenAI(base_url=f"{gateway.public_url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model=MODEL, messages=HELLO)
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)

    assert caught.value.status_code == 503
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60


# -- responses ---------------------------------------------------------------------------------------------------------

RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": MODEL,
    "status": "completed",
    "output": [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {
        "input_tokens": 3,
        "output_tokens": 2,
        "total_tokens": 5,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    },
}


def typed(kind: str, number: int, **more: object) -> bytes:
    return f"event: {kind}\n".encode() + event({"type": kind, "sequence_number": number, **more})


def created() -> bytes:
    return typed("response.created", 0, response={**RESPONSE, "status": "in_progress", "output": []})


def text_delta(number: int, text: str) -> bytes:
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
    return typed("response.output_text.delta", number, delta=text, **place)


async def test_a_response_is_made_continued_and_fetched_where_it_is_kept(served: Served) -> None:
    served.scripted.play = answer(200, RESPONSE)
    before = await served.counted(MODEL)

    made = await served.client.responses.create(model=MODEL, input="hi")
    await served.client.responses.create(model=MODEL, input="and?", previous_response_id=made.id)
    fetched = await served.client.responses.retrieve(made.id)

    assert made.output_text == fetched.output_text == "Hello"
    after = await served.counted(MODEL)
    assert (after[0] - before[0], after[1] - before[1]) == (6, 4)
    assert [asked.method for asked in served.scripted.requests] == ["POST", "POST", "GET"]
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.retrieve("resp_of_nobody")


async def test_a_response_is_streamed_by_events_and_ends_without_done(served: Served) -> None:
    served.scripted.play = stream(
        created(), text_delta(1, "Hel"), text_delta(2, "lo"), typed("response.completed", 3, response=RESPONSE)
    )

    events = [one async for one in await served.client.responses.create(model=MODEL, input="hi", stream=True)]

    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == "Hello"
    assert events[-1].type == "response.completed"


async def test_a_response_that_breaks_off_ends_with_an_error_event(served: Served) -> None:
    served.scripted.play = stream(created(), text_delta(1, "Hel"), end="rst")
    events: list[ResponseStreamEvent] = []

    with pytest.raises(openai.APIError):
        await collect(served.client.responses.create(model=MODEL, input="hi", stream=True), events)

    assert [one.type for one in events[:2]] == ["response.created", "response.output_text.delta"]


async def test_many_clients_at_once_are_all_answered(served: Served) -> None:
    async def one(number: int) -> str:
        raw = await served.client.chat.completions.with_raw_response.create(
            model=SIM, messages=HELLO, extra_body=LENGTH, extra_headers={"x-request-id": f"many-{number}"}
        )
        return raw.headers["x-request-id"]

    answered = await asyncio.gather(*(one(number) for number in range(60)))

    assert answered == [f"many-{number}" for number in range(60)]
    assert await served.gauge("headrace_in_flight") == 0
