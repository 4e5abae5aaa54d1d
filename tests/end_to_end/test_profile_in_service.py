"""What the gateway learns of an engine from its traffic: shown on its status page, compared with a stored profile, exported."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from gateway.load.client import Client, Target
from gateway.load.figures import Objectives, Record
from gateway.load.run import ClosedLoop
from gateway.profiling.live import TRUSTED_SEEN, exported
from gateway.replay.trace import Request
from tests.end_to_end.engine_process import eventually, simulated
from tests.end_to_end.gateway_process import GatewayProcess

POLICY = """
version: 1
classes:
  interactive: {ttft_sla_s: 2.0}
  bulk: {}
sizing: {policy: token_ledger}
"""


@pytest.mark.many
async def test_a_gateway_learns_an_engines_speed_and_tells_how_far_it_is_from_the_profile(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    async with simulated(tmp_path, "--profile", "rtx4090_llama31_8b_tp1") as engine:
        entry = f"{{name: e, url: '{engine.url}', kind: vllm, profile: a100x8_llama3_70b_tp8, gpu: {{source: none}}}}"
        config = f"engines: [{entry}]\npolicy_file: {policy}\n"
        async with GatewayProcess(tmp_path / "gateway", config) as gateway, httpx.AsyncClient(trust_env=False) as http:
            client = Client(Target(gateway.public_url, "sim-8b"), {"": Record(time.monotonic, Objectives())})
            running = asyncio.get_running_loop().create_task(ClosedLoop(client, traffic(), clients=6).run())

            async def learned() -> bool:
                status = (await http.get(f"{gateway.admin_url}/admin/v1/status")).json()
                step = status["engines"][0]["learned_step"]
                return step is not None and step["seen"] >= TRUSTED_SEEN

            await eventually(learned, within_s=60)
            profile = await exported(gateway.admin_url, "e")
            page = (await http.get(f"{gateway.admin_url}/metrics")).text
            running.cancel()
            await asyncio.wait([running])
            await client.close()

    step, told = (
        profile["step_ms"],
        re.search(r'^headrace_engine_profile_drift_ratio\{engine="e"\} (\S+)$', page, re.MULTILINE),
    )
    assert isinstance(step, dict)
    assert 8 < step["a"] < 200  # 17 ms, on a machine that does other things as well
    assert profile["kind"] == "learned in service"
    assert told is not None
    assert float(told[1]) > 0


def traffic() -> Iterator[Request]:
    """Prompts and answers of several lengths, for ever."""
    return (Request(0.0, 40 + 200 * (number % 5), 10 + 7 * (number % 4)) for number in count())
