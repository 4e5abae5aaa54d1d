"""The five ways in which clients ask for a stream and engines answer, so that one test can run over all of them.

A fault found on one endpoint usually stands on its neighbours too, so a test takes a `Way` and says nothing of paths or
payloads: `way.ask()` is a whole request, `way.opening`, `way.token("text")` and `way.ending` are an engine's events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.end_to_end.scripted_engine import DONE, delta, event
from tests.gateway.ingress.raw_client import request

TGI_MODEL = "tgi-model"


def typed(payload: dict[str, object]) -> bytes:
    """An event that carries its type in the event field too."""
    return b"event: %b\n" % str(payload["type"]).encode() + event(payload)


@dataclass(frozen=True)
class Way:
    """One endpoint with its dialect.

    body      fields of the request besides model and stream
    opening   events before the first token; ending: events after the last one
    read      the text in one event's payload
    """

    path: str
    body: dict[str, object]
    opening: tuple[bytes, ...]
    token: Callable[[str], bytes]
    ending: tuple[bytes, ...]
    read: Callable[[dict[str, Any]], str]
    whole: Callable[[str], dict[str, object]]
    whole_path: str = ""
    model: str = "only-first"
    options: dict[str, object] = field(default_factory=lambda: {"stream": True})

    def ask(self, *headers: str, **more: object) -> bytes:
        """A request for a stream."""
        body = {"model": self.model, **self.body, **self.options, **more}
        return request("POST", self.path, orjson.dumps(body), "Content-Type: application/json", *headers)

    def ask_whole(self, *headers: str, **more: object) -> bytes:
        """A request for a whole answer."""
        body = orjson.dumps({"model": self.model, **self.body, **more})
        return request("POST", self.whole_path or self.path, body, "Content-Type: application/json", *headers)

    def stream(self, *texts: str) -> list[bytes]:
        """A good stream's events."""
        return [*self.opening, *map(self.token, texts), *self.ending]

    def text(self, body: bytes) -> str:
        """All text in a stream, whatever its line ends."""
        return "".join(self.read(payload) for payload in payloads(body))

    def __repr__(self) -> str:
        return self.path


def payloads(body: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a stream's data, by the framing rules of server-sent events; fails on what is no JSON."""
    text = body.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    found = []
    for block in text.split("\n\n"):
        lines = [line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        data = "\n".join(lines)
        if data and data != "[DONE]":
            found.append(orjson.loads(data))
    return found


def _choices(payload: dict[str, Any]) -> Sequence[dict[str, Any]]:
    return payload.get("choices") or ()


CHAT = Way(
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "hi"}]},
    (event({**delta(), "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),),
    lambda text: event(delta(text)),
    (event(delta(finish="stop")), DONE),
    lambda payload: "".join(choice["delta"].get("content") or "" for choice in _choices(payload)),
    lambda text: {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
    },
)

COMPLETIONS = Way(
    "/v1/completions",
    {"prompt": "hi"},
    (),
    lambda text: event({"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": None}]}),
    (event({"id": "cmpl-1", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}), DONE),
    lambda payload: "".join(choice.get("text") or "" for choice in _choices(payload)),
    lambda text: {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": "stop"}]},
)

RESPONSES = Way(
    "/v1/responses",
    {"input": "hi"},
    (
        typed({"type": "response.created", "sequence_number": 0, "response": {"id": "resp_1"}}),
        typed({"type": "response.in_progress", "sequence_number": 1, "response": {"id": "resp_1"}}),
    ),
    lambda text: typed({"type": "response.output_text.delta", "sequence_number": 2, "delta": text}),
    (typed({"type": "response.completed", "sequence_number": 3, "response": {"id": "resp_1", "status": "completed"}}),),
    lambda payload: payload.get("delta", ""),
    lambda text: {"id": "resp_1", "object": "response", "status": "completed", "output": [{"text": text}]},
)

MESSAGES = Way(
    "/v1/messages",
    {"max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]},
    (
        typed({"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 3}}}),
        typed({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
    ),
    lambda text: typed({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}),
    (
        typed({"type": "content_block_stop", "index": 0}),
        typed({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}),
        typed({"type": "message_stop"}),
    ),
    lambda payload: payload.get("delta", {}).get("text", ""),
    lambda text: {"type": "message", "content": [{"type": "text", "text": text}], "stop_reason": "end_turn"},
)

TGI = Way(
    "/generate_stream",
    {"inputs": "hi"},
    (),
    lambda text: (
        b"data:" + orjson.dumps({"index": 1, "token": {"id": 1, "text": text}, "generated_text": None}) + b"\n\n"
    ),
    (b"data:" + orjson.dumps({"index": 9, "token": {"id": 2, "text": ""}, "generated_text": "all"}) + b"\n\n",),
    lambda payload: payload.get("token", {}).get("text", ""),
    lambda text: {"generated_text": text},
    whole_path="/generate",
    model=TGI_MODEL,
    options={},
)

WAYS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, TGI)
