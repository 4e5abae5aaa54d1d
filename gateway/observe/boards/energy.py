"""Energy and cost: what is drawn, and what a useful token takes of it."""

from __future__ import annotations

from gateway import instruments as of
from gateway.observe.panels import RANGE, Board, Draw, Panel, Query, chosen, gauge, per_second

_ENGINE = chosen("engine")

BOARD = Board(
    "headrace-energy",
    "Headrace: energy and cost",
    "What the engines draw, and what a useful token takes of it.",
    ("engine",),
    (
        (
            "Energy",
            (
                Panel(
                    "Power, busy and idle",
                    "Mean power while the engine had work, and while it had none, as parts of the time.",
                    (Query(per_second(of.GPU_ENERGY, "engine, activity", _ENGINE), "{{engine}} {{activity}}"),),
                    unit="watt",
                    draw=Draw.STACK,
                ),
                Panel(
                    "Joules per output token",
                    "All energy of the engine over the tokens that clients got.",
                    (
                        Query(
                            f"{per_second(of.GPU_ENERGY, 'engine', _ENGINE)} /"
                            f" {per_second(of.ENGINE_OUTPUT_TOKENS, 'engine', _ENGINE)}",
                            "{{engine}}",
                        ),
                    ),
                    unit="joule",
                ),
                Panel(
                    "Idle power",
                    "What the engine's GPUs draw for nothing.",
                    (Query(gauge(of.GPU_IDLE_POWER, "engine", _ENGINE), "{{engine}}"),),
                    unit="watt",
                ),
                Panel(
                    "Idle part of energy",
                    "Energy used while there was no work, as a part of all.",
                    (
                        Query(
                            f"{per_second(of.GPU_ENERGY, 'engine', chosen('engine', activity='idle'))} /"
                            f" {per_second(of.GPU_ENERGY, 'engine', _ENGINE)}",
                            "{{engine}}",
                        ),
                    ),
                    unit="percentunit",
                    high=1.0,
                    width=12,
                ),
                Panel(
                    "Energy in an hour",
                    "At the present rate.",
                    (Query(f"sum by (engine) (rate({of.GPU_ENERGY.name}{_ENGINE}[{RANGE}])) / 1000", "{{engine}}"),),
                    unit="kwatth",
                    width=12,
                ),
                Panel(
                    "Joules per token by batch",
                    "Energy while so many sequences ran, over the tokens made meanwhile: where the best batch lies.",
                    (
                        Query(
                            f"{per_second(of.ENERGY_BATCH_J, 'engine, batch', _ENGINE)} /"
                            f" {per_second(of.ENERGY_BATCH_TOKENS, 'engine, batch', _ENGINE)}",
                            "{{engine}} {{batch}}",
                        ),
                    ),
                    unit="joule",
                    width=12,
                ),
                Panel(
                    "Joules of a prompt token and of a generated one",
                    "Beyond what time costs, by regression on the engine's counters; nothing while it cannot be told.",
                    (Query(gauge(of.ENERGY_PER_TOKEN, "engine, phase", _ENGINE), "{{engine}} {{phase}}"),),
                    unit="joule",
                    width=12,
                ),
            ),
        ),
        (
            "Cost and waste",
            (
                Panel(
                    "Spent in an hour",
                    "At the present rate, in the currency of the prices that are set.",
                    (
                        Query(
                            f"3600 * {per_second(of.COST, 'engine, capacity, part', _ENGINE)}",
                            "{{engine}} {{capacity}} {{part}}",
                        ),
                    ),
                    draw=Draw.STACK,
                ),
                Panel(
                    "Cost of a million tokens",
                    "Prompt and output together, since the start, idle time included; a generated token counts six.",
                    (
                        Query(
                            gauge(of.COST_PER_MILLION, "engine, class, tenant, capacity", _ENGINE),
                            "{{engine}} {{class}} {{tenant}} {{capacity}}",
                        ),
                    ),
                ),
                Panel(
                    "Wasted part of tokens",
                    "Of works that did not complete, and computed again after an eviction, over those served.",
                    (
                        Query(
                            f"{per_second(of.WASTED_TOKENS, 'engine, reason', _ENGINE)} / on (engine) group_left ()"
                            f" {per_second(of.SERVED_TOKENS, 'engine', _ENGINE)}",
                            "{{engine}} {{reason}}",
                        ),
                    ),
                    unit="percentunit",
                ),
            ),
        ),
    ),
)
