"""The bytes of a vLLM answer, streamed or whole, as 0.32.0 writes them field by field.

What repeats in every event of a choice is put together once; per token only its text is encoded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import orjson

from backends.simulated.generation import Choice, Generation, Taken
from backends.simulated.openai_request import CompletionRequest

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Identity:
    """What every event of one answer carries. fingerprint: as in system_fingerprint."""

    id: str
    created_s: int
    model: str
    fingerprint: str


def error_body(message: str, kind: str, param: str | None, code: int) -> bytes:
    """The error object of vLLM's OpenAI routes."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_event(message: str, kind: str, code: int) -> bytes:
    """The same in a stream that has already been answered with 200, and the end of that stream."""
    text = f'{{"error": {{"message": {_text(message)}, "type": {_text(kind)}, "param": null, "code": {code}}}}}'
    return b"data: " + text.encode() + b"\n\n" + DONE


class VllmEvents:
    """Renders one streamed answer. Stateless but for the tool-call text that was opened."""

    def __init__(self, identity: Identity, request: CompletionRequest, generation: Generation) -> None:
        self._request = request
        self._generation = generation
        self._identity = identity
        kind = "chat.completion.chunk" if request.chat else "text_completion"
        self._head = (
            f'data: {{"id":{_text(identity.id)},"object":"{kind}","created":{identity.created_s},'
            f'"model":{_text(identity.model)},"choices":['
        )
        self._opened = False

    def tokens(self, choice: Choice) -> bytes:
        """Events for the tokens a choice has gained; the first time, in chat, the role events go ahead."""
        taken = choice.take()
        opening = "" if self._opened or not self._request.chat else self._roles()
        self._opened = True
        return (opening + self._piece(choice, taken)).encode()

    def tail(self) -> bytes:
        """The events after the last choice has ended: usage where asked for, and the end."""
        if not self._request.include_usage:
            return DONE
        usage = _usage(self._request, self._generation, with_details=True)
        return (
            f'{self._head}],"usage":{usage},"system_fingerprint":{_text(self._identity.fingerprint)}}}\n\n'
        ).encode() + DONE

    def _roles(self) -> str:
        request = self._request
        ids = list(self._generation.choices[0].prompt_ids) if request.return_token_ids else None
        usage = f',"usage":{_usage(request, self._generation, completion_tokens=0)}' if request.continuous_usage else ""
        return "".join(
            f'{self._head}{{"index":{choice.index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null}}]{usage},"prompt_token_ids":{_json(ids)},"prompt_text":null}}\n\n'
            for choice in self._generation.choices
        )

    def _piece(self, choice: Choice, taken: Taken) -> str:
        request = self._request
        token_ids = _json(taken.ids) if request.return_token_ids else "null"
        first = choice.taken_tokens == len(taken.ids)
        finish = f'"finish_reason":{_json(_finish_reason(choice, request) if taken.last else None)}'
        stop_reason = f'"stop_reason":{_json(_stop_reason(choice, taken))}'
        if request.chat:
            stop_reason = f",{stop_reason}" if taken.last else ""
            body = (
                f'"delta":{_delta(choice, request, taken, first=first)},"logprobs":null,{finish}{stop_reason},'
                f'"token_ids":{token_ids}'
            )
        else:
            prompt = list(choice.prompt_ids) if request.return_token_ids and first else None
            body = (
                f'"text":{_text(taken.text)},"logprobs":null,{finish},{stop_reason},'
                f'"prompt_token_ids":{_json(prompt)},"token_ids":{token_ids}'
            )
        usage = f',"usage":{_usage(request, self._generation)}' if request.continuous_usage else ""
        mark = (
            f',"system_fingerprint":{_text(self._identity.fingerprint)}'
            if taken.last and not request.include_usage
            else ""
        )
        return f'{self._head}{{"index":{choice.index},{body}}}]{usage}{mark}}}\n\n'


def whole_answer(identity: Identity, request: CompletionRequest, generation: Generation) -> bytes:
    """The body of an answer that was not streamed."""
    choices = [_whole_choice(choice, request) for choice in generation.choices]
    usage = orjson.loads(_usage(request, generation, with_details=True))
    document: dict[str, object] = {
        "id": identity.id,
        "object": "chat.completion" if request.chat else "text_completion",
        "created": identity.created_s,
        "model": identity.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": identity.fingerprint,
        "usage": usage,
    }
    if request.chat:
        ids = list(generation.choices[0].prompt_ids) if request.return_token_ids else None
        document |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
    document |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
    return orjson.dumps(document)


def _whole_choice(choice: Choice, request: CompletionRequest) -> dict[str, object]:
    taken = choice.take()
    ids = taken.ids if request.return_token_ids else None
    end = {
        "logprobs": None,
        "finish_reason": _finish_reason(choice, request),
        "stop_reason": _stop_reason(choice, taken),
        "token_ids": ids,
    }
    if not request.chat:
        prompt = list(choice.prompt_ids) if request.return_token_ids else None
        return {"index": choice.index, "text": taken.text, **end, "prompt_logprobs": None, "prompt_token_ids": prompt,
                "routed_experts": None}  # fmt: skip
    message: dict[str, object] = {
        "role": "assistant",
        "content": None if request.tool else taken.text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    if request.tool:
        function = {"name": request.tool.name, "arguments": _arguments(taken.text, first=True, last=True)}
        message["tool_calls"] = [{"id": _call_id(choice), "type": "function", "function": function}]
    return {"index": choice.index, "message": message, **end, "routed_experts": None}


def _delta(choice: Choice, request: CompletionRequest, taken: Taken, *, first: bool) -> str:
    if request.tool is None:
        return f'{{"content":{_text(taken.text)}}}'
    arguments = _text(_arguments(taken.text, first=first, last=taken.last))
    if not first:
        return f'{{"tool_calls":[{{"index":0,"function":{{"arguments":{arguments}}}}}]}}'
    return (
        f'{{"tool_calls":[{{"id":{_text(_call_id(choice))},"type":"function","index":0,'
        f'"function":{{"name":{_text(request.tool.name)},"arguments":{arguments}}}}}]}}'
    )


def _arguments(text: str, *, first: bool, last: bool) -> str:
    """A piece of the JSON text of a call's arguments; the pieces of one call put together are valid JSON."""
    return ('{"text":"' if first else "") + _text(text)[1:-1] + ('"}' if last else "")


def _call_id(choice: Choice) -> str:
    return f"chatcmpl-tool-{choice.sequence.id}"


def _finish_reason(choice: Choice, request: CompletionRequest) -> str:
    return "tool_calls" if request.tool and choice.finish_reason == "stop" else choice.finish_reason


def _stop_reason(choice: Choice, taken: Taken) -> str | None:
    return choice.stop.stop if choice.stop is not None and taken.last else None


def _usage(
    request: CompletionRequest,
    generation: Generation,
    *,
    completion_tokens: int | None = None,
    with_details: bool = False,
) -> str:
    prompt = request.prompt_tokens
    made = generation.taken_tokens if completion_tokens is None else completion_tokens
    counts = f'"prompt_tokens":{prompt},"total_tokens":{prompt + made},"completion_tokens":{made}'
    if not with_details:
        return f'{{{counts},"completion_tokens_details":null}}'
    return f'{{{counts},"prompt_tokens_details":{{"cached_tokens":0,"created_cache_tokens":0}}}}'


def _text(text: str) -> str:
    return orjson.dumps(text).decode()


def _json(value: str | Iterable[int] | None) -> str:
    return orjson.dumps(value).decode()
