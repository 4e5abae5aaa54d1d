"""Any server with OpenAI's routes: what all adapters share, and the adapter for servers of no known kind.

Of an unknown server only the model list is asked for: `/health` may be missing, there are no metrics that could be
trusted to mean something, and nothing is added to a body. A known kind is a subclass that says what its metrics are
called (`_measure`), what its readiness looks like (`_probe`) and what it understands (`capabilities`).

A probe or sample is bounded by the address's sample_s, whatever the polling interval: under a long prefill an engine's
pages are slow while its streams run well, which is no fault. The engine side's HTTP is the pool's business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import orjson

from backends.base import (
    BackendError,
    Call,
    Capabilities,
    EngineAddress,
    EngineRequest,
    Headers,
    Measured,
    ModelCard,
    Priority,
    Probe,
    Receiver,
    Sample,
    Signal,
    Unready,
)
from backends.dialects import read_error
from backends.dialects.payload import JsonObject, count, load, text
from backends.exposition import Series, parse
from backends.series import once, own

NO_SUCH_ROUTE = frozenset({404, 405, 501})
NOT_ASKED_SO = NO_SUCH_ROUTE | {400, 415, 422}
"""Answers to a trial of a server whose model does something else, e.g. embeds."""
FACTS_S = 5.0
"""The version, and what else stays, is asked for no more often than this while an engine stays ready."""
MODELS_S = 1.0
"""The same of the model list, which changes while an engine serves: adapters are loaded and unloaded."""
TRIAL_MAX_S = 60.0
"""Above what any caller of `try_generation` allows; only so that the request is bounded by itself."""
TRIAL_ID = "headrace-trial"
"""Request id of a generation that tries an engine out, in the engine's own log."""
TGI_ROUTES = frozenset({"/", "/generate", "/generate_stream", "/chat_tokenize", "/info"})
"""Routes of TGI's own dialect, which no other engine speaks though SGLang has a /generate of another form."""


class Pool(Protocol):
    """What an adapter needs of `backends.connection.EnginePool`."""

    def call(self, request: EngineRequest, receiver: Receiver) -> Call: ...

    async def fetch(
        self, method: bytes, target: bytes, headers: Headers = (), body: bytes = b"", *, timeout_s: float = ...
    ) -> tuple[int, Headers, bytes]: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One fetched page."""

    path: str
    status: int
    headers: Headers
    body: bytes
    method: str = "GET"

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def json(self) -> object:
        """The body's JSON value, None if it holds none."""
        return load(self.body)


