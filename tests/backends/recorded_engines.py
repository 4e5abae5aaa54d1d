"""Engines for adapter tests: a pool that answers from recorded pages, and the pages of each kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from backends.base import BackendError, Call, EngineAddress, EngineRequest, Headers, Receiver
from backends.detect import make_backend
from backends.openai_compatible import OpenAICompatible

DATA = Path(__file__).parent.parent / "data" / "engines"
KEY = "sk-engine-secret"
NOT_FOUND = (404, b'{"detail":"Not Found"}')

Page = bytes | str | tuple[int, bytes] | Exception | None
"""A body with status 200, a status and body, an exception to raise, or None: never answered."""


def recorded(name: str) -> bytes:
    return (DATA / name).read_bytes()


class StartedCall:
    """What the fake pool's `call` returns."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...


@dataclass
class RecordedPool:
    """Answers `fetch` from `pages`; a path without one is 404, or what `otherwise` says."""

    pages: Mapping[str, Page] = field(default_factory=dict)
    otherwise: Page = NOT_FOUND
    server: bytes = b"uvicorn"
    asked: list[str] = field(default_factory=list)
    called: list[EngineRequest] = field(default_factory=list)
    closed: bool = False

    def call(self, request: EngineRequest, receiver: Receiver) -> Call:
        self.called.append(request)
        return StartedCall()

    async def fetch(
        self,
        method: bytes,
        target: bytes,
        headers: Headers = (),
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
    ) -> tuple[int, Headers, bytes]:
        path = target.decode()
        self.asked.append(path)
        page = self.pages.get(path, self.otherwise)
        if page is None:
            await asyncio.Event().wait()
        if isinstance(page, Exception):
            raise page
        if isinstance(page, str):
            page = page.encode()
        assert page is not None
        status, answer = (200, page) if isinstance(page, bytes) else page
        return status, [(b"server", self.server)], answer

    async def close(self) -> None:
        self.closed = True


def adapter(
    kind: str,
    pages: Mapping[str, Page],
    *,
    otherwise: Page = NOT_FOUND,
    sample_s: float = 5.0,
    priority: bool | None = None,
    monotonic: Callable[[], float] = lambda: 42.0,
) -> tuple[OpenAICompatible, RecordedPool]:
    pool = RecordedPool(pages, otherwise)
    address = EngineAddress("e1", "http://engine.invalid:8000", KEY, sample_s=sample_s)
    return make_backend(kind, address, pool, monotonic=monotonic, priority_honoured=priority), pool


REFUSED = BackendError("engine e1: connect refused")
TGI_INFO = {
    "model_id": "org/model",
    "model_pipeline_tag": "text-generation",
    "max_concurrent_requests": 128,
    "max_input_tokens": 4095,
    "max_total_tokens": 4096,
    "version": "3.3.6",
    "router": "text-generation-router",
}
SGLANG_INFO = {"model_path": "org/model", "tp_size": 2, "max_total_num_tokens": 1000, "max_running_requests": 48}
SGLANG_MODELS = {"object": "list", "data": [{"id": "org/model", "owned_by": "sglang", "max_model_len": 131072}]}
GENERIC_MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "someone"}]}

TRTLLM_MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "tensorrt_llm"}]}
TRTLLM_METRICS = """\
# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 5.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 3.0
trtllm_num_paused_requests{engine_type="trtllm",model_name="m"} 1.0
trtllm_max_num_active_requests{engine_type="trtllm",model_name="m"} 64.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.62
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 1000.0
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m"} 32.0
trtllm_generation_tokens_total{engine_type="trtllm",model_name="m"} 4711.0
"""
TRITON_MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "Triton Inference Server"}]}
TRITON_METRICS = """\
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 7
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 9
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.4
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 2500
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 3739
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 6239
"""

ENGINES: dict[str, dict[str, Page]] = {
    "vllm": {
        "/health": b"",
        "/version": b'{"version":"0.32.0"}',
        "/v1/models": recorded("vllm_models.json"),
        "/metrics": recorded("vllm_metrics.txt"),
    },
    "tgi": {"/health": b"", "/info": json.dumps(TGI_INFO), "/metrics": recorded("tgi_metrics.txt")},
    "sglang": {
        "/health": b"",
        "/v1/models": json.dumps(SGLANG_MODELS),
        "/get_server_info": json.dumps({**SGLANG_INFO, "version": "0.5.4"}),
        "/metrics": recorded("sglang_metrics.txt"),
    },
    "llamacpp": {
        "/health": b'{"status":"ok"}',
        "/v1/models": recorded("llamacpp_models.json"),
        "/props": recorded("llamacpp_props.json"),
        "/slots": recorded("llamacpp_slots_busy.json"),
        "/metrics": recorded("llamacpp_metrics.txt"),
    },
    "trtllm": {
        "/health": b"",
        "/version": b'{"version":"1.1.0"}',
        "/v1/models": json.dumps(TRTLLM_MODELS),
        "/metrics": TRTLLM_METRICS.encode(),
    },
    "triton": {"/health/ready": b"", "/v1/models": json.dumps(TRITON_MODELS), "/metrics": TRITON_METRICS.encode()},
    "openai": {"/v1/models": json.dumps(GENERIC_MODELS)},
}
"""The pages of one engine of each kind under load, by path."""
