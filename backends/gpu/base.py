"""What one GPU tells at one moment, and the contract of whoever asks it.

No field can be relied upon: unified memory has no memory figures, a virtual GPU no power, a MIG slice hardly more than
memory, an old library lacks functions, a card falls off the bus. So a reading holds, for every field, a value or the
reason why there is none, and one field's fault never costs another's value. A source never raises for what a GPU, a
driver or an exporter does: a read that found nothing says so in its sample.

Sources also repeat sentinels and nonsense as if they were measurements (2^63 - 14 for "blank", 4294967.295 W, more
memory used than there is): `reading` drops what cannot be, and derives what other fields tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from backends.base import Measured, Signal

MIB: Final = 1024 * 1024


class GpuField(StrEnum):
    """What a card can tell; the unit is in the name.

    MEMORY_USED_BYTES   excludes what the driver reserves, where the driver tells that apart
    BUSY_FRACTION       of the time in which some kernel ran: near 1 on any busy engine, says little about room
    HEAT_MARGIN_C       degrees left until the card slows down
    ENERGY_J_TOTAL      since the driver was loaded
    CLOCK_REASONS       bits, see `backends.gpu.throttle`
    """

    MEMORY_TOTAL_BYTES = "memory_total_bytes"
    MEMORY_USED_BYTES = "memory_used_bytes"
    MEMORY_FREE_BYTES = "memory_free_bytes"
    MEMORY_RESERVED_BYTES = "memory_reserved_bytes"
    BUSY_FRACTION = "busy_fraction"
    MEMORY_BUSY_FRACTION = "memory_busy_fraction"
    TEMPERATURE_C = "temperature_c"
    SLOWDOWN_C = "slowdown_c"
    SHUTDOWN_C = "shutdown_c"
    HEAT_MARGIN_C = "heat_margin_c"
    POWER_W = "power_w"
    POWER_LIMIT_W = "power_limit_w"
    ENERGY_J_TOTAL = "energy_j_total"
    CLOCK_REASONS = "clock_reasons"


OF_THE_DIE: Final = frozenset(
    {
        GpuField.TEMPERATURE_C,
        GpuField.SLOWDOWN_C,
        GpuField.SHUTDOWN_C,
        GpuField.HEAT_MARGIN_C,
        GpuField.CLOCK_REASONS,
    }
)
"""True of every slice of a partitioned card alike, so the whole card may answer for its slices; power is not."""


class Unknown(StrEnum):
    """Why a field has no value."""

    NOT_SUPPORTED = "not_supported"
    NO_PERMISSION = "no_permission"
    NO_FUNCTION = "no_function"
    """The library or its Python module is older (or newer) than the field."""
    GONE = "gone"
    """The card is not there (any more)."""
    ABSURD = "absurd"
    TIMED_OUT = "timed_out"
    NOT_TOLD = "not_told"
    """The source does not speak of it."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One card, or one MIG slice. `values` and `unknown` share no field and together hold all of them.

    id            its UUID; the index, or what it was asked for by, where there is no UUID to be had
    index         the number that its host gives to the card
    partition     "" for a whole card; a slice's profile ("1g.10gb"), or "mig" where that is not told
    instance      a slice's GPU instance id, "" where there is none
    """

    id: str
    values: Mapping[GpuField, float]
    unknown: Mapping[GpuField, Unknown]
    index: str = ""
    name: str = ""
    partition: str = ""
    instance: str = ""
    host: str = ""
    pci_bus_id: str = ""

    def value(self, wanted: GpuField) -> float | None:
        """The number, or None when it is unknown."""
        return self.values.get(wanted)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something an operator should know of the cards. name is a short stable word, detail a sentence."""

    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One read of all cards of one engine.

    source      "nvml", "dcgm" or "none"
    detail      why nothing could be read, for people; "" when something was
    absent      there is nothing to read on this host (no library, no driver): no fault, unless a GPU was expected
    values      the cards as one engine, see `backends.gpu.combine`
    """

    taken_s: float
    source: str = "none"
    detail: str = ""
    absent: bool = False
    cards: tuple[GpuReading, ...] = ()
    values: Mapping[Signal, Measured] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def up(self) -> bool:
        """True when at least one card told something."""
        return any(card.values for card in self.cards)


GPU_UNSEEN: Final = GpuSample(taken_s=-math.inf)


class GpuSource(Protocol):
    """Where one engine's cards are read."""

    source: str

    async def read(self) -> GpuSample:
        """Read all cards once, bounded. Raises nothing but cancellation."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


_TIB = 1024.0**4
_BOUNDS: Final[Mapping[GpuField, tuple[float, float]]] = {
    GpuField.MEMORY_TOTAL_BYTES: (1, 64 * _TIB),
    GpuField.MEMORY_USED_BYTES: (0, 64 * _TIB),
    GpuField.MEMORY_FREE_BYTES: (0, 64 * _TIB),
    GpuField.MEMORY_RESERVED_BYTES: (0, 64 * _TIB),
    GpuField.BUSY_FRACTION: (0, 1),
    GpuField.MEMORY_BUSY_FRACTION: (0, 1),
    GpuField.TEMPERATURE_C: (-40, 150),
    GpuField.SLOWDOWN_C: (20, 200),
    GpuField.SHUTDOWN_C: (20, 200),
    GpuField.HEAT_MARGIN_C: (-100, 200),
    GpuField.POWER_W: (0, 20_000),
    GpuField.POWER_LIMIT_W: (1, 20_000),
    GpuField.ENERGY_J_TOTAL: (0, 1e13),
    GpuField.CLOCK_REASONS: (0, 2.0**32),
}
"""Lowest and highest value that is believed; 1e13 J are 10 kW for thirty years."""

Raw = Mapping[GpuField, float | Unknown]
"""What a source found, in our units, before anything is believed."""


def reading(
    id: str,
    raw: Raw,
    *,
    missing: Unknown = Unknown.NOT_TOLD,
    index: str = "",
    name: str = "",
    partition: str = "",
    instance: str = "",
    host: str = "",
    pci_bus_id: str = "",
) -> GpuReading:
    """A card from what a source found. missing: the reason for fields that `raw` does not hold."""
    values: dict[GpuField, float] = {}
    unknown: dict[GpuField, Unknown] = {}
    for one in GpuField:
        _put(values, unknown, one, raw.get(one, missing))
    _derive(values, unknown)
    _drop_contradictions(values, unknown)
    return GpuReading(
        id,
        values,
        unknown,
        index=index,
        name=name,
        partition=partition,
        instance=instance,
        host=host,
        pci_bus_id=pci_bus_id,
    )


def _derive(values: dict[GpuField, float], unknown: dict[GpuField, Unknown]) -> None:
    """What other fields tell: a DCGM exporter shows no total by default, and few cards tell their margin."""
    total, used, free, reserved = (values.get(one) for one in _MEMORY)
    if total is None and used is not None and free is not None:
        _put(values, unknown, GpuField.MEMORY_TOTAL_BYTES, used + free + (reserved or 0.0))
    slowdown_c, temperature_c = values.get(GpuField.SLOWDOWN_C), values.get(GpuField.TEMPERATURE_C)
    if GpuField.HEAT_MARGIN_C in unknown and slowdown_c is not None and temperature_c is not None:
        _put(values, unknown, GpuField.HEAT_MARGIN_C, slowdown_c - temperature_c)


def _put(
    values: dict[GpuField, float], unknown: dict[GpuField, Unknown], one: GpuField, found: float | Unknown
) -> None:
    """File a field as what it is: a value, if it can be one."""
    unknown.pop(one, None)
    if isinstance(found, Unknown):
        unknown[one] = found
        return
    low, high = _BOUNDS[one]
    if math.isfinite(found) and low <= found <= high:
        values[one] = float(found)
    else:
        unknown[one] = Unknown.ABSURD


_MEMORY: Final = (
    GpuField.MEMORY_TOTAL_BYTES,
    GpuField.MEMORY_USED_BYTES,
    GpuField.MEMORY_FREE_BYTES,
    GpuField.MEMORY_RESERVED_BYTES,
)


_ROUNDING: Final = 1.02
"""Sources round each part by itself, and to MiB."""


def _drop_contradictions(values: dict[GpuField, float], unknown: dict[GpuField, Unknown]) -> None:
    """Parts that exceed the whole, or memory neither used nor free: nobody knows which is wrong, so none is believed."""
    total, used, free, reserved = (values.get(one) for one in _MEMORY)
    exceeds = total is not None and (used or 0.0) + (free or 0.0) + (reserved or 0.0) > total * _ROUNDING
    if exceeds or (used == 0 and free == 0):
        for one in _MEMORY:
            if values.pop(one, None) is not None:
                unknown[one] = Unknown.ABSURD
