"""Several cards of one engine as one, and what is wrong between them.

Tensor parallel ranks step together and hold equal parts, so the engine is as free as its tightest card and as hot as
its hottest. The rules:

1. **Sum**: power, energy.
2. **Maximum**: temperature (as the least margin), busy and power fractions; throttled, or slowed, if any card is.
3. **Tightest**: free memory is n times the least free card's; its fraction is that card's.
4. **All or nothing**: where one card's part is unknown the signal is unknown, since a sum or a maximum without a card
   is a number that nobody measured. It is told as absurd where the part was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from backends.base import Measured, Signal
from backends.gpu.base import Finding, GpuField, GpuReading, GpuSample, Unknown
from backends.gpu.throttle import BY_HARDWARE, slowed, throttling

IMBALANCE_FRACTION: Final = 0.10
"""Spread of used memory between cards, as a fraction of the fullest card's use, past which it is a finding."""

_Combine = Callable[[Sequence[tuple[float, ...]]], float]


def combined(
    source: str, taken_s: float, cards: tuple[GpuReading, ...], findings: tuple[Finding, ...] = ()
) -> GpuSample:
    """A sample of these cards. findings: what the source found itself, told first."""
    values = {
        signal: measured
        for signal, fields, combine in _RULES
        if (measured := _measure(cards, fields, combine, source)) is not None
    }
    return GpuSample(
        taken_s,
        source,
        _nothing_told(source, cards),
        absent=not cards,
        cards=cards,
        values=values,
        findings=(*findings, *_findings(cards)),
    )


def _nothing_told(source: str, cards: Sequence[GpuReading]) -> str:
    if any(card.values for card in cards):
        return ""
    reasons = sorted({reason for card in cards for reason in card.unknown.values()})
    return f"{source}: no GPU tells anything ({', '.join(reasons)})" if cards else f"{source}: no GPU is to be seen"


def _measure(
    cards: Sequence[GpuReading], fields: tuple[GpuField, ...], combine: _Combine, source: str
) -> Measured | None:
    parts: list[tuple[float, ...]] = []
    reasons: set[Unknown] = set()
    for card in cards:
        part = tuple(card.values[one] for one in fields if one in card.values)
        if len(part) == len(fields):
            parts.append(part)
        else:
            reasons.update(card.unknown[one] for one in fields if one in card.unknown)
    name = f"{source}:{'/'.join(fields)}"
    if Unknown.ABSURD in reasons:
        return Measured(None, name)
    return None if reasons or not parts else Measured(combine(parts), name)


def _highest_ratio(parts: Sequence[tuple[float, ...]]) -> float:
    return min(1.0, max(part[0] / part[1] for part in parts))


def _tightest_fraction(parts: Sequence[tuple[float, ...]]) -> float:
    return min(1.0, *(part[0] / part[1] for part in parts))


_RULES: Final[tuple[tuple[Signal, tuple[GpuField, ...], _Combine], ...]] = (
    (Signal.GPU_BUSY_FRACTION, (GpuField.BUSY_FRACTION,), lambda parts: max(part[0] for part in parts)),
    (Signal.GPU_POWER_W, (GpuField.POWER_W,), lambda parts: math.fsum(part[0] for part in parts)),
    (Signal.GPU_POWER_FRACTION, (GpuField.POWER_W, GpuField.POWER_LIMIT_W), _highest_ratio),
    (Signal.GPU_TEMPERATURE_C, (GpuField.TEMPERATURE_C,), lambda parts: max(part[0] for part in parts)),
    (Signal.GPU_HEAT_MARGIN_C, (GpuField.HEAT_MARGIN_C,), lambda parts: min(part[0] for part in parts)),
    (
        Signal.GPU_MEMORY_FREE_BYTES,
        (GpuField.MEMORY_FREE_BYTES,),
        lambda parts: len(parts) * min(part[0] for part in parts),
    ),
    (
        Signal.GPU_MEMORY_FREE_FRACTION,
        (GpuField.MEMORY_FREE_BYTES, GpuField.MEMORY_TOTAL_BYTES),
        _tightest_fraction,
    ),
    (
        Signal.GPU_THROTTLED,
        (GpuField.CLOCK_REASONS,),
        lambda parts: float(any(throttling(int(part[0])) for part in parts)),
    ),
    (Signal.GPU_SLOWED, (GpuField.CLOCK_REASONS,), lambda parts: float(any(slowed(int(part[0])) for part in parts))),
)


def _findings(cards: Sequence[GpuReading]) -> Iterator[Finding]:
    for card in cards:
        if not card.values:
            why = ", ".join(sorted(set(card.unknown.values())))
            yield Finding("gpu_silent", f"GPU {card.id} tells nothing ({why}); see the driver's log")
        bits = card.value(GpuField.CLOCK_REASONS)
        braking = [reason for reason in throttling(int(bits or 0)) if reason in BY_HARDWARE]
        if braking:
            yield Finding("hardware_slowdown", f"GPU {card.id} slows itself down: {', '.join(braking)}")
    used = [used for card in cards if (used := card.value(GpuField.MEMORY_USED_BYTES)) is not None]
    if len(used) > 1 and max(used) > 0 and (spread := 1 - min(used) / max(used)) > IMBALANCE_FRACTION:
        yield Finding(
            "memory_imbalance",
            f"memory in use differs by {spread:.0%} between the engine's GPUs; the tightest one bounds it",
        )
    sizes = {total for card in cards if (total := card.value(GpuField.MEMORY_TOTAL_BYTES)) is not None}
    if sizes and 1 - min(sizes) / max(sizes) > IMBALANCE_FRACTION:
        yield Finding("unlike_gpus", "the engine's GPUs differ in memory; the smallest one bounds it")
