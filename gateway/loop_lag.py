"""How late the event loop runs: a timer that measures its own delay.

Everything on this loop (every stream, every decision) is late by at least as much, so it is the first number to look
at when latency grows. Awaited by whoever owns it, in a TaskGroup.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

from gateway.telemetry import LOOP_LAG, Telemetry

SAMPLE_S = 0.25


async def watch_loop_lag(telemetry: Telemetry, *, every_s: float = SAMPLE_S) -> NoReturn:
    """Observe the lag until cancelled."""
    loop = asyncio.get_running_loop()
    lag = telemetry.keep(LOOP_LAG)
    while True:
        due_s = loop.time() + every_s
        await asyncio.sleep(every_s)
        lag.observe(max(0.0, loop.time() - due_s))
