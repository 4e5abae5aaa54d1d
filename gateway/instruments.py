"""The table of everything that the gateway measures: one row an instrument, in sections, in the order of the page.

It is the single source. The exposition is made from it (`gateway.series`), docs/metrics.md is written from it
(`gateway.observe.metrics_page`), and no dashboard or rule may name a metric that is not here. To add one, write its row
into its section, fill it through `gateway.telemetry`, show it on a board (`gateway.observe.boards`) or say there why not,
and `make generate`.

A row's help is a sentence for the operator. Units are base units and stand last in the name; counters end in _total.
What a gauge means over several processes is its `merge`: by default only what the deciding process says counts.
"""

from __future__ import annotations

from gateway.series import Instrument, Kind, Merge

LATENCY_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5,
    10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 1800.0,
)  # fmt: skip
"""Web-style buckets end at 10 s and make every LLM p99 read 10 s; these follow TTFT objectives up to whole answers."""

STEP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)
"""For things that should take milliseconds: token gaps, Redis round trips, lag of the loop."""

DECISION_BUCKETS_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
"""For plain functions: a decision should take well under a millisecond."""

COARSE_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""For what is told of every tenant: each bucket here is a series for each of them."""

SIZE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
"""Numbers of works or sequences."""


STEPS_BEYOND = 4096
"""Told as steps to overflow where memory suffices at every horizon that is looked at."""


class Section:
    """A part of the table under one heading. Its methods make a row and keep it."""

    __slots__ = ("_rows", "title")

    def __init__(self, title: str) -> None:
        self.title = title
        self._rows: list[Instrument] = []

    @property
    def rows(self) -> tuple[Instrument, ...]:
        """In the order in which they were written."""
        return tuple(self._rows)

    def counter(self, name: str, unit: str, text: str, *labels: str) -> Instrument:
        """Only grows; summed over processes."""
        return self._keep(Instrument(name, Kind.COUNTER, text, labels, unit))

    def gauge(self, name: str, unit: str, text: str, *labels: str, merge: Merge = Merge.DECIDER) -> Instrument:
        """A value of now, absent while unknown."""
        return self._keep(Instrument(name, Kind.GAUGE, text, labels, unit, merge=merge))

    def histogram(
        self, name: str, buckets: tuple[float, ...], text: str, *labels: str, unit: str = "seconds"
    ) -> Instrument:
        """Counts by bucket; summed over processes."""
        return self._keep(Instrument(name, Kind.HISTOGRAM, text, labels, unit, buckets))

    def _keep(self, row: Instrument) -> Instrument:
        self._rows.append(row)
        return row


_requests = Section("Requests")
REQUESTS = _requests.counter(
    "headrace_requests_total", "", "Works settled, each exactly once.", "class", "model", "tenant", "result", "status"
)
SLA = _requests.counter(
    "headrace_ttft_sla_total",
    "",
    "Works of classes with a TTFT objective by whether they met it; a shed or failed work missed it.",
    "class",
    "model",
    "outcome",
)
DEADLINES = _requests.counter(
    "headrace_deadline_total",
    "",
    "Works of classes with a deadline for their whole answers by whether they met it; a shed or failed work missed it.",
    "class",
    "model",
    "outcome",
)
GOODPUT = _requests.counter(
    "headrace_goodput_total",
    "",
    "Works completed inside their class's TTFT objective; of a class without one, every completed work.",
    "class",
    "model",
    "tenant",
)
PROMPT_TOKENS = _requests.counter(
    "headrace_prompt_tokens_total", "tokens", "Prompt tokens of settled works.", "class", "model", "tenant"
)
OUTPUT_TOKENS = _requests.counter(
    "headrace_output_tokens_total", "tokens", "Tokens relayed to clients.", "class", "model", "tenant"
)
SHEDS = _requests.counter("headrace_sheds_total", "", "Works refused at admission or while waiting.", "class", "reason")
ATTEMPTS = _requests.counter("headrace_attempts_total", "", "Tries sent to an engine.", "engine", "class")
RETRIES = _requests.counter(
    "headrace_retries_total", "", "Works tried again after an attempt failed, by the failure.", "engine", "reason"
)
PREEMPTED = _requests.counter(
    "headrace_preempted_total", "", "Attempts given up for works with an objective, and begun anew.", "engine", "class"
)
PREEMPTED_TOKENS = _requests.counter(
    "headrace_preempted_tokens_total", "", "Output tokens seen of attempts given up so: waste.", "engine", "class"
)
RETRIES_WITHHELD = _requests.counter(
    "headrace_retries_withheld_total", "", "Works not tried again since the budget of retries was used up.", "engine"
)
REQUEST_BATCH = _requests.histogram(
    "headrace_request_batch_size", SIZE_BUCKETS, "Sequences that one request asks for (prompts x n).", "class", unit=""
)
REQUEST_PARTS = _requests.counter(
    "headrace_request_parts_total", "", "Works that are parts of a larger request, which was split.", "class"
)
CLASSIFIED = _requests.counter(
    "headrace_classified_total",
    "",
    "Requests by the class they got and what gave it: a rule, a side of the shape, or a learned pattern.",
    "class",
    "reason",
)
REFUSALS = _requests.counter(
    "headrace_http_refusals_total",
    "",
    "Requests that were answered with an error before they became works: no key, no such model or route, too large.",
    "status",
    "reason",
)
IDEMPOTENT = _requests.counter(
    "headrace_idempotent_requests_total",
    "",
    "Requests with an Idempotency-Key: first, replayed, running, reused, not_kept, or unavailable (served without).",
    "outcome",
)

_latency = Section("Latency")
QUEUE_WAIT = _latency.histogram(
    "headrace_queue_wait_seconds", LATENCY_BUCKETS_S, "Accepted to granted, of works that were granted.", "class"
)
TTFT = _latency.histogram(
    "headrace_ttft_seconds",
    LATENCY_BUCKETS_S,
    "Accepted to first content byte written to the client.",
    "class",
    "model",
)
ENGINE_TTFT = _latency.histogram(
    "headrace_engine_ttft_seconds",
    LATENCY_BUCKETS_S,
    "Sent to first content byte from the engine, last attempt.",
    "engine",
    "class",
)
TPOT = _latency.histogram(
    "headrace_tpot_seconds", STEP_BUCKETS_S, "Mean gap between the tokens of one completed answer.", "class", "model"
)
ITL = _latency.histogram(
    "headrace_itl_seconds",
    STEP_BUCKETS_S,
    "Gap between two reads of one stream that both bring tokens; pauses that the client makes are left out.",
    "engine",
    "class",
)
TENANT_TTFT = _latency.histogram(
    "headrace_tenant_ttft_seconds", COARSE_BUCKETS_S, "TTFT of one tenant's works, coarsely.", "class", "tenant"
)
DURATION = _latency.histogram(
    "headrace_request_duration_seconds", LATENCY_BUCKETS_S, "Accepted to settled.", "class", "model"
)
OBJECTIVE = _latency.gauge(
    "headrace_ttft_objective_seconds", "seconds", "The TTFT objective of a class; absent for one without.", "class"
)

_queue = Section("Queue")
QUEUED = _queue.gauge("headrace_queued", "", "Works waiting in the queue.", "class")
OLDEST = _queue.gauge("headrace_queue_oldest_seconds", "seconds", "Age of the oldest waiting work.", "class")
TENANT_QUEUED = _queue.gauge(
    "headrace_tenant_queued", "", "Works of one tenant waiting in the queue.", "class", "tenant"
)

_decisions = Section("Decisions and batch size")
DECISIONS = _decisions.counter(
    "headrace_decisions_total",
    "",
    "Decisions of the dispatcher by action and by the guard that bound them.",
    "action",
    "class",
    "engine",
    "guard",
)
IN_FLIGHT = _decisions.gauge("headrace_in_flight", "", "Works sent to an engine and not ended.", "engine", "class")
WINDOW = _decisions.gauge(
    "headrace_window", "", "Works that may be in flight now; absent without such a cap.", "engine", "class"
)
WINDOW_TOKENS = _decisions.gauge(
    "headrace_window_tokens",
    "tokens",
    "KV tokens that may be in flight now; absent without such a cap.",
    "engine",
    "class",
)
LEDGER_KV_TOKENS = _decisions.gauge(
    "headrace_ledger_kv_tokens", "tokens", "Prompt and generated tokens of our works in flight.", "engine"
)
LEDGER_PREFILL_TOKENS = _decisions.gauge(
    "headrace_ledger_prefill_tokens", "tokens", "Prompt tokens of our works without a first token.", "engine"
)
GUARD_VALUE = _decisions.gauge(
    "headrace_guard_value",
    "",
    "What a guard measures for one more work of the class on the engine now; in the guard's own unit.",
    "engine",
    "class",
    "guard",
)
GUARD_THRESHOLD = _decisions.gauge(
    "headrace_guard_threshold",
    "",
    "The most that the guard lets pass; its value over this is how near it is to binding.",
    "engine",
    "class",
    "guard",
)
PREFIX_EXPECTED = _decisions.counter(
    "headrace_prefix_expected_tokens_total",
    "tokens",
    "Prompt tokens that the engine was expected to have in its prefix cache, of works placed there.",
    "engine",
)
GUARD_BINDING = _decisions.gauge(
    "headrace_guard_binding",
    "",
    "1 for the guard that would hold back one more work of the class now; none: it could start.",
    "engine",
    "class",
    "guard",
)
STEPS_TO_OVERFLOW = _decisions.gauge(
    "headrace_steps_to_overflow",
    "",
    f"Engine steps after which KV memory is forecast not to suffice; {STEPS_BEYOND}: at no horizon; absent: not forecast.",
    "engine",
)
DISPATCH_BATCH = _decisions.histogram(
    "headrace_dispatch_batch_size", SIZE_BUCKETS, "Works that one round sent to one engine.", "engine", unit=""
)
DISPATCH_BATCHES = _decisions.counter(
    "headrace_dispatch_batches_total",
    "",
    "Batches that rounds sent to an engine, by the guard that let no more in; none: nothing more waited for it.",
    "engine",
    "guard",
)
DISPATCH_SEQUENCES = _decisions.counter(
    "headrace_dispatch_sequences_total", "", "Sequences (prompts x n) in these batches.", "engine"
)
DECISION_TIME = _decisions.histogram(
    "headrace_decision_seconds",
    DECISION_BUCKETS_S,
    "Time to decide: a round over what waits, or arrival (may it start at once).",
    "kind",
)

_engines = Section("Engines")
ENGINE_STATE = _engines.gauge("headrace_engine_state", "", "1 for the state that the engine is in.", "engine", "state")
ENGINE_OUT = _engines.gauge(
    "headrace_engine_out_of_rotation",
    "",
    "1 for the reason for which an engine is out of rotation.",
    "engine",
    "reason",
)
ENGINE_FALLS = _engines.counter(
    "headrace_engine_falls_total", "", "Times that an engine left the rotation, by reason.", "engine", "reason"
)
ENGINE_FINDING = _engines.gauge(
    "headrace_engine_finding", "", "1 for what is wrong with what an engine tells of itself.", "engine", "finding"
)
ENGINE_KV = _engines.gauge(
    "headrace_engine_kv_used_ratio", "ratio", "KV cache in use, 0 to 1, as the engine says; absent: unknown.", "engine"
)
ENGINE_KV_CAPACITY = _engines.gauge(
    "headrace_engine_kv_capacity_tokens", "tokens", "Size of the KV cache; absent: unknown.", "engine"
)
ENGINE_RUNNING = _engines.gauge(
    "headrace_engine_running", "", "Sequences decoding, as the engine says; absent: unknown.", "engine"
)
ENGINE_WAITING = _engines.gauge(
    "headrace_engine_waiting", "", "Requests in the engine's own queue; absent: unknown.", "engine"
)
ENGINE_SAMPLE_AGE = _engines.gauge(
    "headrace_engine_sample_age_seconds", "seconds", "Age of the newest sample; absent: none yet.", "engine"
)
ENGINE_RESULTS = _engines.counter(
    "headrace_engine_results_total", "", "Works settled, by the engine that had them last.", "engine", "class", "result"
)
ENGINE_OUTPUT_TOKENS = _engines.counter(
    "headrace_engine_relayed_tokens_total", "tokens", "Tokens relayed from the engine to clients.", "engine", "class"
)
ENGINE_PREEMPTIONS = _engines.counter(
    "headrace_engine_preemptions_total", "", "Sequences that the engine evicted from its KV cache.", "engine"
)
ENGINE_PROMPT_TOKENS = _engines.counter(
    "headrace_engine_prompt_tokens_total", "tokens", "Prompt tokens by the engine's own count, others' too.", "engine"
)
ENGINE_GENERATED_TOKENS = _engines.counter(
    "headrace_engine_generated_tokens_total", "tokens", "Tokens made by the engine's own count, others' too.", "engine"
)
PREDICTION_ERROR = _engines.gauge(
    "headrace_engine_prediction_error_ratio",
    "ratio",
    "Typical error of what was predicted of the engine's gaps and first tokens, relative to the larger; absent: not"
    " learned.",
    "engine",
)
TTFT_FACTOR = _engines.gauge(
    "headrace_engine_ttft_factor_ratio",
    "ratio",
    "First tokens of the last half minute over what was predicted of them, 0.7 to 1.4; absent: not learned.",
    "engine",
)
PROFILE_DRIFT = _engines.gauge(
    "headrace_engine_profile_drift_ratio",
    "ratio",
    "How far the speed learned in service is from the engine's stored profile (largest relative difference of usual"
    " work); above 0.2 the profile should be renewed. Absent without a profile, or while too little was learned.",
    "engine",
)
SIGNAL_AGE = _engines.gauge(
    "headrace_engine_signal_age_seconds", "seconds", "Age of one signal; absent: never seen.", "engine", "signal"
)
SIGNAL_QUALITY = _engines.gauge(
    "headrace_engine_signal_quality",
    "",
    "1 for how far one signal can be trusted now: fresh, stale, missing, frozen or absurd.",
    "engine",
    "signal",
    "quality",
)

_CARD = ("engine", "gpu", "partition")
"""Labels of one card: its UUID (or index), and for a MIG slice its profile."""

_gpus = Section("GPUs")
GPU_UP = _gpus.gauge(
    "headrace_gpu_telemetry_up",
    "",
    "1 while some GPU of the engine tells something; absent without a source.",
    "engine",
)
VRAM_HEADROOM = _gpus.gauge(
    "headrace_engine_vram_headroom_ratio",
    "ratio",
    "Free part of the memory of the engine's tightest GPU; absent: unknown.",
    "engine",
)
GPU_MEMORY_TOTAL = _gpus.gauge("headrace_gpu_memory_total_bytes", "bytes", "Memory of a GPU or MIG slice.", *_CARD)
GPU_MEMORY_USED = _gpus.gauge("headrace_gpu_memory_used_bytes", "bytes", "Memory in use; absent: unknown.", *_CARD)
GPU_MEMORY_FREE = _gpus.gauge("headrace_gpu_memory_free_bytes", "bytes", "Memory free; absent: unknown.", *_CARD)
GPU_MEMORY_RESERVED = _gpus.gauge(
    "headrace_gpu_memory_reserved_bytes", "bytes", "Memory the driver keeps, where it is told apart.", *_CARD
)
GPU_BUSY = _gpus.gauge(
    "headrace_gpu_utilisation_ratio", "ratio", "Time in which some kernel ran; near 1 on any busy engine.", *_CARD
)
GPU_TEMPERATURE = _gpus.gauge("headrace_gpu_temperature_celsius", "celsius", "Temperature of the die.", *_CARD)
GPU_SLOWDOWN = _gpus.gauge(
    "headrace_gpu_temperature_limit_celsius", "celsius", "Temperature at which the GPU slows down.", *_CARD
)
GPU_MARGIN = _gpus.gauge(
    "headrace_gpu_temperature_margin_celsius", "celsius", "Degrees left until the GPU slows down.", *_CARD
)
GPU_POWER = _gpus.gauge("headrace_gpu_power_watts", "watts", "Power drawn; absent: unknown.", *_CARD)
GPU_POWER_LIMIT = _gpus.gauge("headrace_gpu_power_limit_watts", "watts", "Power limit in force.", *_CARD)
GPU_CLOCK_REASON = _gpus.gauge(
    "headrace_gpu_clock_reason", "", "1 for each reason for which clocks are held down now.", *_CARD, "reason"
)
GPU_FINDING = _gpus.gauge(
    "headrace_gpu_finding", "", "1 for what is wrong with the engine's GPUs.", "engine", "finding"
)

_energy = Section("Energy and cost")
GPU_ENERGY = _energy.counter(
    "headrace_gpu_energy_joules_total",
    "joules",
    "Energy of the engine's GPUs while it had work (busy) and while it had none (idle).",
    "engine",
    "activity",
)
GPU_IDLE_POWER = _energy.gauge(
    "headrace_gpu_idle_power_watts", "watts", "Mean power of the engine's GPUs while it had no work.", "engine"
)

ENERGY_BATCH_J = _energy.counter(
    "headrace_energy_batch_joules_total",
    "joules",
    "Energy of the engine's GPUs while it had work, by the sequences that it ran (the power of two at or above).",
    "engine",
    "batch",
)
ENERGY_BATCH_TOKENS = _energy.counter(
    "headrace_energy_batch_tokens_total", "tokens", "Tokens that the engine made meanwhile.", "engine", "batch"
)
ENERGY_PER_TOKEN = _energy.gauge(
    "headrace_energy_token_joules",
    "joules",
    "Energy of one prompt token (prefill) and of one generated token (decode) beyond what time costs; absent: not seen"
    " well enough.",
    "engine",
    "phase",
)
SERVED_TOKENS = _energy.counter(
    "headrace_served_tokens_total",
    "tokens",
    "Tokens of completed works by the engine that served them; kind is prompt or output.",
    "engine",
    "class",
    "tenant",
    "kind",
)
WASTED_TOKENS = _energy.counter(
    "headrace_wasted_tokens_total",
    "tokens",
    "Tokens computed for nobody: of works that did not complete (aborted), and again after the engine evicted a sequence"
    " (recomputed, estimated).",
    "engine",
    "reason",
)
COST = _energy.counter(
    "headrace_cost_total",
    "",
    "Money spent on an engine that answered, in the currency of the prices: GPU hours (gpu) and energy, capacity is"
    " spot or on_demand. Absent without prices.",
    "engine",
    "capacity",
    "part",
)
COST_PER_MILLION = _energy.gauge(
    "headrace_cost_per_million_tokens",
    "",
    "Cost of a million prompt and output tokens since the start, idle time included; absent without prices.",
    "engine",
    "class",
    "tenant",
    "capacity",
)

_pool = Section("Pool and Redis")
LEADER = _pool.gauge("headrace_leader", "", "1 while this process decides for the pool.", "pool", merge=Merge.MAX)
LEADER_EPOCH = _pool.gauge(
    "headrace_leader_epoch",
    "",
    "Number of the leadership in force, as its holder knows it; a change is a takeover. Absent where nobody leads.",
    "pool",
    merge=Merge.MAX,
)
CLOCK_ERROR = _pool.gauge(
    "headrace_clock_error_seconds",
    "seconds",
    "How wrong the process's estimate of the pool clock may be; absent before the first answer.",
    merge=Merge.MAX,
)
REDIS_UP = _pool.gauge("headrace_redis_up", "", "1 while Redis answers and takes writes.", merge=Merge.MIN)
REDIS_LATENCY = _pool.histogram(
    "headrace_redis_round_trip_seconds", STEP_BUCKETS_S, "One call of the queue to Redis.", "operation"
)
REDIS_ERRORS = _pool.counter("headrace_redis_errors_total", "", "Queue calls that Redis did not serve.", "operation")

_policy = Section("Policy")
POLICY_GENERATION = _policy.gauge(
    "headrace_policy_generation", "", "Policies put in force since the start, first is 1."
)
POLICY_RELOAD_FAILED = _policy.gauge(
    "headrace_policy_reload_failed", "", "1 while the newest policy file is refused.", merge=Merge.MAX
)
POLICY_INFO = _policy.gauge("headrace_policy_info", "", "1 for the content hash of the policy in force.", "version")

_process = Section("Processes")
CONNECTIONS = _process.gauge("headrace_client_connections", "", "Open client connections.", merge=Merge.SUM)
BODIES_HELD = _process.gauge("headrace_bodies_held_bytes", "bytes", "Request bodies held in memory.", merge=Merge.SUM)
EVENTS_DROPPED = _process.counter(
    "headrace_attempt_events_dropped_total",
    "",
    "Beginnings, first tokens and ends of attempts in other processes that no leader could learn from.",
)
LOOP_LAG = _process.histogram("headrace_loop_lag_seconds", STEP_BUCKETS_S, "How late the event loop ran a timer.")
BUILD_INFO = _process.gauge("headrace_build_info", "", "1 for the running version.", "version", merge=Merge.MAX)
WORKER_UP = _process.gauge("headrace_worker_up", "", "1 for a worker that answers; 0 while it does not.", "worker")
WORKER_RESTARTS = _process.counter(
    "headrace_worker_restarts_total",
    "",
    "Processes replaced: it died, left (a signal to it), or reload; process is a worker's number or decider.",
    "process",
    "reason",
)

SECTIONS = (_requests, _latency, _queue, _decisions, _engines, _gpus, _energy, _pool, _policy, _process)
INSTRUMENTS: tuple[Instrument, ...] = tuple(row for section in SECTIONS for row in section.rows)
"""All rows, in the order of the page."""
