"""What KEDA asks Prometheus, asked here of a real one: while there is nothing to do, from zero engines, and under load."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.engine_process import eventually, simulated
from tests.end_to_end.gateway_process import GatewayProcess
from tests.observability.prometheus import Prometheus, monitoring
from tests.ports import free_port

pytestmark = [pytest.mark.observability, pytest.mark.timeout(120)]

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "headrace" / "templates" / "keda.yaml"
WITHIN_S = 30.0
WINDOW = 4
REQUESTS = 12


def queries() -> dict[str, str]:
    """Name of each trigger of the chart -> what it asks, for the engines of this test."""
    text = CHART.read_text()
    found = re.findall(r"name: (\S+)\n(?:.*\n){2,5}? +query: (?:>-\n((?: {10}.*\n)+)|(.*)\n)", text)
    return {name: (folded or line).replace("{{ .engines }}", "e.*") for name, folded, line in found}


async def values(prometheus: Prometheus) -> dict[str, float]:
    """What each query answers now. One that answers nothing, or several numbers, stops KEDA, and fails here."""
    answers = {}
    for name, query in queries().items():
        told = await prometheus.get("/api/v1/query", query=query)
        (series,) = told["data"]["result"]
        answers[name] = float(series["value"][1])
    return answers


def test_the_chart_asks_for_connections_load_and_time_in_the_queue() -> None:
    assert set(queries()) == {"connections", "load", "queue-seconds"}


async def test_queries_start_the_first_engine_and_follow_the_load(tmp_path: Path) -> None:
    port = free_port()
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        f"version: 1\nclasses: {{interactive: {{ttft_sla_s: 1}}}}\nsizing: {{policy: fixed, fixed: {{total: {WINDOW}}}}}\n"
    )
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(
            GatewayProcess(
                tmp_path / "gateway",
                f"engines:\n  - {{name: e1, kind: vllm, url: 'http://127.0.0.1:{port}'}}\npoll_s: 0.2\npolicy_file: {policy}\n",
            )
        )
        prometheus, _ = await stack.enter_async_context(monitoring(tmp_path / "monitoring", gateway.admin_url))
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=60.0))
        url = f"{gateway.public_url}/v1/completions"
        body = {"model": "sim-8b", "prompt": "water", "max_tokens": 3000, "ignore_eos": True}

        # Nothing to do.
        await eventually(lambda: prometheus.points("up == 1"), WITHIN_S)
        assert await values(prometheus) == {"connections": 0, "load": 0, "queue-seconds": 0}

        # From zero: a request finds no engine, and is why there will be one.
        while (await values(prometheus))["load"] == 0:
            assert (await http.post(url, json=body)).status_code == 503
            await asyncio.sleep(0.5)

        # More than may run on one engine at a time.
        await stack.enter_async_context(simulated(tmp_path, listen=f"127.0.0.1:{port}"))
        await gateway.until_ready()
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(http.post(url, json=body)) for _ in range(REQUESTS)]
            async with asyncio.timeout(WITHIN_S):
                while (told := await values(prometheus))["load"] < REQUESTS or told["queue-seconds"] < 1:
                    await asyncio.sleep(0.5)
            assert told["connections"] >= REQUESTS
            for task in asked:
                task.cancel()
