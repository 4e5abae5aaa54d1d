"""The first page: is it well, and if not, where to look."""

from __future__ import annotations

from gateway import instruments as of
from gateway.observe.panels import Board, Click, Draw, Panel, Query, chosen, gauge, none_is_zero, per_second, quantile

_CLASS = chosen("class")
_ENGINE = chosen("engine")
_ATTAINED = f"{per_second(of.SLA, '', chosen('class', outcome='met'))} / {per_second(of.SLA, '', _CLASS)}"
_TO_QUEUES = Click("Where did {{class}} lose time?", "headrace-queues", ("class",))
_TO_ENGINE = Click("Why is this engine so?", "headrace-engines", ("engine",))

BOARD = Board(
    "headrace-overview",
    "Headrace: overview",
    "Is it well, and if not, where to look. Click a series to go to where it is explained.",
    ("class", "engine"),
    (
        (
            "Memory, queue, tokens",
            (
                Panel(
                    "VRAM headroom",
                    "Free part of the memory of each engine's tightest GPU. Below 10 % an engine is near to failing.",
                    (Query(gauge(of.VRAM_HEADROOM, "engine", _ENGINE, "min"), "{{engine}}"),),
                    unit="percentunit",
                    steps=((0.0, "red"), (0.05, "orange"), (0.10, "green")),
                    high=1.0,
                    click=Click("This engine's GPUs", "headrace-gpus", ("engine",)),
                ),
                Panel(
                    "Queue depth",
                    "Works that wait with us. It may be long for bulk; for a class with an objective it should be short.",
                    (Query(gauge(of.QUEUED, "class", _CLASS), "{{class}}"),),
                    click=_TO_QUEUES,
                ),
                Panel(
                    "Token latency",
                    "Time to first token, as clients see it, and the gap between two tokens; 95 of 100 are faster.",
                    (
                        Query(quantile(0.95, of.TTFT, "class", _CLASS), "first token {{class}}"),
                        Query(quantile(0.95, of.ITL, "class", _CLASS), "gap {{class}}"),
                    ),
                    unit="s",
                    click=_TO_QUEUES,
                ),
            ),
        ),
        (
            "Right now",
            (
                Panel(
                    "TTFT attainment",
                    "Part of the works with an objective that met it. A refused work missed it.",
                    (Query(_ATTAINED),),
                    unit="percentunit",
                    draw=Draw.STAT,
                    width=4,
                    steps=((0.0, "red"), (0.97, "orange"), (0.99, "green")),
                ),
                Panel(
                    "Goodput",
                    "Works completed inside their objective, each second.",
                    (Query(per_second(of.GOODPUT, "", _CLASS)),),
                    unit="reqps",
                    draw=Draw.STAT,
                    width=4,
                ),
                Panel(
                    "Refused",
                    "Works refused each second, at admission or while they waited.",
                    (Query(none_is_zero(per_second(of.SHEDS, "", _CLASS))),),
                    unit="reqps",
                    draw=Draw.STAT,
                    width=4,
                    steps=((0.0, "green"), (0.01, "orange"), (1.0, "red")),
                ),
                Panel(
                    "Engines up",
                    "Engines that take work now.",
                    (Query(f"sum({gauge(of.ENGINE_STATE, 'engine', chosen('engine', state='up'))})"),),
                    draw=Draw.STAT,
                    width=4,
                    steps=((0.0, "red"), (1.0, "green")),
                ),
                Panel(
                    "Deciding",
                    "Processes that decide for the pool. One, always: none decides nothing, two decide twice.",
                    (Query(f"sum({of.LEADER.name})"),),
                    draw=Draw.STAT,
                    width=4,
                    steps=((0.0, "red"), (1.0, "green"), (2.0, "red")),
                    click=Click("The gateway itself", "headrace-internals"),
                ),
                Panel(
                    "Power",
                    "Of all GPUs that tell it.",
                    (Query(f"sum({gauge(of.GPU_POWER, 'engine, gpu, partition', _ENGINE)})"),),
                    unit="watt",
                    draw=Draw.STAT,
                    width=4,
                    click=Click("Energy and cost", "headrace-energy"),
                ),
            ),
        ),
        (
            "Work and engines",
            (
                Panel(
                    "Requests",
                    "How works end, each second.",
                    (Query(per_second(of.REQUESTS, "result", _CLASS), "{{result}}"),),
                    unit="reqps",
                    draw=Draw.STACK,
                ),
                Panel(
                    "Tokens",
                    "Prompt tokens taken in and output tokens relayed, each second.",
                    (
                        Query(per_second(of.PROMPT_TOKENS, "class", _CLASS), "prompt {{class}}"),
                        Query(per_second(of.OUTPUT_TOKENS, "class", _CLASS), "output {{class}}"),
                    ),
                    unit="cps",
                ),
                Panel(
                    "Batch size",
                    "Works of ours that each engine runs together.",
                    (Query(f"sum by (engine) ({gauge(of.IN_FLIGHT, 'engine, class', _ENGINE)})", "{{engine}}"),),
                    click=_TO_ENGINE,
                ),
                Panel(
                    "KV cache in use",
                    "As the engines say. Near 1 an engine throws sequences out and computes them again.",
                    (Query(gauge(of.ENGINE_KV, "engine", _ENGINE), "{{engine}}"),),
                    unit="percentunit",
                    high=1.0,
                    click=_TO_ENGINE,
                ),
                Panel(
                    "What holds work back",
                    "Of each pair of engine and class, the guard that would refuse one more work; none: it could start.",
                    (Query(f"sum by (guard) ({gauge(of.GUARD_BINDING, 'engine, class, guard')})", "{{guard}}"),),
                    draw=Draw.STACK,
                    click=Click("The guards of each engine", "headrace-engines"),
                ),
                Panel(
                    "Goodput by class",
                    "Works completed inside their objective, each second.",
                    (Query(per_second(of.GOODPUT, "class", _CLASS), "{{class}}"),),
                    unit="reqps",
                    draw=Draw.STACK,
                    click=_TO_QUEUES,
                ),
            ),
        ),
    ),
)
