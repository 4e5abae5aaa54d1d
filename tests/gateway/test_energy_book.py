"""The book of energy and cost: what it counts for one engine, and what a page then says of classes and tenants."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from backends.base import Measured, Sample, Signal
from backends.gpu.base import GpuField, reading
from backends.gpu.combine import combined
from gateway.control.energy import GAP_MAX_S, EnergyBook, tell_costs
from gateway.control.roster import Engine
from gateway.dispatch.ledger import Ledger
from gateway.settings import EngineSettings
from gateway.telemetry import Telemetry
from policies.vocabulary import EngineState, Outcome, Result, Work

OUTCOME = Outcome(
    work_id="1",
    class_name="chat",
    tenant="red",
    model="m",
    engine="e",
    result=Result.COMPLETED,
    reason="",
    status=200,
    attempts=1,
    prompt_tokens=100,
    output_tokens=50,
    total_s=1.0,
    ttft_s=0.1,
)


class Bench:
    """One engine, one book, one page, and a clock that the test moves."""

    def __init__(self, settings: EngineSettings, kwh_price: float | None = None) -> None:
        self.now_s = 100.0
        self.telemetry = Telemetry(version="0")
        self.telemetry.models_known(frozenset({"m"}))
        self.engine = Engine(settings, Ledger()[settings.name], poll_s=0.5, state=EngineState.UP)
        self.book = EnergyBook(self.telemetry, clock=lambda: self.now_s, kwh_price=kwh_price)
        self.counters = dict.fromkeys(
            (Signal.PROMPT_TOKENS_TOTAL, Signal.GENERATION_TOKENS_TOTAL, Signal.PREEMPTIONS_TOTAL), 0.0
        )
        self.after(0.0)
        self.book.used(self.engine, 0.0, 0.0)
        self.book.heard(self.engine)

    def after(self, seconds: float, *, running: float = 0.0, **grown: float) -> None:
        """Time passes and the engine says what it did."""
        self.now_s += seconds
        for name, amount in grown.items():
            self.counters[Signal(name)] += amount
        values = {signal: Measured(value, "t") for signal, value in self.counters.items()}
        self.engine.sample = Sample(self.now_s, {**values, Signal.RUNNING: Measured(running, "t")})

    def told(self, name: str) -> dict[str, float]:
        """Series of a metric on the page, by their labels."""
        self.book.tell(self.telemetry)
        tell_costs(self.telemetry)
        self.telemetry.refresh()
        page = self.telemetry.render()[0].decode()
        return {labels: float(value) for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", page, re.MULTILINE)}


def bench(kwh_price: float | None = None, **settings: object) -> Bench:
    return Bench(replace(EngineSettings("e", "http://h:1"), **settings), kwh_price)  # type: ignore[arg-type]


def test_energy_counts_by_the_batch_that_ran_with_the_tokens_made_meanwhile() -> None:
    one = bench()
    one.after(1.0)
    one.book.used(one.engine, 0.0, 40.0)

    one.after(1.0, running=6, generation_tokens_total=300)
    one.book.used(one.engine, 500.0, 0.0)

    assert one.told("headrace_energy_batch_joules_total") == {'batch="8",engine="e"': 500.0}
    assert one.told("headrace_energy_batch_tokens_total") == {'batch="8",engine="e"': 300.0}
    assert one.told("headrace_gpu_energy_joules_total") == {
        'activity="busy",engine="e"': 500.0,
        'activity="idle",engine="e"': 40.0,
    }


def test_the_phases_are_told_once_they_were_seen_for_a_while() -> None:
    one = bench()
    for number in range(120):
        prompt, generated = ((900.0, 100.0), (100.0, 700.0), (50.0, 50.0))[number // 4 % 3]
        one.after(1.0, running=4, prompt_tokens_total=prompt, generation_tokens_total=generated)
        one.book.used(one.engine, 100.0 + 0.02 * prompt + 0.1 * generated, 0.0)
        if number == 20:
            assert one.told("headrace_energy_token_joules") == {}

    found = one.told("headrace_energy_token_joules")
    assert found['engine="e",phase="decode"'] == pytest.approx(0.1, rel=0.1)
    assert found['engine="e",phase="prefill"'] == pytest.approx(0.02, rel=0.3)


def test_rent_counts_while_the_engine_answers_for_each_of_its_gpus() -> None:
    one = bench(gpu_hour_price=3.6, gpus=2, spot=True)
    one.after(10.0)
    one.book.heard(one.engine)
    one.engine.state = EngineState.DOWN
    one.after(10.0)
    one.book.heard(one.engine)
    one.engine.state = EngineState.UP
    one.after(GAP_MAX_S + 1)
    one.book.heard(one.engine)

    assert one.told("headrace_cost_total") == {'capacity="spot",engine="e",part="gpu"': pytest.approx(0.02)}


def test_gpus_that_telemetry_shows_are_counted() -> None:
    one = bench(gpu_hour_price=3.6)
    cards = tuple(reading(f"GPU-{at}", {GpuField.POWER_W: 100.0}) for at in range(4))
    one.engine.gpu = combined("nvml", one.now_s, cards)

    one.after(1.0)
    one.book.heard(one.engine)

    assert one.told("headrace_cost_total") == {'capacity="on_demand",engine="e",part="gpu"': pytest.approx(0.004)}


def test_energy_costs_what_a_kilowatt_hour_costs_idle_or_not() -> None:
    one = bench(kwh_price=0.36)
    one.after(1.0, running=1)
    one.book.used(one.engine, 6e5, 4e5)

    assert one.told("headrace_cost_total") == {'capacity="on_demand",engine="e",part="energy"': pytest.approx(0.1)}


def test_the_cost_of_a_million_tokens_is_told_by_who_had_them() -> None:
    one = bench(gpu_hour_price=3600.0)
    one.telemetry.observe_outcome(OUTCOME, sla_met=True)
    one.telemetry.observe_outcome(replace(OUTCOME, tenant="blue", output_tokens=200), sla_met=True)
    one.after(1.0)
    one.book.heard(one.engine)

    found = one.told("headrace_cost_per_million_tokens")

    tokens = {"red": 150, "blue": 300}
    labels = 'capacity="on_demand",class="chat",engine="e",tenant="%s"'
    assert sum(found[labels % tenant] * count / 1e6 for tenant, count in tokens.items()) == pytest.approx(1.0)
    assert found[labels % "blue"] > found[labels % "red"]


def test_without_prices_no_cost_is_told() -> None:
    one = bench()
    one.telemetry.observe_outcome(OUTCOME, sla_met=True)
    one.after(1.0)
    one.book.heard(one.engine)
    one.book.used(one.engine, 1e6, 0.0)

    assert one.told("headrace_cost_total") == one.told("headrace_cost_per_million_tokens") == {}


def test_works_that_did_not_complete_are_waste_where_the_engine_had_begun() -> None:
    one = bench()
    one.telemetry.observe_outcome(replace(OUTCOME, result=Result.CANCELLED, status=499), sla_met=None)
    one.telemetry.observe_outcome(replace(OUTCOME, result=Result.TIMED_OUT, ttft_s=None, output_tokens=0), sla_met=None)
    one.telemetry.observe_outcome(replace(OUTCOME, result=Result.SHED, engine="", ttft_s=None), sla_met=None)

    assert one.told("headrace_wasted_tokens_total") == {'engine="e",reason="aborted"': 150.0}
    assert one.told("headrace_served_tokens_total") == {}


def test_an_evicted_sequence_is_computed_again_from_its_context() -> None:
    one = bench()
    for number in range(2):
        work = Work(f"{number}", "chat", "red", "m", "/v1/completions", 0.0, 0.0, prompt_tokens=1600)
        one.engine.ledger.add(work, 1, one.now_s)
    one.after(0.5)
    one.book.heard(one.engine)
    one.after(0.5, preemptions_total=3)
    one.book.heard(one.engine)

    assert one.told("headrace_wasted_tokens_total") == {'engine="e",reason="recomputed"': 4800.0}


def test_counters_that_start_anew_are_not_counted_backwards() -> None:
    one = bench()
    one.after(1.0, running=1, generation_tokens_total=1000)
    one.book.used(one.engine, 10.0, 0.0)
    one.counters[Signal.GENERATION_TOKENS_TOTAL] = 0.0
    one.after(1.0, running=1)
    one.book.used(one.engine, 10.0, 0.0)

    assert one.told("headrace_energy_batch_tokens_total") == {'batch="1",engine="e"': 1000.0}
