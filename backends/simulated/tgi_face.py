"""The HTTP face of Text Generation Inference 3, over a virtual engine with reserved tokens.

Imitated because a gateway leans on them: streams are always 200 and carry their errors as events, flat on
/generate_stream, wrapped and all called 422 on the OpenAI routes; /generate_stream has no [DONE]; every stream carries
comment lines while it has nothing to say; overload is 429 "Model is overloaded", decided by counting requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

from backends.simulated.event_stream import EventStream, open_event_stream
from backends.simulated.generation import Choice, Generation
from backends.simulated.openai_request import (
    OUTPUT_TOKENS_FIELD,
    Body,
    CompletionRequest,
    RequestRefusedError,
    parse_completion,
    parse_json,
    text_prompts,
)
from backends.simulated.reserved import ReservedScheduler
from backends.simulated.service import Service
from backends.simulated.tgi_metrics import render_tgi_metrics

VERSION = "3.3.6-dev0"
_COMPUTE_TYPE = "gpu+optimized"
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
    "x-compute-type": _COMPUTE_TYPE,
}
_KEEP_ALIVE_S = 15.0
_DEFAULT_NEW_TOKENS = 100
_CLIENT_BATCH = 4
_LOGPROB = -0.5
_STATUS = {"overloaded": 429, "validation": 422, "generation": 424, "incomplete_generation": 500}


class TgiError(Exception):
    """A failure in TGI's own words; kind is its error_type."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind


