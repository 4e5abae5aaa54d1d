"""TGI's budget of reserved tokens, and what an absent gauge means."""

from __future__ import annotations

import json

import pytest

from backends.base import Measured, Sample, Signal
from tests.backends.recorded_engines import ENGINES, TGI_INFO, adapter

KV = Signal.KV_USED_FRACTION
BUDGET = "tgi_batch_max_total_tokens"
USE = f"tgi_batch_current_max_tokens/{BUDGET}"


async def sample_of(page: str) -> Sample:
    backend, _ = adapter("tgi", {"/metrics": page})
    return await backend.sample()


async def test_a_recorded_engine_says_all_of_it() -> None:
    backend, _ = adapter("tgi", ENGINES["tgi"])

    probe = await backend.probe()
    sample = await backend.sample()

    (card,) = probe.models
    assert (probe.version, card.id, card.max_model_len, card.raw["object"]) == ("3.3.6", "org/model", 4096, "model")
    assert sample.values == {
        Signal.RUNNING: Measured(12, "tgi_batch_current_size"),
        Signal.WAITING: Measured(5, "tgi_queue_size"),
        KV: Measured(0.61, USE),
        Signal.KV_CAPACITY_TOKENS: Measured(20000, BUDGET),
        Signal.SEATS: Measured(128, "/info max_concurrent_requests"),
    }


async def test_without_the_budget_use_is_unknown() -> None:
    sample = await sample_of("tgi_queue_size 5\ntgi_batch_current_size 12\ntgi_request_count 100\n")

    assert sample.values == {
        Signal.RUNNING: Measured(12, "tgi_batch_current_size"),
        Signal.WAITING: Measured(5, "tgi_queue_size"),
    }


async def test_gauges_never_set_are_zero_while_nothing_has_run() -> None:
    sample = await sample_of(f"{BUDGET} 20000\n")

    assert (sample.value(Signal.RUNNING), sample.value(Signal.WAITING), sample.value(KV)) == (0, 0, 0)


async def test_a_gauge_missing_after_work_is_unknown() -> None:
    sample = await sample_of(f"{BUDGET} 20000\ntgi_request_count 1\n")

    assert sample.values == {Signal.KV_CAPACITY_TOKENS: Measured(20000, BUDGET)}


@pytest.mark.parametrize("budget", ["0", "NaN", "-5"])
async def test_an_absurd_budget_gives_no_fraction(budget: str) -> None:
    sample = await sample_of(f"{BUDGET} {budget}\ntgi_batch_current_max_tokens 5\ntgi_request_count 1\n")

    assert sample.values == {Signal.KV_CAPACITY_TOKENS: Measured(None, BUDGET)}


async def test_the_batch_s_own_bound_wins_where_it_is_published() -> None:
    info = json.dumps({**TGI_INFO, "max_batch_size": 24})
    backend, _ = adapter("tgi", {**ENGINES["tgi"], "/info": info})

    await backend.probe()

    assert (await backend.sample()).values[Signal.SEATS] == Measured(24, "/info max_batch_size")


async def test_a_server_without_its_info_page_lists_its_models() -> None:
    backend, _ = adapter("tgi", {"/health": b"", "/info": b'{"version":"0"}', "/v1/models": b'{"data":[{"id":"m"}]}'})

    probe = await backend.probe()

    assert (probe.ready, [card.id for card in probe.models]) == (True, ["m"])
