"""What every adapter promises, whatever engine stands behind it: `backends.base.Backend`, over recorded pages."""

from __future__ import annotations

import asyncio
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Backend, BackendError, Capabilities, EngineRequest, Priority, Signal
from backends.detect import BACKENDS
from tests.backends.recorded_engines import ENGINES, KEY, REFUSED, Page, adapter

KINDS = sorted(BACKENDS)
MEASURING = sorted(set(KINDS) - {"openai"})
TAKES_NO_BYTES = EngineRequest(b"POST", b"/v1/chat/completions", (), b"{}")


def with_values(page: bytes, value: str) -> bytes:
    """The page with every sample's value replaced."""
    return re.sub(rb"(?m)^([^#\s].*) \S+$", rb"\1 " + value.encode(), page)


def test_every_adapter_has_its_recorded_engine() -> None:
    assert sorted(ENGINES) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_backend(kind: str) -> None:
    backend: Backend
    backend, _ = adapter(kind, ENGINES[kind])

    assert (backend.name, backend.kind, backend.speaks("/v1/chat/completions")) == ("e1", kind, True)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_serves_is_ready_with_its_models(kind: str) -> None:
    backend, _ = adapter(kind, ENGINES[kind])

    probe = await backend.probe()

    assert (probe.ready, probe.detail, len(probe.models)) == (True, "", 1)
    assert probe.models[0].raw["id"] == probe.models[0].id


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "broken",
    [
        dict.fromkeys(("/health", "/health/ready"), (503, b'{"error":{"message":"Loading model","code":503}}')),
        {"/v1/models": (401, b'{"error":"Unauthorized"}'), "/info": (401, b"")},
        {"/v1/models": b'{"data":[]}', "/info": b"{}"},
        {"/v1/models": b'{"data":[null,7,{"id":5}]}', "/info": b'{"model_id":null}'},
        {"/v1/models": b"<html>", "/info": b"<html>"},
        {"/v1/models": REFUSED, "/info": REFUSED},
        {path: OSError("reset") for path in ("/health", "/health/ready", "/v1/models", "/info")},
    ],
    ids="+".join,
)
async def test_an_engine_that_cannot_serve_is_not_ready_and_says_why(kind: str, broken: dict[str, Page]) -> None:
    backend, _ = adapter(kind, {**ENGINES[kind], **broken})

    probe = await backend.probe()

    assert probe.ready is False
    assert "e1" in probe.detail
    assert KEY not in probe.detail


@pytest.mark.parametrize("kind", KINDS)
async def test_a_silent_engine_is_given_up_after_its_bound(kind: str) -> None:
    backend, _ = adapter(kind, {}, otherwise=None, sample_s=0.01)

    probe = await backend.probe()

    assert (probe.ready, probe.detail) == (False, "engine e1 gave no answer within 0.01 s")


@pytest.mark.parametrize("kind", MEASURING)
async def test_an_engine_slower_than_its_bound_gives_no_sample(kind: str) -> None:
    backend, _ = adapter(kind, {}, otherwise=None, sample_s=0.01)

    with pytest.raises(BackendError, match=r"engine e1 gave no sample within 0\.01 s"):
        await asyncio.wait_for(backend.sample(), 5)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_probe_can_be_cancelled(kind: str) -> None:
    backend, _ = adapter(kind, {}, otherwise=None)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(backend.probe(), 0.001)


@pytest.mark.parametrize("kind", MEASURING)
async def test_a_sample_under_load_knows_what_runs_and_how_full_it_is(kind: str) -> None:
    backend, _ = adapter(kind, ENGINES[kind])
    await backend.probe()

    sample = await backend.sample()

    assert sample.taken_s == 42.0
    for signal in (Signal.RUNNING, Signal.WAITING, Signal.KV_USED_FRACTION, Signal.KV_CAPACITY_TOKENS):
        assert (sample.value(signal) or 0) > 0, signal
    assert all(measured.source for measured in sample.values.values())


async def test_a_server_of_no_known_kind_has_no_signals() -> None:
    backend, pool = adapter("openai", ENGINES["openai"])

    sample = await backend.sample()

    assert (sample.values, pool.asked) == ({}, [])


@pytest.mark.parametrize("kind", MEASURING)
@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf"])
async def test_an_absurd_value_is_unknown_and_not_zero(kind: str, value: str) -> None:
    page = ENGINES[kind]["/metrics"]
    assert isinstance(page, bytes)
    backend, _ = adapter(kind, {"/metrics": with_values(page, value)})

    sample = await backend.sample()

    told_by_labels = {Signal.KV_CAPACITY_TOKENS, Signal.KV_BLOCK_TOKENS} if kind == "vllm" else set()
    assert Signal.RUNNING in sample.values
    assert {signal for signal in sample.values if sample.value(signal) is not None} == told_by_labels


@pytest.mark.parametrize("kind", MEASURING)
async def test_what_the_page_lacks_is_absent(kind: str) -> None:
    backend, _ = adapter(kind, {"/metrics": b"# nothing here\n"})

    assert (await backend.sample()).values == {}


