"""Which signals ask to stop."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from gateway.stop_signals import stop_signals


@pytest.mark.parametrize(("before", "stops"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
async def test_a_hangup_stops_those_who_end_with_their_terminal_but_not_under_nohup(
    before: signal.Handlers, *, stops: bool
) -> None:
    usual = signal.signal(signal.SIGHUP, before)
    try:
        with stop_signals(signal.SIGHUP) as (first, _):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.005)
    finally:
        signal.signal(signal.SIGHUP, usual)

    assert first.is_set() == stops