class OpenAICompatible:
    """See the module header. All adapters are built alike, so that `backends.detect` can build any of them.

    monotonic           this process's clock; stamps samples
    priority_honoured   the operator says whether the engine was started so that a body's `priority` has an effect; None:
                        only where the engine itself tells (most accept the field and ignore it)
    metrics             where /metrics is, if elsewhere; owned like the pool
    """

    kind: str = "openai"
    understands: ClassVar[Capabilities] = Capabilities()
    priority: ClassVar[Priority | None] = None
    metrics_path: ClassVar[str] = "/metrics"

    def __init__(
        self,
        address: EngineAddress,
        pool: Pool,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        priority_honoured: bool | None = None,
        metrics: Pool | None = None,
    ) -> None:
        self.name = address.name
        self.capabilities = replace(self.understands, priority=self.priority if priority_honoured else None)
        self._priority_told = priority_honoured is not None
        self._metrics = metrics or pool
        self.models: frozenset[str] = frozenset()
        self._facts: tuple[tuple[ModelCard, ...], str] | None
        self._facts_s = self._models_s = 0.0
        self._forget()
        self._sample_s = address.sample_s
        self._key_remedy = address.key_remedy
        self._pool = pool
        self._monotonic = monotonic

    def speaks(self, path: str) -> bool:
        """Everything but TGI's own routes: a new route of an engine works without a release of ours."""
        return path not in TGI_ROUTES

    def call(self, request: EngineRequest, receiver: Receiver) -> Call:
        """Start a call."""
        return self._pool.call(request, receiver)

    async def sample(self) -> Sample:
        """Measure once. Raises BackendError, also when the engine takes longer than its bound."""
        try:
            async with asyncio.timeout(self._sample_s):
                values = await self._measure()
        except TimeoutError:
            bound = f"{self._sample_s:g} s"
            raise BackendError(f"engine {self.name} gave no sample within {bound}; its last one grows old") from None
        return Sample(self._monotonic(), values)

    async def probe(self) -> Probe:
        """Ask once who serves here. Every failure is a Probe that is not ready, with what was wrong."""
        try:
            async with asyncio.timeout(self._sample_s):
                probe = await self._probe()
        except TimeoutError:
            late = f"engine {self.name} gave no answer within {self._sample_s:g} s"
            probe = Probe(ready=False, detail=late, unready=Unready.SILENT)
        except BackendError as error:
            probe = Probe(ready=False, detail=str(error), unready=error.unready)
        if not probe.ready:
            self._forget()  # whoever answers next may be another
        self.models = frozenset(card.id for card in probe.models) or self.models
        return probe

    async def try_generation(self, within_s: float) -> str:
        """Have it make one token; "" when it did. A server whose model makes none, but says so, passes as well."""
        try:
            async with asyncio.timeout(within_s):
                return await self._try_generation()
        except TimeoutError:
            return f"engine {self.name} made no token within {within_s:g} s"
        except BackendError as error:
            return str(error)

    async def close(self) -> None:
        await self._pool.close()
        if self._metrics is not self._pool:
            await self._metrics.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} models={sorted(self.models)}>"

    # -- for adapters ----------------------------------------------------------------------------------------------

    async def _measure(self) -> Mapping[Signal, Measured]:
        """The signals now. A server of no known kind has none, and that it has none is its sample."""
        return {}

    async def _probe(self) -> Probe:
        """Health, then models, then version; the first that is not as it should be decides."""
        health = await self._get("/health")
        if not health.ok and health.status not in NO_SUCH_ROUTE:
            return Probe(ready=False, detail=self._refused(health))
        return self._ready(*await self._known_facts())

    async def _known_facts(self) -> tuple[tuple[ModelCard, ...], str]:
        """Models as of at most MODELS_S ago, version as of at most FACTS_S ago: an engine is asked twice a second."""
        now_s = self._monotonic()
        if self._facts is None or now_s - self._facts_s >= FACTS_S:
            self._facts = await self._ask_facts()
            self._facts_s = self._models_s = self._monotonic()
        elif now_s - self._models_s >= MODELS_S:
            self._facts = await self._ask_models(*self._facts)
            self._models_s = self._monotonic()
        return self._facts

    def _forget(self) -> None:
        """What is known of the server besides its samples is old."""
        self._facts = None

    async def _ask_facts(self) -> tuple[tuple[ModelCard, ...], str]:
        return await self._model_cards(), await self._version()

    async def _ask_models(self, _cards: tuple[ModelCard, ...], version: str) -> tuple[tuple[ModelCard, ...], str]:
        """The facts with the models of now."""
        return await self._model_cards(), version

    async def _try_generation(self) -> str:
        cards, _ = await self._known_facts()
        model = cards[0].id if cards else ""
        for path, body in self._trials(model):
            answer = await self._post(path, body)
            if answer.status not in NOT_ASKED_SO:
                return self._tried(answer)
        return ""

    def _trials(self, model: str) -> tuple[tuple[str, JsonObject], ...]:
        """What to ask, in turn, until the model does that: one token of text, else an embedding."""
        short = {"model": model, "max_tokens": 1, "temperature": 0}
        return (
            ("/v1/completions", {**short, "prompt": "1"}),
            ("/v1/chat/completions", {**short, "messages": [{"role": "user", "content": "1"}]}),
            ("/v1/embeddings", {"model": model, "input": "1"}),
        )

    def _tried(self, answer: Answer) -> str:
        if not answer.ok:
            return self._refused(answer)
        said = answer.json if isinstance(answer.json, dict) else {}
        choices = said.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else said
        aborted = isinstance(first, dict) and first.get("finish_reason") in {"abort", "error"}
        if "error" in said or aborted or not (choices or said.get("data") or said.get("generated_text") is not None):
            return (
                f"engine {self.name}: POST {answer.path} was answered without a token; is it shutting down or paused?"
            )
        return ""

    def _ready(self, cards: tuple[ModelCard, ...], version: str) -> Probe:
        detail = "" if cards else f"engine {self.name} lists no model: expected at least one; is it still loading?"
        return Probe(ready=bool(cards), models=cards, version=version, detail=detail)

    async def _model_cards(self) -> tuple[ModelCard, ...]:
        """The model list; entries without a name are left out."""
        answer = await self._get("/v1/models")
        if not answer.ok:
            raise BackendError(self._refused(answer))
        listed = answer.json
        entries = listed.get("data") if isinstance(listed, dict) else listed
        if not isinstance(entries, list):
            raise BackendError(f"engine {self.name}: GET /v1/models: expected a list under data; is this an engine?")
        named = [entry for entry in entries if isinstance(entry, dict) and text(entry.get("id"))]
        return tuple(ModelCard(str(entry["id"]), entry, self._context_tokens(entry)) for entry in named)

    def _context_tokens(self, card: Mapping[str, object]) -> int | None:
        return count(card.get("max_model_len")) or None

    async def _version(self) -> str:
        """What /version says, "" if there is nothing; it decides nothing, so its failure is none."""
        return text((await self._ask_object("/version")).get("version"))

    async def _ask_object(self, path: str, within_s: float | None = None) -> Mapping[str, object]:
        """The JSON object at an optional route, {} where there is none."""
        try:
            answer = await self._fetch("GET", path, within_s=within_s)
        except BackendError:
            return {}
        found = answer.json if answer.ok else None
        return found if isinstance(found, dict) else {}

    async def _scrape(self, wanted: Collection[str], path: str = "") -> dict[str, Series]:
        """The engine's own series of the wanted names on /metrics. Raises BackendError."""
        answer = await self._fetch("GET", path or self.metrics_path, pool=self._metrics)
        if not answer.ok:
            raise BackendError(self._refused(answer))
        told = parse(self._page(answer.body), wanted)
        found = {name: once(own(series, self.models)) for name, series in told.items()}
        return {name: series for name, series in found.items() if series}

    def _page(self, body: bytes) -> bytes:
        """The metrics page under the names that the adapter knows."""
        return body

    def _found_priority(self, meaning: Priority | None) -> None:
        """The engine tells what a body's priority means to it; what the operator says counts more."""
        if not self._priority_told:
            self.capabilities = replace(self.capabilities, priority=meaning)

    async def _get(self, path: str) -> Answer:
        return await self._fetch("GET", path)

    async def _post(self, path: str, body: JsonObject) -> Answer:
        headers = ((b"content-type", b"application/json"), (b"x-request-id", TRIAL_ID.encode()))
        return await self._fetch("POST", path, headers, orjson.dumps(body), within_s=TRIAL_MAX_S)

    async def _fetch(
        self,
        method: str,
        path: str,
        headers: Headers = (),
        body: bytes = b"",
        *,
        within_s: float | None = None,
        pool: Pool | None = None,
    ) -> Answer:
        bound_s = self._sample_s if within_s is None else within_s
        try:
            status, fields, said = await (pool or self._pool).fetch(
                method.encode(), path.encode(), headers, body, timeout_s=bound_s
            )
        except BackendError:
            raise
        except Exception as error:
            raise BackendError(
                f"engine {self.name}: {method} {path} failed: {type(error).__name__}: {error}"
            ) from error
        return Answer(path, status, fields, said, method)

    def _refused(self, answer: Answer) -> str:
        what = f"engine {self.name}: {answer.method} {answer.path} answered {answer.status}"
        if answer.status in {401, 403}:  # what it says may quote the key
            return f"{what}; {self._key_remedy}"
        said = read_error(answer.body, answer.status).message
        return f"{what}: {said}" if said else what