@pytest.mark.parametrize("kind", MEASURING)
@pytest.mark.parametrize("answer", [(500, b""), (404, b'{"detail":"Not Found"}'), OSError("reset"), REFUSED])
async def test_a_failed_sample_names_the_engine(kind: str, answer: Page) -> None:
    backend, _ = adapter(kind, {"/metrics": answer})

    with pytest.raises(BackendError, match="engine e1"):
        await backend.sample()


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.binary(max_size=40), st.integers(200, 599))
async def test_no_answer_makes_it_raise_anything_else(kind: str, junk: bytes, status: int) -> None:
    backend, _ = adapter(kind, {"/health": b""}, otherwise=(status, junk))

    probe = await backend.probe()
    try:
        values = (await backend.sample()).values
    except BackendError:
        values = {}

    assert probe.ready is False
    assert not any(math.isnan(measured.value or 0) for measured in values.values())


COMPLETION = b'{"choices":[{"index":0,"text":"x","finish_reason":"length"}],"generated_text":"x"}'
ABORTED = b'{"choices":[{"index":0,"text":"","finish_reason":"abort"}]}'
NO_COMPLETIONS = (404, b'{"error":{"message":"The model does not support Completions API","code":404}}')
GENERATES = ("/v1/completions", "/v1/chat/completions", "/generate", "/v1/embeddings")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        (COMPLETION, True),
        (ABORTED, False),
        (b'{"error":{"message":"dead","code":500}}', False),
        (b"", False),
        ((500, b'{"error":{"message":"cannot schedule new futures after shutdown"}}'), False),
        ((503, b""), False),
        ((429, b""), False),
        (OSError("reset"), False),
        (None, False),
    ],
    ids=str,
)
async def test_a_trial_passes_with_a_token_and_with_nothing_else(kind: str, answer: Page, passes: bool) -> None:
    backend, _ = adapter(kind, {**ENGINES[kind], **dict.fromkeys(GENERATES, answer)})
    await backend.probe()

    problem = await backend.try_generation(0.05)

    assert (problem == "") == passes
    assert passes or "e1" in problem


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"tgi"}))
async def test_a_model_that_makes_no_text_is_tried_by_what_it_makes(kind: str) -> None:
    pages = {**ENGINES[kind], **dict.fromkeys(GENERATES, NO_COMPLETIONS), "/v1/embeddings": b'{"data":[{"index":0}]}'}
    backend, pool = adapter(kind, pages)
    await backend.probe()

    problem = await backend.try_generation(1.0)

    assert (problem, pool.asked[-1]) == ("", "/v1/embeddings")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_stays_ready_is_not_asked_the_same_at_every_poll(kind: str) -> None:
    backend, pool = adapter(kind, ENGINES[kind])
    await backend.probe()
    await backend.sample()
    pool.asked.clear()

    for _ in range(5):
        await backend.probe()
        await backend.sample()

    assert len(pool.asked) <= 5 * (3 if kind in {"llamacpp", "trtllm"} else 2)
    assert not {"/v1/models", "/version", "/info", "/props"} & set(pool.asked)


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_go_to_the_pool_as_they_are(kind: str) -> None:
    backend, pool = adapter(kind, {})

    backend.call(TAKES_NO_BYTES, None)  # type: ignore[arg-type] # the fake pool never answers

    assert pool.called == [TAKES_NO_BYTES]


@pytest.mark.parametrize("kind", KINDS)
async def test_closing_closes_the_pool(kind: str) -> None:
    backend, pool = adapter(kind, {})

    await backend.close()

    assert pool.closed


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("vllm", Capabilities(include_usage=True, priority=Priority.LOWER_FIRST, return_token_ids=True)),
        ("sglang", Capabilities(include_usage=True, priority=Priority.HIGHER_FIRST)),
        ("tgi", Capabilities(include_usage=True)),
        ("trtllm", Capabilities(include_usage=True)),
        ("triton", Capabilities(include_usage=True)),
        ("llamacpp", Capabilities()),
        ("openai", Capabilities()),
    ],
)
def test_priority_is_sent_only_where_the_operator_says_it_counts(kind: str, told: Capabilities) -> None:
    untold, _ = adapter(kind, {})
    honoured, _ = adapter(kind, {}, priority=True)

    assert honoured.capabilities == told
    assert untold.capabilities.priority is None


@pytest.mark.parametrize("kind", KINDS)
def test_only_tgi_speaks_its_own_dialect(kind: str) -> None:
    backend, _ = adapter(kind, {})

    spoken = {path for path in ("/", "/generate", "/generate_stream") if backend.speaks(path)}

    assert spoken == ({"/", "/generate", "/generate_stream"} if kind == "tgi" else set())


@pytest.mark.parametrize("kind", ["vllm", "openai", "sglang", "llamacpp"])
@pytest.mark.parametrize(
    "path", ["/rerank", "/v2/rerank", "/v1/score", "/tokenize", "/v1/audio/transcriptions", "/v1/new"]
)
def test_a_route_that_we_never_heard_of_is_left_to_the_engine(kind: str, path: str) -> None:
    backend, _ = adapter(kind, {})

    assert backend.speaks(path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engines_key_shows_nowhere(kind: str) -> None:
    backend, _ = adapter(kind, {})

    assert KEY not in repr(backend) + str(vars(backend))
