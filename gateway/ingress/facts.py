"""What the gateway reads of a body, and nothing more: `Facts` for classifying, queueing and sizing.

The body is parsed once, by orjson (strict UTF-8, no NaN, no recursion). What is no JSON object, is nested deeper than
DEPTH_MAX (engines parse recursively and may die of it), or names no model, is refused here. Every other oddity is the
engine's to judge: a field of a strange type counts as absent and passes unread, so that a new API field never breaks.

Token counts are estimates: a quarter of the text's UTF-8 bytes, the length of lists of token ids, a flat number for an
image or a sound.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import cast

import orjson

from gateway.errors import Refusal
from gateway.exchange import Facts

DEPTH_MAX = 200
MODEL_MAX_CHARS = 256
BYTES_PER_TOKEN = 4
MEDIA_TOKENS = 1_024
INPUTS_MAX = 65_536
"""Inputs of one request; more would be a file, not a request."""
SEQUENCES_MAX = 16_384
"""Answers that one request may ask for where it wants several to an input: what vLLM takes as `n` (VLLM_MAX_N_SEQUENCES)."""

_PROMPT_FIELDS = (
    "messages",
    "prompt",
    "input",
    "inputs",
    "system",
    "instructions",
    "tools",
    "query",
    "queries",
    "documents",
    "texts",
    "text_1",
    "text_2",
)
_WHOLE_ROUTES = frozenset(
    {
        *("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
        *("/tokenize", "/detokenize", "/v1/audio/speech", "/v1/messages/count_tokens"),
    }
)
"""Routes that never answer in events, whatever a body says: clients of these must not be promised a stream of them."""
_LIST_FIELDS = ("prompt", "inputs", "documents", "texts", "text_2")
_INPUT_LISTS = frozenset({"/v1/embeddings", "/pooling", "/classify"})
_LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")
_MEDIA_KEYS = frozenset({"image_url", "input_audio", "video_url", "audio_url", "image", "source", "file_data"})

_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))
_STRING = re.compile(rb'"[^"]*"')
_COUNTABLE = 2**63
"""Larger numbers are as good as this one; none can be counted exactly in a float."""
_BETWEEN_BRACKETS = (ord("[") + ord("]")) // 2

_Object = dict[str, object]


def read_json(
    body: bytes,
    *,
    path: str,
    always_stream: bool = False,
    default_model: str | None = None,
) -> Facts:
    """The facts of a JSON body. Raises a 400 Refusal when it is no object, names no usable model or asks for too much.

    default_model    taken when the body names none
    """
    if not body or body.isspace():
        raise _bad_request("body is empty: send one JSON object")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _bad_request(f"body is not valid JSON: {error.msg} at byte {error.pos}; send one JSON object") from None
    if _too_deep(body):
        raise _bad_request(f"body is nested deeper than {DEPTH_MAX} levels: send a flatter one")
    if not isinstance(document, dict):
        raise _bad_request(f"body is a JSON {_KINDS.get(type(document), 'value')}: expected an object")
    fields = cast("_Object", document)
    options = fields.get("stream_options")
    parameters = fields.get("parameters")
    tier = fields.get("service_tier")
    previous = fields.get("previous_response_id")
    inputs = _inputs(fields, path)
    copies, by = _copies(fields, cast("_Object", parameters) if isinstance(parameters, dict) else {})
    _check_sequences(inputs, copies, by)
    return Facts(
        model=_model(fields, default_model),
        stream=always_stream or (fields.get("stream") is True and path not in _WHOLE_ROUTES),
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
        prompt_tokens=_prompt_tokens(fields) + (inputs - 1) * _repeated_tokens(fields),
        max_tokens=_limit(fields, cast("_Object", parameters) if isinstance(parameters, dict) else {}),
        inputs=inputs,
        copies=copies,
        sequences=inputs * copies,
        service_tier=tier if isinstance(tier, str) else "",
        previous_response_id=previous if isinstance(previous, str) else None,
    )


def checked_model(model: object) -> str:
    """A model name that may go into labels and keys. Raises a 400 Refusal."""
    if not isinstance(model, str):
        raise _bad_model(f"model is a JSON {_KINDS.get(type(model), 'value')}: expected a string")
    if not model or len(model) > MODEL_MAX_CHARS:
        raise _bad_model(f"model has {len(model)} characters: expected 1 to {MODEL_MAX_CHARS}")
    return model


def _too_deep(body: bytes) -> bool:
    """True when valid JSON nests deeper than DEPTH_MAX.

    A body has to hold more brackets than that to be looked at closer, which few do. Then everything but brackets goes, at
    the speed of memory, and what is left is counted up and down: linear, whatever the body, and far below its parsing.
    """
    if body.count(b"[") + body.count(b"{") <= DEPTH_MAX:
        return False
    # Pairs of backslashes first: what then still stands before a quote escapes it.
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    # Two quotes in a row hold nothing between them, whichever strings they belong to.
    skeleton = unescaped.translate(_TO_BRACKETS, _NO_STRUCTURE).replace(b'""', b"")
    if b'"' in skeleton:
        skeleton = _STRING.sub(b"", skeleton)
    steps = map(_BETWEEN_BRACKETS.__sub__, skeleton)
    return max(accumulate(steps), default=0) > DEPTH_MAX


def _model(fields: _Object, default_model: str | None) -> str:
    model = fields.get("model")
    if model is None:
        if default_model is not None:
            return default_model
        raise _bad_model("model is missing: expected the name of a served model; GET /v1/models lists them")
    return checked_model(model)


def _prompt_tokens(fields: _Object) -> int:
    """Estimate over all prompts."""
    return _tokens_in([fields[name] for name in _PROMPT_FIELDS if name in fields])


def _tokens_in(waiting: list[object]) -> int:
    """Estimate over values of any form. Iterative: the body's nesting is the client's choice."""
    text_bytes = tokens = 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            text_bytes += len(value) if value.isascii() else len(value.encode())
        elif isinstance(value, list):
            if value and type(value[0]) is int:
                tokens += len(value)
            else:
                waiting.extend(value)
        elif isinstance(value, dict):
            if _MEDIA_KEYS.isdisjoint(value):
                waiting.extend(value.values())
            else:
                tokens += MEDIA_TOKENS
                waiting.extend(part for key, part in value.items() if key not in _MEDIA_KEYS)
    return tokens + (text_bytes + BYTES_PER_TOKEN - 1) // BYTES_PER_TOKEN


def _limit(fields: _Object, parameters: _Object) -> int | None:
    """The output limit per sequence, by whichever name; null is absent, nonsense is the engine's to refuse."""
    for name in _LIMIT_FIELDS:
        for source in (fields, parameters):
            value = source.get(name)
            if type(value) is int and value > 0:
                return value
    return None


