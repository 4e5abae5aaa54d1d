"""Which kind of engine answers: by what only that kind says, and never by a 200 alone."""

from __future__ import annotations

import pytest

from backends.base import EngineAddress
from backends.detect import BACKENDS, detect, make_backend
from tests.backends.recorded_engines import ENGINES, REFUSED, Page, RecordedPool

MODELS = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"fake","max_model_len":4096}]}'
SAME = b'{"version": "0.0-fake"}'
LOADING = (503, b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}')
FAKE: dict[str, Page] = {"/health": SAME, "/ping": SAME, "/version": SAME, "/info": SAME, "/v1/models": MODELS}


@pytest.mark.parametrize("kind", sorted(BACKENDS))
async def test_each_kind_is_known_by_its_pages(kind: str) -> None:
    assert await detect(RecordedPool(ENGINES[kind])) == kind


@pytest.mark.parametrize("kind", sorted(BACKENDS))
async def test_each_kind_is_known_without_a_metrics_page(kind: str) -> None:
    pages = {path: page for path, page in ENGINES[kind].items() if path != "/metrics"}

    assert await detect(RecordedPool(pages)) == kind


async def test_a_fake_with_vllm_s_metrics_passes_for_vllm() -> None:
    pages: dict[str, Page] = {**FAKE, "/metrics": 'vllm:num_requests_running{model_name="m"} 0.0\n'}

    assert await detect(RecordedPool(pages)) == "vllm"


async def test_a_fake_that_says_the_same_everywhere_is_a_plain_server() -> None:
    pool = RecordedPool(FAKE, otherwise=SAME)

    kind = await detect(pool)
    probe = await make_backend(kind or "", EngineAddress("e1", "http://e"), pool).probe()

    assert (kind, probe.ready) == ("openai", True)


async def test_a_slow_metrics_page_does_not_hide_the_engine() -> None:
    assert await detect(RecordedPool({**FAKE, "/metrics": TimeoutError()})) == "openai"


@pytest.mark.parametrize("otherwise", [REFUSED, TimeoutError(), OSError("reset")], ids=repr)
async def test_a_silent_address_is_not_known_yet_and_asked_twice_only(otherwise: Page) -> None:
    pool = RecordedPool(otherwise=otherwise)

    kind = await detect(pool)

    assert (kind, pool.asked) == (None, ["/metrics", "/v1/models"])


async def test_a_server_that_still_loads_is_not_known_yet() -> None:
    assert await detect(RecordedPool(otherwise=LOADING)) is None


async def test_llama_cpp_is_known_by_its_name_while_it_loads() -> None:
    assert await detect(RecordedPool(otherwise=LOADING, server=b"llama.cpp")) == "llamacpp"


async def test_a_metric_named_in_a_label_is_no_metric() -> None:
    pages: dict[str, Page] = {**FAKE, "/metrics": b'proxy_upstream{name="vllm:num_requests_running"} 1\n# vllm:x\n'}

    assert await detect(RecordedPool(pages)) == "openai"


async def test_a_refused_key_leaves_a_plain_server_whose_probe_says_so() -> None:
    assert await detect(RecordedPool({"/v1/models": (401, b'{"error":"Unauthorized"}')})) == "openai"


def test_an_unknown_kind_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="engine e1: kind 'ollama': expected auto or one of vllm, tgi"):
        make_backend("ollama", EngineAddress("e1", "http://e"), RecordedPool())
