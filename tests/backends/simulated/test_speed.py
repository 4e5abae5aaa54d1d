"""How fast the virtual engine is. How near it is to real ones: tests/gateway/bench/test_fidelity.py."""

from __future__ import annotations

import time

from backends.simulated.profiles import build_engine, load_profile
from backends.simulated.sequence import Sequence


def test_a_minute_of_a_busy_engine_is_simulated_in_a_small_part_of_a_second() -> None:
    engine = build_engine(load_profile("h100_llama31_8b_tp1"))
    started_s = time.process_time()

    for number in range(600):
        at_s = number / 10
        while (event_s := engine.next_event_s()) <= at_s:
            engine.advance(event_s)
        engine.submit(Sequence(str(number), prompt_tokens=1155, output_tokens=211), at_s)
    engine.advance(60.0)

    assert engine.totals.finished > 400
    assert time.process_time() - started_s < 60 / 300
