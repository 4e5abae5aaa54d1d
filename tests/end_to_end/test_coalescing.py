"""Bulk embeddings that start together on an engine that pads are one call there, and each client's own answer.

What is to start together waits first: a request with as many inputs as the window holds the engine until all wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.end_to_end.conftest import SHORT_TIMEOUTS
from tests.end_to_end.engine_process import eventually
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import Asked, ScriptedEngine, Wire

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

WINDOW = 8
PADS, PLAIN, BOTH = "only-pads", "only-plain", "both"
HOLD = "hold the engine"
TEXTS = [f"text {number}" for number in range(WINDOW)]
POLICY = f"""\
version: 1
classes: {{interactive: {{ttft_sla_s: 5}}, bulk: {{max_request_batch: {WINDOW}}}}}
sizing: {{policy: fixed, fixed: {{total: 64, windows: {{interactive: {WINDOW}, bulk: {WINDOW}}}}}}}
"""


def embedding_of(one: object) -> list[float]:
    """What only this input leads to."""
    return [float(len(str(one))), *map(float, str(one).encode())]


def tokens_of(one: object) -> int:
    return len(one) if isinstance(one, list) else 3


def inputs_of(asked: Asked) -> list[Any]:
    """The inputs of one call: a text and a list of token ids are one each."""
    given = asked.json()["input"]
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


async def embed(asked: Asked, wire: Wire) -> None:
    """Embeddings as vLLM answers them."""
    inputs = inputs_of(asked)
    data = [{"index": at, "object": "embedding", "embedding": embedding_of(one)} for at, one in enumerate(inputs)]
    tokens = sum(map(tokens_of, inputs))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    await wire.reply(200, {"id": "embd-1", "object": "list", "created": 1, "model": "m", "data": data, "usage": usage})


@dataclass
class Served:
    """A gateway before an engine that pads and one that is not said to; `play` is what both do with what is not held."""

    gateway: GatewayProcess
    pads: ScriptedEngine
    plain: ScriptedEngine
    http: httpx.AsyncClient
    release: asyncio.Event = field(default_factory=asyncio.Event)
    play: Callable[[Asked, Wire], Any] = embed

    def calls(self, engine: ScriptedEngine) -> list[list[Any]]:
        """The inputs of each call that was not there to hold the engine."""
        return [inputs for inputs in map(inputs_of, engine.requests) if HOLD not in inputs]

    async def answer(self, asked: Asked, wire: Wire) -> None:
        if HOLD in inputs_of(asked):
            await self.release.wait()
            await embed(asked, wire)
        else:
            await self.play(asked, wire)

    async def ask(self, model: str, one: object, class_name: str = "bulk", **more: object) -> httpx.Response:
        body = {"model": model, "input": one, **more}
        headers = {"X-Headrace-Class": class_name}
        return await self.http.post(f"{self.gateway.public_url}/v1/embeddings", json=body, headers=headers)

    async def waiting(self, class_name: str) -> float:
        """Works that the dispatcher saw in the queue when it last looked: what it did not see starts a round later."""
        series = (await self.gateway.metrics()).items()
        return sum(value for name, value in series if name.startswith(f'headrace_tenant_queued{{class="{class_name}"'))

    @asynccontextmanager
    async def together(
        self, model: str, inputs: Sequence[object], class_name: str = "bulk", *, dimensions: Sequence[int | None] = ()
    ) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
        """Clients that ask for one input each and are all granted at once, when this is entered."""
        self.release.clear()
        engines = [engine for engine in (self.pads, self.plain) if model in engine.models]
        async with asyncio.TaskGroup() as group:
            for _ in engines:
                group.create_task(self.ask(model, [HOLD] * WINDOW, class_name))
            await eventually(lambda: all(engine.active for engine in engines))
            wanted = zip(inputs, dimensions or [None] * len(inputs), strict=True)
            tasks = [group.create_task(self.ask(model, one, class_name, dimensions=size)) for one, size in wanted]

            async def all_wait() -> bool:
                return await self.waiting(class_name) == len(inputs)

            await eventually(all_wait)
            self.release.set()
            yield tasks

    async def answers(self, model: str, inputs: Sequence[object], class_name: str = "bulk") -> list[httpx.Response]:
        async with self.together(model, inputs, class_name) as tasks:
            pass
        return [task.result() for task in tasks]


@asynccontextmanager
async def serving(folder: Path, *, pads: Sequence[str], plain: Sequence[str]) -> AsyncIterator[Served]:
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(ScriptedEngine(models=list(pads)))
        second = await stack.enter_async_context(ScriptedEngine(models=list(plain)))
        engines = f"engines:\n  - {{url: '{first.url}', pads: true}}\n  - {{url: '{second.url}'}}\n"
        config = f"{engines}policy_file: {policy}\n{SHORT_TIMEOUTS}"
        gateway = await stack.enter_async_context(GatewayProcess(folder / "gateway", config))
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=20))
        served = Served(gateway, first, second, http)
        first.play = second.play = served.answer
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("coalescing"), pads=[PADS], plain=[PLAIN]) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def served(shared: Served) -> Served:
    shared.play = embed
    for engine in (shared.pads, shared.plain):
        engine.requests.clear()
        engine.aborted = 0
    return shared


def vector(answer: httpx.Response) -> object:
    """The only embedding of a good answer."""
    assert answer.status_code == 200, answer.text
    (one,) = answer.json()["data"]
    assert one["index"] == 0
    return one["embedding"]


# -- what goes out together --------------------------------------------------------------------------------------------


async def test_texts_that_start_together_are_one_call_and_each_client_gets_its_own(served: Served) -> None:
    answers = await served.answers(PADS, TEXTS)

    assert [vector(answer) for answer in answers] == [embedding_of(text) for text in TEXTS]
    (call,) = served.calls(served.pads)
    assert sorted(call) == TEXTS
    assert [answer.json()["usage"]["prompt_tokens"] for answer in answers] == [3] * WINDOW


async def test_token_lists_get_the_very_usage_that_they_get_alone(served: Served) -> None:
    inputs = [[5] * length for length in (4, 5, 6, 7, 4, 5, 6, 7)]
    alone = [(await served.ask(PADS, one)).json() for one in inputs]
    served.pads.requests.clear()

    answers = await served.answers(PADS, inputs)

    assert [answer.json() for answer in answers] == alone
    assert [len(call) for call in served.calls(served.pads)] == [WINDOW]


async def test_an_array_of_one_text_goes_with_texts(served: Served) -> None:
    answers = await served.answers(PADS, [["text a"], "text b"])

    assert [vector(answer) for answer in answers] == [embedding_of("text a"), embedding_of("text b")]
    assert [sorted(call) for call in served.calls(served.pads)] == [["text a", "text b"]]


async def test_each_work_is_counted_by_itself(served: Served) -> None:
    before = await served.gateway.metrics()
    await served.answers(PADS, TEXTS)
    after = await served.gateway.metrics()

    grown = {
        name: sum(value - before.get(series, 0) for series, value in after.items() if series.startswith(f"{name}{{"))
        for name in ("headrace_requests_total", "headrace_retries_total", "headrace_prompt_tokens_total")
    }
    assert grown == {
        "headrace_requests_total": WINDOW + 1,
        "headrace_retries_total": 0,
        "headrace_prompt_tokens_total": 3 * 2 * WINDOW,
    }


# -- what does not -----------------------------------------------------------------------------------------------------


async def test_requests_with_other_parameters_are_never_in_one_call(served: Served) -> None:
    sizes = [2, 3] * (WINDOW // 2)
    async with served.together(PADS, TEXTS, dimensions=sizes) as tasks:
        pass

    assert [vector(task.result()) for task in tasks] == [embedding_of(text) for text in TEXTS]
    called = [(asked.json()["dimensions"], sorted(inputs_of(asked))) for asked in served.pads.requests[1:]]
    assert sorted(called) == [(2, TEXTS[::2]), (3, TEXTS[1::2])]


async def test_short_texts_are_not_padded_to_a_long_ones_length(served: Served) -> None:
    long = "a text of many words " * 20
    await served.answers(PADS, ["short", long, "brief", long + "and one"])

    assert sorted(sorted(call) for call in served.calls(served.pads)) == [[long, long + "and one"], ["brief", "short"]]


async def test_a_class_with_an_objective_is_never_coalesced(served: Served) -> None:
    answers = await served.answers(PADS, TEXTS, "interactive")

    assert [vector(answer) for answer in answers] == [embedding_of(text) for text in TEXTS]
    assert [len(call) for call in served.calls(served.pads)] == [1] * WINDOW


async def test_an_engine_that_is_not_said_to_pad_gets_every_request_alone(served: Served) -> None:
    answers = await served.answers(PLAIN, TEXTS)

    assert [vector(answer) for answer in answers] == [embedding_of(text) for text in TEXTS]
    assert [len(call) for call in served.calls(served.plain)] == [1] * WINDOW


# -- what goes wrong ---------------------------------------------------------------------------------------------------


async def test_one_bad_input_among_eight_is_the_only_one_that_is_refused(served: Served) -> None:
    async def refuse(asked: Asked, wire: Wire) -> None:
        if TEXTS[5] in inputs_of(asked):
            error = {"message": f"cannot embed {TEXTS[5]!r}", "type": "BadRequestError", "code": 400}
            await wire.reply(400, {"error": error})
        else:
            await embed(asked, wire)

    served.play = refuse
    answers = await served.answers(PADS, TEXTS)

    assert [answer.status_code for answer in answers] == [200] * 5 + [400] + [200] * 2
    assert TEXTS[5] in answers[5].text
    assert [vector(answers[number]) for number in (0, 7)] == [embedding_of(TEXTS[number]) for number in (0, 7)]
    assert sorted(map(len, served.calls(served.pads))) == [1] * WINDOW + [WINDOW]
    assert not any(text in served.gateway.log for text in TEXTS)


@pytest.mark.parametrize("how", ["one embedding too few", "no JSON", "an error", "a reset"])
async def test_after_an_answer_that_is_nobodys_each_is_asked_alone(served: Served, how: str) -> None:
    async def spoil(asked: Asked, wire: Wire) -> None:
        inputs = inputs_of(asked)
        if len(inputs) == 1:
            await embed(asked, wire)
        elif how == "a reset":
            wire.rst()
        elif how == "an error":
            await wire.reply(500, {"error": {"message": "out of memory"}})
        elif how == "no JSON":
            await wire.reply(200, b'{"data": [{"index": 0, "embedd')
        else:
            await wire.reply(200, {"data": [{"index": at, "embedding": []} for at in range(len(inputs) - 1)]})

    served.play = spoil
    answers = await served.answers(PADS, TEXTS)

    assert [vector(answer) for answer in answers] == [embedding_of(text) for text in TEXTS]
    assert {answer.headers["x-headrace-engine"] for answer in answers} == {served.pads.url.removeprefix("http://")}
    alone = [call for call in served.calls(served.pads) if len(call) == 1]
    assert sorted(alone) == [[text] for text in TEXTS]


async def test_a_client_that_leaves_is_left_out_and_the_call_goes_on(served: Served) -> None:
    go_on = asyncio.Event()

    async def wait(asked: Asked, wire: Wire) -> None:
        await go_on.wait()
        await embed(asked, wire)

    served.play = wait
    before = await served.gateway.metrics()
    async with served.together(PADS, TEXTS) as tasks:
        await eventually(lambda: served.calls(served.pads))
        tasks[2].cancel()
        await eventually(lambda: _left(served, before, 1))
        go_on.set()

    kept = [task for task in tasks if not task.cancelled()]
    assert len(kept) == WINDOW - 1
    assert [vector(task.result()) for task in kept] == [embedding_of(text) for text in TEXTS if text != TEXTS[2]]
    assert [len(call) for call in served.calls(served.pads)] == [WINDOW]
    assert served.pads.aborted == 0


async def test_a_call_that_all_clients_have_left_is_aborted(served: Served) -> None:
    async def hang(_asked: Asked, wire: Wire) -> None:
        await wire.gone.wait()

    served.play = hang
    async with served.together(PADS, TEXTS) as tasks:
        await eventually(lambda: served.calls(served.pads))
        for task in tasks:
            task.cancel()

    await eventually(lambda: served.pads.active == 0)
    assert served.pads.aborted == 1


async def _left(served: Served, before: dict[str, float], clients: int) -> bool:
    name = 'headrace_requests_total{class="bulk"'
    after = await served.gateway.metrics()
    return (
        sum(
            value - before.get(series, 0)
            for series, value in after.items()
            if series.startswith(name) and "cancelled" in series
        )
        == clients
    )


async def test_an_engine_that_dies_in_mid_call_loses_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path, pads=[BOTH], plain=[BOTH]) as served:
        died = asyncio.Event()

        async def die(asked: Asked, wire: Wire) -> None:
            if asked in served.plain.requests:
                await died.wait()  # an engine that is free sooner must not take what the other one was to have
                await embed(asked, wire)
                return
            await served.pads.stop_listening()
            wire.rst()
            died.set()

        served.play = die
        texts = [*TEXTS, *(f"more {number}" for number in range(WINDOW))]
        answers = await served.answers(BOTH, texts)

        assert [vector(answer) for answer in answers] == [embedding_of(text) for text in texts]
        assert [len(call) for call in served.calls(served.pads)] == [WINDOW]
        assert sorted(served.calls(served.plain)) == sorted([text] for text in texts)
