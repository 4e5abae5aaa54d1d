"""What `headrace bench real` measured, for readers: lines of a table, a verdict, a JSON document and a page in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gateway.bench.real import BULK_BAR, TTFT_BAR, Arm, Outcome, Plan, Side
from gateway.load.report import shown

INTRODUCTION = """# What it does on real engines

`{command}`, commit `{commit}`, on {machine}.

Three arms take turns, {rounds} rounds of {for_s:g} s each: interactive requests alone, straight at the engine; the same with
{bulk_clients} bulk clients, straight at it ("unprotected"); and both through the gateway ("protected") with the preset
`balanced`, whose objective is {slack:g} times the p95 of first tokens alone. Interactive requests have prompts of
{interactive.prompt_tokens:g} words and answers of {interactive.output_tokens:g} tokens on average, bulk {bulk.prompt_tokens:g}
and {bulk.output_tokens:g}; they come at {share:g} of the rate at which the engine answers one after another. Bulk is
counted in tokens that its clients got. Engine, gateway and clients share the machine's cores.
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """One engine's, with what it was measured on. load: the machine's load average, before and after."""

    engine: str
    version: str
    outcome: Outcome
    load: tuple[float, float]
    took_s: float


LATE_S = 0.02
"""Clients that send later than this with one request in a hundred measure themselves."""
HEADS = ("arm", "requests", "failed", "TTFT p50", "p95", "p99", "÷ alone", "ITL p95", "bulk tokens/s", "÷ unprotected")


def title_of(one: Measured) -> str:
    """The engine, and what came of its speed."""
    scale = one.outcome.scale
    return f"{one.engine} ({one.version}): {scale.rate_rps:.2f} interactive requests/s, objective {shown(scale.objective_s)}"


def lines_of(outcome: Outcome) -> list[tuple[str, ...]]:
    """A line an arm, as HEADS."""
    return [_line(arm, outcome.sides[arm], outcome) for arm in Arm]


def _line(arm: Arm, side: Side, outcome: Outcome) -> tuple[str, ...]:
    alone, unprotected = outcome.sides[Arm.ALONE], outcome.sides[Arm.UNPROTECTED]
    seen, bulk = side.figures, side.bulk_tokens_per_s
    return (
        str(arm),
        f"{seen.sent:,}",
        f"{seen.sent - seen.completed + sum(side.bulk_errors.values()):,}",
        shown(seen.ttft.p50_s),
        shown(seen.ttft.p95_s),
        shown(seen.ttft.p99_s),
        _ratio(seen.ttft.p95_s, alone.figures.ttft.p95_s),
        shown(seen.itl.p95_s),
        "-" if bulk is None else f"{bulk:,.0f}",
        _ratio(bulk, unprotected.bulk_tokens_per_s),
    )


def _ratio(one: float | None, other: float | None) -> str:
    return "-" if one is None or not other else f"{one / other:.2f}"


def verdict_of(outcome: Outcome) -> str:
    """Both bars, how far rounds differ, and whether the machine was too busy for its own clients."""
    ttft, bulk = outcome.ttft_ratio, outcome.bulk_ratio
    within = [one for one in outcome.rounds_ttft_ratio if one is not None]
    said = (
        f"p95 of first tokens protected ÷ alone: {_mark(ttft, ttft is not None and ttft <= TTFT_BAR)} (bar {TTFT_BAR:g})",
        f"bulk protected ÷ unprotected: {_mark(bulk, bulk is not None and bulk >= BULK_BAR)} (bar {BULK_BAR:g})",
    )
    spread = f"; round by round {min(within):.2f} to {max(within):.2f}" if within else ""
    late_s = max((side.figures.late_p99_s or 0.0 for side in outcome.sides.values()), default=0.0)
    busy = f"; NOT TO BE USED: clients were {shown(late_s)} late, the machine was too busy" if late_s > LATE_S else ""
    return "; ".join(said) + spread + busy


def _mark(value: float | None, held: bool) -> str:
    return "not measured" if value is None else f"{value:.2f}, {'held' if held else 'MISSED'}"


def plain_of(one: Measured) -> dict[str, object]:
    """As JSON has it."""
    outcome = one.outcome
    return {
        "engine": one.engine,
        "version": one.version,
        "load": one.load,
        "took_s": one.took_s,
        "scale": asdict(outcome.scale),
        "ttft_ratio": outcome.ttft_ratio,
        "bulk_ratio": outcome.bulk_ratio,
        "rounds_ttft_ratio": list(outcome.rounds_ttft_ratio),
        "arms": {
            str(arm): {
                "figures": side.figures.plain(),
                "bulk_tokens_per_s": side.bulk_tokens_per_s,
                "bulk_errors": dict(side.bulk_errors),
                "rounds_p95_s": list(side.rounds_p95_s),
                "rounds_bulk_tokens_per_s": list(side.rounds_bulk),
            }
            for arm, side in outcome.sides.items()
        },
    }


def page(facts: Mapping[str, str], plan: Plan, measured: Sequence[Measured]) -> str:
    """The whole of it in Markdown. facts: command, commit and machine."""
    parts = [INTRODUCTION.format(**facts, **_fields(plan))]
    for one in measured:
        rows = [HEADS, ("---", *["---:"] * (len(HEADS) - 1)), *lines_of(one.outcome)]
        before, after = one.load
        parts += [
            f"## {title_of(one)}\n",
            "\n".join("| " + " | ".join(row) + " |" for row in rows),
            f"\n{verdict_of(one.outcome)}. Load of the machine {before:.1f} before, {after:.1f} after; {one.took_s:,.0f} s.\n",
        ]
    return "\n".join(parts)


def _fields(plan: Plan) -> Mapping[str, Any]:
    return {name: getattr(plan, name) for name in plan.__slots__}
