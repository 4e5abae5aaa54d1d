"""Why a card holds its clocks down: the bits of NVML and DCGM in words.

The same bits under both of their names (clocks throttle reasons, later clocks event reasons). Some are no fault: a
card without work clocks down by itself, and settings of the operator are what the operator wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Reason(StrEnum):
    """One reason; the words are metric labels."""

    GPU_IDLE = "gpu_idle"
    CLOCKS_SETTING = "clocks_setting"
    SW_POWER_CAP = "sw_power_cap"
    HW_SLOWDOWN = "hw_slowdown"
    SYNC_BOOST = "sync_boost"
    SW_THERMAL = "sw_thermal"
    HW_THERMAL = "hw_thermal"
    HW_POWER_BRAKE = "hw_power_brake"
    DISPLAY_CLOCKS = "display_clocks"
    BOARD_LIMIT = "board_limit"
    RELIABILITY = "reliability"
    OTHER = "other"
    """A bit that is newer than this table."""


BITS: Final[Mapping[int, Reason]] = {
    0x1: Reason.GPU_IDLE,
    0x2: Reason.CLOCKS_SETTING,
    0x4: Reason.SW_POWER_CAP,
    0x8: Reason.HW_SLOWDOWN,
    0x10: Reason.SYNC_BOOST,
    0x20: Reason.SW_THERMAL,
    0x40: Reason.HW_THERMAL,
    0x80: Reason.HW_POWER_BRAKE,
    0x100: Reason.DISPLAY_CLOCKS,
    0x200: Reason.BOARD_LIMIT,
    0x400: Reason.RELIABILITY,
}

HARMLESS: Final = frozenset({Reason.GPU_IDLE, Reason.CLOCKS_SETTING, Reason.DISPLAY_CLOCKS})
BY_HARDWARE: Final = frozenset({Reason.HW_SLOWDOWN, Reason.HW_THERMAL, Reason.HW_POWER_BRAKE})
"""The card protects itself: cooling or power supply needs a person."""
PROTECTIVE: Final = BY_HARDWARE | {Reason.SW_THERMAL}
"""Less work is what helps now. A power cap is none of these: a busy card may run at it all day."""


def decode(bits: int) -> tuple[Reason, ...]:
    """All reasons, lowest bit first."""
    known = tuple(reason for bit, reason in BITS.items() if bits & bit)
    return (*known, Reason.OTHER) if bits & ~sum(BITS) else known


def throttling(bits: int) -> tuple[Reason, ...]:
    """The reasons for which work is slower than it could be."""
    return tuple(reason for reason in decode(bits) if reason not in HARMLESS)


def slowed(bits: int) -> bool:
    """Whether the card slows itself down to protect itself."""
    return not PROTECTIVE.isdisjoint(decode(bits))
