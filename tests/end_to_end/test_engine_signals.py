"""Engines' metrics through the whole process (K10): what the admin API and /metrics say of pages that differ, lie or are late."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.end_to_end.conftest import StartGateway, engines_yaml
from tests.end_to_end.engine_process import eventually
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import MODEL, ScriptedEngine
from tests.end_to_end.test_engine_faults import ask, chat

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAST = "poll_s: 0.2\n"


def page(*series: tuple[str, float], engine: str = "0", model: str = MODEL) -> str:
    return "".join(f'vllm:{name}{{engine="{engine}",model_name="{model}"}} {value}\n' for name, value in series)


BASE = page(("num_requests_running", 0), ("num_requests_waiting", 0), ("generation_tokens_total", 100))
TWO_ENGINES = (
    page(("num_requests_running", 6), ("num_requests_waiting", 4), ("kv_cache_usage_perc", 0.97))
    + page(("num_requests_running", 0), ("num_requests_waiting", 0), ("kv_cache_usage_perc", 0.02), engine="1")
    + page(("num_requests_running", 50), ("num_requests_waiting", 9), ("kv_cache_usage_perc", 0.99), model="other")
)
PAGES = {
    "old": BASE + page(("gpu_cache_usage_perc", 0.61)),
    "new": BASE + page(("kv_cache_usage_perc", 0.61)),
    "both": BASE + page(("gpu_cache_usage_perc", 0.0), ("kv_cache_usage_perc", 0.61)),
    "neither": BASE,
    "percent": BASE + page(("kv_cache_usage_perc", 61.0)),
    "ranks": TWO_ENGINES,
}


async def engine(gateway: GatewayProcess, name: str) -> dict[str, Any]:
    return next(one for one in (await gateway.status())["engines"] if one["name"] == name)


def logged(gateway: GatewayProcess) -> list[str]:
    """The log's lines of a value that cannot be."""
    return re.findall(r'"finding":"absurd"', gateway.log)


async def test_kv_use_is_the_same_under_every_name_and_unknown_is_never_nothing(start_gateway: StartGateway) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine(metrics=one)) for one in PAGES.values()]
        names = dict(zip(PAGES, (f"e{number}" for number in range(len(PAGES))), strict=True))
        gateway = await stack.enter_async_context(start_gateway(engines_yaml(*engines) + FAST))

        async def told() -> bool:
            return (await engine(gateway, names["ranks"]))["running"] is not None

        await eventually(told)
        shown = {name: (await engine(gateway, place))["signals"]["kv_used"] for name, place in names.items()}
        ranks = await engine(gateway, names["ranks"])
        metrics = await gateway.metrics()

        async def absurd_is_found() -> bool:
            return "absurd" in (await engine(gateway, names["percent"]))["findings"]

        await eventually(absurd_is_found)
        await eventually(lambda: logged(gateway))  # lines leave through a thread
        lines = logged(gateway)

    fractions = {name: (signal["value"], signal["quality"]) for name, signal in shown.items()}
    assert fractions == {
        "old": (0.61, "fresh"),
        "new": (0.61, "fresh"),
        "both": (0.61, "fresh"),
        "neither": (None, "missing"),
        "percent": (None, "absurd"),
        "ranks": (0.97, "fresh"),
    }
    assert shown["both"]["source"] == "vllm:kv_cache_usage_perc"
    assert shown["neither"]["instead"]
    assert (ranks["running"], ranks["waiting"]) == (6, 4)
    assert len(lines) == 1
    for name, place in names.items():
        series = metrics.get(f'headrace_engine_kv_used_ratio{{engine="{place}"}}')
        assert series == fractions[name][0], name
        told_of = [
            found
            for found, value in metrics.items()
            if found.startswith("headrace_engine_signal_quality{")
            and f'engine="{place}"' in found
            and 'signal="kv_used_fraction"' in found
            and value == 1
        ]
        assert [f'quality="{fractions[name][1]}"' in found for found in told_of] == [True], name


@pytest.mark.slow
async def test_a_page_that_comes_late_ages_and_costs_no_work(start_gateway: StartGateway) -> None:
    async with AsyncExitStack() as stack:
        late = await stack.enter_async_context(ScriptedEngine(metrics=PAGES["new"]))
        gateway = await stack.enter_async_context(start_gateway(engines_yaml(late) + FAST))
        late.page_delay_s = 12.0

        async def stale() -> bool:
            return bool((await engine(gateway, "e0"))["signals"]["kv_used"]["quality"] == "stale")

        await eventually(stale, within_s=5.0)
        answered = await ask(gateway, chat())
        one = await engine(gateway, "e0")
        metrics = await gateway.metrics()

    assert (answered.status, one["state"]) == (200, "up")
    assert 'headrace_engine_kv_used_ratio{engine="e0"}' not in metrics
