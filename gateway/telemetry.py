"""Every number that the gateway tells about itself, filled by typed calls.

The rows are in `gateway.instruments`; the machine that keeps and renders them is `gateway.series`. The calls here take
the value types of `policies.vocabulary`, so that what is counted is what was decided.

Invariants:

* What a client can type is never a label as it stands: a model counts under its own name only when an engine serves
  it (`models_known`), else under `other`. Classes and tenants come from configuration, reasons from code.
* Unknown is absent: a reading that is not fresh has no series. `headrace_engine_signal_quality` says why.
* Gauges that are cheaper to read than to keep are set by callbacks which `refresh` runs, on the loop, before a page
  is rendered; `render` itself may run in a thread.

It times nothing, starts no task and holds no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Final

from backends.gpu.base import GpuField, GpuSample
from backends.gpu.throttle import decode
from gateway.errors import Refusal
from gateway.instruments import (
    ATTEMPTS,
    BUILD_INFO,
    COARSE_BUCKETS_S,
    DEADLINES,
    DECISION_TIME,
    DECISIONS,
    DISPATCH_BATCH,
    DISPATCH_BATCHES,
    DISPATCH_SEQUENCES,
    DURATION,
    ENGINE_GENERATED_TOKENS,
    ENGINE_KV,
    ENGINE_KV_CAPACITY,
    ENGINE_OUTPUT_TOKENS,
    ENGINE_PREEMPTIONS,
    ENGINE_PROMPT_TOKENS,
    ENGINE_RESULTS,
    ENGINE_RUNNING,
    ENGINE_SAMPLE_AGE,
    ENGINE_STATE,
    ENGINE_TTFT,
    ENGINE_WAITING,
    GOODPUT,
    GPU_BUSY,
    GPU_CLOCK_REASON,
    GPU_FINDING,
    GPU_IDLE_POWER,
    GPU_MARGIN,
    GPU_MEMORY_FREE,
    GPU_MEMORY_RESERVED,
    GPU_MEMORY_TOTAL,
    GPU_MEMORY_USED,
    GPU_POWER,
    GPU_POWER_LIMIT,
    GPU_SLOWDOWN,
    GPU_TEMPERATURE,
    GPU_UP,
    GUARD_BINDING,
    GUARD_THRESHOLD,
    GUARD_VALUE,
    IN_FLIGHT,
    INSTRUMENTS,
    LATENCY_BUCKETS_S,
    LEDGER_KV_TOKENS,
    LEDGER_PREFILL_TOKENS,
    OBJECTIVE,
    OLDEST,
    OUTPUT_TOKENS,
    POLICY_GENERATION,
    POLICY_INFO,
    POLICY_RELOAD_FAILED,
    PREEMPTED,
    PREEMPTED_TOKENS,
    PREFIX_EXPECTED,
    PROMPT_TOKENS,
    QUEUE_WAIT,
    QUEUED,
    REDIS_ERRORS,
    REDIS_LATENCY,
    REFUSALS,
    REQUEST_BATCH,
    REQUESTS,
    RETRIES,
    SERVED_TOKENS,
    SHEDS,
    SIGNAL_AGE,
    SIGNAL_QUALITY,
    SLA,
    STEPS_BEYOND,
    STEPS_TO_OVERFLOW,
    TENANT_QUEUED,
    TENANT_TTFT,
    TPOT,
    TTFT,
    VRAM_HEADROOM,
    WASTED_TOKENS,
    WINDOW,
    WINDOW_TOKENS,
)
from gateway.series import OTHER, Counter, Gauge, Histogram, Instrument, Kind, Labels, Registry, Spread, Tally
from policies.sizing import Window
from policies.vocabulary import (
    UNKNOWN,
    Decision,
    DispatchBatch,
    EngineState,
    EngineView,
    Outcome,
    Quality,
    Reading,
    Result,
    Verdict,
)


class Telemetry:
    """The process's instruments, filled by typed calls. One per process; handed to whoever counts."""

    __slots__ = (
        "_counters",
        "_followed",
        "_gauges",
        "_histograms",
        "_kept",
        "_known_models",
        "_qualities",
        "_refreshers",
        "_registry",
    )

    def __init__(self, *, version: str, longest_s: float = 0.0) -> None:
        """longest_s: the largest configured time-out; the latency histograms tell durations apart up to it."""
        self._counters = {row: Counter(row) for row in INSTRUMENTS if row.kind is Kind.COUNTER}
        self._gauges = {row: Gauge(row) for row in INSTRUMENTS if row.kind is Kind.GAUGE}
        self._histograms = {
            row: Histogram(row, top=longest_s if row.buckets in (LATENCY_BUCKETS_S, COARSE_BUCKETS_S) else 0.0)
            for row in INSTRUMENTS
            if row.kind is Kind.HISTOGRAM
        }
        families: dict[Instrument, Counter | Gauge | Histogram] = {**self._counters, **self._gauges, **self._histograms}
        self._registry = Registry([families[row] for row in INSTRUMENTS])
        self._kept: dict[tuple[str, str, str, str, Result, int], _Settled] = {}
        self._known_models: frozenset[str] = frozenset()
        self._followed: dict[tuple[Instrument, str], float] = {}
        self._qualities: dict[tuple[str, str], Quality] = {}
        self._refreshers: list[Callable[[Telemetry], None]] = []
        self.set(BUILD_INFO, 1, version)

    # What happens to works.

    def observe_outcome(
        self,
        outcome: Outcome,
        *,
        sla_met: bool | None,
        deadline_met: bool | None = None,
        sequences: int = 1,
        trace_id: str = "",
        at_s: float = 0.0,
    ) -> None:
        """Count one settled work.

        sla_met       None for a class without a TTFT objective
        deadline_met  None for a class without a deadline for its whole answers
        sequences     that it asked for
        trace_id      of the trace that tells of it, kept as an exemplar of its latencies at at_s, wall time; "": none
        """
        key = (outcome.class_name, outcome.model, outcome.tenant, outcome.engine, outcome.result, outcome.status)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._settled(outcome)
        kept.requests.value += 1
        kept.prompt_tokens.value += outcome.prompt_tokens
        kept.output_tokens.value += outcome.output_tokens
        kept.engine_results.value += 1
        if outcome.result is Result.COMPLETED:
            kept.served_prompt.value += outcome.prompt_tokens
            kept.served_output.value += outcome.output_tokens
        elif outcome.ttft_s is not None or outcome.output_tokens:
            kept.wasted.value += outcome.prompt_tokens + outcome.output_tokens
        kept.engine_tokens.value += outcome.output_tokens
        kept.duration.observe(outcome.total_s)
        kept.request_batch.observe(sequences)
        completed = outcome.result is Result.COMPLETED
        if completed and sla_met is not False and deadline_met is not False:
            kept.goodput.value += 1
        if outcome.queued_s is not None:
            kept.queue_wait.observe(outcome.queued_s)
        if outcome.ttft_s is not None:
            kept.ttft.observe(outcome.ttft_s)
            kept.tenant_ttft.observe(outcome.ttft_s)
            if completed and outcome.output_tokens > 1:
                kept.tpot.observe((outcome.total_s - outcome.ttft_s) / (outcome.output_tokens - 1))
        if outcome.engine_ttft_s is not None:
            kept.engine_ttft.observe(outcome.engine_ttft_s)
        if trace_id:
            kept.mark(outcome, trace_id, at_s)
        if sla_met is not None:
            self.add(SLA, 1, outcome.class_name, kept.model, "met" if sla_met else "missed")
        if deadline_met is not None:
            self.add(DEADLINES, 1, outcome.class_name, kept.model, "met" if deadline_met else "missed")
        if outcome.result is Result.SHED:
            self.add(SHEDS, 1, outcome.class_name, outcome.reason)

    def decision(self, decision: Decision) -> None:
        """Count one decision by action and binding guard."""
        self.add(DECISIONS, 1, decision.action, decision.class_name, decision.engine, decision.binding)
        if decision.cached_tokens:
            self.add(PREFIX_EXPECTED, decision.cached_tokens, decision.engine)

    def attempt(self, engine: str, class_name: str) -> None:
        """Count one try sent to an engine."""
        self.add(ATTEMPTS, 1, engine, class_name)

    def retry(self, engine: str, reason: str) -> None:
        """Count one work that goes on elsewhere; engine is the one that failed it."""
        self.add(RETRIES, 1, engine, reason)

    def preempted(self, engine: str, class_name: str, output_tokens: int) -> None:
        """Count one attempt that the gateway gave up for a work with an objective, and what it had made."""
        self.add(PREEMPTED, 1, engine, class_name)
        self.add(PREEMPTED_TOKENS, output_tokens, engine, class_name)

    def refused(self, refusal: Refusal) -> None:
        """Count one request that became no work."""
        self.add(REFUSALS, 1, str(refusal.status), refusal.reason or refusal.type)

    def decided(self, kind: str, seconds: float) -> None:
        """See `gateway.dispatch.dispatcher.Meter`."""
        self.observe(DECISION_TIME, seconds, kind)

    def dispatched(self, batch: DispatchBatch) -> None:
        """See `gateway.dispatch.dispatcher.Meter`."""
        self.observe(DISPATCH_BATCH, sum(batch.works.values()), batch.engine)
        self.add(DISPATCH_BATCHES, 1, batch.engine, batch.binding)
        self.add(DISPATCH_SEQUENCES, batch.sequences, batch.engine)

    def redis_call(self, operation: str, seconds: float, answered: bool) -> None:
        """Count one command to the queue's store."""
        self.observe(REDIS_LATENCY, seconds, operation)
        if not answered:
            self.add(REDIS_ERRORS, 1, operation)

    # What engines and queues look like.

    def engine_counts(self, view: EngineView) -> None:
        """Let our counters follow the engine's own. Only the process that decides calls it: others would count twice."""
        for row, reading in (
            (ENGINE_PREEMPTIONS, view.preemptions_total),
            (ENGINE_PROMPT_TOKENS, view.prompt_tokens_total),
            (ENGINE_GENERATED_TOKENS, view.generation_tokens_total),
        ):
            total = _known(reading)
            if total is None:
                continue
            before = self._followed.get((row, view.name), total)
            self._followed[row, view.name] = total
            self.add(row, total - before if total >= before else total, view.name)

    def guards(self, verdicts: Mapping[tuple[str, str], Verdict]) -> None:
        """Replace what is told of guards: by engine and class, the answer to one more work."""
        readings = [(of, reading) for of, verdict in verdicts.items() for reading in verdict.guards]
        self.set_only(GUARD_BINDING, {(*of, verdict.binding): 1 for of, verdict in verdicts.items()})
        self.set_only(GUARD_VALUE, {(*of, one.guard): one.value for of, one in readings})
        self.set_only(GUARD_THRESHOLD, {(*of, one.guard): one.threshold for of, one in readings})

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
        self.set(VRAM_HEADROOM, _known(view.gpu_memory_free_fraction), name)
        for signal in _SIGNALS:
            reading: Reading = getattr(view, signal)
            self.set(SIGNAL_AGE, reading.age_s, name, signal)
            before = self._qualities.get((name, signal))
            if before is not reading.quality:
                self._qualities[name, signal] = reading.quality
                if before is not None:
                    self.set(SIGNAL_QUALITY, None, name, signal, before)
                self.set(SIGNAL_QUALITY, 1, name, signal, reading.quality)
        self.set(LEDGER_KV_TOKENS, view.kv_tokens, name)
        self.set(LEDGER_PREFILL_TOKENS, view.prefill_tokens, name)
        steps = [steps for window in windows.values() if (steps := window.steps_to_overflow) is not None]
        self.set(STEPS_TO_OVERFLOW, min(*steps, STEPS_BEYOND) if steps else None, name)
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

    def queue(
        self,
        depths: Mapping[str, int],
        oldest_s: Mapping[str, float] | None = None,
        *,
        by_tenant: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        """Replace the queue's depth by class, by class and tenant, and the age of the oldest waiting work where known."""
        for row in (QUEUED, OLDEST, TENANT_QUEUED):
            self._gauges[row].clear()
        for (class_name, tenant), depth in (by_tenant or {}).items():
            self.set(TENANT_QUEUED, depth, class_name, tenant)
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

    def set_only(self, row: Instrument, values: Mapping[Labels, float]) -> None:
        """Put these series of a gauge, and take every other one away."""
        self._gauges[row].set_only(values)

    def observe(self, row: Instrument, value: float, *labels: str) -> None:
        """Count a value in a histogram."""
        self._histograms[row].observe(value, *labels)

    def keep(self, row: Instrument, *labels: str) -> Spread:
        """A histogram's series to be held by a caller that observes often."""
        return self._histograms[row].child(*labels)

    def clear(self, row: Instrument) -> None:
        """Take all series of a gauge away."""
        self._gauges[row].clear()

    def series(self, row: Instrument) -> Mapping[Labels, float]:
        """All series of a counter."""
        return {labels: tally.value for labels, tally in self._counters[row].children.items()}

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
        of_engine = (outcome.engine, outcome.class_name)
        of_user = (outcome.engine, outcome.class_name, outcome.tenant)
        at_engine = bool(outcome.engine)
        served = at_engine and outcome.result is Result.COMPLETED
        wasted = at_engine and not served
        kept = _Settled(
            model=model,
            requests=self._counters[REQUESTS].child(*of_tenant, outcome.result, str(outcome.status)),
            prompt_tokens=self._counters[PROMPT_TOKENS].child(*of_tenant),
            output_tokens=self._counters[OUTPUT_TOKENS].child(*of_tenant),
            goodput=self._counters[GOODPUT].child(*of_tenant),
            engine_results=self._counters[ENGINE_RESULTS].child(*of_engine, outcome.result) if at_engine else Tally(),
            engine_tokens=self._counters[ENGINE_OUTPUT_TOKENS].child(*of_engine) if at_engine else Tally(),
            served_prompt=self._counters[SERVED_TOKENS].child(*of_user, "prompt") if served else Tally(),
            served_output=self._counters[SERVED_TOKENS].child(*of_user, "output") if served else Tally(),
            wasted=self._counters[WASTED_TOKENS].child(outcome.engine, "aborted") if wasted else Tally(),
            request_batch=self._histograms[REQUEST_BATCH].child(*of_class),
            duration=self._histograms[DURATION].child(*of_model),
            queue_wait=self._histograms[QUEUE_WAIT].child(*of_class),
            ttft=self._histograms[TTFT].child(*of_model),
            tenant_ttft=self._histograms[TENANT_TTFT].child(outcome.class_name, outcome.tenant),
            tpot=self._histograms[TPOT].child(*of_model),
            engine_ttft=self._histograms[ENGINE_TTFT].child(*of_engine) if at_engine else Spread(()),
        )
        if model is not OTHER and len(self._kept) < KEPT_MAX:
            key = (outcome.class_name, outcome.model, outcome.tenant, outcome.engine, outcome.result, outcome.status)
            self._kept[key] = kept
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
    goodput: Tally
    engine_results: Tally
    engine_tokens: Tally
    served_prompt: Tally
    served_output: Tally
    wasted: Tally
    request_batch: Spread
    duration: Spread
    queue_wait: Spread
    ttft: Spread
    tenant_ttft: Spread
    tpot: Spread
    engine_ttft: Spread

    def mark(self, outcome: Outcome, trace_id: str, at_s: float) -> None:
        """Let the latencies that were just counted lead to their trace."""
        for spread, value in (
            (self.duration, outcome.total_s),
            (self.queue_wait, outcome.queued_s),
            (self.ttft, outcome.ttft_s),
            (self.engine_ttft, outcome.engine_ttft_s),
        ):
            if value is not None:
                spread.mark(trace_id, value, at_s)


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


_SIGNALS: Final = tuple(one.name for one in fields(EngineView) if one.default is UNKNOWN)
"""What the polled half of an engine's view consists of."""


def _known(reading: Reading) -> float | None:
    return reading.value if reading.known else None
