"""A DCGM exporter's page, as exporters write it and as they should not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import BackendError, Call, EngineRequest, Headers, Receiver, Signal
from backends.gpu.base import MIB, GpuField, GpuSample, Unknown
from backends.gpu.dcgm import DcgmSource, cards_of

PAGES = Path(__file__).parents[2] / "data" / "gpu"
TWO_CARDS = (PAGES / "dcgm_two_cards.txt").read_bytes()
MIG = (PAGES / "dcgm_mig.txt").read_bytes()
NEW_NAMES = (PAGES / "dcgm_new_names.txt").read_bytes()


class OnePage:
    """A pool behind which one page stands, or none."""

    def __init__(self, page: bytes | Exception, status: int = 200) -> None:
        self._page = page
        self._status = status
        self.asked: list[bytes] = []
        self.closed = False

    def call(self, request: EngineRequest, receiver: Receiver) -> Call:
        raise AssertionError("a GPU source only fetches")

    async def fetch(
        self, method: bytes, target: bytes, headers: Headers = (), body: bytes = b"", *, timeout_s: float = 0.0
    ) -> tuple[int, Headers, bytes]:
        assert timeout_s > 0
        self.asked.append(method + b" " + target)
        if isinstance(self._page, Exception):
            raise self._page
        return self._status, (), self._page

    async def close(self) -> None:
        self.closed = True


async def read(page: bytes | Exception, *devices: str, status: int = 200) -> GpuSample:
    source = DcgmSource(OnePage(page, status), devices or None, where="http://node-1:9400", monotonic=lambda: 7.0)
    return await source.read()


async def test_the_default_counters_of_two_cards_are_one_engine() -> None:
    sample = await read(TWO_CARDS)

    first, second = sample.cards
    assert (first.id, first.index, first.name, first.host) == ("GPU-aaaa", "0", "NVIDIA H100 80GB HBM3", "node-1")
    assert (second.id, second.pci_bus_id) == ("GPU-bbbb", "00000000:2A:00.0")
    assert first.value(GpuField.ENERGY_J_TOTAL) == 9876543.21
    assert first.value(GpuField.MEMORY_TOTAL_BYTES) == (8000 + 73000 + 559) * MIB
    assert {signal: measured.value for signal, measured in sample.values.items()} == {
        Signal.GPU_BUSY_FRACTION: 0.98,
        Signal.GPU_POWER_W: 800.0,
        Signal.GPU_TEMPERATURE_C: 67,
        Signal.GPU_MEMORY_FREE_BYTES: 2 * 6000 * MIB,
        Signal.GPU_MEMORY_FREE_FRACTION: pytest.approx(6000 / 81559),
    }


async def test_what_an_exporter_does_not_show_is_not_told() -> None:
    sample = await read(TWO_CARDS)

    assert set(sample.cards[0].unknown.values()) == {Unknown.NOT_TOLD}
    assert GpuField.POWER_LIMIT_W in sample.cards[0].unknown
    assert Signal.GPU_THROTTLED not in sample.values


@pytest.mark.parametrize(
    ("blank", "reason"),
    [
        ("9223372036854775794", Unknown.NOT_SUPPORTED),
        ("9223372036854775792", Unknown.NOT_SUPPORTED),
        ("9.223372036854776e+18", Unknown.NOT_SUPPORTED),
        ("140737488355328.000000", Unknown.NOT_SUPPORTED),
        ("140737488355330", Unknown.NOT_SUPPORTED),
        ("2147483632", Unknown.ABSURD),
        ("2147483634", Unknown.ABSURD),
        ("+Inf", Unknown.NOT_SUPPORTED),
        ("NaN", Unknown.ABSURD),
        ("-1", Unknown.ABSURD),
    ],
)
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("DCGM_FI_DEV_POWER_USAGE", GpuField.POWER_W),
        ("DCGM_FI_DEV_GPU_UTIL", GpuField.BUSY_FRACTION),
        ("DCGM_FI_DEV_FB_USED", GpuField.MEMORY_USED_BYTES),
    ],
)
async def test_blank_and_absurd_numbers_are_dropped(name: str, field: GpuField, blank: str, reason: Unknown) -> None:
    page = re.sub(rb"(?m)^(" + name.encode() + rb"\{.*\}) \S+$", rb"\1 " + blank.encode(), TWO_CARDS)

    sample = await read(page)

    assert [card.unknown[field] for card in sample.cards] == [reason, reason]
    assert sample.cards[0].value(GpuField.TEMPERATURE_C) == 61


@pytest.mark.parametrize("pod", ["a", "b"])
async def test_of_repeated_series_the_one_that_says_something_counts(pod: str) -> None:
    free = rb'(?m)^(DCGM_FI_DEV_FB_FREE.*pod="' + pod.encode() + rb'"\}) 8000$'
    page, changed = re.subn(free, rb"\1 9223372036854775794", TWO_CARDS)
    assert changed == 1

    sample = await read(page, "0")

    assert sample.cards[0].value(GpuField.MEMORY_FREE_BYTES) == 8000 * MIB


async def test_mig_slices_stand_for_their_card_and_take_its_temperature_but_not_its_power() -> None:
    sample = await read(MIG)

    assert [(card.id, card.partition, card.instance) for card in sample.cards] == [
        ("GPU-aaaa/7", "1g.10gb", "7"),
        ("GPU-aaaa/2", "3g.40gb", "2"),
    ]
    assert [card.value(GpuField.TEMPERATURE_C) for card in sample.cards] == [44, 44]
    assert [card.value(GpuField.POWER_W) for card in sample.cards] == [None, None]
    assert sample.cards[0].value(GpuField.MEMORY_TOTAL_BYTES) == 9728 * MIB


@pytest.mark.parametrize(
    ("page", "device", "ids"),
    [
        (TWO_CARDS, "1", ["GPU-bbbb"]),
        (TWO_CARDS, "GPU-aaaa", ["GPU-aaaa"]),
        (MIG, "GPU-aaaa/2", ["GPU-aaaa/2"]),
        (MIG, "GPU-aaaa", ["GPU-aaaa/7", "GPU-aaaa/2"]),
        (MIG, "0", ["GPU-aaaa/7", "GPU-aaaa/2"]),
        (TWO_CARDS, "5", ["5"]),
        (TWO_CARDS, "GPU-aaa", ["GPU-aaa"]),
    ],
)
async def test_the_engines_own_cards_are_chosen(page: bytes, device: str, ids: list[str]) -> None:
    sample = await read(page, device)

    assert [card.id for card in sample.cards] == ids


async def test_a_card_that_left_the_page_is_gone() -> None:
    sample = await read(TWO_CARDS, "0", "2")

    assert set(sample.cards[1].unknown.values()) == {Unknown.GONE}
    assert Signal.GPU_POWER_W not in sample.values


async def test_newer_names_are_read_in_their_units() -> None:
    sample = await read(NEW_NAMES)

    (card,) = sample.cards
    assert (card.id, card.host) == ("GPU-cccc", "node-2")
    assert card.values == {
        GpuField.TEMPERATURE_C: 58,
        GpuField.HEAT_MARGIN_C: 29,
        GpuField.POWER_W: 812.5,
        GpuField.POWER_LIMIT_W: 1000,
        GpuField.BUSY_FRACTION: 0.93,
        GpuField.CLOCK_REASONS: 68,
    }
    assert sample.values[Signal.GPU_THROTTLED].value == 1


async def test_cards_of_several_hosts_on_one_page_are_told_apart_and_told_of() -> None:
    sample = await read(TWO_CARDS + TWO_CARDS.replace(b"node-1", b"node-9").replace(b"GPU-", b"GPU-9"))

    assert len(sample.cards) == 4
    assert "several_hosts" in [finding.name for finding in sample.findings]


@pytest.mark.parametrize(
    ("page", "status", "words"),
    [
        (BackendError("engine e1 gpu: connect_refused"), 200, "connect_refused"),
        (b"", 200, "shows no GPU"),
        (b"<html>not found</html>", 404, "answered 404"),
        (b"headrace_gpu_exporter_up 0\n", 200, "shows no GPU"),
        (b"\x00\xff" * 1000, 200, "shows no GPU"),
    ],
)
async def test_a_page_that_cannot_be_had_is_a_sample_that_says_why(
    page: bytes | Exception, status: int, words: str
) -> None:
    sample = await read(page, status=status)

    assert not sample.up
    assert words in sample.detail
    assert sample.detail.startswith("DCGM exporter http://node-1:9400: ")


async def test_the_pool_is_closed_with_the_source() -> None:
    pool = OnePage(TWO_CARDS)
    source = DcgmSource(pool, where="http://node-1:9400", monotonic=lambda: 7.0)

    await source.read()
    await source.close()

    assert (pool.asked, pool.closed) == ([b"GET /metrics"], True)


@given(st.lists(st.sampled_from(TWO_CARDS.splitlines()), max_size=30), st.floats() | st.integers())
def test_every_card_read_from_any_page_accounts_for_every_field(lines: list[bytes], number: float) -> None:
    page = b"\n".join(re.sub(rb"\d+$", repr(number).encode(), line) for line in lines)

    for card in cards_of(page):
        assert {*card.values, *card.unknown} == set(GpuField)
        assert not card.values.keys() & card.unknown.keys()
