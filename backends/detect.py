"""Which kind of engine answers at an address, and the registry of kinds.

The metrics page decides where there is one, since nothing else prefixes its names the way an engine does; a generic
proxy or a fake that answers every route with 200 cannot be mistaken for one. Then the owner in the model list, then
each engine's own page, checked for what only that engine says. Whoever answers but fits nothing is spoken to as a
plain OpenAI server. An engine that does not answer, or is still loading, is not known yet: None, and the caller asks
again later.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from backends.base import EngineAddress, Headers
from backends.dialects.payload import JsonObject, load_object
from backends.llamacpp import LlamaCpp
from backends.openai_compatible import OpenAICompatible, Pool
from backends.sglang import SGLang
from backends.tgi import Tgi
from backends.triton import Triton
from backends.trtllm import TrtLlm
from backends.vllm import Vllm

BACKENDS: dict[str, type[OpenAICompatible]] = {
    adapter.kind: adapter for adapter in (Vllm, Tgi, SGLang, LlamaCpp, TrtLlm, Triton, OpenAICompatible)
}
"""Kind -> adapter; the kinds an operator may name in the settings."""

ASK_S = 5.0

_METRIC = re.compile(
    rb"^(?:# (?:HELP|TYPE) )?(vllm:|ray_vllm|tgi_|sglang:|llamacpp:|trtllm_|nv_trt_llm_)", re.MULTILINE
)
_KIND_OF_PREFIX = {
    b"vllm:": "vllm",
    b"ray_vllm": "vllm",
    b"tgi_": "tgi",
    b"sglang:": "sglang",
    b"llamacpp:": "llamacpp",
    b"trtllm_": "trtllm",
    b"nv_trt_llm_": "triton",
}
_OWNERS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llamacpp",
    "tensorrt_llm": "trtllm",
    "triton inference server": "triton",
}
_PAGES: tuple[tuple[str, bytes, tuple[str, ...]], ...] = (
    ("tgi", b"/info", ("model_id", "max_concurrent_requests")),
    ("sglang", b"/get_server_info", ("model_path", "tp_size")),
    ("sglang", b"/get_model_info", ("model_path", "is_generation")),
    ("llamacpp", b"/props", ("default_generation_settings", "total_slots")),
)


async def detect(pool: Pool, *, ask_s: float = ASK_S, metrics_pool: Pool | None = None) -> str | None:
    """The kind of engine behind the pool, None while that cannot be told. Raises nothing but cancellation.

    ask_s          bound on each of at most seven requests; a silent address costs two
    metrics_pool   where /metrics is, if elsewhere
    """
    metrics = await _ask(metrics_pool or pool, b"/metrics", ask_s)
    if metrics is not None and metrics[0] == 200 and (found := _METRIC.search(metrics[2])):
        return _KIND_OF_PREFIX[found[1]]
    models = await _ask(pool, b"/v1/models", ask_s)
    if models is None and metrics is None:
        return None
    for answer in (models, metrics):
        if answer is not None and (b"server", b"llama.cpp") in answer[1]:
            return "llamacpp"
    owner = _owner(models)
    if owner:
        return owner
    for kind, target, fields in _PAGES:
        answer = await _ask(pool, target, ask_s)
        page = _object(answer)
        if all(field in page for field in fields):
            return kind
    loading = models is None or models[0] >= 500
    return None if loading else OpenAICompatible.kind


def make_backend(
    kind: str,
    address: EngineAddress,
    pool: Pool,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    priority_honoured: bool | None = None,
    metrics_pool: Pool | None = None,
) -> OpenAICompatible:
    """The adapter of that kind; it owns the pools from now on. Raises ValueError for a kind that nobody has."""
    adapter = BACKENDS.get(kind)
    if adapter is None:
        raise ValueError(f"engine {address.name}: kind {kind!r}: expected auto or one of {', '.join(BACKENDS)}")
    return adapter(address, pool, monotonic=monotonic, priority_honoured=priority_honoured, metrics=metrics_pool)


async def _ask(pool: Pool, target: bytes, ask_s: float) -> tuple[int, Headers, bytes] | None:
    try:
        return await pool.fetch(b"GET", target, timeout_s=ask_s)
    except Exception:
        return None


def _object(answer: tuple[int, Headers, bytes] | None) -> JsonObject:
    return (load_object(answer[2]) or {}) if answer is not None and answer[0] == 200 else {}


def _owner(models: tuple[int, Headers, bytes] | None) -> str:
    """The kind that the model list's entries name as their owner, "" when it names none we know."""
    listed = _object(models).get("data")
    entries = listed if isinstance(listed, list) else []
    owners = {str(entry.get("owned_by")).lower() for entry in entries if isinstance(entry, dict)}
    return next((kind for owner, kind in _OWNERS.items() if owner in owners), "")
