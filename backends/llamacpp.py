"""llama.cpp's server: a fixed number of slots, each with its part of the context.

There is no gauge of KV use, so it is what the busy slots hold (prompt and generated tokens in /slots) of what all slots
could (slots x context of one). A server whose slots share one context (unified KV) looks larger than it is by that
reckoning; nothing on the wire tells. Its token counter moves when a request ends; what busy slots have generated so
far is added, so that the sum shows progress. /metrics and /slots can each be switched off (501): then their signals
are absent, and only both missing is an error. /health is 503 while the model loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from backends.base import BackendError, Capabilities, Measured, ModelCard, Signal
from backends.dialects.payload import child, count, text
from backends.exposition import Series
from backends.openai_compatible import OpenAICompatible
from backends.series import fullest, measured, total

_RUNNING = "llamacpp:requests_processing"
_WAITING = "llamacpp:requests_deferred"
_GENERATED = "llamacpp:tokens_predicted_total"
_PROMPTS = "llamacpp:prompt_tokens_total"
METRICS = (_RUNNING, _WAITING, _GENERATED, _PROMPTS)
_SLOTS = "/slots"

Slots = Sequence[Mapping[str, object]]


class LlamaCpp(OpenAICompatible):
    """See the module header."""

    kind: str = "llamacpp"
    # It understands include_usage too, but then moves `timings`, which clients read, into the event that we would strip;
    # its timings tell the counts as well.
    understands: ClassVar[Capabilities] = Capabilities()

    async def _measure(self) -> dict[Signal, Measured]:
        problem: BackendError | None = None
        found: Mapping[str, Series] = {}
        try:
            found = await self._scrape(METRICS)
        except BackendError as error:
            problem = error
        slots = await self._slots()
        if problem is not None and not slots:
            raise problem
        values = {
            signal: total(found[name], name)
            for signal, name in ((Signal.WAITING, _WAITING), (Signal.PROMPT_TOKENS_TOTAL, _PROMPTS))
            if name in found
        }
        busy = [slot for slot in slots if slot.get("is_processing") is True]
        if _RUNNING in found:
            values[Signal.RUNNING] = total(found[_RUNNING], _RUNNING)
        elif slots:
            values[Signal.RUNNING] = measured(len(busy), _SLOTS)
        if slots:
            values.update(_slot_signals(slots, busy))
        if _GENERATED in found:
            running: Series = [({}, float(_generated(slot))) for slot in busy]
            values[Signal.GENERATION_TOKENS_TOTAL] = total([*found[_GENERATED], *running], _GENERATED)
        return values

    async def _ask_facts(self) -> tuple[tuple[ModelCard, ...], str]:
        props = await self._ask_object("/props")
        return await self._model_cards(), text(props.get("build_info"))

    def _context_tokens(self, card: Mapping[str, object]) -> int | None:
        return count(child(card, "meta").get("n_ctx")) or super()._context_tokens(card)

    async def _slots(self) -> Slots:
        try:
            listed = (await self._get(_SLOTS)).json
        except BackendError:
            return ()
        return [slot for slot in listed if isinstance(slot, dict)] if isinstance(listed, list) else ()


def _slot_signals(slots: Slots, busy: Slots) -> dict[Signal, Measured]:
    values = {Signal.SEATS: measured(len(slots), _SLOTS)}
    contexts = [count(slot.get("n_ctx")) for slot in slots]
    if not all(contexts):
        return values
    capacity = sum(tokens or 0 for tokens in contexts)
    values[Signal.KV_CAPACITY_TOKENS] = measured(capacity, _SLOTS)
    prompts = [count(slot.get("n_prompt_tokens")) for slot in busy]
    if None not in prompts:
        used = sum(tokens or 0 for tokens in prompts) + sum(map(_generated, busy))
        values[Signal.KV_USED_FRACTION] = fullest([({}, min(used / capacity, 1.0))], _SLOTS)
    return values


def _generated(slot: Mapping[str, object]) -> int:
    """Tokens that a slot has generated for its request; a list of one in newer versions, an object in older ones."""
    progress = slot.get("next_token")
    first = progress[0] if isinstance(progress, list) and progress else progress
    return (count(first.get("n_decoded")) or 0) if isinstance(first, dict) else 0
