"""Engines and batch size: what each engine runs, what binds it, what it tells."""

from __future__ import annotations

from gateway import instruments as of
from gateway.observe.panels import (
    Board,
    Click,
    Draw,
    Panel,
    Query,
    chosen,
    gauge,
    mean,
    none_is_zero,
    per_second,
    quantiles,
)

_ENGINE = chosen("engine")
_BOTH = chosen("engine", "class")
_KV_GUARD = chosen("engine", "class", guard="kv")
_NEAR = f"{gauge(of.GUARD_VALUE, 'engine, class, guard', _BOTH)} / {gauge(of.GUARD_THRESHOLD, 'engine, class, guard', _BOTH)}"

BOARD = Board(
    "headrace-engines",
    "Headrace: engines and batch size",
    "What each engine runs, what would hold back one more work, and how far its signals can be trusted.",
    ("engine", "class"),
    (
        (
            "Batch size",
            (
                Panel(
                    "In flight and window",
                    "Works of ours on the engine, and how many may be; a window is not a target but a bound.",
                    (
                        Query(gauge(of.IN_FLIGHT, "engine, class", _BOTH), "{{engine}} {{class}}"),
                        Query(gauge(of.WINDOW, "engine, class", _BOTH), "window {{engine}} {{class}}"),
                    ),
                    width=12,
                ),
                Panel(
                    "The engine's own count",
                    "Sequences decoding and requests waiting inside the engine. Waiting there is time we cannot reorder.",
                    (
                        Query(gauge(of.ENGINE_RUNNING, "engine", _ENGINE), "running {{engine}}"),
                        Query(gauge(of.ENGINE_WAITING, "engine", _ENGINE), "waiting {{engine}}"),
                    ),
                    width=6,
                ),
                Panel(
                    "Dispatch batch",
                    "Works that one round sends to one engine.",
                    (
                        Query(mean(of.DISPATCH_BATCH, "engine", _ENGINE), "works {{engine}}"),
                        Query(
                            f"{per_second(of.DISPATCH_SEQUENCES, 'engine', _ENGINE)} /"
                            f" {per_second(of.DISPATCH_BATCHES, 'engine', _ENGINE)}",
                            "sequences {{engine}}",
                        ),
                    ),
                    width=6,
                ),
            ),
        ),
        (
            "What binds",
            (
                Panel(
                    "Binding guard",
                    "The guard that would refuse one more work of the class on the engine; none: it could start.",
                    (Query(gauge(of.GUARD_BINDING, "engine, class, guard", _BOTH), "{{engine}} {{class}} {{guard}}"),),
                    draw=Draw.STACK,
                    width=6,
                ),
                Panel(
                    "What ended each dispatch batch",
                    "Batches sent each second by the guard that let no more in; none: nothing more waited.",
                    (Query(per_second(of.DISPATCH_BATCHES, "engine, guard", _ENGINE), "{{engine}} {{guard}}"),),
                    unit="reqps",
                    draw=Draw.STACK,
                    width=6,
                ),
                Panel(
                    "How near each guard is",
                    "Its value over its threshold: at 1 it binds.",
                    (Query(_NEAR, "{{engine}} {{class}} {{guard}}"),),
                    unit="percentunit",
                    steps=((0.0, "green"), (1.0, "red")),
                    width=6,
                ),
                Panel(
                    "Decisions",
                    "Each second, by what was done and the guard that bound it.",
                    (Query(per_second(of.DECISIONS, "action, guard", _BOTH), "{{action}} {{guard}}"),),
                    unit="reqps",
                    width=6,
                ),
            ),
        ),
        (
            "KV cache",
            (
                Panel(
                    "KV now and forecast",
                    "In use as the engine says, and what the forecast needs of what it may have (the kv guard).",
                    (
                        Query(gauge(of.ENGINE_KV, "engine", _ENGINE), "used {{engine}}"),
                        Query(
                            f"{gauge(of.GUARD_VALUE, 'engine, class', _KV_GUARD)} /"
                            f" {gauge(of.GUARD_THRESHOLD, 'engine, class', _KV_GUARD)}",
                            "forecast {{engine}} {{class}}",
                        ),
                    ),
                    unit="percentunit",
                ),
                Panel(
                    "Steps to overflow",
                    f"Engine steps until KV memory would not suffice; {of.STEPS_BEYOND}: at no horizon.",
                    (Query(gauge(of.STEPS_TO_OVERFLOW, "engine", _ENGINE, "min"), "{{engine}}"),),
                ),
                Panel(
                    "Tokens",
                    "By our own count: KV tokens of works in flight, prompt tokens not yet prefilled, the bound.",
                    (
                        Query(gauge(of.LEDGER_KV_TOKENS, "engine", _ENGINE), "held {{engine}}"),
                        Query(gauge(of.LEDGER_PREFILL_TOKENS, "engine", _ENGINE), "to prefill {{engine}}"),
                        Query(gauge(of.WINDOW_TOKENS, "engine", _BOTH), "bound {{engine}}"),
                        Query(gauge(of.ENGINE_KV_CAPACITY, "engine", _ENGINE), "capacity {{engine}}"),
                    ),
                ),
                Panel(
                    "Preemptions",
                    "Sequences that the engine threw out each second, and works that we stopped for more urgent ones.",
                    (
                        Query(per_second(of.ENGINE_PREEMPTIONS, "engine", _ENGINE), "by the engine {{engine}}"),
                        Query(
                            none_is_zero(per_second(of.PREEMPTED, "engine, class", _BOTH)), "by us {{engine}} {{class}}"
                        ),
                    ),
                    unit="reqps",
                ),
                Panel(
                    "Tokens made for nothing",
                    "Of works that we stopped and that begin anew.",
                    (Query(none_is_zero(per_second(of.PREEMPTED_TOKENS, "engine", _BOTH)), "{{engine}}"),),
                    unit="cps",
                ),
                Panel(
                    "Tokens per second",
                    "Made by the engine's own count, others' too, and relayed by us. The difference is lost or foreign.",
                    (
                        Query(per_second(of.ENGINE_GENERATED_TOKENS, "engine", _ENGINE), "made {{engine}}"),
                        Query(per_second(of.ENGINE_OUTPUT_TOKENS, "engine", _ENGINE), "relayed {{engine}}"),
                        Query(per_second(of.ENGINE_PROMPT_TOKENS, "engine", _ENGINE), "prompt {{engine}}"),
                    ),
                    unit="cps",
                ),
            ),
        ),
        (
            "Latency",
            (
                Panel(
                    "Engine TTFT",
                    "Sent to the engine's first byte.",
                    quantiles(of.ENGINE_TTFT, "engine", _BOTH, (0.5, 0.95)),
                    unit="s",
                    width=12,
                ),
                Panel(
                    "Gap between tokens",
                    "As relayed. A p99 far above the median is a stall: a long prompt, or a preemption.",
                    quantiles(of.ITL, "engine", _BOTH),
                    unit="s",
                    width=12,
                ),
                Panel(
                    "Prediction error",
                    "Typical error of predicted gaps and first tokens; the batch is as good as this is small.",
                    (Query(gauge(of.PREDICTION_ERROR, "engine", _ENGINE), "{{engine}}"),),
                    unit="percentunit",
                    width=12,
                ),
                Panel(
                    "First tokens over predicted",
                    "Of the last half minute; above 1 an engine is slower than it was, and bulk there is held back.",
                    (Query(gauge(of.TTFT_FACTOR, "engine", _ENGINE), "{{engine}}"),),
                    unit="percentunit",
                    width=12,
                ),
                Panel(
                    "Expected in prefix caches",
                    "Prompt tokens of placed requests that their engine was sent before; conversations come back to it.",
                    (Query(per_second(of.PREFIX_EXPECTED, "engine", _ENGINE), "{{engine}}"),),
                    unit="short",
                    width=12,
                ),
                Panel(
                    "Drift from the profile",
                    "How far the speed learned in service is from the stored profile; above 20 % measure again.",
                    (Query(gauge(of.PROFILE_DRIFT, "engine", _ENGINE), "{{engine}}"),),
                    unit="percentunit",
                    steps=((0.0, "green"), (0.2, "red")),
                    width=12,
                ),
            ),
        ),
        (
            "Health",
            (
                Panel(
                    "State",
                    "The state that each engine is in.",
                    (Query(f"{gauge(of.ENGINE_STATE, 'engine, state', _ENGINE)} == 1", "{{engine}} {{state}}"),),
                    width=6,
                    draw=Draw.STACK,
                ),
                Panel(
                    "Out of rotation",
                    "Why an engine gets nothing new, and how often engines left the rotation in five minutes.",
                    (
                        Query(none_is_zero(gauge(of.ENGINE_OUT, "engine, reason", _ENGINE)), "{{engine}} {{reason}}"),
                        Query(
                            none_is_zero(f"sum by (engine, reason) (increase({of.ENGINE_FALLS.name}{_ENGINE}[5m]))"),
                            "left {{engine}} {{reason}}",
                        ),
                    ),
                    width=6,
                ),
                Panel(
                    "Results",
                    "How works end, by engine.",
                    (Query(per_second(of.ENGINE_RESULTS, "engine, result", _BOTH), "{{engine}} {{result}}"),),
                    unit="reqps",
                    width=6,
                ),
                Panel(
                    "Attempts and retries",
                    "Tries sent, and works that went on elsewhere by why.",
                    (
                        Query(per_second(of.ATTEMPTS, "engine", _BOTH), "attempts {{engine}}"),
                        Query(per_second(of.RETRIES, "engine, reason", _ENGINE), "{{reason}} {{engine}}"),
                        Query(none_is_zero(per_second(of.RETRIES_WITHHELD, "engine", _ENGINE)), "withheld {{engine}}"),
                    ),
                    unit="reqps",
                    width=6,
                ),
                Panel(
                    "Findings",
                    "What is wrong with what an engine tells of itself, while it is.",
                    (
                        Query(
                            none_is_zero(gauge(of.ENGINE_FINDING, "engine, finding", _ENGINE)), "{{engine}} {{finding}}"
                        ),
                    ),
                    width=24,
                    draw=Draw.STACK,
                ),
                Panel(
                    "Age of samples",
                    "Of the newest answer, and of the oldest signal. Past three polls a signal is stale.",
                    (
                        Query(gauge(of.ENGINE_SAMPLE_AGE, "engine", _ENGINE), "sample {{engine}}"),
                        Query(gauge(of.SIGNAL_AGE, "engine", _ENGINE), "oldest signal {{engine}}"),
                    ),
                    unit="s",
                    width=12,
                ),
                Panel(
                    "Signals by quality",
                    "What cannot be read is not guessed: guards that need it are careful instead.",
                    (
                        Query(
                            f"count by (engine, quality) ({gauge(of.SIGNAL_QUALITY, 'engine, signal, quality', _ENGINE)})",
                            "{{engine}} {{quality}}",
                        ),
                    ),
                    width=12,
                    draw=Draw.STACK,
                    click=Click("The engine's GPUs", "headrace-gpus", ("engine",)),
                ),
            ),
        ),
    ),
)
