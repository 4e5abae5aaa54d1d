"""What the controller needs to know of an engine, which signal serves each need, and what stands in where none does.

Pure: from an engine's view and sample to rows and findings, so that the running gateway, its admin page and `headrace check
engines` tell the same. A finding names something that an operator can put right or should know; an engine that merely lacks a
signal that its kind never gives has a row that says so, and no finding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from backends.base import Priority, Signal
from gateway.control.roster import Engine
from policies.vocabulary import EngineView, Quality, Reading


@dataclass(frozen=True, slots=True)
class Need:
    """One thing to know. instead: what is done without it."""

    name: str
    signal: Signal
    instead: str


NEEDS: Final = (
    Need(
        "kv_used", Signal.KV_USED_FRACTION, "the ledger's own count of tokens; prefix hits and others' traffic unseen"
    ),
    Need("kv_capacity", Signal.KV_CAPACITY_TOKENS, "a window that grows until first tokens are late"),
    Need("kv_block", Signal.KV_BLOCK_TOKENS, "16 tokens"),
    Need("running", Signal.RUNNING, "our own count; others' traffic unseen"),
    Need("waiting", Signal.WAITING, "our own count; the engine's queue unseen"),
    Need("seats", Signal.SEATS, "the policy's window; say --max-num-seqs there"),
    Need("progress", Signal.GENERATION_TOKENS_TOTAL, "bytes of our own streams, with three times the patience"),
    Need("prefill", Signal.PROMPT_TOKENS_TOTAL, "first tokens of our own streams"),
    Need("preemptions", Signal.PREEMPTIONS_TOTAL, "gaps in our own streams"),
    Need("restarts", Signal.START_TIME_S, "refused connections"),
)


class Finding(StrEnum):
    """What is wrong with what an engine tells."""

    NO_METRICS = "no_metrics"
    ABSURD = "absurd"
    FROZEN = "frozen"
    CAPACITY_DISAGREES = "capacity_disagrees"
    SEATS_UNKNOWN = "seats_unknown"
    FOREIGN_TRAFFIC = "foreign_traffic"
    PRIORITY_UNUSED = "priority_unused"
    CONTEXT_UNKNOWN = "context_unknown"


PROBLEMS: Final = frozenset({Finding.NO_METRICS, Finding.ABSURD, Finding.FROZEN, Finding.CAPACITY_DISAGREES})
"""Findings by which decisions are worse than they look; the others are for an operator to know."""

FOREIGN_WORKS = 2.0
CAPACITY_SLACK = 1.1


@dataclass(frozen=True, slots=True)
class Row:
    """One need as it is served now. source: the metric or route; instead: "" while the signal can be used."""

    need: str
    signal: str
    quality: Quality
    value: float | None
    age_s: float | None
    source: str
    instead: str


def rows(engine: Engine, view: EngineView) -> list[Row]:
    """Every need, in order."""
    found = []
    for need in NEEDS:
        reading: Reading = getattr(view, need.signal.value)
        measured = engine.sample.values.get(need.signal)
        found.append(
            Row(
                need.name,
                need.signal.value,
                reading.quality,
                reading.value,
                round(reading.age_s, 1) if math.isfinite(reading.age_s) else None,
                "" if measured is None else measured.source,
                "" if reading.known else need.instead,
            )
        )
    return found


def findings(engine: Engine, view: EngineView, frozen_for_s: Mapping[Signal, float]) -> dict[Finding, str]:
    """What is to be said of an engine that is reachable, each with a sentence. frozen_for_s: see `gateway.control.frozen`."""
    found: dict[Finding, str] = {}
    if not engine.reachable or engine.backend is None:
        return found
    if not engine.sample.values:
        if engine.kind != "openai":
            found[Finding.NO_METRICS] = (
                "its metrics page gives nothing that is known; give metrics_url, or switch it on"
            )
    elif view.running.quality is Quality.STALE:
        found[Finding.NO_METRICS] = f"its metrics page has not answered for {view.running.age_s:.0f} s"
    absurd = [need.signal.value for need in NEEDS if getattr(view, need.signal.value).quality is Quality.ABSURD]
    if absurd:
        found[Finding.ABSURD] = f"no number that can be: {', '.join(absurd)}"
    if frozen_for_s:
        names = ", ".join(signal.value for signal in frozen_for_s)
        found[Finding.FROZEN] = f"stood still for {max(frozen_for_s.values()):.0f} s while our streams moved: {names}"
    capacity = view.kv_capacity_tokens.value
    if capacity and view.kv_tokens - view.prefill_tokens > CAPACITY_SLACK * capacity:
        held = view.kv_tokens - view.prefill_tokens
        found[Finding.CAPACITY_DISAGREES] = f"our works there hold {held} tokens, and it says that {capacity:.0f} fit"
    if engine.sample.values and view.seats.value is None:
        found[Finding.SEATS_UNKNOWN] = "it does not tell how many sequences it runs at once"
    foreign = _foreign(view)
    if foreign is not None and foreign > FOREIGN_WORKS:
        found[Finding.FOREIGN_TRAFFIC] = f"{foreign:.0f} requests there are not ours"
    if engine.kind in _ORDERS and engine.backend.capabilities.priority is None:
        found[Finding.PRIORITY_UNUSED] = f"nothing says that it honours priority; {_ORDERS[engine.kind]}"
    if engine.cards and all(card.max_model_len is None for card in engine.cards):
        found[Finding.CONTEXT_UNKNOWN] = (
            "it does not tell its context length; requests too long are refused by it alone"
        )
    return found


_ORDERS: Final = {
    "vllm": "start it with --scheduling-policy priority and set priority: true",
    "sglang": "start it with --enable-priority-scheduling",
}


def meaning_of(priority: Priority | None) -> str:
    """For people."""
    return {None: "not used", Priority.LOWER_FIRST: "lower first", Priority.HIGHER_FIRST: "higher first"}[priority]


def _foreign(view: EngineView) -> float | None:
    if view.running.value is None or not view.running.known:
        return None
    waiting = view.waiting.value if view.waiting.known and view.waiting.value is not None else 0.0
    return view.running.value + waiting - view.in_flight_total


def as_plain(table: Sequence[Row], found: Mapping[str, str]) -> dict[str, object]:
    """JSON-ready, for the admin page and `--json`."""
    return {
        "signals": {
            row.need: {
                "signal": row.signal,
                "quality": row.quality.value,
                "value": row.value,
                "age_s": row.age_s,
                "source": row.source,
                "instead": row.instead,
            }
            for row in table
        },
        "findings": {str(finding): text for finding, text in found.items()},
    }