class TgiFace:
    """Routes and handlers."""

    def __init__(self, service: Service, scheduler: ReservedScheduler) -> None:
        self._service = service
        self._scheduler = scheduler
        self._requests = 0
        self._failures: dict[str, int] = {}

    def routes(self) -> list[web.RouteDef]:
        """Every route of this face."""
        return [
            web.post("/", self._compat),
            web.post("/generate", self._generate),
            web.post("/generate_stream", self._generate_stream),
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._completions),
            web.get("/v1/models", self._models),
            web.get("/info", self._info),
            web.get("/", self._healthy),
            web.get("/health", self._healthy),
            web.get("/ping", self._healthy),
            web.get("/metrics", self._metrics),
            web.post("/tokenize", self._tokenize),
        ]

    def middlewares(self) -> list[Middleware]:
        """None: TGI answers as its handlers do."""
        return []

    # Native routes --------------------------------------------------------------------------------------------

    async def _compat(self, request: web.Request) -> web.StreamResponse:
        body = _object(await request.read())
        if body.get("stream"):
            return await self._native_stream(request, body)
        return await self._native_whole(request, body, as_list=True)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._native_whole(request, _object(await request.read()), as_list=False)

    async def _generate_stream(self, request: web.Request) -> web.StreamResponse:
        return await self._native_stream(request, _object(await request.read()))

    async def _native_whole(self, request: web.Request, body: Body, *, as_list: bool) -> web.StreamResponse:
        try:
            self._check_room()
            choice = self._native_choice(request, body)
        except TgiError as error:
            return self._failed(error)
        generation = self._generation([choice])
        async with self._service.under_way(generation):
            await generation.finished()
        taken = choice.take()
        if choice.finish_reason == "abort":
            return self._failed(TgiError("Request failed during generation: engine stopped", "generation"))
        answer: dict[str, object] = {"generated_text": taken.text}
        if _parameters(body).get("details"):
            answer["details"] = self._details(choice) | {"prefill": [], "tokens": [
                _token(token_id, self._service.tokenizer.decode([token_id])) for token_id in taken.ids
            ]}  # fmt: skip
        headers = self._timing_headers(choice)
        return _json_response(orjson.dumps([answer] if as_list else answer), headers=headers)

    async def _native_stream(self, request: web.Request, body: Body) -> web.StreamResponse:
        stream = await open_event_stream(request, _STREAM_HEADERS)
        try:
            self._check_room()
            choice = self._native_choice(request, body)
        except TgiError as error:
            self._count(error)
            return await stream.finish(_event({"error": error.message, "error_type": error.kind}))
        texts: list[str] = []
        wants_details = bool(_parameters(body).get("details"))

        def render(choice: Choice) -> bytes:
            events = b""
            while choice.untaken_tokens:
                taken = choice.take(at_most=1)
                texts.append(taken.text)
                details = self._details(choice) if wants_details and taken.last else None
                events += _event({
                    "index": choice.taken_tokens,
                    "token": _token(taken.ids[0], taken.text),
                    "generated_text": "".join(texts) if taken.last else None,
                    "details": details,
                })  # fmt: skip
            return events

        return await self._run_stream(stream, [choice], render, b"")

    def _native_choice(self, request: web.Request, body: Body) -> Choice:
        inputs, parameters = body.get("inputs"), _parameters(body)
        if not isinstance(inputs, str):
            raise TgiError(
                "Failed to deserialize the JSON body into the target type: missing field `inputs`", "validation"
            )
        if not inputs:
            raise TgiError("Input validation error: `inputs` cannot be empty", "validation")
        temperature = parameters.get("temperature")
        if temperature is not None and not (isinstance(temperature, int | float) and temperature > 0):
            raise TgiError("Input validation error: `temperature` must be strictly positive", "validation")
        new_tokens = parameters.get("max_new_tokens")
        new_tokens = _DEFAULT_NEW_TOKENS if new_tokens is None else new_tokens
        if type(new_tokens) is not int or new_tokens < 1:
            raise TgiError("Input validation error: `max_new_tokens` must be strictly positive", "validation")
        ids = self._service.tokenizer.encode(inputs)
        truncate = parameters.get("truncate")
        ids = ids[-truncate:] if isinstance(truncate, int) and truncate > 0 else ids
        return self._choice(0, tuple(ids), new_tokens, _fixed_length(request, body), _stops(parameters.get("stop")))

    # OpenAI routes --------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=False)

    async def _complete(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        raw = await request.read()
        body = _object(raw)
        if body.get("stream"):
            stream = await open_event_stream(request, _STREAM_HEADERS)
            try:
                asked = self._openai_request(request, raw, chat=chat)
                choices = self._openai_choices(asked)
            except TgiError as error:
                self._count(error)
                event = _event({"error": {"message": error.message, "http_status_code": 422}})
                return await stream.finish(event + _event("[DONE]"))
            return await self._openai_stream(stream, asked, choices)
        try:
            asked = self._openai_request(request, raw, chat=chat)
            choices = self._openai_choices(asked)
        except TgiError as error:
            return self._failed(error)
        generation = self._generation(choices)
        async with self._service.under_way(generation):
            await generation.finished()
        if any(choice.finish_reason == "abort" for choice in choices):
            return self._failed(TgiError("Request failed during generation: engine stopped", "generation"))
        return _json_response(self._openai_whole(asked, generation), headers=self._timing_headers(choices[0]))

    def _openai_request(self, request: web.Request, raw: bytes, *, chat: bool) -> CompletionRequest:
        try:
            self._check_room()
            return parse_completion(
                parse_json(raw),
                self._service.tokenizer,
                chat=chat,
                model=None,
                max_model_len=self._service.max_model_len,
                output_tokens_header=request.headers.get(OUTPUT_TOKENS_FIELD.replace("_", "-")),
            )
        except RequestRefusedError as refusal:
            raise TgiError(f"Input validation error: {refusal.message}", "validation") from None

    def _openai_choices(self, asked: CompletionRequest) -> list[Choice]:
        if len(asked.prompts) > _CLIENT_BATCH:
            message = f"Number of prompts exceeds the maximum allowed batch size of {_CLIENT_BATCH}"
            raise TgiError(message, "validation")
        return [
            self._choice(index, prompt, asked.max_tokens, asked.output_tokens, asked.stops)
            for index, prompt in enumerate(asked.prompts)
        ]

    async def _openai_stream(
        self, stream: EventStream, asked: CompletionRequest, choices: list[Choice]
    ) -> web.StreamResponse:
        def chunk(more: dict[str, object]) -> bytes:
            kind = "chat.completion.chunk" if asked.chat else "text_completion"
            return _event(self._openai_head(kind) | more)

        def piece(choice: Choice) -> bytes:
            taken = choice.take(at_most=1)
            reason = _finish_reason(choice, chat=asked.chat) if taken.last else None if asked.chat else ""
            said: dict[str, object] = {"index": choice.index, "logprobs": None, "finish_reason": reason}
            said |= {"delta": {"role": "assistant", "content": taken.text}} if asked.chat else {"text": taken.text}
            return chunk({"choices": [said]} | ({"usage": None} if asked.chat else {}))

        def render(choice: Choice) -> bytes:
            return b"".join(piece(choice) for _ in range(choice.untaken_tokens))

        def tail() -> bytes:
            usage = chunk({"choices": [], "usage": _usage(asked, choices)}) if asked.include_usage else b""
            return usage + _event("[DONE]")

        return await self._run_stream(stream, choices, render, tail)

    def _openai_whole(self, asked: CompletionRequest, generation: Generation) -> bytes:
        pieces: list[dict[str, object]] = []
        for choice in generation.choices:
            text = choice.take().text
            piece: dict[str, object] = {
                "index": choice.index,
                "logprobs": None,
                "finish_reason": _finish_reason(choice, chat=asked.chat),
            }
            pieces.append(
                piece | ({"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text})
            )
        head = self._openai_head("chat.completion" if asked.chat else "text_completion")
        return orjson.dumps(head | {"choices": pieces, "usage": _usage(asked, generation.choices)})

    def _openai_head(self, kind: str) -> dict[str, object]:
        return {
            "object": kind,
            "id": "",
            "created": int(self._service.wall_s()),
            "model": self._service.config.model,
            "system_fingerprint": f"{VERSION}-simulated",
        }

    # What both have -------------------------------------------------------------------------------------------

    async def _run_stream(
        self,
        stream: EventStream,
        choices: list[Choice],
        render: Callable[[Choice], bytes],
        tail: bytes | Callable[[], bytes],
    ) -> web.StreamResponse:
        def on_tokens(choice: Choice) -> None:
            if not stream.congested:
                stream.send(render(choice))

        def on_end(choice: Choice) -> None:
            if choice.untaken_tokens:
                stream.send(render(choice))

        generation = self._generation(choices, on_tokens=on_tokens, on_end=on_end)
        async with self._service.under_way(generation):
            while True:
                try:
                    async with asyncio.timeout(_KEEP_ALIVE_S):
                        await generation.finished()
                    break
                except TimeoutError:
                    stream.send(b":\n\n")
            return await stream.finish(tail if isinstance(tail, bytes) else tail())

    def _check_room(self) -> None:
        if self._service.draining or self._service.stats.in_flight >= self._service.config.max_concurrent_requests:
            raise TgiError("Model is overloaded", "overloaded")

    def _choice(
        self, index: int, ids: tuple[int, ...], new_tokens: int, output_tokens: int | None, stops: tuple[str, ...]
    ) -> Choice:
        most = self._service.max_model_len
        if len(ids) + new_tokens > most:
            raise TgiError(
                f"Input validation error: `inputs` tokens + `max_new_tokens` must be <= {most}. "
                f"Given: {len(ids)} `inputs` tokens and {new_tokens} `max_new_tokens`",
                "validation",
            )
        return self._service.choice(
            index, ids, variant=0, max_tokens=new_tokens, output_tokens=output_tokens, stops=stops
        )

    def _generation(
        self,
        choices: list[Choice],
        *,
        on_tokens: Callable[[Choice], None] | None = None,
        on_end: Callable[[Choice], None] | None = None,
    ) -> Generation:
        self._requests += 1
        return Generation(self._service.driver, self._service.stats, choices, on_tokens=on_tokens, on_end=on_end)

    def _details(self, choice: Choice) -> dict[str, object]:
        return {
            "finish_reason": _native_reason(choice),
            "generated_tokens": choice.taken_tokens,
            "seed": None,
            "input_length": len(choice.prompt_ids),
        }

    def _timing_headers(self, choice: Choice) -> dict[str, str]:
        sequence, per_ms = choice.sequence, 1000 / self._service.config.speed
        total_ms = (sequence.finished_s - sequence.arrival_s) * per_ms
        inference_ms = (sequence.finished_s - sequence.scheduled_s) * per_ms
        queue_ms = (sequence.scheduled_s - sequence.arrival_s) * per_ms
        return {
            "x-compute-type": _COMPUTE_TYPE,
            "x-compute-time": f"{total_ms / 1000:.6f}",
            "x-compute-characters": str(len(choice.prompt_ids)),
            "x-total-time": f"{total_ms:.0f}",
            "x-validation-time": "0",
            "x-queue-time": f"{queue_ms:.0f}",
            "x-inference-time": f"{inference_ms:.0f}",
            "x-time-per-token": f"{inference_ms / sequence.output_tokens:.0f}",
            "x-prompt-tokens": str(sequence.prompt_tokens),
            "x-generated-tokens": str(sequence.output_tokens),
        }

    def _failed(self, error: TgiError) -> web.Response:
        self._count(error)
        body = orjson.dumps({"error": error.message, "error_type": error.kind})
        return _json_response(body, _STATUS[error.kind])

    def _count(self, error: TgiError) -> None:
        self._failures[error.kind] = self._failures.get(error.kind, 0) + 1

    # The rest -------------------------------------------------------------------------------------------------

    async def _models(self, _request: web.Request) -> web.Response:
        model = self._service.config.model
        card = {"id": model, "object": "model", "created": 0, "owned_by": model}
        return _json_response(orjson.dumps({"object": "list", "data": [card]}))

    async def _info(self, _request: web.Request) -> web.Response:
        service = self._service
        info = {
            "model_id": service.config.model,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": service.config.max_concurrent_requests,
            "max_best_of": 2,
            "max_stop_sequences": 4,
            "max_input_tokens": service.max_model_len - 1,
            "max_total_tokens": service.max_model_len,
            "validation_workers": 2,
            "max_client_batch_size": _CLIENT_BATCH,
            "router": "text-generation-router",
            "version": VERSION,
            "sha": None,
            "docker_label": None,
        }
        return _json_response(orjson.dumps(info))

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _request: web.Request) -> web.Response:
        text = render_tgi_metrics(
            self._service.driver.engine,
            self._scheduler,
            self._service.stats,
            requests=self._requests,
            failures=self._failures,
        )
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; charset=utf-8"})

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokenizer = self._service.tokenizer
        body = _object(await request.read())
        text = str(body.get("inputs", ""))
        tokens, start = [], 0
        for token_id in text_prompts({"inputs": text}, tokenizer, "inputs")[0] if text else []:
            piece = tokenizer.decode([token_id])
            tokens.append({"id": token_id, "text": piece, "start": start, "stop": start + len(piece)})
            start += len(piece)
        return _json_response(orjson.dumps(tokens))


def _object(raw: bytes) -> Body:
    try:
        return parse_json(raw)
    except RequestRefusedError as refusal:
        raise web.HTTPBadRequest(text=f"Failed to parse the request body as JSON: {refusal.message}") from None


def _parameters(body: Body) -> Body:
    parameters = body.get("parameters")
    return parameters if isinstance(parameters, dict) else {}


def _fixed_length(request: web.Request, body: Body) -> int | None:
    fixed = request.headers.get(OUTPUT_TOKENS_FIELD.replace("_", "-")) or body.get(OUTPUT_TOKENS_FIELD)
    try:
        return int(fixed) if isinstance(fixed, int | str) else None
    except ValueError:
        raise TgiError(f"Input validation error: `{OUTPUT_TOKENS_FIELD}` must be an integer", "validation") from None


def _stops(stop: object) -> tuple[str, ...]:
    return tuple(one for one in stop if isinstance(one, str) and one) if isinstance(stop, list) else ()


def _native_reason(choice: Choice) -> str:
    if choice.stop is not None:
        return "stop_sequence"
    return "eos_token" if choice.finish_reason == "stop" else "length"


def _finish_reason(choice: Choice, *, chat: bool) -> str:
    reason = _native_reason(choice)
    return "stop" if chat and reason != "length" else reason


def _token(token_id: int, text: str) -> dict[str, object]:
    return {"id": token_id, "text": text, "logprob": _LOGPROB, "special": False}


def _usage(asked: CompletionRequest, choices: Iterable[Choice]) -> dict[str, int]:
    made = sum(choice.taken_tokens for choice in choices)
    prompt = asked.prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _event(value: dict[str, object] | str) -> bytes:
    """One event as axum 0.7 writes it; a TGI on axum 0.6 has no space after the colon."""
    data = value.encode() if isinstance(value, str) else orjson.dumps(value)
    return b"data: " + data + b"\n\n"


def _json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
