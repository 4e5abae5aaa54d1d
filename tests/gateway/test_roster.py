"""An engine's view: what we count of it is in it at once, what it says of itself since its last word or the last tick."""

from __future__ import annotations

import pytest

from backends.base import Measured, Sample, Signal
from gateway.control.roster import Engine
from gateway.dispatch.ledger import EngineLedger
from gateway.settings import EngineSettings
from policies.vocabulary import Work


def said(taken_s: float, running: float) -> Sample:
    return Sample(taken_s, {Signal.RUNNING: Measured(running, "vllm:num_requests_running")})


@pytest.fixture
def engine() -> Engine:
    engine = Engine(EngineSettings("e", "http://e"), EngineLedger(), poll_s=0.5)
    engine.sampled(said(100.0, 3.0), 100.0)
    return engine


def test_a_work_is_counted_at_once_and_the_engines_readings_age_by_the_tick(engine: Engine) -> None:
    before = engine.view(100.0)
    engine.ledger.add(Work("w", "chat", "acme", "m", "/v1/completions", 1.0, 1.0, prompt_tokens=20), 1, 100.2)
    granted = engine.view(100.2)
    engine.ledger.refresh()
    ticked = engine.view(100.2)

    assert [one.in_flight.get("chat", 0) for one in (before, granted, ticked)] == [0, 1, 1]
    assert [one.running.age_s for one in (before, granted, ticked)] == pytest.approx([0.0, 0.0, 0.2])


def test_a_new_sample_is_in_the_next_view(engine: Engine) -> None:
    engine.view(100.0)
    engine.sampled(said(100.5, 4.0), 100.5)

    running = engine.view(100.6).running

    assert running.value == 4.0
    assert running.age_s == pytest.approx(0.1)


def test_a_reading_that_stands_still_is_frozen_in_the_next_view_that_is_made(engine: Engine) -> None:
    engine.view(100.0)
    engine.frozen = {Signal.RUNNING: 9.0}
    engine.ledger.add(Work("w", "chat", "acme", "m", "/v1/completions", 1.0, 1.0, prompt_tokens=20), 1, 100.2)

    assert engine.view(100.2).running.age_s == 9.0
