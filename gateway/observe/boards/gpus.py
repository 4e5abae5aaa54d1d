"""GPUs: memory, heat, power, and what holds clocks down."""

from __future__ import annotations

from gateway import instruments as of
from gateway.observe.panels import Board, Draw, Panel, Query, chosen, gauge

_ENGINE = chosen("engine")
_CARD = "engine, gpu, partition"
_NAME = "{{engine}} {{gpu}} {{partition}}"

BOARD = Board(
    "headrace-gpus",
    "Headrace: GPUs",
    "Memory, heat and power of every GPU that some engine uses.",
    ("engine",),
    (
        (
            "Memory",
            (
                Panel(
                    "VRAM headroom",
                    "Free part of the memory of each engine's tightest GPU.",
                    (Query(gauge(of.VRAM_HEADROOM, "engine", _ENGINE, "min"), "{{engine}}"),),
                    unit="percentunit",
                    steps=((0.0, "red"), (0.05, "orange"), (0.10, "green")),
                ),
                Panel(
                    "Memory in use",
                    "Against what there is.",
                    (
                        Query(gauge(of.GPU_MEMORY_USED, _CARD, _ENGINE), f"used {_NAME}"),
                        Query(gauge(of.GPU_MEMORY_TOTAL, _CARD, _ENGINE), f"total {_NAME}"),
                    ),
                    unit="bytes",
                ),
                Panel(
                    "Memory free",
                    "And what the driver keeps for itself.",
                    (
                        Query(gauge(of.GPU_MEMORY_FREE, _CARD, _ENGINE), f"free {_NAME}"),
                        Query(gauge(of.GPU_MEMORY_RESERVED, _CARD, _ENGINE), f"reserved {_NAME}"),
                    ),
                    unit="bytes",
                ),
            ),
        ),
        (
            "Load, heat, power",
            (
                Panel(
                    "Time busy",
                    "Part of the time in which some kernel ran. It says little of how much more would fit.",
                    (Query(gauge(of.GPU_BUSY, _CARD, _ENGINE), _NAME),),
                    unit="percentunit",
                ),
                Panel(
                    "Temperature",
                    "And the temperature at which the GPU slows down.",
                    (
                        Query(gauge(of.GPU_TEMPERATURE, _CARD, _ENGINE), _NAME),
                        Query(gauge(of.GPU_SLOWDOWN, _CARD, _ENGINE), f"slows down {_NAME}"),
                        Query(gauge(of.GPU_MARGIN, _CARD, _ENGINE), f"left {_NAME}"),
                    ),
                    unit="celsius",
                ),
                Panel(
                    "Power",
                    "Drawn, and the limit in force.",
                    (
                        Query(gauge(of.GPU_POWER, _CARD, _ENGINE), _NAME),
                        Query(gauge(of.GPU_POWER_LIMIT, _CARD, _ENGINE), f"limit {_NAME}"),
                    ),
                    unit="watt",
                ),
            ),
        ),
        (
            "What is wrong",
            (
                Panel(
                    "Clocks held down",
                    "Why, while they are.",
                    (Query(gauge(of.GPU_CLOCK_REASON, f"{_CARD}, reason", _ENGINE), f"{{{{reason}}}} {_NAME}"),),
                    draw=Draw.STACK,
                ),
                Panel(
                    "Findings",
                    "What the GPU's telemetry says of itself that an operator should look at.",
                    (Query(gauge(of.GPU_FINDING, "engine, finding", _ENGINE), "{{engine}} {{finding}}"),),
                    draw=Draw.STACK,
                ),
                Panel(
                    "Telemetry",
                    "1 while some GPU of the engine tells something.",
                    (Query(gauge(of.GPU_UP, "engine", _ENGINE), "{{engine}}"),),
                ),
            ),
        ),
    ),
)
