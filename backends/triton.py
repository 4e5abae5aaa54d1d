"""Triton with the TensorRT-LLM backend, behind its OpenAI-compatible frontend.

The frontend shows Triton's metrics on its own /metrics; where Triton's own port is used instead (8002), that is the engine's
`metrics_url`. One metric holds many numbers, told apart by a label. `scheduled` requests run, `waiting` ones wait (absent in
older versions, then unknown), `max` is what may be active at once. The fraction of KV in use is newer than used and max
blocks, which give it too. Series bear the backend's model name (`tensorrt_llm`), not the one that is served, so all count.
Triton with the vLLM backend shows vLLM's own metrics, and is spoken to as vLLM.

After the metrics page in NVIDIA's documentation of tensorrtllm_backend; never seen running here.
"""

from __future__ import annotations

from typing import ClassVar

from backends.base import Capabilities, Measured, Probe, Signal
from backends.exposition import Series
from backends.openai_compatible import NO_SUCH_ROUTE, OpenAICompatible
from backends.series import fullest, total
from backends.trtllm import blocks_of

_REQUESTS = "nv_trt_llm_request_metrics"
_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
METRICS = (_REQUESTS, _BLOCKS)
_HEALTH = ("/health/ready", "/v2/health/ready")


class Triton(OpenAICompatible):
    """See the module header."""

    kind: str = "triton"
    understands: ClassVar[Capabilities] = Capabilities(include_usage=True)

    async def _measure(self) -> dict[Signal, Measured]:
        found = await self._scrape(METRICS)
        requests, blocks = found.get(_REQUESTS, []), found.get(_BLOCKS, [])
        kinds = ((Signal.RUNNING, "scheduled"), (Signal.WAITING, "waiting"), (Signal.SEATS, "max"))
        values = {
            signal: total(series, f"{_REQUESTS}{{{kind}}}")
            for signal, kind in kinds
            if (series := _of(requests, "request_type", kind))
        }
        fractions, used, most = (_of(blocks, "kv_cache_block_type", kind) for kind in ("fraction", "used", "max"))
        if not fractions and used and len(used) == len(most):
            fractions = [({}, held / size if size else -1.0) for (_, held), (_, size) in zip(used, most, strict=True)]
        if fractions:
            values[Signal.KV_USED_FRACTION] = fullest(fractions, _BLOCKS)
        values.update(blocks_of(most, _of(blocks, "kv_cache_block_type", "tokens_per"), _BLOCKS))
        return values

    async def _probe(self) -> Probe:
        for path in _HEALTH:
            health = await self._get(path)
            if health.status not in NO_SUCH_ROUTE:
                if not health.ok:
                    return Probe(ready=False, detail=self._refused(health))
                break
        return self._ready(*await self._known_facts())


def _of(series: Series, label: str, value: str) -> Series:
    return [item for item in series if item[0].get(label) == value]
