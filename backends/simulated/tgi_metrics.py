"""GET /metrics as TGI 3 writes it. A gauge that was never set is absent, as there; both batch gauges fall back to 0."""

from __future__ import annotations

from backends.simulated.engine import Engine
from backends.simulated.exposition import Exposition
from backends.simulated.reserved import ReservedScheduler
from backends.simulated.stats import ExchangeStats


def render_tgi_metrics(
    engine: Engine, scheduler: ReservedScheduler, stats: ExchangeStats, *, requests: int, failures: dict[str, int]
) -> str:
    """The exposition text. failures: refused or failed requests by TGI's `err` label."""
    out = Exposition({}, created_s=0.0)
    out.gauge("tgi_queue_size", "", ({}, float(scheduler.waiting)))
    if engine.totals.steps:
        out.gauge("tgi_batch_current_size", "", ({}, float(scheduler.running)))
        out.gauge("tgi_batch_current_max_tokens", "", ({}, float(scheduler.reserved_tokens)))
    out.gauge("tgi_batch_max_total_tokens", "", ({}, float(scheduler.limits.max_batch_total_tokens)))
    out.plain_counter("tgi_request_count", ({}, float(requests)))
    out.plain_counter("tgi_request_success", ({}, float(engine.totals.finished)))
    if failures:
        out.plain_counter(
            "tgi_request_failure", *(({"err": kind}, float(count)) for kind, count in sorted(failures.items()))
        )
    for name, histogram in (
        ("tgi_request_duration", stats.whole_s),
        ("tgi_request_queue_duration", stats.queued_s),
        ("tgi_request_inference_duration", stats.inference_s),
        ("tgi_request_mean_time_per_token_duration", stats.per_output_token_s),
        ("tgi_request_input_length", stats.prompt_tokens),
        ("tgi_request_generated_tokens", stats.generation_tokens),
    ):
        out.plain_histogram(name, histogram)
    return out.text()
