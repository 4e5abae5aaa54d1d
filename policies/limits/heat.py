"""What temperature, power and clocks of an engine's GPUs say of one more work: nothing, hold, or shrink.

Shared by the sizing policies that look at the machine. At a limit (HOT) what runs should become less; a band below it
(WARM) only keeps it from becoming more, since a card gets warmer for half a minute after work was added. What is not told
says nothing: a GPU that cannot be read bounds nobody.
"""

from __future__ import annotations

from enum import IntEnum

from policies.vocabulary import Reading

WARM_C = 5.0
"""Degrees of the band."""
WARM_POWER = 0.05
"""The same of power, as a part of its limit."""


class Heat(IntEnum):
    """How close the machine is to its limits."""

    COOL = 0
    WARM = 1
    HOT = 2


def heat(
    margin_c: float | None,
    power_fraction: float | None,
    slowed: float | None,
    *,
    heat_margin_c: float,
    power_at: float | None,
) -> Heat:
    """The hotter of the three; None: not known.

    margin_c         degrees below the temperature at which the hottest GPU slows down
    power_fraction   of its limit, of the hungriest GPU
    slowed           above 0 while some GPU slows itself down to protect itself
    heat_margin_c    so much margin, or less, is hot
    power_at         so much power, or more, is hot; None: power does not matter
    """
    if slowed or (margin_c is not None and margin_c <= heat_margin_c):
        return Heat.HOT
    found = Heat.COOL
    if power_at is not None and power_fraction is not None:
        if power_fraction >= power_at:
            return Heat.HOT
        if power_fraction > power_at - WARM_POWER:
            found = Heat.WARM
    if margin_c is not None and margin_c < heat_margin_c + WARM_C:
        found = Heat.WARM
    return found


def known(reading: Reading) -> float | None:
    """A reading's value where it can be used as it stands."""
    return reading.value if reading.known else None
