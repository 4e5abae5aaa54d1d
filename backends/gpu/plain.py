"""A GPU sample as plain values and back, so that one process can tell another what it has read.

Times travel as ages, since clocks differ. What the other side does not know (fields and reasons of another release) is
passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from backends.base import Measured, Signal
from backends.gpu.base import GPU_UNSEEN, Finding, GpuField, GpuReading, GpuSample, Unknown


def gpu_to_plain(sample: GpuSample, now_s: float) -> dict[str, object] | None:
    """JSON-ready; None for a sample that was never taken."""
    if not math.isfinite(sample.taken_s):
        return None
    return {
        "age_s": now_s - sample.taken_s,
        "source": sample.source,
        "detail": sample.detail,
        "absent": sample.absent,
        "cards": [_card_to_plain(card) for card in sample.cards],
        "values": {signal.value: [measured.value, measured.source] for signal, measured in sample.values.items()},
        "findings": [[finding.name, finding.detail] for finding in sample.findings],
    }


def gpu_from_plain(plain: Mapping[str, Any] | None, now_s: float) -> GpuSample:
    """The sample, taken so long before now_s."""
    if plain is None:
        return GPU_UNSEEN
    return GpuSample(
        now_s - float(plain["age_s"]),
        str(plain["source"]),
        str(plain["detail"]),
        absent=bool(plain["absent"]),
        cards=tuple(map(_card_from_plain, plain["cards"])),
        values={
            Signal(name): Measured(value, source)
            for name, (value, source) in plain["values"].items()
            if name in _SIGNALS
        },
        findings=tuple(Finding(name, detail) for name, detail in plain["findings"]),
    )


_NAMES = ("id", "index", "name", "partition", "instance", "host", "pci_bus_id")
_SIGNALS = frozenset(signal.value for signal in Signal)
_FIELDS = frozenset(one.value for one in GpuField)
_REASONS = frozenset(reason.value for reason in Unknown)


def _card_to_plain(card: GpuReading) -> dict[str, object]:
    return {
        **{name: getattr(card, name) for name in _NAMES},
        "values": {one.value: value for one, value in card.values.items()},
        "unknown": {one.value: reason.value for one, reason in card.unknown.items()},
    }


def _card_from_plain(plain: Mapping[str, Any]) -> GpuReading:
    values = {GpuField(name): float(value) for name, value in plain["values"].items() if name in _FIELDS}
    reasons: Mapping[str, str] = plain["unknown"]
    return GpuReading(
        values=values,
        unknown={
            one: Unknown(reason) if (reason := reasons.get(one.value, "")) in _REASONS else Unknown.NOT_TOLD
            for one in GpuField
            if one not in values
        },
        **{name: str(plain.get(name, "")) for name in _NAMES},
    )
