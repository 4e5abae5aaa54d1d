"""What engines say inside the bytes: streams, whole answers and errors of the four dialects, read but not rewritten.

    openai      chat and completions: `data: {"choices": ...}` ... `data: [DONE]`
    responses   typed events with sequence numbers, ended by response.completed or response.incomplete
    messages    typed events, ended by message_stop
    tgi         /generate_stream: `data:{"token": ...}`, ended by the event that holds generated_text

A stream's events are looked at as they pass (`StreamReader.inspect`); only what the gateway asked for on its own (a
usage event) is taken out, and an error inside a 200 is found before it passes for an answer. Nothing here raises on
what an engine sends.
"""

from __future__ import annotations

from backends.dialects.errors import EngineError, read_error
from backends.dialects.messages import MessagesReader
from backends.dialects.openai import OpenAIReader
from backends.dialects.reading import EventReader, Remark, StreamReader
from backends.dialects.replies import ReplyFacts, read_reply
from backends.dialects.responses import ResponsesReader
from backends.dialects.tgi import TgiReader

__all__ = ["EngineError", "Remark", "ReplyFacts", "StreamReader", "open_reader", "read_error", "read_reply"]

_READERS: dict[str, type[EventReader]] = {
    "openai": OpenAIReader,
    "responses": ResponsesReader,
    "messages": MessagesReader,
    "tgi": TgiReader,
}


def open_reader(dialect: str, path: str, *, sequences: int, strip_usage: bool) -> StreamReader:
    """A reader for one stream.

    dialect      "openai", "responses", "messages" or "tgi"; the first speaks for any other event stream too
    path         engine path of the request, named in the error
    sequences    sequences the engine will decode for the request (prompts x n), >= 1
    strip_usage  take out the usage-only event, which the client did not ask for
    Raises ValueError for a dialect that nobody speaks.
    """
    reader = _READERS.get(dialect)
    if reader is None:
        raise ValueError(f"dialect {dialect!r} of {path}: expected one of {', '.join(_READERS)}; map the route to one")
    return reader(sequences=sequences, strip_usage=strip_usage)
