"""The public listener: one code path from a request's bytes to an `Exchange`, and the few answers that need no engine.

The order is the same on every route, and each step refuses before the next costs anything:

    path and method → preflight → API key → size from the head → 100-continue → body → facts → service

Every answer, errors too, carries `x-request-id` and the CORS fields, in the dialect of its path. Nothing here fetches
anything that a client names, and no route that tells about the gateway itself is served here (the admin listener does).
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import orjson
from aiohttp import web

from gateway.clock import Clock
from gateway.errors import Dialect, Refusal, model_not_found, render_body
from gateway.exchange import Exchange, Facts
from gateway.ingress import headers as fields_of
from gateway.ingress.auth import Caller, KeyRing
from gateway.ingress.body import BodyBudget, check_announced, read_body
from gateway.ingress.connection import Connection, ConnectionBounds, HttpServer
from gateway.ingress.cors import Cors
from gateway.ingress.downstream import TransportDownstream
from gateway.ingress.facts import read_json
from gateway.ingress.multipart import read_multipart
from gateway.ingress.routes import Answerer, Route, Target, find, last_segments, parse_target, wrong_method
from gateway.ingress.wire import JSON, DateLine, refusal_headers
from gateway.logs import Log
from gateway.settings import Settings

BACKLOG = 4096
CLOSE_S = 5.0

Fields = list[tuple[bytes, bytes]]


class Service(Protocol):
    """What takes an exchange from here: `gateway.dispatch.service`."""

    async def serve(self, exchange: Exchange) -> None:
        """Answer through `exchange.downstream`; returns once it is finished or aborted."""
        ...


class Catalogue(Protocol):
    """What the engines offer, as the clients see it (aliases included). Answers from memory."""

    def models(self) -> Sequence[Mapping[str, object]]:
        """The union of the engines' model objects, without duplicates and with the engines' own fields."""
        ...

    def knows(self, model: str) -> bool:
        """False only when it is certain that no engine serves this name; True while that cannot be told yet."""
        ...

    def info(self, model: str) -> Mapping[str, object]:
        """TGI's /info object for a model."""
        ...


