"""A gateway that says that it serves does: behind a store that nobody leads yet, and beside one that leads already."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.end_to_end.engine_process import simulated
from tests.end_to_end.gateway_process import GatewayProcess
from tests.redis_servers import serving

pytestmark = pytest.mark.slow


async def test_behind_a_shared_redis_the_first_request_of_each_gateway_is_served(tmp_path: Path) -> None:
    body = {"model": "sim-8b", "prompt": "water", "max_tokens": 2}
    with serving("valkey-9") as store:
        async with simulated(tmp_path) as engine, httpx.AsyncClient(timeout=30.0, trust_env=False) as http:
            config = f"engines: [{{name: e, url: '{engine.url}'}}]\nredis_url: {store.url}\n"
            async with GatewayProcess(tmp_path / "first", config) as first:
                answers = [await http.post(f"{first.public_url}/v1/completions", json=body)]
                async with GatewayProcess(tmp_path / "second", config) as second:
                    answers.append(await http.post(f"{second.public_url}/v1/completions", json=body))

    assert [answer.status_code for answer in answers] == [200, 200]
