"""Every number that the gateway tells about itself: one table of instruments, and the typed calls that fill it.

`INSTRUMENTS` is the single source: the exposition is made from it, and so are the metrics page of the docs and the
dashboards. The calls take the value types of `policies.vocabulary`, so that what is counted is what was decided.

Invariants:

* What a client can type is never a label as it stands: a model counts under its own name only when an engine serves
  it (`models_known`), else under `other`. Classes and tenants come from configuration, reasons from code.
* Unknown is absent: a reading that is not fresh has no series. `headrace_engine_sample_age_seconds` says why.
* Gauges that are cheaper to read than to keep are set by callbacks which `refresh` runs, on the loop, before a page
  is rendered; `render` itself may run in a thread.

It times nothing, starts no task and holds no lock. The machine below it is `gateway.series`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from backends.gpu.base import GpuField, GpuSample
from backends.gpu.throttle import decode
from gateway.series import OTHER, Counter, Gauge, Histogram, Instrument, Kind, Merge, Registry, Spread, Tally
from policies.sizing import Window
from policies.vocabulary import Decision, EngineState, EngineView, Outcome, Reading, Result

LATENCY_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5,
    10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 1800.0,
)  # fmt: skip
"""Web-style buckets end at 10 s and make every LLM p99 read 10 s; these follow TTFT objectives up to whole answers."""

STEP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)
"""For things that should take milliseconds: token gaps, Redis round trips, lag of the loop."""


def _counter(name: str, unit: str, text: str, *labels: str) -> Instrument:
    return Instrument(name, Kind.COUNTER, text, labels, unit)


def _gauge(name: str, unit: str, text: str, *labels: str, merge: Merge = Merge.DECIDER) -> Instrument:
    return Instrument(name, Kind.GAUGE, text, labels, unit, merge=merge)


def _histogram(name: str, buckets: tuple[float, ...], text: str, *labels: str) -> Instrument:
    return Instrument(name, Kind.HISTOGRAM, text, labels, "seconds", buckets)


_CARD = ("engine", "gpu", "partition")
"""Labels of one card: its UUID (or index), and for a MIG slice its profile."""

REQUESTS = _counter(
    "headrace_requests_total", "", "Works settled, each exactly once.", "class", "model", "tenant", "result", "status"
)
SLA = _counter(
    "headrace_ttft_sla_total",
    "",
    "Works of classes with a TTFT objective by whether they met it; a shed or failed work missed it.",
    "class",
    "model",
    "outcome",
)
PROMPT_TOKENS = _counter(
    "headrace_prompt_tokens_total", "tokens", "Prompt tokens of settled works.", "class", "model", "tenant"
)
OUTPUT_TOKENS = _counter(
    "headrace_output_tokens_total", "tokens", "Tokens relayed to clients.", "class", "model", "tenant"
)
SHEDS = _counter("headrace_sheds_total", "", "Works refused at admission or while waiting.", "class", "reason")
ATTEMPTS = _counter("headrace_attempts_total", "", "Tries sent to an engine.", "engine", "class")
RETRIES = _counter(
    "headrace_retries_total", "", "Works tried again after an attempt failed, by the failure.", "engine", "reason"
)
DECISIONS = _counter(
    "headrace_decisions_total",
    "",
    "Decisions of the dispatcher by action and by the guard that bound them.",
    "action",
    "class",
    "engine",
    "guard",
)
QUEUE_WAIT = _histogram(
    "headrace_queue_wait_seconds", LATENCY_BUCKETS_S, "Accepted to granted, of works that were granted.", "class"
)
TTFT = _histogram(
    "headrace_ttft_seconds",
    LATENCY_BUCKETS_S,
    "Accepted to first content byte written to the client.",
    "class",
    "model",
)
ENGINE_TTFT = _histogram(
    "headrace_engine_ttft_seconds",
    LATENCY_BUCKETS_S,
    "Sent to first content byte from the engine, last attempt.",
    "engine",
    "class",
)
TPOT = _histogram(
    "headrace_tpot_seconds", STEP_BUCKETS_S, "Mean gap between the tokens of one completed answer.", "class", "model"
)
DURATION = _histogram("headrace_request_duration_seconds", LATENCY_BUCKETS_S, "Accepted to settled.", "class", "model")
QUEUED = _gauge("headrace_queued", "", "Works waiting in the queue.", "class")
OLDEST = _gauge("headrace_queue_oldest_seconds", "seconds", "Age of the oldest waiting work.", "class")
IN_FLIGHT = _gauge("headrace_in_flight", "", "Works sent to an engine and not ended.", "engine", "class")
WINDOW = _gauge("headrace_window", "", "Works that may be in flight now; absent without such a cap.", "engine", "class")
WINDOW_TOKENS = _gauge(
    "headrace_window_tokens",
    "tokens",
    "KV tokens that may be in flight now; absent without such a cap.",
    "engine",
    "class",
)
LEDGER_KV_TOKENS = _gauge(
    "headrace_ledger_kv_tokens", "tokens", "Prompt and generated tokens of our works in flight.", "engine"
)
LEDGER_PREFILL_TOKENS = _gauge(
    "headrace_ledger_prefill_tokens", "tokens", "Prompt tokens of our works without a first token.", "engine"
)
ENGINE_STATE = _gauge("headrace_engine_state", "", "1 for the state that the engine is in.", "engine", "state")
ENGINE_KV = _gauge(
    "headrace_engine_kv_used_ratio", "ratio", "KV cache in use, 0 to 1, as the engine says; absent: unknown.", "engine"
)
ENGINE_KV_CAPACITY = _gauge(
    "headrace_engine_kv_capacity_tokens", "tokens", "Size of the KV cache; absent: unknown.", "engine"
)
ENGINE_RUNNING = _gauge(
    "headrace_engine_running", "", "Sequences decoding, as the engine says; absent: unknown.", "engine"
)
ENGINE_WAITING = _gauge("headrace_engine_waiting", "", "Requests in the engine's own queue; absent: unknown.", "engine")
ENGINE_SAMPLE_AGE = _gauge(
    "headrace_engine_sample_age_seconds", "seconds", "Age of the newest sample; absent: none yet.", "engine"
)
GPU_UP = _gauge(
    "headrace_gpu_telemetry_up",
    "",
    "1 while some GPU of the engine tells something; absent without a source.",
    "engine",
)
GPU_MEMORY_TOTAL = _gauge("headrace_gpu_memory_total_bytes", "bytes", "Memory of a GPU or MIG slice.", *_CARD)
GPU_MEMORY_USED = _gauge("headrace_gpu_memory_used_bytes", "bytes", "Memory in use; absent: unknown.", *_CARD)
GPU_MEMORY_FREE = _gauge("headrace_gpu_memory_free_bytes", "bytes", "Memory free; absent: unknown.", *_CARD)
GPU_MEMORY_RESERVED = _gauge(
    "headrace_gpu_memory_reserved_bytes", "bytes", "Memory the driver keeps, where it is told apart.", *_CARD
)
GPU_BUSY = _gauge(
    "headrace_gpu_utilisation_ratio", "ratio", "Time in which some kernel ran; near 1 on any busy engine.", *_CARD
)
GPU_TEMPERATURE = _gauge("headrace_gpu_temperature_celsius", "celsius", "Temperature of the die.", *_CARD)
GPU_SLOWDOWN = _gauge(
    "headrace_gpu_temperature_limit_celsius", "celsius", "Temperature at which the GPU slows down.", *_CARD
)
GPU_MARGIN = _gauge(
    "headrace_gpu_temperature_margin_celsius", "celsius", "Degrees left until the GPU slows down.", *_CARD
)
GPU_POWER = _gauge("headrace_gpu_power_watts", "watts", "Power drawn; absent: unknown.", *_CARD)
GPU_POWER_LIMIT = _gauge("headrace_gpu_power_limit_watts", "watts", "Power limit in force.", *_CARD)
GPU_CLOCK_REASON = _gauge(
    "headrace_gpu_clock_reason", "", "1 for each reason for which clocks are held down now.", *_CARD, "reason"
)
GPU_FINDING = _gauge("headrace_gpu_finding", "", "1 for what is wrong with the engine's GPUs.", "engine", "finding")
GPU_ENERGY = _counter(
    "headrace_gpu_energy_joules_total",
    "joules",
    "Energy of the engine's GPUs while it had work (busy) and while it had none (idle).",
    "engine",
    "activity",
)
GPU_IDLE_POWER = _gauge(
    "headrace_gpu_idle_power_watts", "watts", "Mean power of the engine's GPUs while it had no work.", "engine"
)
CONNECTIONS = _gauge("headrace_client_connections", "", "Open client connections.", merge=Merge.SUM)
BODIES_HELD = _gauge("headrace_bodies_held_bytes", "bytes", "Request bodies held in memory.", merge=Merge.SUM)
REDIS_UP = _gauge("headrace_redis_up", "", "1 while Redis answers and takes writes.", merge=Merge.MIN)
REDIS_LATENCY = _histogram(
    "headrace_redis_round_trip_seconds", STEP_BUCKETS_S, "One call of the queue to Redis.", "operation"
)
REDIS_ERRORS = _counter("headrace_redis_errors_total", "", "Queue calls that Redis did not serve.", "operation")
LOOP_LAG = _histogram("headrace_loop_lag_seconds", STEP_BUCKETS_S, "How late the event loop ran a timer.")
LEADER = _gauge("headrace_leader", "", "1 while this process decides for the pool.", "pool", merge=Merge.MAX)
POLICY_GENERATION = _gauge("headrace_policy_generation", "", "Policies put in force since the start, first is 1.")
OBJECTIVE = _gauge(
    "headrace_ttft_objective_seconds", "seconds", "The TTFT objective of a class; absent for one without.", "class"
)
POLICY_RELOAD_FAILED = _gauge(
    "headrace_policy_reload_failed", "", "1 while the newest policy file is refused.", merge=Merge.MAX
)
POLICY_INFO = _gauge("headrace_policy_info", "", "1 for the content hash of the policy in force.", "version")
BUILD_INFO = _gauge("headrace_build_info", "", "1 for the running version.", "version", merge=Merge.MAX)
WORKER_UP = _gauge("headrace_worker_up", "", "1 for a worker that answers; 0 while it does not.", "worker")
WORKER_RESTARTS = _counter(
    "headrace_worker_restarts_total",
    "",
    "Processes replaced: it died, left (a signal to it), or reload; process is a worker's number or decider.",
    "process",
    "reason",
)

INSTRUMENTS: tuple[Instrument, ...] = (
    REQUESTS,
    SLA,
    PROMPT_TOKENS,
    OUTPUT_TOKENS,
    SHEDS,
    ATTEMPTS,
    RETRIES,
    DECISIONS,
    QUEUE_WAIT,
    TTFT,
    ENGINE_TTFT,
    TPOT,
    DURATION,
    QUEUED,
    OLDEST,
    IN_FLIGHT,
    WINDOW,
    WINDOW_TOKENS,
    LEDGER_KV_TOKENS,
    LEDGER_PREFILL_TOKENS,
    ENGINE_STATE,
    ENGINE_KV,
    ENGINE_KV_CAPACITY,
    ENGINE_RUNNING,
    ENGINE_WAITING,
    ENGINE_SAMPLE_AGE,
    GPU_UP,
    GPU_MEMORY_TOTAL,
    GPU_MEMORY_USED,
    GPU_MEMORY_FREE,
    GPU_MEMORY_RESERVED,
    GPU_BUSY,
    GPU_TEMPERATURE,
    GPU_SLOWDOWN,
    GPU_MARGIN,
    GPU_POWER,
    GPU_POWER_LIMIT,
    GPU_CLOCK_REASON,
    GPU_FINDING,
    GPU_ENERGY,
    GPU_IDLE_POWER,
    CONNECTIONS,
    BODIES_HELD,
    REDIS_UP,
    REDIS_LATENCY,
    REDIS_ERRORS,
    LOOP_LAG,
    LEADER,
    POLICY_GENERATION,
    OBJECTIVE,
    POLICY_RELOAD_FAILED,
    POLICY_INFO,
    BUILD_INFO,
    WORKER_UP,
    WORKER_RESTARTS,
)
"""The table, in the order of the page."""


class Telemetry:
    """The process's instruments, filled by typed calls. One per process; handed to whoever counts."""

    __slots__ = ("_counters", "_gauges", "_histograms", "_kept", "_known_models", "_refreshers", "_registry")

    def __init__(self, *, version: str, longest_s: float = 0.0) -> None:
        """longest_s: the largest configured time-out; the latency histograms tell durations apart up to it."""
        self._counters = {row: Counter(row) for row in INSTRUMENTS if row.kind is Kind.COUNTER}
        self._gauges = {row: Gauge(row) for row in INSTRUMENTS if row.kind is Kind.GAUGE}
        self._histograms = {
            row: Histogram(row, top=longest_s if row.buckets is LATENCY_BUCKETS_S else 0.0)
            for row in INSTRUMENTS
            if row.kind is Kind.HISTOGRAM
        }
        families: dict[Instrument, Counter | Gauge | Histogram] = {**self._counters, **self._gauges, **self._histograms}
        self._registry = Registry([families[row] for row in INSTRUMENTS])
        self._kept: dict[tuple[str, str, str, Result, int], _Settled] = {}
        self._known_models: frozenset[str] = frozenset()
        self._refreshers: list[Callable[[Telemetry], None]] = []
        self.set(BUILD_INFO, 1, version)

    # What happens to works.

    def observe_outcome(self, outcome: Outcome, *, sla_met: bool | None) -> None:
        """Count one settled work. sla_met: None for a class without a TTFT objective."""
        key = (outcome.class_name, outcome.model, outcome.tenant, outcome.result, outcome.status)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._settled(outcome)
        kept.requests.value += 1
        kept.prompt_tokens.value += outcome.prompt_tokens
        kept.output_tokens.value += outcome.output_tokens
        kept.duration.observe(outcome.total_s)
        if outcome.queued_s is not None:
            kept.queue_wait.observe(outcome.queued_s)
        if outcome.ttft_s is not None:
            kept.ttft.observe(outcome.ttft_s)
            if outcome.result is Result.COMPLETED and outcome.output_tokens > 1:
                kept.tpot.observe((outcome.total_s - outcome.ttft_s) / (outcome.output_tokens - 1))
        if outcome.engine_ttft_s is not None:
            self.observe(ENGINE_TTFT, outcome.engine_ttft_s, outcome.engine, outcome.class_name)
        if sla_met is not None:
            self.add(SLA, 1, outcome.class_name, kept.model, "met" if sla_met else "missed")
        if outcome.result is Result.SHED:
            self.add(SHEDS, 1, outcome.class_name, outcome.reason)

    def decision(self, decision: Decision) -> None:
        """Count one decision by action and binding guard."""
        self.add(DECISIONS, 1, decision.action, decision.class_name, decision.engine, decision.binding)

    def attempt(self, engine: str, class_name: str) -> None:
        """Count one try sent to an engine."""
        self.add(ATTEMPTS, 1, engine, class_name)

    def retry(self, engine: str, reason: str) -> None:
        """Count one work that goes on elsewhere; engine is the one that failed it."""
        self.add(RETRIES, 1, engine, reason)

    # What engines and queues look like.

    def engine(self, view: EngineView, windows: Mapping[str, Window], *, sample_age_s: float | None) -> None:
        """Replace everything told of one engine. windows: by class; sample_age_s: None before the first sample."""
        name = view.name
        for state in EngineState:
            self.set(ENGINE_STATE, 1 if state is view.state else 0, name, state)
        self.set(ENGINE_KV, _known(view.kv_used_fraction), name)
        self.set(ENGINE_KV_CAPACITY, _known(view.kv_capacity_tokens), name)
        self.set(ENGINE_RUNNING, _known(view.running), name)
        self.set(ENGINE_WAITING, _known(view.waiting), name)
        self.set(ENGINE_SAMPLE_AGE, sample_age_s, name)
        self.set(LEDGER_KV_TOKENS, view.kv_tokens, name)
        self.set(LEDGER_PREFILL_TOKENS, view.prefill_tokens, name)
        for per_class in (IN_FLIGHT, WINDOW, WINDOW_TOKENS):
            self._gauges[per_class].drop(name)
        for class_name in windows.keys() | view.in_flight.keys():
            self.set(IN_FLIGHT, view.in_flight.get(class_name, 0), name, class_name)
        for class_name, window in windows.items():
            self.set(WINDOW, window.requests, name, class_name)
            self.set(WINDOW_TOKENS, window.tokens, name, class_name)

    def gpu(self, name: str, sample: GpuSample, *, idle_power_w: float | None) -> None:
        """Replace everything told of one engine's GPUs; a source that is "none" tells nothing."""
        for row in (*_GPU_FIELDS.values(), GPU_CLOCK_REASON, GPU_FINDING):
            self._gauges[row].drop(name)
        self.set(GPU_UP, None if sample.source == "none" else int(sample.up), name)
        self.set(GPU_IDLE_POWER, idle_power_w, name)
        for card in sample.cards:
            for one, row in _GPU_FIELDS.items():
                self.set(row, card.value(one), name, card.id, card.partition)
            for reason in decode(int(card.value(GpuField.CLOCK_REASONS) or 0)):
                self.set(GPU_CLOCK_REASON, 1, name, card.id, card.partition, reason)
        for finding in sample.findings:
            self.set(GPU_FINDING, 1, name, finding.name)

    def engine_gone(self, name: str) -> None:
        """Take away the gauges of an engine that is no longer configured; its counters stay, as counters must."""
        for row, gauge in self._gauges.items():
            if row.labels[:1] == ("engine",):
                gauge.drop(name)

    def queue(self, depths: Mapping[str, int], oldest_s: Mapping[str, float] | None = None) -> None:
        """Replace the queue's depth by class, and the age of the oldest waiting work where known."""
        self._gauges[QUEUED].clear()
        self._gauges[OLDEST].clear()
        for class_name, depth in depths.items():
            self.set(QUEUED, depth, class_name)
        for class_name, age_s in (oldest_s or {}).items():
            self.set(OLDEST, age_s, class_name)

    def policy(
        self, version: str, *, generation: int, reload_failed: bool, objectives: Mapping[str, float] | None = None
    ) -> None:
        """Tell which policy is in force and whether a newer file was refused. objectives: TTFT seconds by class."""
        self._gauges[POLICY_INFO].clear()
        self._gauges[OBJECTIVE].clear()
        for class_name, ttft_s in (objectives or {}).items():
            self.set(OBJECTIVE, ttft_s, class_name)
        self.set(POLICY_INFO, 1, version)
        self.set(POLICY_GENERATION, generation)
        self.set(POLICY_RELOAD_FAILED, int(reload_failed))

    def models_known(self, models: frozenset[str]) -> None:
        """Models that engines serve now: the only ones that count under their own name."""
        if models != self._known_models:
            self._known_models = models
            self._kept.clear()

    # Any row by itself.

    def add(self, row: Instrument, amount: float, *labels: str) -> None:
        """Raise a counter."""
        self._counters[row].add(amount, *labels)

    def set(self, row: Instrument, value: float | None, *labels: str) -> None:
        """Put a gauge; None takes its series away."""
        self._gauges[row].set(value, *labels)

    def observe(self, row: Instrument, value: float, *labels: str) -> None:
        """Count a value in a histogram."""
        self._histograms[row].observe(value, *labels)

    def keep(self, row: Instrument, *labels: str) -> Spread:
        """A histogram's series to be held by a caller that observes often."""
        return self._histograms[row].child(*labels)

    # All rows, for merging the numbers of several processes (gateway.workers.merge).

    def counters(self) -> Iterable[Counter]:
        """In the order of the table, each with all its series."""
        return self._counters.values()

    def histograms(self) -> Iterable[Histogram]:
        """In the order of the table, each with all its series."""
        return self._histograms.values()

    def gauges(self) -> Iterable[Gauge]:
        """In the order of the table, each with all its series as of the last `refresh`."""
        return self._gauges.values()

    # The page.

    def on_refresh(self, refresher: Callable[[Telemetry], None]) -> None:
        """Have `refresher` set its gauges before each page. It runs on the loop and must not block."""
        self._refreshers.append(refresher)

    def refresh(self) -> None:
        """Run the refreshers."""
        for refresher in self._refreshers:
            refresher(self)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type; takes milliseconds to seconds, so call it in a thread."""
        return self._registry.render(accept)

    def _settled(self, outcome: Outcome) -> _Settled:
        model = outcome.model if outcome.model in self._known_models else OTHER
        of_class = (outcome.class_name,)
        of_model = (outcome.class_name, model)
        of_tenant = (outcome.class_name, model, outcome.tenant)
        kept = _Settled(
            model=model,
            requests=self._counters[REQUESTS].child(*of_tenant, outcome.result, str(outcome.status)),
            prompt_tokens=self._counters[PROMPT_TOKENS].child(*of_tenant),
            output_tokens=self._counters[OUTPUT_TOKENS].child(*of_tenant),
            duration=self._histograms[DURATION].child(*of_model),
            queue_wait=self._histograms[QUEUE_WAIT].child(*of_class),
            ttft=self._histograms[TTFT].child(*of_model),
            tpot=self._histograms[TPOT].child(*of_model),
        )
        if model is not OTHER and len(self._kept) < KEPT_MAX:
            self._kept[(outcome.class_name, outcome.model, outcome.tenant, outcome.result, outcome.status)] = kept
        return kept


KEPT_MAX: Final = 4_096
"""Combinations of labels whose series are kept at hand; more are looked up each time."""


@dataclass(frozen=True, slots=True)
class _Settled:
    """The series that one settled work touches, looked up once per combination of labels."""

    model: str
    requests: Tally
    prompt_tokens: Tally
    output_tokens: Tally
    duration: Spread
    queue_wait: Spread
    ttft: Spread
    tpot: Spread


_GPU_FIELDS: Final[Mapping[GpuField, Instrument]] = {
    GpuField.MEMORY_TOTAL_BYTES: GPU_MEMORY_TOTAL,
    GpuField.MEMORY_USED_BYTES: GPU_MEMORY_USED,
    GpuField.MEMORY_FREE_BYTES: GPU_MEMORY_FREE,
    GpuField.MEMORY_RESERVED_BYTES: GPU_MEMORY_RESERVED,
    GpuField.BUSY_FRACTION: GPU_BUSY,
    GpuField.TEMPERATURE_C: GPU_TEMPERATURE,
    GpuField.SLOWDOWN_C: GPU_SLOWDOWN,
    GpuField.HEAT_MARGIN_C: GPU_MARGIN,
    GpuField.POWER_W: GPU_POWER,
    GpuField.POWER_LIMIT_W: GPU_POWER_LIMIT,
}


def _known(reading: Reading) -> float | None:
    return reading.value if reading.known else None
