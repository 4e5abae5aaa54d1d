"""The HTTP face of vLLM 0.32.0's OpenAI server, over a virtual engine.

Imitated because a gateway leans on them: a queued stream is answered 200 at once and says nothing until it runs; the
role event comes with the first token; refusals have vLLM's texts and shapes, and one that is met after the early check
comes as an event in a 200 stream; while draining, health and metrics stay fine and new work gets 500; `priority` is
accepted without a priority policy and then has no effect; a client that leaves is aborted within a step.
"""

from __future__ import annotations

import base64
import hmac
import struct
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

from backends.simulated.answer import Answer
from backends.simulated.continuous import ContinuousLimits
from backends.simulated.event_stream import open_event_stream
from backends.simulated.generation import Choice, Generation
from backends.simulated.openai_request import (
    OUTPUT_TOKENS_FIELD,
    Body,
    CompletionRequest,
    RequestRefusedError,
    chat_prompt,
    check_model,
    parse_completion,
    parse_json,
    text_prompts,
)
from backends.simulated.service import Service
from backends.simulated.vllm_events import Identity, VllmEvents, error_body, error_event, whole_answer
from backends.simulated.vllm_metrics import render_vllm_metrics

VERSION = "0.32.0"
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}
_EMBEDDING_WIDTH = 64
_BUSY = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
_BACKLOG = "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class VllmFace:
    """Routes and handlers; `routes` and `middlewares` are what the application is made of."""

    def __init__(self, service: Service, limits: ContinuousLimits) -> None:
        self._service = service
        self._limits = limits
        self._fingerprint = f"vllm-{VERSION}-{service.new_id()[:8]}"

    def routes(self) -> list[web.RouteDef]:
        """Every route of this face."""
        return [
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._completions),
            web.post("/v1/embeddings", self._embeddings),
            web.get("/v1/models", self._models),
            web.get("/health", self._healthy),
            web.get("/ping", self._healthy),
            web.post("/ping", self._healthy),
            web.get("/version", self._version),
            web.get("/load", self._load),
            web.get("/metrics", self._metrics),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
        ]

    def middlewares(self) -> list[Middleware]:
        """What every request goes through."""
        return [self._middleware]

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keys on /v1, refusals in vLLM's shape, the router's own 404 and 405 in FastAPI's."""
        if not self._authorised(request):
            return _json_response(b'{"error":"Unauthorized"}', 401)
        try:
            return await handler(request)
        except RequestRefusedError as refusal:
            body = error_body(refusal.message, refusal.kind, refusal.param, refusal.status)
            return _json_response(body, refusal.status)
        except web.HTTPRequestEntityTooLarge:
            raise
        except web.HTTPException as error:
            if error.status in {404, 405}:
                detail = "Not Found" if error.status == 404 else "Method Not Allowed"
                return _json_response(orjson.dumps({"detail": detail}), error.status)
            raise

    # Completions ----------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=False)

    async def _complete(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        service = self._service
        asked = parse_completion(
            parse_json(await request.read()),
            service.tokenizer,
            chat=chat,
            model=service.config.model,
            max_model_len=service.max_model_len,
            output_tokens_header=request.headers.get(OUTPUT_TOKENS_FIELD.replace("_", "-")),
        )
        if service.draining:
            raise RequestRefusedError(500, "cannot schedule new futures after shutdown", "InternalServerError")
        self._check_room()
        identity = self._identity(request, asked)
        if asked.stream:
            return await self._stream(request, asked, identity)
        if self._too_many(asked):
            raise self._busy()
        generation = self._generation(asked)
        async with service.under_way(generation):
            await generation.finished()
            return _json_response(whole_answer(identity, asked, generation))

    async def _stream(self, request: web.Request, asked: CompletionRequest, identity: Identity) -> web.StreamResponse:
        refused = self._too_many(asked)
        stream = await open_event_stream(request, _STREAM_HEADERS)
        if refused:
            self._busy()
            return await stream.finish(error_event(_BUSY, "Service Unavailable", 503))

        def on_tokens(choice: Choice) -> None:
            if not stream.congested:
                stream.send(events.tokens(choice))

        def on_end(choice: Choice) -> None:
            if choice.sequence.generated_tokens:
                stream.send(events.tokens(choice))

        generation = self._generation(asked, on_tokens=on_tokens, on_end=on_end)
        events = VllmEvents(identity, asked, generation)
        async with self._service.under_way(generation):
            await generation.finished()
            return await stream.finish(events.tail())

    def _generation(
        self,
        asked: CompletionRequest,
        *,
        on_tokens: Callable[[Choice], None] | None = None,
        on_end: Callable[[Choice], None] | None = None,
    ) -> Generation:
        service = self._service
        choices = [
            service.choice(
                place * asked.n + variant,
                prompt,
                variant=variant,
                max_tokens=asked.max_tokens,
                min_tokens=asked.min_tokens,
                ignore_eos=asked.ignore_eos,
                output_tokens=asked.output_tokens,
                stops=asked.stops,
                priority=asked.priority,
            )
            for place, prompt in enumerate(asked.prompts)
            for variant in range(asked.n)
        ]
        return Generation(service.driver, service.stats, choices, on_tokens=on_tokens, on_end=on_end)

    def _identity(self, request: web.Request, asked: CompletionRequest) -> Identity:
        service = self._service
        number = request.headers.get("X-Request-Id") or asked.request_id or service.new_id()
        prefix = "chatcmpl" if asked.chat else "cmpl"
        return Identity(f"{prefix}-{number}", int(service.wall_s()), service.config.model, self._fingerprint)

    # Room -----------------------------------------------------------------------------------------------------

    def _check_room(self) -> None:
        """The early check: refuse when a limit is reached already."""
        config, waiting = self._service.config, self._service.driver.engine.scheduler.waiting
        if config.max_num_queued_reqs is not None and waiting >= config.max_num_queued_reqs:
            raise self._busy()
        if config.max_num_queued_tokens is not None:
            backlog = self._service.prefill_backlog_tokens()
            if backlog >= config.max_num_queued_tokens:
                self._service.stats.rejected["max_num_queued_tokens"] += 1
                raise RequestRefusedError(503, _BACKLOG, "Service Unavailable")

    def _too_many(self, asked: CompletionRequest) -> bool:
        """The late check, when the engine takes the sequences: do they all find room?"""
        limit = self._service.config.max_num_queued_reqs
        sequences = len(asked.prompts) * asked.n
        return limit is not None and self._service.driver.engine.scheduler.waiting + sequences > limit

    def _busy(self) -> RequestRefusedError:
        self._service.stats.rejected["max_num_queued_reqs"] += 1
        return RequestRefusedError(503, _BUSY, "Service Unavailable")

    # Everything else ------------------------------------------------------------------------------------------

    async def _models(self, _request: web.Request) -> web.Response:
        service = self._service
        permission = {
            "id": f"modelperm-{service.config.model}",
            "object": "model_permission",
            "created": int(service.started_s),
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": service.config.model,
            "object": "model",
            "created": int(service.started_s),
            "owned_by": "vllm",
            "root": service.config.profile,
            "parent": None,
            "max_model_len": service.max_model_len,
            "permission": [permission],
        }
        return _json_response(orjson.dumps({"object": "list", "data": [card]}))

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _request: web.Request) -> web.Response:
        return _json_response(orjson.dumps({"version": VERSION}))

    async def _load(self, _request: web.Request) -> web.Response:
        return _json_response(orjson.dumps({"server_load": self._service.stats.in_flight}))

    async def _metrics(self, _request: web.Request) -> web.Response:
        service = self._service
        text = render_vllm_metrics(
            service.driver.engine,
            self._limits,
            service.stats,
            model=service.config.model,
            created_s=service.started_s,
        )
        headers = {"Content-Type": "text/plain; version=1.0.0; charset=utf-8"}
        return web.Response(body=text.encode(), headers=headers)

    async def _tokenize(self, request: web.Request) -> web.Response:
        service, body = self._service, await self._body(request)
        ids = (
            chat_prompt(body, service.tokenizer)
            if "messages" in body
            else text_prompts(body, service.tokenizer, "prompt")[0]
        )
        answer = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": None}
        return _json_response(orjson.dumps(answer))

    async def _detokenize(self, request: web.Request) -> web.Response:
        service, body = self._service, await self._body(request)
        ids = text_prompts(body, service.tokenizer, "tokens")[0]
        return _json_response(orjson.dumps({"prompt": service.tokenizer.decode(ids)}))

    async def _embeddings(self, request: web.Request) -> web.Response:
        service, body = self._service, await self._body(request)
        prompts = text_prompts(body, service.tokenizer, "input")
        as_text = body.get("encoding_format") == "base64"
        data = [
            {"index": index, "object": "embedding", "embedding": _embedding(service, prompt, as_text=as_text)}
            for index, prompt in enumerate(prompts)
        ]
        tokens = sum(map(len, prompts))
        answer = {
            "id": f"embd-{service.new_id()}",
            "object": "list",
            "created": int(service.wall_s()),
            "model": service.config.model,
            "data": data,
            "usage": {
                "prompt_tokens": tokens,
                "total_tokens": tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": None,
            },
        }
        return _json_response(orjson.dumps(answer))

    async def _body(self, request: web.Request) -> Body:
        body = parse_json(await request.read())
        check_model(body, self._service.config.model)
        return body

    def _authorised(self, request: web.Request) -> bool:
        key = self._service.config.api_key
        if key is None or not request.path.startswith("/v1") or request.method == "OPTIONS":
            return True
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        return scheme.lower() == "bearer" and hmac.compare_digest(given, key.encode())


def _embedding(service: Service, prompt: list[int], *, as_text: bool) -> list[float] | str:
    """A unit vector that follows from the prompt's tokens."""
    answer = Answer(service.tokenizer, prompt)
    raw = [answer.next_id() / service.tokenizer.word_count - 0.5 for _ in range(_EMBEDDING_WIDTH)]
    length = sum(value * value for value in raw) ** 0.5 or 1.0
    vector = [value / length for value in raw]
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if as_text else vector


def _json_response(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
