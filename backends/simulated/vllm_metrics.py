"""GET /metrics as vLLM 0.32.0 writes it: the names, labels, buckets and help texts that its clients rely on.

Values are the engine's own, read at the moment of the scrape. Families that a virtual engine has nothing to say about
(multi-modal cache, KV transfer, floating point operations) are left out, which readers have to stand anyway.
"""

from __future__ import annotations

from backends.simulated.continuous import ContinuousLimits
from backends.simulated.engine import Engine
from backends.simulated.exposition import Exposition, Histogram
from backends.simulated.stats import ExchangeStats


def render_vllm_metrics(
    engine: Engine, limits: ContinuousLimits, stats: ExchangeStats, *, model: str, created_s: float
) -> str:
    """The exposition text. created_s: wall time at which the engine started."""
    out = Exposition({"engine": "0", "model_name": model}, created_s=created_s)
    _gauges(out, engine)
    _cache_config(out, limits)
    _counters(out, engine, stats)
    for name, text, histogram in _histograms(stats):
        out.histogram(f"vllm:{name}", text, histogram)
    return _process_lines(created_s) + out.text() + _rejections(stats, model, created_s)


def _process_lines(created_s: float) -> str:
    out = Exposition({}, created_s=created_s)
    out.gauge("process_start_time_seconds", "Start time of the process since unix epoch in seconds.", ({}, created_s))
    return out.text()


def _gauges(out: Exposition, engine: Engine) -> None:
    scheduler = engine.scheduler
    out.gauge(
        "vllm:num_requests_running", "Number of requests in model execution batches.", ({}, float(scheduler.running))
    )
    out.gauge(
        "vllm:num_requests_waiting", "Number of requests waiting to be processed.", ({}, float(scheduler.waiting))
    )
    out.gauge(
        "vllm:num_requests_waiting_by_reason",
        "Number of waiting requests by reason.",
        ({"reason": "capacity"}, float(scheduler.waiting)),
        ({"reason": "deferred"}, 0.0),
    )
    out.gauge(
        "vllm:engine_sleep_state",
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake.",
        ({"sleep_state": "awake"}, 1.0),
        ({"sleep_state": "weights_offloaded"}, 0.0),
        ({"sleep_state": "discard_all"}, 0.0),
    )
    out.gauge(
        "vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", ({}, scheduler.kv_used_fraction)
    )


def _cache_config(out: Exposition, limits: ContinuousLimits) -> None:
    blocks = limits.kv_tokens // limits.block_tokens
    config = {
        "block_size": str(limits.block_tokens),
        "cache_dtype": "auto",
        "enable_prefix_caching": str(limits.prefix_caching),
        "gpu_memory_utilization": "0.9",
        "kv_cache_max_concurrency": str(round(limits.kv_tokens / limits.max_model_len, 2)),
        "kv_cache_size_tokens": str(blocks * limits.block_tokens),
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(blocks),
        "num_gpu_blocks_override": "None",
    }
    out.gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", (config, 1.0))


def _counters(out: Exposition, engine: Engine, stats: ExchangeStats) -> None:
    totals = engine.totals
    out.counter(
        "vllm:prefix_cache_queries_total",
        "Prefix cache queries, in terms of number of queried tokens.",
        ({}, float(totals.queried_prompt_tokens)),
    )
    out.counter(
        "vllm:prefix_cache_hits_total",
        "Prefix cache hits, in terms of number of cached tokens.",
        ({}, float(totals.cached_prompt_tokens)),
    )
    out.counter(
        "vllm:num_preemptions_total",
        "Cumulative number of preemption from the engine.",
        ({}, float(totals.preemptions)),
    )
    out.counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.", ({}, float(totals.prompt_tokens)))
    out.counter(
        "vllm:generation_tokens_total",
        "Number of generation tokens processed.",
        ({}, float(totals.generation_tokens)),
    )
    out.counter(
        "vllm:request_success_total",
        "Count of successfully processed requests.",
        *(({"finished_reason": reason}, float(count)) for reason, count in stats.finished.items()),
    )


def _histograms(stats: ExchangeStats) -> list[tuple[str, str, Histogram]]:
    return [
        ("request_prompt_tokens", "Number of prefill tokens processed.", stats.prompt_tokens),
        ("request_generation_tokens", "Number of generation tokens processed.", stats.generation_tokens),
        ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", stats.first_token_s),
        ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", stats.inter_token_s),
        (
            "request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            stats.per_output_token_s,
        ),
        ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", stats.whole_s),
        ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", stats.queued_s),
        ("request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", stats.inference_s),
        ("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", stats.prefill_s),
        ("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", stats.decode_s),
        (
            "request_num_preemptions",
            "Histogram of the number of times a request was preempted.",
            stats.preemptions,
        ),
    ]


def _rejections(stats: ExchangeStats, model: str, created_s: float) -> str:
    """This family alone carries no engine label: the API server counts it."""
    out = Exposition({"model_name": model}, created_s=created_s)
    out.counter(
        "vllm:admission_rejections_total",
        "Number of admission attempts rejected by a queue limit, by reason.",
        *(({"reason": reason}, float(count)) for reason, count in stats.rejected.items()),
    )
    return out.text()
