"""SGLang's ranks, its counters that move too late, and a server without metrics."""

from __future__ import annotations

import json

import pytest

from backends.base import Measured, Priority, Signal
from tests.backends.recorded_engines import ENGINES, SGLANG_INFO, adapter


async def test_a_recorded_engine_says_all_of_it() -> None:
    backend, _ = adapter("sglang", ENGINES["sglang"])

    probe = await backend.probe()
    sample = await backend.sample()

    assert (probe.version, probe.models[0].max_model_len) == ("0.5.4", 131072)
    assert {signal.value: sample.value(signal) for signal in sample.values} == {
        "running": 12,
        "waiting": 3,
        "kv_used_fraction": 0.61,
        "kv_capacity_tokens": 942516,
        "kv_block_tokens": 64,
        "seats": 48,
        "preemptions_total": 3,
        "prompt_tokens_total": 1282888,
        "generation_tokens_total": 512,
    }


async def test_a_counter_that_moves_at_the_end_is_no_sign_of_progress() -> None:
    backend, _ = adapter("sglang", {"/metrics": 'sglang:generation_tokens_total{model_name="m"} 337\n'})

    assert Signal.GENERATION_TOKENS_TOTAL not in (await backend.sample()).values


async def test_one_absurd_rank_makes_its_sum_unknown() -> None:
    page = 'sglang:num_running_reqs{dp_rank="0",tp_rank="0"} NaN\nsglang:num_running_reqs{dp_rank="0",tp_rank="1"} 2\n'
    backend, _ = adapter("sglang", {"/metrics": page})

    assert (await backend.sample()).values == {Signal.RUNNING: Measured(None, "sglang:num_running_reqs")}


async def test_without_metrics_the_server_s_own_words_remain() -> None:
    pages = {name: page for name, page in ENGINES["sglang"].items() if name not in {"/metrics", "/get_server_info"}}
    backend, _ = adapter("sglang", {**pages, "/server_info": json.dumps(SGLANG_INFO)})

    await backend.probe()

    assert (await backend.sample()).values == {
        Signal.KV_CAPACITY_TOKENS: Measured(1000, "/server_info max_total_num_tokens"),
        Signal.SEATS: Measured(48, "/server_info max_running_requests"),
    }


@pytest.mark.parametrize(
    ("started_with", "meaning"),
    [
        ({}, None),
        ({"enable_priority_scheduling": False}, None),
        ({"enable_priority_scheduling": True}, Priority.HIGHER_FIRST),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, Priority.LOWER_FIRST),
    ],
    ids=str,
)
async def test_its_info_page_says_what_a_priority_means(
    started_with: dict[str, bool], meaning: Priority | None
) -> None:
    pages = {**ENGINES["sglang"], "/get_server_info": json.dumps({**SGLANG_INFO, **started_with})}
    backend, _ = adapter("sglang", pages)

    await backend.probe()

    assert backend.capabilities.priority is meaning
