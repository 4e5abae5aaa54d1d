"""Reads an OpenAI completion request as vLLM does: lax about types and unknown fields, exact about its refusals.

Only what changes the answer is read; everything else (response_format, logit_bias, vendor fields) is accepted and has
no effect. The texts of the refusals are vLLM 0.32.0's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from backends.simulated.tokenizer import Tokenizer

Body = Mapping[str, object]

OUTPUT_TOKENS_FIELD = "x_simulated_output_tokens"
"""Body field (and, with hyphens, request header) that fixes the true length of an answer, for tests and demos."""

N_MAX = 16_384
"""vLLM's VLLM_MAX_N_SEQUENCES where nobody sets it."""

_LEGACY_MAX_TOKENS = 16
_IMAGE_TOKENS = 576
"""What one image counts in a prompt: the patches of a 336 x 336 picture in the LLaVA family."""


class RequestRefusedError(Exception):
    """A request the engine does not take. `message` is told to the client."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True)
class ToolWish:
    """The function that the model has to call."""

    name: str


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request, read. prompts are token ids; max_tokens is resolved and fits the context.

    output_tokens   the true length asked for by a test; None: drawn
    priority        lower is sooner; without a priority policy it has no effect
    """

    chat: bool
    model: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    stops: tuple[str, ...]
    priority: int
    request_id: str | None
    output_tokens: int | None
    tool: ToolWish | None

    @property
    def prompt_tokens(self) -> int:
        """Over all prompts, each counted once."""
        return sum(len(prompt) for prompt in self.prompts)


