"""Field cases of metrics through a whole process; the others of their kind are told where they are tested.

OBS-03   tests/gateway/test_telemetry.py      latencies from milliseconds to minutes are told apart
OBS-05   tests/end_to_end/test_workers.py     counters of several processes, one of them killed; its gauges gone
OBS-06   tests/observability/test_dashboards.py, test_live_panels.py
OBS-08   tests/gateway/test_admin_api.py      fifty thousand series are served while the loop keeps turning
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import orjson
import pytest

from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import MODEL, ScriptedEngine

pytestmark = pytest.mark.slow

MANY = 1000


async def test_typed_models_make_no_series_and_a_model_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """OBS-01."""
    async with (
        ScriptedEngine() as engine,
        GatewayProcess(tmp_path, f"engines: [{{name: e0, url: '{engine.url}'}}]\n") as gateway,
        httpx.AsyncClient(base_url=gateway.public_url, trust_env=False, timeout=30.0) as http,
    ):
        at_once = asyncio.Semaphore(50)

        async def ask(model: object) -> int:
            body = orjson.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]})
            async with at_once:
                return (await http.post("/v1/chat/completions", content=body)).status_code

        assert await ask(MODEL) == 200
        async with asyncio.TaskGroup() as group:
            typed = [group.create_task(ask(f"gpt-typo-{number}")) for number in range(MANY)]
        assert {task.result() for task in typed} == {404}
        assert await ask("m" * 5000) in {400, 404}
        assert [await ask(model) for model in (["a"], {"a": 1}, 7, None, True)] == [400] * 5

        page = await gateway.metrics()
    assert sum(value for series, value in page.items() if series.startswith("headrace_http_refusals_total")) >= MANY + 6
    of_models = {series for series in page if "model=" in series}
    assert not [series for series in of_models if "typo" in series or "mmm" in series]
    assert len(page) < 1500
