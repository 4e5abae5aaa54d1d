"""TensorRT-LLM's own server (trtllm-serve): Prometheus text beside a JSON page of the same purpose.

Its /metrics is a list of iteration statistics as JSON, emptied by whoever reads it; the text is at /prometheus/metrics (and
at /metrics when another server, such as Dynamo, passes it on: `metrics_url`). Token counters there move when a request ends,
too late to show progress, so no generation counter is given. Paused requests have lost their KV and wait like the others.

After NVIDIA/TensorRT-LLM `tensorrt_llm/metrics/collector.py`; never seen running here.
"""

from __future__ import annotations

from typing import ClassVar

from backends.base import BackendError, Capabilities, Measured, Signal
from backends.exposition import Series
from backends.openai_compatible import OpenAICompatible
from backends.series import fullest, total

_RUNNING = "trtllm_num_requests_running"
_WAITING = "trtllm_num_requests_waiting"
_PAUSED = "trtllm_num_paused_requests"
_FRACTION = "trtllm_kv_cache_utilization"
_BLOCKS = "trtllm_kv_cache_max_blocks"
_PER_BLOCK = "trtllm_kv_cache_tokens_per_block"
_SEATS = "trtllm_max_num_active_requests"
_STARTED = "process_start_time_seconds"
METRICS = (_RUNNING, _WAITING, _PAUSED, _FRACTION, _BLOCKS, _PER_BLOCK, _SEATS, _STARTED)


class TrtLlm(OpenAICompatible):
    """See the module header."""

    kind: str = "trtllm"
    understands: ClassVar[Capabilities] = Capabilities(include_usage=True)
    metrics_path: ClassVar[str] = "/prometheus/metrics"

    async def _measure(self) -> dict[Signal, Measured]:
        if self._metrics is not self._pool:
            found = await self._scrape(METRICS, "/metrics")
        else:
            try:
                found = await self._scrape(METRICS)
            except BackendError:
                found = await self._scrape(METRICS, "/metrics")
        values = {
            signal: total(found[name], name)
            for signal, name in ((Signal.RUNNING, _RUNNING), (Signal.SEATS, _SEATS))
            if name in found
        }
        if _WAITING in found:
            values[Signal.WAITING] = total([*found[_WAITING], *found.get(_PAUSED, [])], _WAITING)
        if _FRACTION in found:
            values[Signal.KV_USED_FRACTION] = fullest(found[_FRACTION], _FRACTION)
        values.update(blocks_of(found.get(_BLOCKS, []), found.get(_PER_BLOCK, []), _BLOCKS))
        if _STARTED in found:
            values[Signal.START_TIME_S] = total(found[_STARTED][:1], _STARTED)
        return values


def blocks_of(blocks: Series, per_block: Series, source: str) -> dict[Signal, Measured]:
    """KV capacity from a number of blocks and the tokens in each."""
    tokens = total(per_block[:1], source).value if per_block else None
    if not tokens:
        return {}
    values = {Signal.KV_BLOCK_TOKENS: Measured(tokens, source)}
    if blocks:
        count = total(blocks, source).value
        values[Signal.KV_CAPACITY_TOKENS] = Measured(count * tokens if count else None, source)
    return values
