"""Text Generation Inference: its own dialect, one model, and a KV budget of reserved tokens.

Use of the budget is `tgi_batch_current_max_tokens / tgi_batch_max_total_tokens`: prompt plus max_new_tokens of all in
the batch, reserved, so it never preempts. Versions before October 2024 have no maximum, and then the use is unknown. A
gauge that was never set is absent from the page; that means zero only while nothing at all has run since the start,
which the request counters show. Its token histograms move when a request ends, too late to show progress, so no
generation counter is given. The model is in /info; a server that has no such page may still list it under /v1/models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from backends.base import Capabilities, Measured, ModelCard, Probe, Signal
from backends.dialects.payload import JsonObject, count, text
from backends.exposition import Series
from backends.openai_compatible import OpenAICompatible
from backends.series import fullest, measured, total

_RUNNING = "tgi_batch_current_size"
_WAITING = "tgi_queue_size"
_RESERVED = "tgi_batch_current_max_tokens"
_BUDGET = "tgi_batch_max_total_tokens"
_WORK_DONE = ("tgi_request_count", "tgi_batch_inference_count", "tgi_request_success")
METRICS = (_RUNNING, _WAITING, _RESERVED, _BUDGET, *_WORK_DONE)

_ROUTES = frozenset(
    {
        "/",
        "/generate",
        "/generate_stream",
        "/tokenize",
        "/chat_tokenize",
        "/info",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
    }
)


class Tgi(OpenAICompatible):
    """See the module header."""

    kind: str = "tgi"
    understands: ClassVar[Capabilities] = Capabilities(include_usage=True)

    _seats: Measured | None = None

    def speaks(self, path: str) -> bool:
        """TGI's routes are few and old, so they are listed."""
        return path in _ROUTES

    async def _measure(self) -> dict[Signal, Measured]:
        found = await self._scrape(METRICS)
        if _BUDGET in found and not any(value for name in _WORK_DONE for _, value in found.get(name, [])):
            for name in (_RUNNING, _WAITING, _RESERVED):
                found.setdefault(name, [({}, 0.0)])
        values = {
            signal: total(found[name], name)
            for signal, name in ((Signal.RUNNING, _RUNNING), (Signal.WAITING, _WAITING))
            if name in found
        }
        if _BUDGET in found:
            values.update(_budget(found))
        if self._seats is not None:
            values[Signal.SEATS] = self._seats
        return values

    async def _probe(self) -> Probe:
        health = await self._get("/health")
        if not health.ok:
            return Probe(ready=False, detail=self._refused(health))
        return self._ready(*await self._known_facts())

    async def _ask_facts(self) -> tuple[tuple[ModelCard, ...], str]:
        info = await self._ask_object("/info")
        if not text(info.get("model_id")):
            return await self._model_cards(), text(info.get("version"))
        self._seats = _seats(info)
        return (_card(info),), text(info.get("version"))

    async def _ask_models(self, _cards: tuple[ModelCard, ...], _version: str) -> tuple[tuple[ModelCard, ...], str]:
        return await self._ask_facts()

    def _trials(self, _model: str) -> tuple[tuple[str, JsonObject], ...]:
        return (("/generate", {"inputs": "1", "parameters": {"max_new_tokens": 1}}),)


def _budget(found: Mapping[str, Series]) -> dict[Signal, Measured]:
    budget = total(found[_BUDGET], _BUDGET)
    if not budget.value:
        return {Signal.KV_CAPACITY_TOKENS: Measured(None, _BUDGET)}
    values = {Signal.KV_CAPACITY_TOKENS: budget}
    if _RESERVED in found:
        reserved = total(found[_RESERVED], _RESERVED).value
        fraction = math.nan if reserved is None else reserved / budget.value
        values[Signal.KV_USED_FRACTION] = fullest([({}, fraction)], f"{_RESERVED}/{_BUDGET}")
    return values


def _seats(info: Mapping[str, object]) -> Measured | None:
    """Requests held at once: the batch's bound where it is published, else the router's, past which it answers 429."""
    for key in ("max_batch_size", "max_concurrent_requests"):
        if seats := count(info.get(key)):
            return measured(seats, f"/info {key}")
    return None


def _card(info: Mapping[str, object]) -> ModelCard:
    """TGI has no model list; this entry says in OpenAI's form what /info says in its own."""
    context_tokens = count(info.get("max_total_tokens")) or None
    model = text(info.get("model_id"))
    raw: dict[str, object] = {"id": model, "object": "model", "created": 0, "owned_by": "tgi"}
    if context_tokens:
        raw["max_model_len"] = context_tokens
    return ModelCard(model, raw, context_tokens)
