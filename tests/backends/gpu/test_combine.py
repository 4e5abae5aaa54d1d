"""Several cards as one engine: sums, maxima, the tightest card, and what is wrong between them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Signal
from backends.gpu.base import MIB, GpuField, GpuReading, Unknown, reading
from backends.gpu.combine import combined
from backends.gpu.plain import gpu_from_plain, gpu_to_plain
from backends.gpu.throttle import BITS, HARMLESS, Reason, decode, throttling

GIB = 1024.0 * MIB


def card(id: str = "a", /, **raw: float | Unknown) -> GpuReading:
    healthy: dict[GpuField, float | Unknown] = {
        GpuField.MEMORY_TOTAL_BYTES: 80 * GIB,
        GpuField.MEMORY_USED_BYTES: 60 * GIB,
        GpuField.MEMORY_FREE_BYTES: 20 * GIB,
        GpuField.BUSY_FRACTION: 0.5,
        GpuField.TEMPERATURE_C: 60,
        GpuField.SLOWDOWN_C: 90,
        GpuField.POWER_W: 300,
        GpuField.POWER_LIMIT_W: 600,
        GpuField.CLOCK_REASONS: 0,
    }
    return reading(id, {**healthy, **{GpuField(name): value for name, value in raw.items()}})


def values(*cards: GpuReading) -> dict[Signal, float | None]:
    return {signal: measured.value for signal, measured in combined("nvml", 0.0, cards).values.items()}


def findings(*cards: GpuReading) -> list[str]:
    return [finding.name for finding in combined("nvml", 0.0, cards).findings]


def test_an_engine_is_as_free_as_its_tightest_card_and_as_hot_as_its_hottest() -> None:
    cool = card("a", temperature_c=50, power_w=200, busy_fraction=0.9)
    tight = card("b", memory_used_bytes=70 * GIB, memory_free_bytes=10 * GIB, temperature_c=80, power_w=450)

    assert values(cool, tight) == {
        Signal.GPU_BUSY_FRACTION: 0.9,
        Signal.GPU_POWER_W: 650,
        Signal.GPU_POWER_FRACTION: 0.75,
        Signal.GPU_TEMPERATURE_C: 80,
        Signal.GPU_HEAT_MARGIN_C: 10,
        Signal.GPU_MEMORY_FREE_BYTES: 20 * GIB,
        Signal.GPU_MEMORY_FREE_FRACTION: 0.125,
        Signal.GPU_THROTTLED: 0,
        Signal.GPU_SLOWED: 0,
    }


@pytest.mark.parametrize("reason", [reason for reason in Unknown if reason is not Unknown.ABSURD])
def test_a_sum_without_a_card_is_no_sum(reason: Unknown) -> None:
    found = values(card("a"), card("b", power_w=reason))

    assert not {Signal.GPU_POWER_W, Signal.GPU_POWER_FRACTION} & found.keys()
    assert found[Signal.GPU_TEMPERATURE_C] == 60


def test_an_absurd_part_makes_the_signal_absurd_not_absent() -> None:
    found = values(card("a"), card("b", power_w=1e9))

    assert found[Signal.GPU_POWER_W] is None


@pytest.mark.parametrize(
    ("used_gib", "found"),
    [((60, 60), []), ((60, 55), []), ((60, 53), ["memory_imbalance"]), ((60, 0), ["memory_imbalance"])],
)
def test_memory_that_differs_by_more_than_a_tenth_is_a_finding(used_gib: tuple[int, int], found: list[str]) -> None:
    cards = [
        card(str(number), memory_used_bytes=used * GIB, memory_free_bytes=(80 - used) * GIB)
        for number, used in enumerate(used_gib)
    ]

    assert findings(*cards) == found


def test_cards_of_different_size_are_a_finding() -> None:
    small = card("b", memory_total_bytes=40 * GIB, memory_used_bytes=38 * GIB, memory_free_bytes=2 * GIB)

    assert "unlike_gpus" in findings(card("a"), small)


def test_a_card_that_brakes_itself_is_a_finding_and_one_at_its_power_cap_is_not() -> None:
    assert findings(card(clock_reasons=0x40)) == ["hardware_slowdown"]
    assert findings(card(clock_reasons=0x4)) == []
    assert values(card(clock_reasons=0x4))[Signal.GPU_THROTTLED] == 1


@pytest.mark.parametrize(("clock_reasons", "slowed"), [(0x1, 0), (0x4, 0), (0x20, 1), (0x40, 1), (0x8, 1), (0x80, 1)])
def test_only_a_card_that_protects_itself_is_slowed(clock_reasons: int, slowed: int) -> None:
    assert values(card(clock_reasons=0), card("b", clock_reasons=clock_reasons))[Signal.GPU_SLOWED] == slowed


def test_nothing_but_silent_cards_is_not_up_and_says_why() -> None:
    sample = combined("nvml", 0.0, (reading("a", {}, missing=Unknown.GONE),))

    assert (sample.up, sample.detail) == (False, "nvml: no GPU tells anything (gone)")
    assert [finding.name for finding in sample.findings] == ["gpu_silent"]


@pytest.mark.parametrize(
    "raw",
    [
        {"memory_used_bytes": 90 * GIB},
        {"memory_free_bytes": 79 * GIB},
        {"memory_total_bytes": 1.0},
        {"memory_used_bytes": 0.0, "memory_free_bytes": 0.0},
        {"memory_used_bytes": 0.0, "memory_free_bytes": 0.0, "memory_total_bytes": Unknown.NOT_TOLD},
    ],
)
def test_memory_that_contradicts_itself_is_not_believed(raw: dict[str, float | Unknown]) -> None:
    unknown = card(**raw).unknown

    assert unknown[GpuField.MEMORY_TOTAL_BYTES] is Unknown.ABSURD
    assert unknown[GpuField.MEMORY_USED_BYTES] is Unknown.ABSURD


def test_every_bit_has_its_word_and_harmless_ones_throttle_nothing() -> None:
    assert decode(0) == ()
    assert [decode(bit) for bit in BITS] == [(reason,) for reason in BITS.values()]
    assert decode(0x1 | 0x8 | 1 << 40) == (Reason.GPU_IDLE, Reason.HW_SLOWDOWN, Reason.OTHER)
    assert not any(throttling(bit) for bit, reason in BITS.items() if reason in HARMLESS)
    assert all(throttling(bit) for bit, reason in BITS.items() if reason not in HARMLESS)


RAW = st.dictionaries(
    st.sampled_from(GpuField), st.floats() | st.sampled_from([0.0, 1.0, 80 * GIB]) | st.sampled_from(Unknown)
)


@settings(max_examples=300)
@given(st.lists(RAW, max_size=4))
def test_whatever_cards_tell_they_can_be_combined_and_nothing_absurd_comes_out(
    raws: list[dict[GpuField, float | Unknown]],
) -> None:
    sample = combined("nvml", 0.0, tuple(reading(str(number), raw) for number, raw in enumerate(raws)))

    for signal, measured in sample.values.items():
        assert measured.value is None or math.isfinite(measured.value)
        assert measured.value is None or not signal.endswith("fraction") or 0 <= measured.value <= 1
    assert bool(sample.detail) != sample.up


@given(RAW, st.floats(0, 1e6))
def test_a_sample_survives_being_told_to_another_process(raw: dict[GpuField, float | Unknown], age_s: float) -> None:
    sample = combined("dcgm", 100.0, (reading("a", raw, name="H100", partition="mig"), card("b")))

    back = gpu_from_plain(gpu_to_plain(sample, 100.0 + age_s), 500.0)

    assert (back.cards, back.values, back.findings, back.detail) == (
        sample.cards,
        sample.values,
        sample.findings,
        sample.detail,
    )
    assert back.taken_s == pytest.approx(500.0 - age_s)


def test_what_another_release_tells_is_passed_over() -> None:
    plain = gpu_to_plain(combined("nvml", 0.0, (card(),)), 1.0)
    assert plain is not None
    told: dict[str, object] = {
        **plain,
        "values": {"gpu_smell": [1.0, "nvml"]},
        "cards": [{"id": "a", "values": {"smell": 1.0}, "unknown": {"power_w": "on_holiday"}, "colour": "green"}],
    }

    back = gpu_from_plain(told, 1.0)

    assert back.values == {}
    assert set(back.cards[0].unknown) == set(GpuField)
    assert back.cards[0].unknown[GpuField.POWER_W] is Unknown.NOT_TOLD
