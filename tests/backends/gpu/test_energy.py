"""Joules over time: counted where a counter is, integrated where power is, never invented."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.gpu.base import GpuField, GpuReading, Unknown, reading
from backends.gpu.energy import GAP_MAX_S, WRAP_J, Energy, EnergyMeter


def card(energy_j: float | None = None, power_w: float | None = None, id: str = "a") -> GpuReading:
    return reading(
        id,
        {
            GpuField.ENERGY_J_TOTAL: Unknown.NOT_SUPPORTED if energy_j is None else energy_j,
            GpuField.POWER_W: Unknown.NOT_SUPPORTED if power_w is None else power_w,
        },
    )


def metered(*steps: tuple[float, float | None, float | None], busy: bool = True) -> Energy:
    """What a meter says after (time, counter, power) of one card."""
    meter = EnergyMeter()
    for at_s, energy_j, power_w in steps:
        meter.add([card(energy_j, power_w)], at_s, busy=busy)
    return meter.total


def test_a_counter_is_exact_over_any_gap() -> None:
    assert metered((0, 1000, None), (1, 1400, None), (3600, 601_400, None)).total_j == 600_400


def test_without_a_counter_power_is_integrated() -> None:
    assert metered((0, None, 100), (1, None, 200), (2, None, 200)).total_j == 150 + 200


def test_power_is_not_integrated_over_a_gap_which_counts_as_unmeasured() -> None:
    energy = metered((0, None, 100), (GAP_MAX_S + 1, None, 100), (GAP_MAX_S + 2, None, 100))

    assert (energy.total_j, energy.unmeasured_s) == (100, GAP_MAX_S + 1)


def test_a_counter_that_wraps_goes_on() -> None:
    assert metered((0, WRAP_J - 100, None), (1, 300, None)).total_j == pytest.approx(400)


def test_a_counter_that_starts_anew_counts_from_zero() -> None:
    assert metered((0, 5_000_000, None), (60, 700, None), (61, 1000, None)).total_j == 1000


def test_a_counter_that_jumps_is_not_believed() -> None:
    assert metered((0, 1000, 300), (1, 9_000_000, 300), (2, 9_000_400, 300)).total_j == 300 + 400


def test_a_counter_that_stands_at_zero_counts_nothing_and_power_does() -> None:
    assert metered((0, 0, 300), (1, 0, 300)).total_j == 300


def test_a_counter_that_returns_holds_what_power_told_meanwhile() -> None:
    energy = metered((0, 1000, 300), (1, None, 300), (2, None, 300), (3, 1900, 300))

    assert energy.total_j == 900


def test_a_counter_that_moves_every_half_minute_is_believed_and_its_time_is_kept() -> None:
    steps = [(float(at_s), 1000.0 + 21_000 * (at_s // 30), None) for at_s in range(61)]

    energy = metered(*steps)

    assert (energy.busy_j, energy.busy_s, energy.unmeasured_s) == (42_000, 60, 0)


def test_idle_power_is_kept_apart() -> None:
    meter = EnergyMeter()

    meter.add([card(1000)], 0, busy=False)
    meter.add([card(1060)], 1, busy=False)
    meter.add([card(1460)], 2, busy=True)
    meter.add([card(1860)], 3, busy=False)
    meter.add([card(1920)], 4, busy=False)

    assert meter.total == Energy(busy_j=800, idle_j=120, busy_s=2, idle_s=2)
    assert meter.total.idle_power_w == 60


def test_an_engine_that_was_never_idle_has_no_idle_power() -> None:
    assert metered((0, 1000, None), (1, 1400, None)).idle_power_w is None


def test_cards_add_up_and_one_that_does_not_tell_leaves_its_time_unmeasured() -> None:
    meter = EnergyMeter()

    meter.add([card(1000, id="a"), card(5000, id="b")], 0, busy=True)
    meter.add([card(1300, id="a"), card(5400, id="b")], 1, busy=True)
    meter.add([card(1600, id="a"), card(None, id="b")], 2, busy=True)

    assert meter.total == Energy(busy_j=1000, busy_s=1, unmeasured_s=1)


@given(
    st.lists(
        st.tuples(st.floats(0.5, 5.0), st.floats(0.0, 1000.0), st.booleans(), st.booleans()), min_size=1, max_size=40
    )
)
def test_whatever_is_missing_nothing_is_counted_twice(steps: list[tuple[float, float, bool, bool]]) -> None:
    """A card of steady true power: its counter and its power come and go."""
    meter = EnergyMeter()
    true_j, at_s = 1000.0, 0.0
    meter.add([card(true_j, 500)], at_s, busy=True)
    for step_s, _, counter_there, power_there in steps:
        at_s += step_s
        true_j += 500 * step_s
        before = meter.total
        meter.add([card(true_j if counter_there else None, 500 if power_there else None)], at_s, busy=True)

        assert meter.total.total_j >= before.total_j
        assert meter.total.total_j <= true_j - 1000 + 1e-6
    meter.add([card(true_j, 500)], at_s + 1e-9, busy=True)

    assert meter.total.total_j == pytest.approx(true_j - 1000)
