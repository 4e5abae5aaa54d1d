"""Hugging Face's InferenceClient against the whole process, with a simulated TGI (and a vLLM beside it) behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
import orjson
import pytest
import pytest_asyncio
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import GenerationError, OverloadedError, ValidationError

from tests.end_to_end.conftest import SHORT_TIMEOUTS, engines_yaml
from tests.end_to_end.engine_process import EngineProcess, eventually, simulated
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import ScriptedEngine, answer, event, stream

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

MODEL = "tgi-model"
CONTEXT_TOKENS = 1024
PROMPT = "The mill stands by the river"


@dataclass
class Served:
    """A gateway before a simulated TGI (MODEL, the default) and a simulated vLLM, and one before a TGI that tests script.

    Two gateways, since the client names no model on TGI's own routes.
    """

    gateway: GatewayProcess
    tgi: EngineProcess
    before_scripted: GatewayProcess
    scripted: ScriptedEngine

    @property
    def url(self) -> str:
        return self.gateway.public_url

    def client(self, gateway: GatewayProcess | None = None) -> AsyncInferenceClient:
        base_url = (gateway or self.gateway).public_url
        return AsyncInferenceClient(base_url=base_url, api_key="none", timeout=10)

    async def post(self, path: str, body: object) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False) as client:
            return await client.post(f"{self.url}{path}", json=body)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("huggingface")
    options = ("--dialect", "tgi", "--max-model-len", str(CONTEXT_TOKENS), "--max-concurrent-requests", "64")
    async with AsyncExitStack() as stack:
        tgi = await stack.enter_async_context(simulated(folder, *options, model=MODEL))
        vllm = await stack.enter_async_context(simulated(folder, model="sim-8b"))
        scripted = await stack.enter_async_context(ScriptedEngine(models=["scripted"], metrics="tgi_queue_size 0\n"))
        config = (
            f"engines: [{{name: tgi, url: '{tgi.url}'}}, {{name: vllm, url: '{vllm.url}'}}]\n"
            f"tgi_default_model: {MODEL}\naliases: {{dummy: {MODEL}}}\n{SHORT_TIMEOUTS}"
        )
        gateway = await stack.enter_async_context(GatewayProcess(folder / "gateway", config))
        before_scripted = await stack.enter_async_context(
            GatewayProcess(folder / "before", engines_yaml(scripted) + SHORT_TIMEOUTS)
        )
        yield Served(gateway, tgi, before_scripted, scripted)


async def test_text_generation_answers_with_text(served: Served) -> None:
    async with served.client() as client:
        text = await client.text_generation(PROMPT, max_new_tokens=8)

    assert isinstance(text, str)
    assert text


async def test_the_sync_client_is_answered_alike(served: Served) -> None:
    def ask() -> tuple[str, str]:
        with InferenceClient(base_url=served.url, api_key="none", timeout=10) as client:
            whole = client.text_generation(PROMPT, max_new_tokens=8)
            return whole, "".join(client.text_generation(PROMPT, max_new_tokens=8, stream=True))

    whole, streamed = await asyncio.to_thread(ask)

    assert whole == streamed != ""


async def test_details_say_how_many_tokens_were_made_and_why_they_ended(served: Served) -> None:
    async with served.client() as client:
        told = await client.text_generation(PROMPT, max_new_tokens=8, details=True)

    assert told.details is not None
    assert told.details.finish_reason in {"length", "eos_token"}
    assert told.details.generated_tokens == len(told.details.tokens) <= 8


async def test_a_stream_with_details_ends_with_them_and_the_whole_text(served: Served) -> None:
    async with served.client() as client:
        parts = [
            part async for part in await client.text_generation(PROMPT, max_new_tokens=8, details=True, stream=True)
        ]

    last = parts[-1]
    assert last.details is not None
    assert last.details.generated_tokens == len(parts)
    assert last.generated_text == "".join(part.token.text for part in parts)


@pytest.mark.parametrize("path", ["/", "/generate"])
async def test_whole_answers_come_in_the_form_of_their_route(served: Served, path: str) -> None:
    answered = await served.post(path, {"inputs": PROMPT, "parameters": {"max_new_tokens": 5}})

    body = answered.json()
    said = body[0] if path == "/" else body
    assert isinstance(body, list) == (path == "/")
    assert said["generated_text"]
    assert answered.headers["x-headrace-engine"] == "tgi"
    assert int(answered.headers["x-prompt-tokens"]) > 0


@pytest.mark.parametrize("path", ["/", "/generate_stream"])
async def test_streams_end_without_done_on_tgis_own_routes(served: Served, path: str) -> None:
    answered = await served.post(path, {"inputs": PROMPT, "stream": True, "parameters": {"max_new_tokens": 5}})

    events = [line for line in answered.text.split("\n") if line.startswith("data:")]
    assert answered.headers["content-type"].startswith("text/event-stream")
    assert "[DONE]" not in answered.text
    assert orjson.loads(events[-1].removeprefix("data:"))["generated_text"]


async def test_info_and_health_answer_the_client(served: Served) -> None:
    def ask() -> tuple[dict[str, object], bool]:
        with InferenceClient(served.url, provider="hf-inference", timeout=10) as client:
            return client.get_endpoint_info(), client.health_check()

    info, healthy = await asyncio.to_thread(ask)

    assert (info["model_id"], info["max_total_tokens"]) == (MODEL, CONTEXT_TOKENS)
    assert healthy


async def test_chat_is_answered_and_streamed_with_the_name_that_the_client_makes_up(served: Served) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    async with served.client() as client:
        whole = await client.chat_completion(messages, max_tokens=6)
        chunks = [chunk async for chunk in await client.chat_completion(messages, max_tokens=6, stream=True)]

    assert whole.usage.completion_tokens <= 6
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content != ""


async def test_chat_finds_another_engines_model_by_name(served: Served) -> None:
    async with served.client() as client:
        said = await client.chat_completion([{"role": "user", "content": PROMPT}], model="sim-8b", max_tokens=6)

    assert said.model == "sim-8b"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_refused_request_raises_the_clients_own_error(served: Served, streamed: bool) -> None:
    async with served.client() as client:
        with pytest.raises(ValidationError, match="max_new_tokens"):
            await read(await client.text_generation(PROMPT, max_new_tokens=5000, stream=streamed), [])


async def test_an_error_in_the_middle_of_a_stream_raises_the_clients_own_error(served: Served) -> None:
    token = {"index": 1, "token": {"id": 1, "text": "Hel", "logprob": -1.0, "special": False}}
    error = {"error": "CUDA error", "error_type": "generation"}
    served.scripted.play = stream(event(token), event(error))
    came: list[str] = []

    async with served.client(served.before_scripted) as client:
        with pytest.raises(GenerationError, match="CUDA error"):
            await read(await client.text_generation(PROMPT, stream=True), came)

    assert came == ["Hel"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_overloaded_engine_raises_the_clients_own_error(served: Served, streamed: bool) -> None:
    served.scripted.play = answer(429, {"error": "Model is overloaded", "error_type": "overloaded"})

    async with served.client(served.before_scripted) as client:
        with pytest.raises(OverloadedError):
            await read(await client.text_generation(PROMPT, stream=streamed), [])


async def read(answered: str | AsyncIterable[str], into: list[str]) -> None:
    """All of an answer; what had come stays in `into` when it breaks."""
    if isinstance(answered, str):
        into.append(answered)
        return
    async for one in answered:
        into.append(one)  # noqa: PERF401 - a comprehension would lose what had come


async def test_leaving_a_stream_ends_it_at_the_engine(served: Served) -> None:
    async with served.client() as client:
        parts = await client.text_generation(PROMPT, max_new_tokens=900, stream=True)
        await anext(aiter(parts))
        assert await served.tgi.metric("tgi_batch_current_size") == 1

    await eventually(lambda: _idle(served), within_s=2.0)


async def _idle(served: Served) -> bool:
    status = await served.gateway.status()
    return not any(count for engine in status["engines"] for count in engine["in_flight"].values())


async def test_tokenize_goes_to_the_default_model(served: Served) -> None:
    answered = await served.post("/tokenize", {"inputs": "two stones"})

    assert answered.status_code == 200
    assert "".join(token["text"] for token in answered.json()) == "two stones"
