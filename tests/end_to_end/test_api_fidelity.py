"""What the gateway does not know passes unchanged, both ways: fields, events, endpoints, values; models by every name."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator

import httpx
import orjson
import pytest
import pytest_asyncio

from tests.end_to_end.conftest import SHORT_TIMEOUTS, Stage, StartGateway, engines_yaml
from tests.end_to_end.counts import counts
from tests.end_to_end.engine_process import eventually
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.routes import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    TRANSCRIPTIONS,
    WorkRoute,
    ask,
    chat_body,
    form,
    post,
)
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
from tests.gateway.ingress.raw_client import Answer, RawClient, request

pytestmark = pytest.mark.asyncio(loop_scope="module")

POLLS_S = 3.0
OK = {"id": "x", "object": "x", "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}


def play_on_both(stage: Stage, script: object) -> None:
    stage.first.play = stage.second.play = script  # type: ignore[assignment]


def arrived(stage: Stage) -> Asked:
    """The one request that an engine got."""
    (asked,) = stage.first.requests + stage.second.requests
    return asked


async def eventually_serves(port: int, model: str, status: int = 200) -> Answer:
    """Ask for a model until it is answered with this status, within a few polls."""
    async with asyncio.timeout(POLLS_S):
        while True:
            answered = await post(port, CHAT, body=chat_body(model=model))
            if answered.status == status:
                return answered
            await asyncio.sleep(0.02)


# -- requests ----------------------------------------------------------------------------------------------------------

PASSED = {
    "extra body": (
        CHAT.path,
        (
            b'{ "model" : "m-fake", "messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"enable_thinking":'
            b'false},"guided_json":{"type":"object"},"structured_outputs":{"regex":"a+"},"top_k":5,"min_p":0.10,'
            b'"repetition_penalty":1.1e0,"priority":3,"x_future_field":{"deep":[1,null,true,12345678901234567890123]}}'
        ),
    ),
    "an escaped name, odd numbers and a repeated key": (
        CHAT.path,
        (
            b'{"\\u006dodel":"m-fake","messages":[],"seed":-0,"temperature":1.0E+2,"logit_bias":{"1":-100},"user":"\\u00e9",'
            b'"x":1,"x":2}\n'
        ),
    ),
    "both limits, one null": (
        CHAT.path,
        b'{"model":"m-fake","messages":[{"role":"user","content":"hi"}],"max_tokens":null,"max_completion_tokens":16}',
    ),
    "a vision part and a schema": (
        CHAT.path,
        (
            b'{"model":"m-fake","messages":[{"role":"user","content":[{"type":"text","text":"what?"},{"type":"image_url",'
            b'"image_url":{"url":"data:image/png;base64,iVBORw0KGgo=","detail":"low"}}]}],"response_format":{"type":'
            b'"json_schema","json_schema":{"name":"o","strict":true,"schema":{"type":"object","properties":{"a":{"$ref":'
            b'"#/$defs/x"}},"$defs":{"x":{"type":"string"}}}}}}'
        ),
    ),
    "tool results, audio and null content": (
        CHAT.path,
        (
            b'{"model":"m-fake","messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function",'
            b'"function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"c","content":"\\u0000"},{"role":'
            b'"user","content":[{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}}]}],"tools":[]}'
        ),
    ),
    "lists of token ids": (
        COMPLETIONS.path,
        b'{"model":"m-fake","prompt":[[15496,995],[11,22]],"max_tokens":4,"echo":true,"logprobs":2}',
    ),
    "one list of token ids": (COMPLETIONS.path, b'{"model":"m-fake","prompt":[15496,995],"max_tokens":4}'),
    "a list of strings": (COMPLETIONS.path, b'{"model":"m-fake","prompt":["a","b"],"n":2,"max_tokens":4}'),
    "an empty prompt list": (COMPLETIONS.path, b'{"model":"m-fake","prompt":[],"suffix":"x"}'),
    "prompt_embeds in place of a prompt": (COMPLETIONS.path, b'{"model":"m-fake","prompt_embeds":["AAAA"]}'),
    "embeddings of token ids": (
        EMBEDDINGS.path,
        b'{"model":"m-fake","input":[[1,2,3],[4]],"encoding_format":"base64","dimensions":64}',
    ),
    "embeddings of messages": (
        EMBEDDINGS.path,
        b'{"model":"m-fake","messages":[{"role":"user","content":[]}],"truncate_prompt_tokens":-1}',
    ),
    "a rerank with objects": (
        "/rerank",
        b'{"model":"m-fake","query":"q","documents":["a",{"text":"b","id":"z"}],"top_n":1,"return_documents":true}',
    ),
    "a score of multimodal texts": ("/v1/score", b'{"model":"m-fake","text_1":{"content":[]},"text_2":["a",null]}'),
    "responses with items": (
        RESPONSES.path,
        (
            b'{"model":"m-fake","input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]}],'
            b'"background":false,"store":true,"reasoning":{"effort":"low"},"include":["x"]}'
        ),
    ),
    "messages with thinking": (
        "/v1/messages",
        (
            b'{"model":"m-fake","max_tokens":9,"system":[{"type":"text","text":"s","cache_control":{"type":"ephemeral"}}],'
            b'"messages":[],"thinking":{"type":"enabled","budget_tokens":1024}}'
        ),
    ),
}


@pytest.mark.parametrize("name", PASSED)
async def test_a_body_reaches_the_engine_byte_for_byte(stage: Stage, name: str) -> None:
    path, body = PASSED[name]
    play_on_both(stage, answer(200, OK))

    answered = await ask(stage.port, request("POST", path, body, "Content-Type: application/json; charset=utf-8"))

    assert answered.status == 200
    assert arrived(stage).body == body
    assert arrived(stage).one("content-type") == "application/json; charset=utf-8"


@pytest.mark.parametrize("limit", [None, 0, -1, 10**12, 10**30, "many", 1.5, True, [], {}])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_an_odd_limit_is_the_engines_to_judge(stage: Stage, field: str, limit: object) -> None:
    body = chat_body()[:-1] + b',"%b":%b}' % (
        field.encode(),
        str(limit).encode() if limit == 10**30 else orjson.dumps(limit),
    )
    refusal = {"error": {"message": "bad limit", "type": "BadRequestError", "param": field, "code": 400}}
    play_on_both(stage, answer(400, refusal))

    answered = await post(stage.port, CHAT, body=body)

    assert (answered.status, answered.json()) == (400, refusal)
    assert arrived(stage).body == body


STREAM_OPTIONS = {
    "absent": (b"", b',"stream_options":{"include_usage":true}'),
    "null": (b',"stream_options":null', b',"stream_options":{"include_usage":true}'),
    "said no": (b',"stream_options":{"include_usage":false}', b',"stream_options":{"include_usage":true}'),
    "other options": (
        b',"stream_options":{"continuous_usage_stats":true, "x":1}',
        b',"stream_options":{"continuous_usage_stats":true, "x":1,"include_usage":true}',
    ),
}
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}


@pytest.mark.parametrize("path", [CHAT.path, COMPLETIONS.path])
@pytest.mark.parametrize("given", STREAM_OPTIONS)
async def test_the_usage_we_ask_for_is_counted_and_not_shown(stage: Stage, given: str, path: str) -> None:
    said, sent = STREAM_OPTIONS[given]
    shown = [event(delta("Hel")), event(delta("lo")), event(delta(finish="stop")), DONE]
    usage = event({**delta(), "choices": [], "usage": USAGE})
    play_on_both(stage, stream(*shown[:-1], usage, DONE))
    body = b'{"model":"m-fake","prompt":"hi","messages":[],"stream":true%b}'
    series = f'headrace_prompt_tokens_total{{class="interactive",model="{MODEL}",tenant="default"}}'
    before = (await stage.gateway.metrics()).get(series, 0.0)

    answered = await ask(stage.port, request("POST", path, body % said))

    assert answered.body == b"".join(shown)
    assert arrived(stage).body == body % sent
    assert (await stage.gateway.metrics())[series] - before == USAGE["prompt_tokens"]


async def test_the_usage_a_client_asks_for_is_shown_and_its_body_untouched(stage: Stage) -> None:
    pieces = [event(delta("a")), event(delta(finish="stop")), event({**delta(), "choices": [], "usage": USAGE}), DONE]
    play_on_both(stage, stream(*pieces))
    body = chat_body(stream=True, stream_options={"include_usage": True})

    answered = await post(stage.port, CHAT, body=body)

    assert answered.body == b"".join(pieces)
    assert arrived(stage).body == body


# -- answers -----------------------------------------------------------------------------------------------------------


def spoken(**said: object) -> bytes:
    return event({**delta(), "choices": [{"index": 0, "delta": said, "logprobs": None, "finish_reason": None}]})


def tool(index: int, **function: object) -> bytes:
    return spoken(tool_calls=[{"index": index, "function": function}])


LOGPROBS = {"content": [{"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []}]}
STREAMS = {
    "reasoning and vendor fields": [
        spoken(reasoning=" think"),
        spoken(reasoning_content=" more", x_vendor={"a": [1]}),
        spoken(content="ok", x_odd="é"),
        event({**delta(finish="stop"), "system_fingerprint": "fp", "x_top": 1}),
    ],
    "parallel tool calls": [
        spoken(
            tool_calls=[{"index": 0, "id": "call_a", "type": "function", "function": {"name": "f", "arguments": ""}}]
        ),
        spoken(
            tool_calls=[{"index": 1, "id": "call_b", "type": "function", "function": {"name": "g", "arguments": ""}}]
        ),
        tool(0, arguments='{"ci'),
        tool(1, arguments='{"tz":"C'),
        tool(0, arguments='ty":"Rome"}'),
        tool(1, arguments='ET"}'),
        event(delta(finish="tool_calls")),
    ],
    "two choices with logprobs": [
        *(
            event({**delta(), "choices": [{"index": index, "delta": {"content": text}, "logprobs": LOGPROBS}]})
            for index, text in ((1, "a"), (0, "a"), (1, "b"))
        ),
        event(delta(finish="stop", index=1)),
        event(delta(finish="length", index=0)),
    ],
    "a refusal, audio and an annotation": [
        spoken(role="assistant", content=""),
        spoken(refusal="no"),
        spoken(audio={"id": "a", "data": "AAAA"}),
        spoken(content="b", annotations=[{"type": "url_citation"}]),
        event(delta(finish="content_filter")),
    ],
    "events named, numbered and timed": [
        b"id: 1\nevent: message\nretry: 10\n" + event(delta("a")),
        b": a comment\n\n",
        event(delta(finish="stop")),
    ],
    "a usage in every event": [
        event({**delta("a"), "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}),
        event({**delta(finish="stop"), "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}),
    ],
    "timings of llama.cpp in the last event": [
        event(delta("a")),
        event({**delta(finish="stop"), "timings": {"prompt_n": 1, "predicted_n": 1, "predicted_ms": 1.25}}),
    ],
}


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_reaches_the_client_byte_for_byte(stage: Stage, name: str) -> None:
    pieces = [*STREAMS[name], DONE]
    play_on_both(stage, stream(*pieces))

    answered = await post(stage.port, CHAT, body=chat_body(stream=True, n=2 if "choices" in name else 1))

    assert answered.status == 200
    assert answered.body == b"".join(pieces)
    assert answered.whole


async def test_a_stream_that_opens_with_a_tool_call_has_its_first_token_there(stage: Stage) -> None:
    series = f'headrace_ttft_seconds_count{{class="interactive",model="{MODEL}"}}'
    before = (await stage.gateway.metrics()).get(series, 0.0)
    first, *rest = [*STREAMS["parallel tool calls"], DONE]
    go_on = asyncio.Event()

    async def script(_asked: Asked, wire: Wire) -> None:
        await wire.head()
        await wire.part(first)
        await go_on.wait()
        for piece in rest:
            await wire.part(piece)
        await wire.end()

    play_on_both(stage, script)
    async with RawClient(stage.port) as client:
        await client.send(request("POST", CHAT.path, chat_body(stream=True)))
        await client.read_head()
        seen = await client.read_some()
        go_on.set()
        while DONE not in seen:
            seen += await client.read_some()

    assert first in seen
    assert (await stage.gateway.metrics())[series] == before + 1


async def test_a_stream_of_two_choices_is_not_finished_by_the_first(stage: Stage) -> None:
    both, one_end = STREAMS["two choices with logprobs"][:3], event(delta(finish="stop", index=1))
    play_on_both(stage, stream(*both, one_end))

    answered = await post(stage.port, CHAT, body=chat_body(stream=True, n=2))

    assert answered.body.startswith(b"".join([*both, one_end]))
    assert b'"error"' in answered.body
    assert not answered.whole


WHOLE: dict[str, tuple[WorkRoute, bytes, str]] = {
    "unknown fields at every level": (
        CHAT,
        (
            b'{ "id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"ok","reasoning":"r","x":{"y":[1.0]}},'
            b'"finish_reason":"stop","stop_reason":null,"token_ids":[1]}],"usage":{"prompt_tokens":1,"completion_tokens":1,'
            b'"x_cached":3},"kv_transfer_params":null,"x_top":1e2}\n'
        ),
        "application/json",
    ),
    "NaN among logprobs": (CHAT, b'{"id":"c","choices":[{"index":0,"logprobs":NaN}]}', "application/json"),
    "embeddings in base64": (
        EMBEDDINGS,
        b'{"object":"list","data":[{"index":0,"embedding":"' + base64.b64encode(bytes(range(256))) + b'"}]}',
        "application/json",
    ),
    "many embeddings": (
        EMBEDDINGS,
        orjson.dumps({"data": [{"index": i, "embedding": [0.5, -1.25] * 160} for i in range(2048)], "usage": USAGE}),
        "application/json",
    ),
    "plain text": (TRANSCRIPTIONS, b"hello there\n", "text/plain; charset=utf-8"),
    "subtitles": (TRANSCRIPTIONS, b"WEBVTT\n\n00:00.000 --> 00:01.000\nhi\n", "text/vtt"),
    "sound": (WorkRoute("/v1/audio/speech", chat_body(input="a")), bytes(range(256)) * 64, "audio/mpeg"),
    "an empty text": (TRANSCRIPTIONS, b"", "text/plain"),
    "a list": (WorkRoute("/classify", chat_body()), b'[{"label":"a"}]', "application/json"),
}


@pytest.mark.parametrize("name", WHOLE)
async def test_a_whole_answer_reaches_the_client_byte_for_byte(stage: Stage, name: str) -> None:
    route, body, content_type = WHOLE[name]
    play_on_both(stage, answer(200, body, "X-Vendor: 1", content_type=content_type))

    answered = await post(stage.port, route)

    assert answered.status == 200
    assert answered.body == body
    assert answered.one("content-type") == content_type
    assert answered.one("x-vendor") == "1"


# -- multipart (API-12) ------------------------------------------------------------------------------------------------


def multipart(body: bytes, boundary: str = "form-3f1c") -> WorkRoute:
    return WorkRoute(TRANSCRIPTIONS.path, body, f"multipart/form-data; boundary={boundary}")


@pytest.mark.parametrize("quoted", [False, True])
async def test_a_long_form_passes_whole_with_its_model_after_the_file(stage: Stage, quoted: bool) -> None:
    play_on_both(stage, answer(200, b"hello", content_type="text/plain"))
    body = form(("speech.wav", bytes(range(256)) * 100_000), ("model", MODEL.encode()), ("response_format", b"text"))
    route = multipart(body, '"form-3f1c"' if quoted else "form-3f1c")

    answered = await post(stage.port, route)

    assert (answered.status, answered.body) == (200, b"hello")
    assert arrived(stage).body == body
    assert arrived(stage).one("content-type") == route.content_type


@pytest.mark.parametrize(
    "route",
    [
        multipart(TRANSCRIPTIONS.body, "another"),
        multipart(TRANSCRIPTIONS.body[:-20]),
        multipart(b""),
        multipart(form(("speech.wav", b"x"))),
        WorkRoute(TRANSCRIPTIONS.path, TRANSCRIPTIONS.body, "multipart/form-data"),
        WorkRoute(TRANSCRIPTIONS.path, b"model=m-fake", "application/x-www-form-urlencoded"),
    ],
    ids=["other boundary", "cut short", "empty", "no model", "no boundary", "not multipart"],
)
async def test_a_broken_form_is_a_400_and_reaches_no_engine(stage: Stage, route: WorkRoute) -> None:
    answered = await post(stage.port, route)

    assert answered.status == 400
    assert answered.error()["type"] == "invalid_request_error"
    assert not stage.first.requests + stage.second.requests


# -- models (API-09, API-11) -------------------------------------------------------------------------------------------


async def test_each_model_goes_to_an_engine_that_lists_it(stage: Stage) -> None:
    for _ in range(4):
        assert (await post(stage.port, CHAT, body=chat_body(model="only-first"))).one("x-headrace-engine") == "e0"
        assert (await post(stage.port, CHAT, body=chat_body(model="only-second"))).one("x-headrace-engine") == "e1"


async def test_models_are_the_union_with_the_engines_own_fields(stage: Stage) -> None:
    listed = (await ask(stage.port, request("GET", "/v1/models"), "GET")).json()

    data = listed["data"]
    assert isinstance(data, list)
    ids = [model["id"] for model in data]
    assert {MODEL, "only-first", "only-second"} <= set(ids)
    assert len(ids) == len(set(ids))
    assert all(model["max_model_len"] == 4096 and model["owned_by"] for model in data)


@pytest.fixture
def _models_put_back(stage: Stage) -> object:
    before = list(stage.first.models)
    yield
    stage.first.models = before


@pytest.mark.usefixtures("_models_put_back")
@pytest.mark.parametrize("name", ["lora-1", "org/lora:v2", "modèle"])
async def test_an_adapter_loaded_later_is_served_within_a_few_polls_and_forgotten_when_unloaded(
    stage: Stage, name: str
) -> None:
    assert (await post(stage.port, CHAT, body=chat_body(model=name))).status == 404

    stage.first.models = [*stage.first.models, name]
    answered = await eventually_serves(stage.port, name)
    listed = await ask(stage.port, request("GET", "/v1/models"), "GET")
    stage.first.models = stage.first.models[:-1]

    assert answered.one("x-headrace-engine") == "e0"
    assert orjson.dumps(name) in listed.body
    await eventually_serves(stage.port, name, 404)


async def test_an_alias_reaches_the_engines_model_and_is_listed(start_gateway: StartGateway) -> None:
    async with ScriptedEngine(models=["base", "lora"]) as engine:
        config = engines_yaml(engine) + SHORT_TIMEOUTS + "aliases: {gpt-x: base, nobody: nothing}\n"
        async with start_gateway(config) as gateway:
            answered = await post(gateway.port, CHAT, body=chat_body(model="gpt-x", seed=1))
            leads_nowhere = await post(gateway.port, CHAT, body=chat_body(model="nobody"))
            listed = (await ask(gateway.port, request("GET", "/v1/models"), "GET")).json()
            one = await ask(gateway.port, request("GET", "/v1/models/gpt-x"), "GET")

    (asked,) = engine.requests
    assert answered.status == 200
    assert asked.body == chat_body(model="base", seed=1)
    assert leads_nowhere.status == 404
    assert sorted(model["id"] for model in listed["data"]) == ["base", "gpt-x", "lora"]  # type: ignore[attr-defined]
    assert one.json()["root"] == "base"


# -- stored responses --------------------------------------------------------------------------------------------------


class Keeper:
    """Plays an engine that stores responses: it knows those that it made, and no others."""

    def __init__(self, name: str, padding: int = 0) -> None:
        self.name = name
        self.padding = padding
        self.states: dict[str, str] = {}

    async def __call__(self, asked: Asked, wire: Wire) -> None:
        path = asked.path.partition("?")[0]
        if path == RESPONSES.path:
            body = asked.json()
            previous = body.get("previous_response_id")
            if previous is not None and previous not in self.states:
                await wire.reply(404, {"error": {"message": "not mine", "type": "x", "param": None, "code": 404}})
                return
            made = f"resp_{self.name}_{len(self.states)}"
            self.states[made] = "completed"
            response = {"pad": "x" * self.padding, "id": made, "object": "response", "status": "completed"}
            if body.get("stream"):
                await stream(
                    event({"type": "response.created", "sequence_number": 0, "response": response}),
                    event({"type": "response.output_text.delta", "sequence_number": 1, "delta": "hi"}),
                    event({"type": "response.completed", "sequence_number": 2, "response": response}),
                )(asked, wire)
                return
            await wire.reply(200, response)
            return
        made, _, action = path.removeprefix("/v1/responses/").partition("/")
        if action == "cancel":
            self.states[made] = "cancelled"
        await wire.reply(200, {"id": made, "object": "response", "status": self.states[made], "error": None})


@pytest.mark.parametrize("how", ["whole", "stream", "long"])
async def test_a_response_is_followed_up_where_it_is_kept(stage: Stage, how: str) -> None:
    padding = 1_500_000 if how == "long" else 0
    stage.first.play, stage.second.play = Keeper("a", padding), Keeper("b", padding)
    model = {"model": MODEL}
    made = []
    for _ in range(4):
        answered = await post(
            stage.port, RESPONSES, body=orjson.dumps({**model, "input": "hi", "stream": how == "stream"})
        )
        kept_by = answered.one("x-headrace-engine")
        response_id = answered.body.partition(b'"id":"')[2].partition(b'"')[0].decode()
        made.append((response_id, kept_by))

    for response_id, kept_by in made:
        path = f"{RESPONSES.path}/{response_id}"
        follow = await post(stage.port, RESPONSES, body=orjson.dumps({**model, "previous_response_id": response_id}))
        got = await ask(stage.port, request("GET", path), "GET")
        items = await ask(stage.port, request("GET", f"{path}/input_items?limit=2"), "GET")
        cancelled = await ask(stage.port, request("POST", f"{path}/cancel", b""))
        after = await ask(stage.port, request("GET", path), "GET")
        deleted = await ask(stage.port, request("DELETE", path), "DELETE")

        assert (follow.status, follow.one("x-headrace-engine")) == (200, kept_by)
        assert [one.status for one in (got, items, cancelled, after, deleted)] == [200] * 5
        assert (got.json()["id"], got.json()["status"]) == (response_id, "completed")
        assert cancelled.json()["status"] == after.json()["status"] == "cancelled"


async def test_a_failed_response_that_is_asked_for_is_an_answer(stage: Stage) -> None:
    keeper = Keeper("a")
    stage.first.play = stage.second.play = keeper
    made = str((await post(stage.port, RESPONSES)).json()["id"])
    failed = {"id": made, "status": "failed", "error": {"code": "server_error", "message": "it failed"}}
    play_on_both(stage, answer(200, failed))

    got = await ask(stage.port, request("GET", f"{RESPONSES.path}/{made}"), "GET")

    assert (got.status, got.json()) == (200, failed)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_response_that_nobody_made_is_a_404(stage: Stage, method: str) -> None:
    direct = await ask(stage.port, request(method, "/v1/responses/resp_unknown"), method)
    through = await post(stage.port, RESPONSES, body=orjson.dumps({"model": MODEL, "previous_response_id": "resp_no"}))

    assert direct.status == through.status == 404
    assert direct.error()["code"] == through.error()["code"] == "response_not_found"
    assert not stage.first.requests + stage.second.requests


# -- TGI ---------------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tgi(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[GatewayProcess, ScriptedEngine]]:
    async with ScriptedEngine() as engine:
        config = f"engines: [{{name: t, kind: tgi, url: '{engine.url}'}}]\n{SHORT_TIMEOUTS}"
        async with GatewayProcess(tmp_path_factory.mktemp("tgi"), config) as gateway:
            yield gateway, engine


TGI_BODY = b'{"inputs":"hi","parameters":{"max_new_tokens":4,"details":true,"grammar":null,"adapter_id":"x"}}'
TGI_STREAM = [
    b'data:{"index":1,"token":{"id":1,"text":"a","logprob":-0.1,"special":false},"generated_text":null,"details":null}\n\n',
    (
        b'data:{"index":2,"token":{"id":2,"text":"b","logprob":-0.1,"special":false},"generated_text":"ab","details":'
        b'{"finish_reason":"length","generated_tokens":2,"seed":null}}\n\n'
    ),
]


@pytest.mark.parametrize("path", ["/generate", "/", "/generate_stream", "/?wait=1"])
async def test_tgis_own_routes_pass_byte_for_byte(tgi: tuple[GatewayProcess, ScriptedEngine], path: str) -> None:
    gateway, engine = tgi
    engine.requests.clear()
    whole = b'{"generated_text":"ab","details":{"finish_reason":"length","generated_tokens":2}}'
    engine.play = stream(*TGI_STREAM) if "stream" in path else answer(200, whole)

    answered = await ask(gateway.port, request("POST", path, TGI_BODY, "Content-Type: application/json"))

    (asked,) = engine.requests
    assert (answered.status, answered.body) == (200, b"".join(TGI_STREAM) if "stream" in path else whole)
    assert (asked.path, asked.body) == (path, TGI_BODY)


async def test_a_route_that_no_engine_speaks_is_a_clear_404(tgi: tuple[GatewayProcess, ScriptedEngine]) -> None:
    gateway, _ = tgi
    before = await counts(gateway, MODEL)

    for path in ("/v1/rerank", "/v1/embeddings", "/v1/responses"):
        answered = await ask(gateway.port, request("POST", path, chat_body()))

        assert answered.status == 404
        assert answered.error()["code"] == "route_not_served"
        assert path in str(answered.error()["message"])

    grown = await counts(gateway, MODEL) - before
    assert (grown["client_error"], grown["unavailable"]) == (3, 0)


async def test_a_vllm_engine_is_not_asked_for_tgis_routes(stage: Stage) -> None:
    answered = await ask(stage.port, request("POST", "/generate", orjson.dumps({"model": MODEL, "inputs": "hi"})))

    assert answered.status == 404
    assert "error_type" in answered.json()


# -- ids ---------------------------------------------------------------------------------------------------------------


async def test_a_request_id_is_made_where_none_is_given_and_shown_both_ways(stage: Stage) -> None:
    for given in ("", "x" * 200, "has space", 'quo"te'):
        stage.first.requests.clear()
        stage.second.requests.clear()

        answered = await post(stage.port, CHAT, *([f"X-Request-Id: {given}"] if given else []))

        assert answered.one("x-request-id") not in {"", given}
        assert arrived(stage).one("x-request-id") == answered.one("x-request-id")


async def test_two_requests_with_one_id_reach_engines_under_two(stage: Stage) -> None:
    go_on = asyncio.Event()

    async def script(asked: Asked, wire: Wire) -> None:
        await go_on.wait()
        await hello(asked, wire)

    play_on_both(stage, script)
    async with httpx.AsyncClient(base_url=stage.gateway.public_url) as client:
        same = {"x-request-id": "same"}
        both = [asyncio.ensure_future(client.post(CHAT.path, content=CHAT.body, headers=same)) for _ in range(2)]
        async with asyncio.timeout(POLLS_S):
            while len(stage.first.requests + stage.second.requests) < 2:
                await asyncio.sleep(0.005)
        go_on.set()
        answers = await asyncio.gather(*both)

    assert [one.headers["x-request-id"] for one in answers] == ["same", "same"]
    assert len({asked.one("x-request-id") for asked in stage.first.requests + stage.second.requests}) == 2


async def test_the_decision_on_a_request_is_found_by_the_work_that_its_answer_names(stage: Stage) -> None:
    answered = await post(stage.port, CHAT, "X-Request-Id: why-was-it-slow")

    named = answered.one("x-headrace-work")
    found = [one for one in (await stage.gateway.status())["decisions"] if one["work_id"] == named]
    assert [(one["action"], one["engine"]) for one in found] == [("dispatch", answered.one("x-headrace-engine"))]
    assert found[0]["guards"]
    assert all(set(one) == {"guard", "value", "threshold", "passed"} for one in found[0]["guards"])


async def test_a_request_that_failed_names_its_work_in_the_answer_and_in_the_log(stage: Stage) -> None:
    play_on_both(stage, answer(507, {"error": {"message": "dead", "type": "x"}}))

    answered = await post(stage.port, CHAT, "X-Request-Id: why-did-it-fail")

    def told() -> list[str]:
        return [line for line in stage.gateway.log.splitlines() if "why-did-it-fail" in line]

    assert answered.status == 507
    await eventually(told, within_s=POLLS_S)
    (line,) = told()
    assert orjson.loads(line)["work_id"] == answered.one("x-headrace-work")
