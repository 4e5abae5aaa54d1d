"""A request with more prompts, texts or documents than one work may carry is split, and its answer is one again.

What the engine would have answered to the whole request is asked of the engine itself and compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio
from openai import APIStatusError, AsyncOpenAI

from tests.end_to_end.conftest import SHORT_TIMEOUTS, engines_yaml
from tests.end_to_end.engine_process import EngineProcess, eventually, simulated
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import DONE, MODEL, Asked, ScriptedEngine, Wire, event

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

SIM = "sim-8b"
LENGTH = {"x_simulated_output_tokens": 5}
PROMPTS = [f"prompt {number} of several" for number in range(21)]
URGENT = {"X-Headrace-Class": "interactive"}
BULK = {"X-Headrace-Class": "bulk"}
POLICY = """\
version: 1
classes: {interactive: {ttft_sla_s: 5}, bulk: {}}
sizing: {policy: fixed, fixed: {total: 512, windows: {interactive: 512, bulk: 2}}}
"""


@dataclass
class Served:
    """A gateway before a simulated vLLM (model SIM) and two scripted engines (model MODEL)."""

    gateway: GatewayProcess
    simulated: EngineProcess
    first: ScriptedEngine
    second: ScriptedEngine
    client: AsyncOpenAI
    direct: AsyncOpenAI

    @property
    def asked(self) -> list[Asked]:
        return [*self.first.requests, *self.second.requests]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("batches")
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(simulated(folder))
        first = await stack.enter_async_context(ScriptedEngine(models=[MODEL, "only-first"]))
        second = await stack.enter_async_context(ScriptedEngine())
        config = f"{engines_yaml(first, second)}  - name: sim\n    url: {engine.url}\npolicy_file: {policy}\n{SHORT_TIMEOUTS}"
        gateway = await stack.enter_async_context(GatewayProcess(folder / "gateway", config))
        clients = [
            await stack.enter_async_context(AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
            for url in (gateway.public_url, engine.url)
        ]
        yield Served(gateway, engine, first, second, *clients)


@pytest_asyncio.fixture(loop_scope="module")
async def served(shared: Served) -> Served:
    for engine in (shared.first, shared.second):
        engine.play = complete
        engine.requests.clear()
        engine.aborted = 0
    return shared


async def complete(asked: Asked, wire: Wire) -> None:
    """Completions as vLLM writes them: of each prompt, what only it leads to."""
    body = asked.json()
    prompts: list[object] = body["prompt"]
    common = {"id": f"cmpl-{asked.one('x-request-id')}", "created": len(prompts), "model": MODEL}
    usage = {"prompt_tokens": len(prompts), "completion_tokens": 2 * len(prompts), "total_tokens": 3 * len(prompts)}
    if not body.get("stream"):
        choices = [
            {"index": index, "text": f"<{prompt}>", "finish_reason": "stop"} for index, prompt in enumerate(prompts)
        ]
        await wire.reply(200, {**common, "object": "text_completion", "choices": choices, "usage": usage})
        return
    await wire.head()
    for text, finish in (("<", None), ("{}>", "stop")):
        for index, prompt in enumerate(prompts):
            choice = {"index": index, "text": text.format(prompt), "finish_reason": finish}
            await wire.part(event({**common, "choices": [choice]}))
            await asyncio.sleep(0)
    if body["stream_options"]["include_usage"]:
        await wire.part(event({**common, "choices": [], "usage": usage}))
    await wire.part(DONE)
    await wire.end()


# -- against an engine that answers the whole itself -------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [PROMPTS, [[number + 1, 7, 9] for number in range(20)]], ids=["texts", "tokens"])
async def test_a_split_array_is_answered_as_the_engine_answers_the_whole(served: Served, prompts: Any) -> None:
    ask: dict[str, Any] = {"model": SIM, "prompt": prompts, "extra_body": LENGTH}
    whole = await served.direct.completions.create(**ask)

    split = await served.client.completions.with_raw_response.create(**ask, extra_headers=URGENT)

    assert split.headers["x-headrace-parts"] == "3"
    parsed = split.parse()
    assert parsed.choices == whole.choices
    assert parsed.usage == whole.usage


async def test_a_split_stream_says_what_the_engine_says_to_the_whole(served: Served) -> None:
    ask: dict[str, Any] = {"model": SIM, "prompt": PROMPTS, "extra_body": LENGTH, "stream": True}
    texts: list[dict[int, str]] = []
    ends: list[dict[int, str]] = []
    usages = []
    heads: list[set[object]] = []

    for client in (served.direct, served.client):
        said: dict[int, str] = {}
        ended: dict[int, str] = {}
        seen: set[object] = set()
        async for chunk in await client.completions.create(**ask, stream_options={"include_usage": True}):
            seen.add((chunk.id, chunk.created, chunk.model))
            if not chunk.choices:
                usages.append(chunk.usage)
            for choice in chunk.choices:
                said[choice.index] = said.get(choice.index, "") + choice.text
                if choice.finish_reason:
                    ended[choice.index] = choice.finish_reason
        texts.append(said)
        ends.append(ended)
        heads.append(seen)

    assert texts[0] == texts[1]
    assert ends[0] == ends[1]
    assert usages[0] == usages[1]
    assert len(usages) == 2
    assert len(heads[1]) == 1


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_embeddings_of_many_inputs_are_those_of_the_whole(served: Served, encoding: Any) -> None:
    inputs = [f"text {number}" for number in range(130)]
    ask: dict[str, Any] = {"model": SIM, "input": inputs, "encoding_format": encoding}
    whole = await served.direct.embeddings.create(**ask)

    split = await served.client.embeddings.with_raw_response.create(**ask, extra_headers=BULK)

    assert split.headers["x-headrace-parts"] == "3"
    assert split.parse().data == whole.data
    assert split.parse().usage == whole.usage


# -- what goes out -----------------------------------------------------------------------------------------------------


async def test_each_part_is_the_clients_bytes_with_fewer_inputs_on_any_engine(served: Served) -> None:
    body = b'{ "model":"m-fake", "prompt" : ["a", "b" ,"c"%b], "stop":null,"x":1e-05 }' % b"".join(
        b', "p%d"' % number for number in range(15)
    )

    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"{served.gateway.public_url}/v1/completions", content=body, headers=URGENT)

    assert [choice["text"] for choice in answer.json()["choices"]] == [
        f"<{text}>" for text in ["a", "b", "c", *(f"p{number}" for number in range(15))]
    ]
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(18))
    assert answer.json()["usage"] == {"prompt_tokens": 18, "completion_tokens": 36, "total_tokens": 54}
    parts = sorted(len(asked.json()["prompt"]) for asked in served.asked)
    assert parts == [2, 8, 8]
    assert all(asked.body.endswith(b'], "stop":null,"x":1e-05 }') for asked in served.asked)
    assert len({asked.one("x-request-id") for asked in served.asked}) == 3


async def test_several_answers_to_each_prompt_keep_a_request_whole(served: Served) -> None:
    await served.client.completions.create(model=MODEL, prompt=PROMPTS, n=2, extra_headers=URGENT)

    (asked,) = served.asked
    assert asked.json()["prompt"] == PROMPTS


async def test_a_token_list_of_any_length_is_one_prompt(served: Served) -> None:
    await served.client.completions.create(model=MODEL, prompt=list(range(1, 200)), extra_headers=URGENT)

    (asked,) = served.asked
    assert asked.json()["prompt"] == list(range(1, 200))


async def test_a_rerank_is_merged_by_score_and_cut_to_top_n(served: Served) -> None:
    async def rerank(asked: Asked, wire: Wire) -> None:
        documents = asked.json()["documents"]
        results = [{"index": index, "relevance_score": int(text) / 100} for index, text in enumerate(documents)]
        results.sort(key=lambda one: -one["relevance_score"])
        await wire.reply(200, {"id": "r", "results": results[:4], "usage": {"total_tokens": len(documents)}})

    served.first.play = served.second.play = rerank
    scores = [(number * 37) % 97 for number in range(40)]
    body = {"model": MODEL, "query": "q", "documents": [str(score) for score in scores], "top_n": 4}

    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"{served.gateway.public_url}/v2/rerank", json=body, headers=URGENT)

    best = sorted(range(40), key=lambda number: -scores[number])[:4]
    assert [one["index"] for one in answer.json()["results"]] == best
    assert answer.json()["usage"] == {"total_tokens": 40}
    assert len(served.asked) == 5


# -- what goes wrong ---------------------------------------------------------------------------------------------------


async def test_a_part_that_its_engine_breaks_is_tried_on_another_and_nothing_is_lost(served: Served) -> None:
    async def reset(_asked: Asked, wire: Wire) -> None:
        wire.rst()

    served.first.play = reset

    answer = await served.client.completions.create(model=MODEL, prompt=PROMPTS, extra_headers=URGENT)

    assert [choice.text for choice in answer.choices] == [f"<{prompt}>" for prompt in PROMPTS]
    done = [prompt for asked in served.second.requests for prompt in asked.json()["prompt"]]
    assert sorted(done) == sorted(PROMPTS)


async def test_a_part_that_an_engine_refuses_is_the_requests_refusal_and_ends_the_others(served: Served) -> None:
    async def refuse_one(asked: Asked, wire: Wire) -> None:
        if PROMPTS[9] in asked.json()["prompt"]:
            await asyncio.sleep(0.2)
            await wire.reply(400, {"error": {"message": "no such token", "type": "BadRequestError", "code": 400}})
            return
        await wire.head(content_type="application/json")
        await wire.gone.wait()

    served.first.play = served.second.play = refuse_one

    with pytest.raises(APIStatusError) as raised:
        await served.client.completions.create(model=MODEL, prompt=PROMPTS, extra_headers=URGENT)

    assert raised.value.status_code == 400
    assert "no such token" in raised.value.message
    await eventually(lambda: served.first.active + served.second.active == 0)
    assert served.first.aborted + served.second.aborted == 2


async def test_a_part_that_fails_in_a_stream_ends_it_with_one_error(served: Served) -> None:
    failed = asyncio.Event()

    async def fail_one(asked: Asked, wire: Wire) -> None:
        await wire.head()
        await wire.part(event({"id": "c", "choices": [{"index": 0, "text": "x", "finish_reason": None}]}))
        if PROMPTS[0] in asked.json()["prompt"]:
            await failed.wait()
            wire.rst()
        else:
            await wire.gone.wait()

    served.first.play = served.second.play = fail_one
    body = {"model": MODEL, "prompt": PROMPTS, "stream": True}
    got = b""

    async def read() -> None:
        nonlocal got
        async with httpx.AsyncClient(trust_env=False) as http:
            async with http.stream("POST", f"{served.gateway.public_url}/v1/completions", json=body) as answer:
                async for piece in answer.aiter_raw():
                    got += piece
                    if got.count(b'"text"') == 3:
                        failed.set()

    with pytest.raises(httpx.RemoteProtocolError):
        await read()

    assert got.count(b'"error"') == 1
    assert b"[DONE]" not in got
    assert {orjson.loads(line[6:])["choices"][0]["index"] for line in got.split(b"\n\n")[:3]} == {0, 8, 16}
    await eventually(lambda: served.first.active + served.second.active == 0)


async def test_a_client_that_leaves_ends_every_part(served: Served) -> None:
    async def endless(_asked: Asked, wire: Wire) -> None:
        await wire.head()
        while not wire.gone.is_set():
            await wire.part(event({"id": "c", "choices": [{"index": 0, "text": "x", "finish_reason": None}]}))
            await asyncio.sleep(0.01)

    served.first.play = served.second.play = endless

    stream = await served.client.completions.create(model=MODEL, prompt=PROMPTS, stream=True)
    async for _ in stream:
        break
    await eventually(lambda: served.first.active + served.second.active == 3)
    await stream.close()

    await eventually(lambda: served.first.active + served.second.active == 0)
    assert served.first.aborted + served.second.aborted == 3


async def test_an_answer_that_cannot_be_joined_is_an_error_and_not_a_guess(served: Served) -> None:
    async def odd(_asked: Asked, wire: Wire) -> None:
        await wire.reply(200, {"text": "something else"})

    served.first.play = served.second.play = odd

    with pytest.raises(APIStatusError) as raised:
        await served.client.completions.create(model=MODEL, prompt=PROMPTS, extra_headers=URGENT)

    assert raised.value.status_code == 502
    assert "cannot be joined" in raised.value.message


async def test_a_coded_answer_cannot_be_joined_and_is_refused(served: Served) -> None:
    async def coded(_asked: Asked, wire: Wire) -> None:
        await wire.reply(200, b"\x1f\x8b", "Content-Encoding: zstd")

    served.first.play = served.second.play = coded

    with pytest.raises(APIStatusError) as raised:
        await served.client.completions.create(
            model=MODEL, prompt=PROMPTS, extra_headers={**URGENT, "Accept-Encoding": "zstd"}
        )

    assert raised.value.status_code == 502


async def test_the_parts_under_way_at_a_time_are_bounded(served: Served) -> None:
    held = asyncio.Event()

    async def wait(asked: Asked, wire: Wire) -> None:
        await held.wait()
        await complete(asked, wire)

    served.first.play = served.second.play = wait
    prompts = [f"p{number}" for number in range(8 * 40)]
    asking = asyncio.ensure_future(served.client.completions.create(model=MODEL, prompt=prompts, extra_headers=URGENT))

    await eventually(lambda: len(served.asked) == 32)
    await asyncio.sleep(0.05)
    assert len(served.asked) == 32
    held.set()

    answer = await asking
    assert [choice.text for choice in answer.choices] == [f"<{prompt}>" for prompt in prompts]
    assert len(served.asked) == 40


async def test_parts_are_counted_as_works_and_as_parts(served: Served) -> None:
    before = await served.gateway.metrics()
    await served.client.completions.create(model=MODEL, prompt=PROMPTS, extra_headers=URGENT)
    after = await served.gateway.metrics()

    def grown(name: str) -> float:
        return sum(value - before.get(series, 0) for series, value in after.items() if series.startswith(name))

    assert grown('headrace_request_parts_total{class="interactive"}') == 3
    assert grown('headrace_requests_total{class="interactive"') == 3
    assert grown("headrace_output_tokens_total") == 42


async def test_what_each_round_sent_is_on_record_with_the_guard_that_let_no_more_in(served: Served) -> None:
    before = await served.gateway.metrics()
    prompts = [f"p{number}" for number in range(64 * 5)]
    await served.client.completions.create(model=MODEL, prompt=prompts, extra_headers=BULK)
    after = await served.gateway.metrics()

    batches = (await served.gateway.status())["dispatch_batches"]
    assert batches[-1]["works"] == {"bulk": 1}
    assert batches[-1]["sequences"] == 64
    assert {one["binding"] for one in batches} <= {"window", "none"}
    rounds = sum(
        value - before.get(series, 0)
        for series, value in after.items()
        if series.startswith("headrace_dispatch_batches_total{")
    )
    assert rounds >= 3
