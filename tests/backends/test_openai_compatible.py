"""The adapter for servers of no known kind: a model list is enough."""

from __future__ import annotations

import pytest

from tests.backends.recorded_engines import ENGINES, Page, adapter


@pytest.mark.parametrize("health", [(404, b""), (405, b""), (501, b""), (200, b"anything")])
async def test_a_missing_health_route_is_no_fault(health: Page) -> None:
    backend, _ = adapter("openai", {**ENGINES["openai"], "/health": health})

    assert (await backend.probe()).ready


async def test_the_engine_s_own_card_is_kept_whole() -> None:
    card = '{"id":"m","root":"r","parent":"p","max_model_len":4096,"permission":[{"x":1}]}'
    backend, _ = adapter("openai", {"/v1/models": f'{{"data":[{card}]}}'})

    (listed,) = (await backend.probe()).models

    assert listed.raw == {"id": "m", "root": "r", "parent": "p", "max_model_len": 4096, "permission": [{"x": 1}]}
    assert listed.max_model_len == 4096


@pytest.mark.parametrize("length", ["null", "0", "-1", '"4096"', "true"])
async def test_an_absurd_context_length_is_unknown(length: str) -> None:
    backend, _ = adapter("openai", {"/v1/models": f'{{"data":[{{"id":"m","max_model_len":{length}}}]}}'})

    assert (await backend.probe()).models[0].max_model_len is None


async def test_a_failed_probe_forgets_no_models() -> None:
    pages: dict[str, Page] = dict(ENGINES["openai"])
    backend, _ = adapter("openai", pages)
    await backend.probe()

    pages["/v1/models"] = (503, b"")
    await backend.probe()

    assert backend.models == {"m"}


@pytest.mark.parametrize("kind", ["openai", "vllm", "sglang", "llamacpp", "trtllm", "tgi"])
async def test_an_adapter_loaded_later_is_listed_within_a_second_and_asked_for_no_more_often(kind: str) -> None:
    now_s = 42.0
    pages: dict[str, Page] = {"/v1/models": '{"data":[{"id":"m"}]}', **ENGINES[kind], "/info": (404, b"")}
    backend, pool = adapter(kind, pages, monotonic=lambda: now_s)
    await backend.probe()

    pages["/v1/models"] = '{"data":[{"id":"m"},{"id":"lora"}]}'
    before = len(pool.asked)
    now_s += 0.5
    await backend.probe()
    asked_early = pool.asked[before:]
    now_s += 0.5
    listed = {card.id for card in (await backend.probe()).models}

    assert "/v1/models" not in asked_early
    assert listed == {"m", "lora"}


async def test_a_refused_key_says_what_to_check_and_not_what_the_engine_said() -> None:
    backend, _ = adapter("openai", {"/v1/models": (401, b'{"error":"Unauthorized"}')})

    detail = (await backend.probe()).detail

    assert detail == "engine e1: GET /v1/models answered 401; check the engine's api_key"