def parse_json(raw: bytes) -> Body:
    """The body as an object. Raises RequestRefusedError in the words of vLLM's validation."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        position, reason = _json_fault(raw)
        raise _invalid(
            "json_invalid", str(position), "JSON decode error", 0, f", 'ctx': {{'error': '{reason}'}}"
        ) from None
    if not isinstance(body, dict):
        raise _invalid(
            "model_attributes_type", "", "Input should be a valid dictionary or object to extract fields from", 0
        )
    return body


def parse_completion(
    body: Body,
    tokenizer: Tokenizer,
    *,
    chat: bool,
    model: str | None,
    max_model_len: int,
    output_tokens_header: str | None = None,
) -> CompletionRequest:
    """Read and check one request to /v1/chat/completions or /v1/completions.

    model is the one that is served; None takes any name. Raises RequestRefusedError.
    """
    for required in ("messages",) if chat else ():
        if required not in body:
            raise _invalid("missing", required, "Field required", len(body))
    if model is not None:
        check_model(body, model)
    stream = _flag(body, "stream")
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise _invalid("model_type", "stream_options", "Input should be a valid dictionary", len(body))
    if stream_options and not stream:
        raise _bad("Stream options can only be defined when `stream=True`.", "stream_options")
    asked_n = _whole(body, "n", None)
    n = 1 if asked_n is None else asked_n
    _check_sampling(body, n)
    prompts = _chat_prompts(body, tokenizer) if chat else _plain_prompts(body, tokenizer)
    longest = max(len(prompt) for prompt in prompts)
    fixed = output_tokens_header if output_tokens_header is not None else body.get(OUTPUT_TOKENS_FIELD)
    return CompletionRequest(
        chat=chat,
        model=model or str(body.get("model", "")),
        prompts=tuple(tuple(prompt) for prompt in prompts),
        n=n,
        max_tokens=_max_tokens(body, chat=chat, prompt_tokens=longest, max_model_len=max_model_len),
        min_tokens=_whole(body, "min_tokens", 0) or 0,
        ignore_eos=_flag(body, "ignore_eos"),
        stream=stream,
        include_usage=stream and _flag(stream_options, "include_usage"),
        continuous_usage=stream and _flag(stream_options, "continuous_usage_stats"),
        return_token_ids=_flag(body, "return_token_ids"),
        stops=_stops(body),
        priority=_whole(body, "priority", 0) or 0,
        request_id=str(body["request_id"]) if body.get("request_id") else None,
        output_tokens=None if fixed is None else _whole({OUTPUT_TOKENS_FIELD: fixed}, OUTPUT_TOKENS_FIELD, 1),
        tool=_tool(body) if chat else None,
    )


def check_model(body: Body, model: str) -> None:
    """404 for a model that is not served; a request without one means the served one."""
    asked = body.get("model")
    if asked is not None and not isinstance(asked, str):
        raise _invalid("string_type", "model", "Input should be a valid string", len(body))
    if asked and asked != model:
        raise RequestRefusedError(
            404, f"The model `{asked}` does not exist. Valid aliases: {model}.", "NotFoundError", "model"
        )


def chat_prompt(body: Body, tokenizer: Tokenizer) -> list[int]:
    """Token ids of chat messages under a template of the common kind."""
    return _chat_prompts(body, tokenizer)[0]


def text_prompts(body: Body, tokenizer: Tokenizer, field: str) -> list[list[int]]:
    """Token ids of a field that holds a string, strings, token ids or lists of them."""
    return _plain_prompts(body, tokenizer, field)


def _bad(message: str, param: str | None = None, value: object = None) -> RequestRefusedError:
    if param is not None:
        shown = f", value={value}" if value is not None else ""
        message = f"{message} (parameter={param}{shown})"
    return RequestRefusedError(400, message, "BadRequestError", param)


def _invalid(kind: str, field: str, message: str, fields: int, more: str = "") -> RequestRefusedError:
    where = f"body.{field}" if field else "body"
    text = f"{{'type': '{kind}', 'loc': '{where}', 'msg': '{message}', 'input': '<dict of {fields} items>'{more}}}"
    return RequestRefusedError(400, f"1 validation error:\n  {text}", "Bad Request", where)


def _json_fault(raw: bytes) -> tuple[int, str]:
    try:
        json.loads(raw)
    except json.JSONDecodeError as error:
        return error.pos, error.msg
    except RecursionError:
        return 0, "Too many levels"
    except UnicodeDecodeError as error:
        return error.start, "Invalid UTF-8"
    return 0, "Not valid JSON"


def _flag(body: Body, field: str) -> bool:
    value = body.get(field)
    if value is None:
        return False
    if value in (True, False, 0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):
        return value.lower() in ("true", "1")
    raise _invalid("bool_parsing", field, "Input should be a valid boolean, unable to interpret input", len(body))


def _whole(body: Body, field: str, default: int | None) -> int | None:
    value = body.get(field)
    if value is None:
        return default
    try:
        if isinstance(value, int | str) or (isinstance(value, float) and value.is_integer()):
            return int(value)
    except ValueError:
        pass
    raise _invalid(
        "int_parsing", field, "Input should be a valid integer, unable to parse string as an integer", len(body)
    )


def _check_sampling(body: Body, n: int) -> None:
    if n < 1:
        raise _bad(f"n must be at least 1, got {n}.")
    if n > N_MAX:
        raise _bad(
            f"n must be at most {N_MAX}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
        )
    temperature = body.get("temperature")
    if temperature is None:
        return
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise _invalid("float_type", "temperature", "Input should be a valid number", len(body))
    if temperature < 0:
        value = float(temperature)
        raise _bad(f"temperature must be non-negative, got {value}.", "temperature", value)
    if temperature == 0 and n > 1:
        raise _bad(f"n must be 1 when using greedy sampling, got {n}.")


def _max_tokens(body: Body, *, chat: bool, prompt_tokens: int, max_model_len: int) -> int:
    if prompt_tokens >= max_model_len:
        raise _bad(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
            f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce "
            "the length of the input prompt.",
            "input_tokens",
            prompt_tokens,
        )
    field = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
    asked = _whole(body, field, None)
    room = max_model_len - prompt_tokens
    if asked is None:
        return room if chat else min(_LEGACY_MAX_TOKENS, room)
    if asked < 1:
        raise _bad(f"{field} must be at least 1, got {asked}.", field, asked)
    if asked > max_model_len:
        raise _bad(
            f"{field}={asked} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens.",
            field,
            asked,
        )
    if asked > room:
        raise _bad(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {asked} output "
            f"tokens and your prompt contains at least {prompt_tokens} input tokens, for a total of at least "
            f"{asked + prompt_tokens} tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens.",
            "input_tokens",
            prompt_tokens,
        )
    return asked


def _chat_prompts(body: Body, tokenizer: Tokenizer) -> list[list[int]]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise _invalid("list_type", "messages", "Input should be a valid list", len(body))
    if not messages:
        raise _bad("Cannot apply chat template to an empty conversation. Provide at least one message.")
    ids: list[int] = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _invalid("dict_type", f"messages.{number}", "Input should be a valid dictionary", len(body))
        text, images = _content(message.get("content"))
        ids.extend(tokenizer.encode(f"<|{message.get('role', 'user')}|>\n{text}\n"))
        ids.extend([1] * (images * _IMAGE_TOKENS))
    ids.extend(tokenizer.encode("<|assistant|>\n"))
    return [ids]


def _content(content: object) -> tuple[str, int]:
    """Text of a message and the number of its parts that are not text."""
    if content is None:
        return "", 0
    if isinstance(content, str):
        return content, 0
    if not isinstance(content, list):
        raise _bad("Message content must be a string or a list of content parts.")
    parts = [part for part in content if isinstance(part, dict)]
    texts = [str(part["text"]) for part in parts if isinstance(part.get("text"), str)]
    return "\n".join(texts), len(parts) - len(texts)


def _plain_prompts(body: Body, tokenizer: Tokenizer, field: str = "prompt") -> list[list[int]]:
    prompt = body.get(field)
    if prompt is None or prompt == "":
        raise _bad("Either prompt or prompt_embeds must be provided and non-empty.", field)
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if not isinstance(prompt, list):
        raise _invalid("string_type", field, "Input should be a valid string", len(body))
    if not prompt:
        raise _bad("You must pass at least one prompt")
    if isinstance(prompt[0], int):
        return [_checked_ids(prompt, tokenizer)]
    return [tokenizer.encode(one) if isinstance(one, str) and one else _checked_ids(one, tokenizer) for one in prompt]


def _checked_ids(ids: object, tokenizer: Tokenizer) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(token_id) is int for token_id in ids):
        raise _bad("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    for token_id in ids:
        if not 0 <= token_id < tokenizer.vocabulary_size:
            raise _bad(f"Token id {token_id} is out of vocabulary")
    return ids


def _stops(body: Body) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise _invalid("list_type", "stop", "Input should be a valid list", len(body))
    if "" in stops:
        raise _bad("stop cannot contain an empty string.")
    return tuple(stops)


def _tool(body: Body) -> ToolWish | None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None
    if not isinstance(tools, list) or not tools:
        raise _bad("When using `tool_choice`, `tools` must be set.")
    names = [
        str(tool["function"]["name"])
        for tool in tools
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    ]
    if choice == "required" and names:
        return ToolWish(names[0])
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        name = str(choice["function"].get("name"))
        if name in names:
            return ToolWish(name)
        raise _bad("The tool specified in `tool_choice` does not match any of the specified `tools`")
    raise _bad('Invalid value for `tool_choice`: must be "none", "auto", "required" or a named tool')
