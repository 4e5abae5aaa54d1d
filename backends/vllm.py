"""vLLM, from 0.6 (V0 engine) to 0.32: metrics under the names of each version, priority where it was switched on.

`kv_cache_usage_perc` is a fraction of 0 to 1 despite its name. Versions 0.9 and 0.10 show it beside the older
`gpu_cache_usage_perc`, which may be stuck at 0, so the newer name wins wherever it is present. Neither name: unknown.
/health stays 200 while the engine is paused, draining or frozen; readiness here means only that it does not say
otherwise, and progress is judged by what moves (`gateway.control.health`). Seats (max_num_seqs) and the scheduling policy,
which decides whether a priority means anything, are on no page but /server_info, and that is there in its developer's mode
only; so is /is_paused. /load counts what the web server holds, once it was started with --enable-server-load-tracking; it
says 0 without, so that only a count above 0 proves it. Under Ray the same metrics stand under `ray_vllm`, on Ray's own page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from backends.base import Capabilities, Measured, ModelCard, Priority, Probe, Signal
from backends.dialects.payload import child, count
from backends.exposition import Series
from backends.openai_compatible import OpenAICompatible
from backends.series import fullest, label_number, measured, total

_FRACTIONS = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_CACHE = "vllm:cache_config_info"
_SUMS: tuple[tuple[Signal, tuple[str, ...]], ...] = (
    (Signal.RUNNING, ("vllm:num_requests_running",)),
    (Signal.PREEMPTIONS_TOTAL, ("vllm:num_preemptions_total",)),
    (Signal.REJECTED_TOTAL, ("vllm:admission_rejections_total",)),
    (Signal.PROMPT_TOKENS_TOTAL, ("vllm:prompt_tokens_total",)),
    (Signal.GENERATION_TOKENS_TOTAL, ("vllm:generation_tokens_total",)),
    (Signal.PREFIX_QUERIES_TOTAL, ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")),
    (Signal.PREFIX_HITS_TOTAL, ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")),
)
_WAITING = "vllm:num_requests_waiting"
_SWAPPED = "vllm:num_requests_swapped"
_STARTED = "process_start_time_seconds"
_SLEEP = "vllm:engine_sleep_state"
INFO_S = 1.0
METRICS = (*_FRACTIONS, _CACHE, _WAITING, _SWAPPED, _STARTED, _SLEEP, *(name for _, names in _SUMS for name in names))


class Vllm(OpenAICompatible):
    """See the module header."""

    kind: str = "vllm"
    understands: ClassVar[Capabilities] = Capabilities(include_usage=True, return_token_ids=True)
    priority: ClassVar[Priority | None] = Priority.LOWER_FIRST

    _paused = False
    _scheduler: Mapping[str, object] | None = None
    _told: dict[Signal, Measured]

    async def _measure(self) -> dict[Signal, Measured]:
        found = await self._scrape(METRICS)
        values = {
            signal: total(found[name], name)
            for signal, names in _SUMS
            for name in [next((name for name in names if name in found), "")]
            if name
        }
        if _WAITING in found:  # the V0 engine counts evicted requests apart; they wait like the others
            values[Signal.WAITING] = total([*found[_WAITING], *found.get(_SWAPPED, [])], _WAITING)
        name = next((name for name in _FRACTIONS if name in found), "")
        if name:
            values[Signal.KV_USED_FRACTION] = fullest(found[name], name)
        if _STARTED in found:
            values[Signal.START_TIME_S] = total(found[_STARTED][:1], _STARTED)
        awake = [value for labels, value in found.get(_SLEEP, []) if labels.get("sleep_state") == "awake"]
        if awake:
            told = all(value in {0.0, 1.0} for value in awake)
            values[Signal.ASLEEP] = measured(1.0 - min(awake) if told else math.nan, _SLEEP)
        values.update(_cache_size(found.get(_CACHE, [])))
        values.update(self._told)
        return values

    def _page(self, body: bytes) -> bytes:
        return body.replace(b"ray_vllm_", b"vllm:").replace(b"ray_vllm:", b"vllm:") if b"ray_vllm" in body else body

    async def _probe(self) -> Probe:
        probe = await super()._probe()
        if probe.ready and self._paused:
            detail = f"engine {self.name}: it is paused; POST /resume to go on"
            return Probe(ready=False, models=probe.models, version=probe.version, detail=detail)
        return probe

    async def _ask_facts(self) -> tuple[tuple[ModelCard, ...], str]:
        facts = await super()._ask_facts()
        self._paused = (await self._ask_object("/is_paused")).get("is_paused") is True
        load = count((await self._ask_object("/load")).get("server_load"))
        if load or Signal.SERVER_LOAD in self._told:
            self._told[Signal.SERVER_LOAD] = measured(load or 0, "/load")
        if self._scheduler is None:
            # The first answer may take long, since all of the machine is looked at for it: then it is asked for again.
            info = await self._ask_object("/server_info?config_format=json", INFO_S)
            self._scheduler = _scheduler(info) or None
        if self._scheduler is not None:
            self._found_priority(Priority.LOWER_FIRST if self._scheduler.get("policy") == "priority" else None)
            if seats := count(self._scheduler.get("max_num_seqs")):
                self._told[Signal.SEATS] = measured(seats, "/server_info max_num_seqs")
        return facts

    def _forget(self) -> None:
        super()._forget()
        self._scheduler = None
        self._told = {}
        self._paused = False


def _scheduler(info: Mapping[str, object]) -> Mapping[str, object]:
    """The scheduler's part of what the engine was started with; {} where it does not tell."""
    config = child(info, "vllm_config")
    return child(config, "scheduler_config") if config else {}


def _cache_size(series: Series) -> dict[Signal, Measured]:
    """KV capacity over all data-parallel engines, and the block size, from the labels of one info metric.

    Older versions give blocks and their size only. Nothing readable (as before warm-up): no signal.
    """
    sizes: list[tuple[dict[str, str], float]] = []
    blocks: list[float] = []
    for labels, _ in series:
        block_tokens = label_number(labels, "block_size")
        tokens = label_number(labels, "kv_cache_size_tokens")
        count = label_number(labels, "num_gpu_blocks")
        if block_tokens is not None:
            blocks.append(block_tokens)
        if tokens is None and count is not None and block_tokens is not None:
            tokens = count * block_tokens
        if tokens is not None:
            sizes.append((labels, tokens or math.nan))  # no capacity at all is absurd
    values = {}
    if sizes and len(sizes) == len(series):
        values[Signal.KV_CAPACITY_TOKENS] = total(sizes, _CACHE)
    if blocks:
        values[Signal.KV_BLOCK_TOKENS] = total([({}, max(blocks) or math.nan)], _CACHE)
    return values