def _inputs(fields: _Object, path: str) -> int:
    """How many inputs an array of them holds: 1 for a list of token ids, and for one of messages."""
    inputs = 1
    for name in _LIST_FIELDS if path not in _INPUT_LISTS else (*_LIST_FIELDS, "input"):
        value = fields.get(name)
        if isinstance(value, list) and value and type(value[0]) is not int and not isinstance(value[0], dict):
            inputs = max(inputs, len(value))
    return inputs


def _copies(fields: _Object, parameters: _Object) -> tuple[int, str]:
    """Answers to each input, and the field that asks for them.

    Engines are lax here, and take "3" and 3.0 for 3. What they cannot take either counts as 1 and is theirs to refuse.
    """
    copies, by = 1, "n"
    for source, name in ((fields, "n"), (fields, "best_of"), (parameters, "best_of")):
        value = source.get(name)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                continue
        if type(value) is float:
            value = _COUNTABLE if value > _COUNTABLE else int(value) if value.is_integer() else 1
        if type(value) is int and value > copies:
            copies, by = value, name
    return copies, by


def _check_sequences(inputs: int, copies: int, by: str) -> None:
    """Raises a 400 Refusal: what one request asks of an engine is counted in full, and so has to have a bound."""
    if inputs > INPUTS_MAX:
        raise Refusal(
            400,
            f"the request has {inputs} inputs: at most {INPUTS_MAX} may be in one; send it in several",
            reason="too_many_inputs",
        )
    if copies > 1 and inputs * copies > SEQUENCES_MAX:
        asked = f"{by} is {copies}" if inputs == 1 else f"{by} is {copies} for each of {inputs} inputs"
        raise Refusal(
            400,
            f"{asked}: at most {SEQUENCES_MAX} answers may be asked for in one request; send it in several",
            reason="too_many_sequences",
            param=by,
        )


def _repeated_tokens(fields: _Object) -> int:
    """What goes into an engine anew with each input: the query of a rerank, the one text of a score."""
    texts = (fields.get(name) for name in ("query", "text_1"))
    return sum(_tokens_in([text]) for text in texts if isinstance(text, str))


_KINDS = {list: "array", dict: "object", str: "string", bool: "boolean", int: "number", float: "number"}


def _bad_request(message: str) -> Refusal:
    return Refusal(400, message, reason="invalid_body")


def _bad_model(message: str) -> Refusal:
    return Refusal(400, message, reason="invalid_model", param="model")
