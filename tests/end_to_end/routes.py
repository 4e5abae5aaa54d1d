"""Every route of work once, with a small good body, so that a test can say "the same on all of them".

`ask` sends one request on a connection of its own; `post` does so to a route.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from tests.end_to_end.scripted_engine import MODEL
from tests.gateway.ingress.raw_client import Answer, RawClient, request

JSON = "application/json"
_BOUNDARY = "form-3f1c"


@dataclass(frozen=True, slots=True)
class WorkRoute:
    """A path and a body that is right for it."""

    path: str
    body: bytes
    content_type: str = JSON

    def __str__(self) -> str:
        return self.path


def form(*fields: tuple[str, bytes], boundary: str = _BOUNDARY) -> bytes:
    """A multipart body; a name with a dot is a file's."""
    parts = []
    for name, value in fields:
        is_file = "." in name
        disposition = f'name="file"; filename="{name}"' if is_file else f'name="{name}"'
        kind = "\r\nContent-Type: application/octet-stream" if is_file else ""
        parts.append(
            f"--{boundary}\r\nContent-Disposition: form-data; {disposition}{kind}\r\n\r\n".encode() + value + b"\r\n"
        )
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


def chat_body(**more: object) -> bytes:
    return orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more})


def _json(path: str, **fields: object) -> WorkRoute:
    return WorkRoute(path, orjson.dumps({"model": MODEL, **fields}))


CHAT = WorkRoute("/v1/chat/completions", chat_body())
COMPLETIONS = _json("/v1/completions", prompt="hi", max_tokens=4)
EMBEDDINGS = _json("/v1/embeddings", input=["a", "b"])
RESPONSES = _json("/v1/responses", input="hi")
MESSAGES = _json("/v1/messages", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
TRANSCRIPTIONS = WorkRoute(
    "/v1/audio/transcriptions",
    form(("speech.wav", b"RIFF\x00\xff\r\n--not-it\r\n"), ("model", MODEL.encode())),
    f"multipart/form-data; boundary={_BOUNDARY}",
)
WORK = (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    MESSAGES,
    TRANSCRIPTIONS,
    WorkRoute("/v1/audio/translations", TRANSCRIPTIONS.body, TRANSCRIPTIONS.content_type),
    _json("/v1/audio/speech", input="hi", voice="a"),
    _json("/v1/messages/count_tokens", messages=[]),
    _json("/rerank", query="q", documents=["a", {"text": "b", "id": "z"}], top_n=1),
    _json("/v1/rerank", query="q", documents=["a"]),
    _json("/v2/rerank", query="q", documents=["a"]),
    _json("/score", text_1="a", text_2=["b", "c"]),
    _json("/v1/score", text_1="a", text_2="b"),
    _json("/pooling", input="a"),
    _json("/classify", input="a"),
    _json("/v1/moderations", input="a"),
    _json("/tokenize", prompt="a"),
    _json("/detokenize", tokens=[1, 2]),
    _json("/v1/a-route-of-tomorrow", anything=True),
)


async def ask(port: int, data: bytes, method: str = "POST") -> Answer:
    """One request's bytes on a connection of its own."""
    async with RawClient(port) as client:
        return await client.ask(data, method)


async def post(port: int, route: WorkRoute, *headers: str, body: bytes | None = None) -> Answer:
    """One request to a route; without a body, the route's own."""
    sent = route.body if body is None else body
    return await ask(port, request("POST", route.path, sent, f"Content-Type: {route.content_type}", *headers))
