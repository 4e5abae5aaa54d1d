"""Two gateways whose wall clocks are seconds apart share a pool: windows hold, both serve, and the wrong one takes over.

The clock is bent where a process reads it, by a `sitecustomize` that only the tests' launcher puts in its way: every
Python process of that gateway, workers and decider too, believes another `time.time()`.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.end_to_end.engine_process import eventually, simulated
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.two_engines import holds, loaded, total
from tests.end_to_end.watches import watched
from tests.redis_servers import serving

pytestmark = pytest.mark.many

OFF_S = 3.0
PLACES = 4
POLICY = f"""\
version: 1
classes:
  interactive: {{ttft_sla_s: 5, max_queue: 500, max_wait_s: 60}}
sizing: {{policy: fixed, fixed: {{total: {PLACES}, windows: {{interactive: {PLACES}}}}}}}
"""
BEND = """\
import sys
import time

_right = time.time
time.time = lambda: _right() + {off_s}
sys.stderr.write("this clock is off by {off_s} s\\n")
"""
MOST_OFF_S = 0.1
TAKEOVER_S = 3.0
WAIT_S = 40.0


def bent(folder: Path, off_s: float) -> dict[str, str]:
    """The environment of a gateway whose wall clock is off."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BEND.format(off_s=off_s))
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("off_s", [OFF_S, -OFF_S], ids=["ahead", "behind"])
async def test_a_gateway_whose_clock_is_three_seconds_off_shares_the_pool_and_takes_it_over(
    tmp_path: Path, off_s: float
) -> None:
    with serving("valkey-9") as store:
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(simulated(tmp_path))
            (tmp_path / "policy.yaml").write_text(POLICY)
            config = (
                f"engines: [{{name: e0, url: '{engine.url}'}}]\nredis_url: {store.url}\npoll_s: 0.2\n"
                f"policy_file: {tmp_path / 'policy.yaml'}\n"
            )
            right = await stack.enter_async_context(GatewayProcess(tmp_path / "right", config))
            await eventually(holds(right, "headrace_leader", 1))
            wrong = await stack.enter_async_context(
                GatewayProcess(tmp_path / "wrong", config, environ=bent(tmp_path / "bent", off_s))
            )
            await wrong.until_ready()

            async with watched([engine], {"right": right, "wrong": wrong}) as (windows, leaders):
                async with loaded(right) as one, loaded(wrong) as other:
                    for load in (one, other):
                        load.start("interactive", 30, tokens=20)
                    await eventually(
                        lambda: one.ended("interactive") == other.ended("interactive") == 30, within_s=WAIT_S
                    )
                error_s = await total(wrong, "headrace_clock_error_seconds")
                killed_s = time.monotonic()
                await right.stop(signal.SIGKILL)
                await eventually(holds(wrong, "headrace_leader", 1))
                took_over_s = time.monotonic() - killed_s
                async with loaded(wrong) as after:
                    after.start("interactive", 4, tokens=5)

    assert f"off by {off_s} s" in wrong.log
    assert all(told.done for load in (one, other, after) for told in load.all_told())
    assert windows.most in range(2, PLACES + 1)
    assert leaders.at_once() == []
    assert error_s < MOST_OFF_S
    assert took_over_s < TAKEOVER_S