class Ingress:
    """See the module header. Owns its sockets and, through them, the tasks of the requests under way."""

    def __init__(
        self,
        settings: Settings,
        service: Service,
        catalogue: Catalogue,
        *,
        capacity: Callable[[str], Mapping[str, object]],
        keys: Callable[[], KeyRing],
        clock: Clock,
        rng: random.Random,
        log: Log,
        wall_s: Callable[[], float] = time.time,
        on_refusal: Callable[[Refusal], None] | None = None,
    ) -> None:
        """Must be made inside the running loop.

        capacity  what fits now, for a query; may raise a Refusal
        keys      the key ring in force now
        rng       for request ids
        on_refusal  told of each request that becomes no work
        """
        self._settings = settings
        self._service = service
        self._catalogue = catalogue
        self._capacity = capacity
        self._keys = keys
        self._clock = clock
        self._rng = rng
        self._log = log
        self._on_refusal = on_refusal or _uncounted
        self._loop = asyncio.get_running_loop()
        self._cors = Cors(settings.cors_origins)
        self._date_line = DateLine(wall_s)
        self._aliases = dict(settings.aliases)
        self._bodies = BodyBudget(settings.limits.bodies_held_bytes)
        bounds = ConnectionBounds(
            head_s=settings.timeouts.request_head_s,
            stalled_s=settings.timeouts.stalled_client_s,
            header_max_bytes=settings.limits.header_max_bytes,
            connections_max=settings.limits.connections_max,
        )
        self._http = HttpServer(self._handle, bounds, self._date_line, loop=self._loop)
        self._listeners: list[asyncio.Server] = []
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.in_flight = 0

    def __repr__(self) -> str:
        return f"<Ingress {self.in_flight} in flight, {self.open_connections} connections, {self._bodies!r}>"

    @property
    def open_connections(self) -> int:
        """Client connections open now."""
        return self._http.open_connections

    @property
    def bodies_held_bytes(self) -> int:
        """Bytes of request bodies held now."""
        return self._bodies.held_bytes

    def new_connection(self) -> asyncio.Protocol:
        """The protocol of one accepted connection, for a socket that somebody else listens on."""
        return self._http()

    async def listen(
        self, *, host: str | None = None, port: int = 0, sock: socket.socket | None = None
    ) -> asyncio.Server:
        """Accept connections on an address (port 0: any free one) or on a bound socket, which is closed with us."""
        if sock is not None:
            listener = await self._loop.create_server(self._http, sock=sock, backlog=BACKLOG)
        else:
            listener = await self._loop.create_server(self._http, host, port, backlog=BACKLOG)
        self._listeners.append(listener)
        return listener

    def retire(self) -> None:
        """Close each connection after its next answer. A client that keeps one busy thus learns of it in an answer,
        and never by a connection that ends under its request."""
        self._http.draining = True

    async def drain(self, within_s: float) -> bool:
        """Accept nothing new and wait for what is under way. False: something still runs after `within_s`."""
        for listener in self._listeners:
            listener.close()
        self._http.drain()
        try:
            async with asyncio.timeout(within_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop accepting, cancel what is under way, close every connection. Idempotent."""
        for listener in self._listeners:
            listener.close()
        tasks = self._http.abandon()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        self._listeners.clear()

    # -- one request ---------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = cast("Connection", request.protocol)
        if connection.writing_paused and not await _flushed(connection):
            return self._http.close_after
        downstream = TransportDownstream(
            connection,
            self._loop,
            self._date_line,
            method=request.method,
            http_1_0=request.version < (1, 1),
            keep_alive=request.keep_alive,
            body_read=request.content.is_eof,
        )
        connection.watcher = downstream
        self.in_flight += 1
        self._quiet.clear()
        try:
            await self._answer(request, downstream)
        finally:
            connection.watcher = None
            self.in_flight -= 1
            if not self.in_flight:
                self._quiet.set()
        return self._http.keep_after if downstream.keep_alive else self._http.close_after

    async def _answer(self, request: web.BaseRequest, downstream: TransportDownstream) -> None:
        """Find who answers, let it, and make sure that the client has an answer in the end."""
        given = request.headers
        request_id = fields_of.sane_request_id(given.get("x-request-id")) or f"{self._rng.getrandbits(96):024x}"
        common = [("x-request-id", request_id), *self._cors.response_headers(given.get("origin"))]
        visit = _Visit(request, downstream, request_id, common)
        try:
            await self._route(visit)
        except Refusal as refusal:
            self._on_refusal(refusal)
            visit.refuse(refusal)
        except ConnectionError:
            downstream.abort()
        except Exception:
            self._log.exception("request failed in the gateway", request_id=request_id, repeat_key="request failed")
            visit.refuse(_FAILED)
        if not downstream.ended and not downstream.gone:
            self._log.error("request was left without an answer", request_id=request_id)
            visit.refuse(_FAILED)

    async def _route(self, visit: _Visit) -> None:
        request = visit.request
        target = parse_target(request._message.path, self._settings.mount_path)
        route = find(target.path)
        visit.dialect = route.dialect
        if request.method == "OPTIONS":
            self._preflight(visit, route)
            return
        if request.method not in route.methods:
            raise wrong_method(request.method, target.path, route)
        if route.answerer is Answerer.HEALTH:
            visit.answer({"status": "ok"})
            return
        fields = fields_of.lowered(request.raw_headers)
        caller = self._keys().authenticate(fields)
        if route.answerer in _BY_ENGINES:
            await self._to_engine(visit, route, target, fields, caller)
        elif route.answerer is Answerer.INFO:
            visit.answer(self._catalogue.info(self._default_model() or ""))
        elif route.answerer is Answerer.CAPACITY:
            visit.answer(self._capacity(target.query))
        elif route.answerer is Answerer.MODELS:
            visit.answer({"object": "list", "data": list(self._catalogue.models())})
        else:
            visit.answer(self._model(last_segments(target.path, "/v1/models/")))

    async def _to_engine(self, visit: _Visit, route: Route, target: Target, fields: Fields, caller: Caller) -> None:
        limits, settings, request = self._settings.limits, self._settings, visit.request
        with self._bodies.hold() as hold:
            check_announced(request, hold, body_max_bytes=limits.body_max_bytes)
            _continue(request)
            body = await read_body(
                request, hold, body_max_bytes=limits.body_max_bytes, silence_s=settings.timeouts.request_body_s
            )
            rule_headers = fields_of.for_rules(fields)
            exchange = Exchange(
                request_id=visit.request_id,
                method=request.method.encode("ascii"),
                path=target.path,
                target=target.line,
                dialect=route.dialect,
                headers=fields_of.to_engine(fields, visit.request_id, trust_forwarded=settings.trust_forwarded),
                body=body,
                facts=self._facts(body, request, route, target),
                tenant=caller.tenant,
                downstream=visit.downstream,
                accepted_s=self._clock.now_s(),
                key_id=caller.key_id,
                max_class=caller.max_class,
                rule_headers=rule_headers,
                read_timeout_s=fields_of.read_timeout_s(rule_headers),
                response_headers=visit.common,
            )
            del body
            await self._service.serve(exchange)

    def _facts(self, body: bytes, request: web.BaseRequest, route: Route, target: Target) -> Facts:
        if route.answerer is Answerer.STORED:
            return Facts(
                model="",
                stream="stream=true" in target.query.split("&"),
                previous_response_id=target.path.split("/")[3],
            )
        default_model = self._default_model() if route.model_optional else None
        content_type = request.headers.get("content-type", "")
        if content_type[:20].lower().startswith("multipart/form-data"):
            facts = read_multipart(body, content_type, default_model=default_model)
        else:
            facts = read_json(body, path=target.path, always_stream=route.always_stream, default_model=default_model)
        if not self._catalogue.knows(self._aliases.get(facts.model, facts.model)):
            raise model_not_found(facts.model)
        return facts

    def _default_model(self) -> str | None:
        """The model of requests that name none: the configured one, else the only one there is.

        As engines call it: an alias would be written into a body that has no model.
        """
        default = self._settings.tgi_default_model
        if default is not None:
            return self._aliases.get(default, default)
        models = self._catalogue.models()
        return str(models[0].get("id")) if len(models) == 1 else None

    def _model(self, name: str) -> Mapping[str, object]:
        for model in self._catalogue.models():
            if model.get("id") == name:
                return model
        raise model_not_found(name)

    def _preflight(self, visit: _Visit, route: Route) -> None:
        given = visit.request.headers
        cors = self._cors.preflight_headers(
            given.get("origin"), given.get("access-control-request-headers"), route.allow
        )
        visit.downstream.start(204, [("allow", route.allow), *cors, *visit.common])
        visit.downstream.finish()


@dataclass(slots=True)
class _Visit:
    """One request being answered. common are the fields that every answer carries."""

    request: web.BaseRequest
    downstream: TransportDownstream
    request_id: str
    common: list[tuple[str, str]]
    dialect: Dialect = Dialect.OPENAI

    def answer(self, answer: Mapping[str, object]) -> None:
        """A 200 with JSON."""
        self._whole(200, orjson.dumps(answer), [JSON])

    def refuse(self, refusal: Refusal) -> None:
        """The refusal in the path's dialect; past the status line only an abort can tell."""
        if self.downstream.started:
            self.downstream.abort()
        else:
            self._whole(refusal.status, render_body(refusal, self.dialect), refusal_headers(refusal))

    def _whole(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
        self.downstream.start(status, [*headers, *self.common], content_length=len(body))
        self.downstream.write(body)
        self.downstream.finish()


_BY_ENGINES = frozenset({Answerer.ENGINE, Answerer.STORED})


def _uncounted(_refusal: Refusal) -> None:
    """Nobody counts refusals."""


_FAILED = Refusal(
    500, "the gateway failed on this request: retry, and report the request id", "server_error", "internal_error"
)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


async def _flushed(connection: Connection) -> bool:
    """Wait for earlier answers to leave; False when the client takes nothing or is gone."""
    try:
        await connection.flushed()
    except (TimeoutError, ConnectionError):
        if connection.transport is not None:
            connection.transport.abort()
        return False
    return True


def _continue(request: web.BaseRequest) -> None:
    """Tell a client that waits with its body to send it. The head has been found good by now."""
    expected = request.headers.get("expect")
    if expected is None:
        return
    if expected.strip().lower() != "100-continue":
        raise Refusal(417, "Expect is not understood: only 100-continue is", reason="expectation_failed")
    if request.version >= (1, 1) and not request.content.is_eof() and request.transport is not None:
        request.transport.write(_CONTINUE)
