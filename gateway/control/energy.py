"""Energy and cost of engines, while this process decides: by size of batch and phase, what was wasted, what was spent.

Told of joules by the GPU watch and of samples by the poller, it fills the counters of the table; nothing else reads it.
What is rented is counted while the engine answers: a machine that is gone costs nothing that we know of. What was spent
is laid on classes and tenants when a page is made (`tell_costs`), from the counters of all processes.

Waste: tokens of works that did not complete are counted where they settle (`gateway.telemetry`); what an engine
computes again after it evicted sequences is estimated here, as the context of a mean sequence for each of them. None of
the engines tells padding, and none of those with continuous batching has any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from backends.base import Signal
from gateway.control.roster import Engine
from gateway.instruments import (
    COST,
    COST_PER_MILLION,
    ENERGY_BATCH_J,
    ENERGY_BATCH_TOKENS,
    ENERGY_PER_TOKEN,
    GPU_ENERGY,
    SERVED_TOKENS,
    WASTED_TOKENS,
)
from gateway.settings import EngineSettings
from gateway.telemetry import Telemetry
from policies.accounting import PhaseEnergy, Prices, batch_bin, energy_cost, per_million, rent
from policies.vocabulary import EngineState

GAP_MAX_S: Final = 15.0
"""After a longer silence another process has counted, or nobody could."""
SPOT, ON_DEMAND = "spot", "on_demand"
PROMPT, OUTPUT = "prompt", "output"


class EnergyBook:
    """See the module header. One per process that decides.

    clock       monotonic seconds
    kwh_price   in the currency of the engines' prices; None: not told
    """

    def __init__(self, telemetry: Telemetry, *, clock: Callable[[], float], kwh_price: float | None) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._kwh_price = kwh_price
        self._accounts: dict[str, _Account] = {}

    def used(self, engine: Engine, busy_j: float, idle_j: float) -> None:
        """Joules of an engine's GPUs since the last call, while it had work and while it had none."""
        account, telemetry, name = self._account(engine), self._telemetry, engine.name
        telemetry.add(GPU_ENERGY, busy_j, name, "busy")
        telemetry.add(GPU_ENERGY, idle_j, name, "idle")
        now_s = self._clock()
        seconds = now_s - account.energy_s
        account.energy_s = now_s
        prompt, generated = account.counted(engine, Signal.PROMPT_TOKENS_TOTAL, Signal.GENERATION_TOKENS_TOTAL)
        if account.prices.kwh is not None:
            telemetry.add(COST, energy_cost(account.prices, busy_j + idle_j), name, account.capacity, "energy")
        if busy_j <= 0:
            return
        batch = batch_bin(_batch(engine, now_s))
        telemetry.add(ENERGY_BATCH_J, busy_j, name, batch)
        if prompt is None or generated is None:
            return
        telemetry.add(ENERGY_BATCH_TOKENS, generated, name, batch)
        if 0 < seconds <= GAP_MAX_S:
            account.phases.add(busy_j, seconds, prompt, generated)

    def heard(self, engine: Engine) -> None:
        """A poll of an engine ended: its rent since the last one, and what it has to compute again."""
        account, now_s = self._account(engine), self._clock()
        seconds = now_s - account.rent_s
        account.rent_s = now_s
        answers = engine.state in {EngineState.UP, EngineState.DRAINING}
        if account.prices.gpu_hour is not None and answers and 0 < seconds <= GAP_MAX_S:
            gpus = engine.settings.gpus or len(engine.gpu.cards) or 1
            self._telemetry.add(COST, rent(account.prices, gpus, seconds), engine.name, account.capacity, "gpu")
        (evicted,) = account.counted(engine, Signal.PREEMPTIONS_TOTAL)
        if evicted:
            view = engine.view(now_s)
            context = view.kv_tokens / max(1, view.in_flight_total)
            self._telemetry.add(WASTED_TOKENS, evicted * context, engine.name, "recomputed")

    def tell(self, telemetry: Telemetry) -> None:
        """Set the gauges, before a page is made."""
        for name, account in self._accounts.items():
            costs = account.phases.costs()
            telemetry.set(ENERGY_PER_TOKEN, costs.prompt_token_j, name, "prefill")
            telemetry.set(ENERGY_PER_TOKEN, costs.generated_token_j, name, "decode")

    def _account(self, engine: Engine) -> _Account:
        found = self._accounts.get(engine.name)
        if found is None:
            found = self._accounts[engine.name] = _Account(engine.settings, self._kwh_price, self._clock())
        return found

    def __repr__(self) -> str:
        return f"<EnergyBook {', '.join(self._accounts) or 'nothing yet'}>"


class _Account:
    """One engine's."""

    __slots__ = ("_counters", "capacity", "energy_s", "phases", "prices", "rent_s")

    def __init__(self, settings: EngineSettings, kwh_price: float | None, now_s: float) -> None:
        self.prices = Prices(settings.gpu_hour_price, kwh_price)
        self.capacity = SPOT if settings.spot else ON_DEMAND
        self.phases = PhaseEnergy()
        self.energy_s = self.rent_s = now_s
        self._counters: dict[Signal, float] = {}

    def counted(self, engine: Engine, *signals: Signal) -> tuple[float | None, ...]:
        """By how much the engine's counters grew since they were last asked for; None where one is not to be had."""
        found: list[float | None] = []
        for signal in signals:
            now = engine.sample.value(signal)
            before = self._counters.get(signal)
            if now is not None:
                self._counters[signal] = now
            found.append(None if now is None or before is None or now < before else now - before)
        return tuple(found)


def tell_costs(telemetry: Telemetry) -> None:
    """Lay what was spent on those who were served, since the start: the cost of a million of their tokens."""
    spent: dict[str, float] = {}
    capacity: dict[str, str] = {}
    for (engine, kind, _), amount in telemetry.series(COST).items():
        spent[engine] = spent.get(engine, 0.0) + amount
        capacity[engine] = kind
    telemetry.clear(COST_PER_MILLION)
    if not spent:
        return
    served: dict[tuple[str, str, str], tuple[float, float]] = {}
    for (engine, class_name, tenant, kind), tokens in telemetry.series(SERVED_TOKENS).items():
        prompt, output = served.get((engine, class_name, tenant), (0.0, 0.0))
        served[engine, class_name, tenant] = (prompt + tokens, output) if kind == PROMPT else (prompt, output + tokens)
    for (engine, class_name, tenant), cost in per_million(spent, served).items():
        telemetry.set(COST_PER_MILLION, cost, engine, class_name, tenant, capacity[engine])


def _batch(engine: Engine, now_s: float) -> float:
    view = engine.view(now_s)
    running = view.running.value if view.running.known else None
    return running or float(view.in_flight_total) or 1.0
