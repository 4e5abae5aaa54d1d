"""SGLang (with --enable-metrics): its names, its ranks, and a priority that runs the other way.

`token_usage` is a fraction. Tensor and pipeline ranks repeat their data-parallel rank's values. Its
`generation_tokens_total` moves when a request ends, so a long answer would look frozen; the decode count that moves at
every step (`realtime_tokens_total`) is read instead where the version has it, and otherwise there is no such signal.
Higher priority numbers go first here unless it was started with --schedule-low-priority-values-first, and only with
--enable-priority-scheduling; its info page tells both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from backends.base import BackendError, Capabilities, Measured, ModelCard, Priority, Signal
from backends.dialects.payload import count, text
from backends.exposition import Series
from backends.openai_compatible import OpenAICompatible
from backends.series import fullest, measured, total, without_copies

_FRACTION = "sglang:token_usage"
_STEPS = "sglang:realtime_tokens_total"
_STARTED = "process_start_time_seconds"
_PAGE = "sglang:page_size"
_SUMS = (
    (Signal.RUNNING, "sglang:num_running_reqs"),
    (Signal.WAITING, "sglang:num_queue_reqs"),
    (Signal.KV_CAPACITY_TOKENS, "sglang:max_total_num_tokens"),
    (Signal.PREEMPTIONS_TOTAL, "sglang:num_retracted_requests_total"),
    (Signal.PROMPT_TOKENS_TOTAL, "sglang:prompt_tokens_total"),
)
METRICS = (_FRACTION, _STEPS, _STARTED, _PAGE, *(name for _, name in _SUMS))
_COPIES = frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "pid"})
_INFO_ROUTES = ("/get_server_info", "/server_info")


class SGLang(OpenAICompatible):
    """See the module header. Without --enable-metrics there is no /metrics: samples hold what /get_server_info said."""

    kind: str = "sglang"
    understands: ClassVar[Capabilities] = Capabilities(include_usage=True)
    priority: ClassVar[Priority | None] = Priority.HIGHER_FIRST

    _constants: Mapping[Signal, Measured] = {}

    async def _measure(self) -> dict[Signal, Measured]:
        try:
            found = await self._scrape(METRICS)
        except BackendError:
            if not self._constants:
                raise
            found = {}
        found = {name: without_copies(series, _COPIES) for name, series in found.items()}
        values = dict(self._constants)
        values.update((signal, total(found[name], name)) for signal, name in _SUMS if name in found)
        if _FRACTION in found:
            values[Signal.KV_USED_FRACTION] = fullest(found[_FRACTION], _FRACTION)
        decoded: Series = [item for item in found.get(_STEPS, []) if item[0].get("mode") == "decode"]
        if decoded:
            values[Signal.GENERATION_TOKENS_TOTAL] = total(decoded, _STEPS)
        for signal, name in ((Signal.KV_BLOCK_TOKENS, _PAGE), (Signal.START_TIME_S, _STARTED)):
            if name in found:
                values[signal] = total(found[name][:1], name)
        return values

    async def _ask_facts(self) -> tuple[tuple[ModelCard, ...], str]:
        cards, version = await super()._ask_facts()
        for path in _INFO_ROUTES:
            info = await self._ask_object(path)
            if info:
                self._constants = _constants(info, path)
                self._found_priority(_priority(info))
                return cards, text(info.get("version")) or version
        return cards, version


def _priority(info: Mapping[str, object]) -> Priority | None:
    """What the server was started with says what a body's priority means, and whether it means anything."""
    if info.get("enable_priority_scheduling") is not True:
        return None
    return Priority.LOWER_FIRST if info.get("schedule_low_priority_values_first") is True else Priority.HIGHER_FIRST


def _constants(info: Mapping[str, object], path: str) -> dict[Signal, Measured]:
    """What the server was started with, for versions whose page does not tell."""
    keys = (
        (Signal.KV_CAPACITY_TOKENS, "max_total_num_tokens"),
        (Signal.SEATS, "max_running_requests"),
        (Signal.KV_BLOCK_TOKENS, "page_size"),
    )
    return {signal: measured(value, f"{path} {key}") for signal, key in keys if (value := count(info.get(key)))}
