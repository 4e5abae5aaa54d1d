"""TensorRT-LLM behind its own server and behind Triton: each number from its place, and metrics on another port."""

from __future__ import annotations

import re

import pytest

from backends.base import BackendError, EngineAddress, Signal
from backends.detect import detect, make_backend
from tests.backends.recorded_engines import ENGINES, TRITON_METRICS, TRTLLM_METRICS, RecordedPool, adapter

ITERATIONS = b'[{"iter":1,"iterLatencyMS":16.5,"kvCacheStats":{}}]'


async def test_trtllm_says_all_of_it() -> None:
    backend, _ = adapter("trtllm", ENGINES["trtllm"])

    sample = await backend.sample()

    assert {signal.value: sample.value(signal) for signal in sample.values} == {
        "running": 5,
        "waiting": 4,
        "seats": 64,
        "kv_used_fraction": 0.62,
        "kv_block_tokens": 32,
        "kv_capacity_tokens": 32_000,
    }


async def test_trtllm_s_json_page_is_left_alone_where_the_text_is_elsewhere() -> None:
    backend, pool = adapter("trtllm", {"/metrics": ITERATIONS, "/prometheus/metrics": TRTLLM_METRICS})

    sample = await backend.sample()

    assert (sample.value(Signal.RUNNING), pool.asked) == (5, ["/prometheus/metrics"])


async def test_trtllm_without_a_text_page_says_nothing() -> None:
    backend, _ = adapter("trtllm", {"/metrics": ITERATIONS})

    assert (await backend.sample()).values == {}


async def test_triton_says_all_of_it() -> None:
    backend, _ = adapter("triton", ENGINES["triton"])

    sample = await backend.sample()

    assert {signal.value: sample.value(signal) for signal in sample.values} == {
        "running": 7,
        "waiting": 2,
        "seats": 512,
        "kv_used_fraction": 0.4,
        "kv_block_tokens": 64,
        "kv_capacity_tokens": 6239 * 64,
    }


async def test_an_older_triton_gives_the_fraction_by_its_blocks_and_no_queue() -> None:
    page = re.sub(r"(?m)^.*(fraction|waiting).*\n", "", TRITON_METRICS)
    backend, _ = adapter("triton", {"/metrics": page})

    sample = await backend.sample()

    assert sample.value(Signal.KV_USED_FRACTION) == 2500 / 6239
    assert Signal.WAITING not in sample.values


async def test_metrics_on_a_port_of_their_own_are_read_there_and_recognised_by() -> None:
    engine = RecordedPool({"/health/ready": b"", "/v1/models": b'{"data":[{"id":"m"}]}'})
    metrics = RecordedPool({"/metrics": TRITON_METRICS})

    kind = await detect(engine, metrics_pool=metrics)
    backend = make_backend(kind or "", EngineAddress("e1", "http://e:9000"), engine, metrics_pool=metrics)
    ready = (await backend.probe()).ready
    running = (await backend.sample()).value(Signal.RUNNING)
    await backend.close()

    assert (kind, ready, running) == ("triton", True, 7)
    assert "/metrics" not in engine.asked
    assert (engine.closed, metrics.closed) == (True, True)


async def test_a_metrics_port_that_is_away_costs_the_sample_only() -> None:
    engine = RecordedPool(ENGINES["vllm"])
    away = RecordedPool(otherwise=BackendError("engine e1: connect refused"))
    backend = make_backend("vllm", EngineAddress("e1", "http://e:8000"), engine, metrics_pool=away)

    assert (await backend.probe()).ready
    with pytest.raises(BackendError, match="e1"):
        await backend.sample()
