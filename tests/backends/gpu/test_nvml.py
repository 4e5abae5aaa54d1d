"""Cards read through the real pynvml from a library that plays every fault: one field's fault costs only that field."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pynvml
import pytest

from backends.base import Signal
from backends.gpu import nvml_cards
from backends.gpu.base import GpuField, GpuSample, Unknown
from backends.gpu.nvml import NvmlSource, NvmlThread
from tests.backends.gpu.conftest import Ticks
from tests.backends.gpu.stub import Stub, build, environ, python

GIB = 1024.0**3
CARD_0 = "GPU-00000000-0000-0000-0000-000000000000"
CARD_1 = "GPU-00000001-0000-0000-0000-000000000000"
SLICE_1 = "MIG-00000000-0000-0000-0000-000000000001"
MEMORY = {
    GpuField.MEMORY_TOTAL_BYTES,
    GpuField.MEMORY_USED_BYTES,
    GpuField.MEMORY_FREE_BYTES,
    GpuField.MEMORY_RESERVED_BYTES,
}
FIELDS_OF = {
    "nvmlDeviceGetUtilizationRates": {GpuField.BUSY_FRACTION, GpuField.MEMORY_BUSY_FRACTION},
    "nvmlDeviceGetTemperature": {GpuField.TEMPERATURE_C},
    "nvmlDeviceGetPowerUsage": {GpuField.POWER_W},
    "nvmlDeviceGetEnforcedPowerLimit": {GpuField.POWER_LIMIT_W},
    "nvmlDeviceGetTotalEnergyConsumption": {GpuField.ENERGY_J_TOTAL},
    "nvmlDeviceGetCurrentClocksEventReasons": {GpuField.CLOCK_REASONS},
}


async def read(thread: NvmlThread, *devices: str, read_s: float = 5.0) -> GpuSample:
    return await NvmlSource(thread, devices or None, read_s=read_s).read()


async def test_a_healthy_card_tells_everything_in_base_units(stub: Stub, thread: NvmlThread) -> None:
    sample = await read(thread)

    (card,) = sample.cards
    assert (card.id, card.index, card.name, card.partition) == (CARD_0, "0", "Stub H100", "")
    assert card.pci_bus_id == "00000000:01:00.0"
    assert card.unknown == {}
    assert card.values == {
        GpuField.MEMORY_TOTAL_BYTES: 80 * GIB,
        GpuField.MEMORY_USED_BYTES: 60 * GIB,
        GpuField.MEMORY_FREE_BYTES: 19.5 * GIB,
        GpuField.MEMORY_RESERVED_BYTES: 0.5 * GIB,
        GpuField.BUSY_FRACTION: 0.77,
        GpuField.MEMORY_BUSY_FRACTION: 0.33,
        GpuField.TEMPERATURE_C: 71,
        GpuField.SLOWDOWN_C: 92,
        GpuField.SHUTDOWN_C: 95,
        GpuField.HEAT_MARGIN_C: 19,
        GpuField.POWER_W: 512.345,
        GpuField.POWER_LIMIT_W: 700,
        GpuField.ENERGY_J_TOTAL: 123456.789,
        GpuField.CLOCK_REASONS: 0x4,
    }


@pytest.mark.parametrize("function", sorted(FIELDS_OF))
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (3, Unknown.NOT_SUPPORTED),
        (4, Unknown.NO_PERMISSION),
        (10, Unknown.TIMED_OUT),
        (25, Unknown.NO_FUNCTION),
        (999, Unknown.FAILED),
        (4711, Unknown.FAILED),
    ],
)
async def test_a_field_that_cannot_be_read_is_unknown_alone_and_says_why(
    stub: Stub, thread: NvmlThread, function: str, code: int, reason: Unknown
) -> None:
    stub.play(f"fail {function} {code}", f"fail {function.replace('EventReasons', 'ThrottleReasons')} {code}")

    sample = await read(thread)

    assert sample.up
    assert sample.cards[0].unknown == dict.fromkeys(FIELDS_OF[function], reason)


async def test_unified_memory_has_no_memory_figures_and_all_else(stub: Stub, thread: NvmlThread) -> None:
    stub.play("fail nvmlDeviceGetMemoryInfo 3", "fail nvmlDeviceGetMemoryInfo_v2 3")

    sample = await read(thread)

    assert sample.up
    assert sample.cards[0].unknown == dict.fromkeys(MEMORY, Unknown.NOT_SUPPORTED)
    assert Signal.GPU_MEMORY_FREE_FRACTION not in sample.values
    assert sample.values[Signal.GPU_POWER_W].value == 512.345


async def test_a_virtual_gpu_without_power_and_heat_still_tells_its_memory(stub: Stub, thread: NvmlThread) -> None:
    missing = ("Temperature", "TemperatureThreshold", "MarginTemperature", "PowerUsage", "EnforcedPowerLimit")
    stub.play(*(f"fail nvmlDeviceGet{name} 3" for name in missing))

    sample = await read(thread)

    assert sample.values[Signal.GPU_MEMORY_FREE_BYTES].value == 19.5 * GIB
    assert not {Signal.GPU_POWER_W, Signal.GPU_POWER_FRACTION, Signal.GPU_HEAT_MARGIN_C} & sample.values.keys()


async def test_without_a_margin_of_its_own_it_is_the_distance_to_the_slow_down(stub: Stub, thread: NvmlThread) -> None:
    stub.play("fail nvmlDeviceGetMarginTemperature 3")

    sample = await read(thread)

    assert sample.cards[0].value(GpuField.HEAT_MARGIN_C) == 92 - 71


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ("value nvmlDeviceGetPowerUsage 4294967295", GpuField.POWER_W),
        ("value nvmlDeviceGetEnforcedPowerLimit 0", GpuField.POWER_LIMIT_W),
        ("value nvmlDeviceGetTemperature 4294967295", GpuField.TEMPERATURE_C),
        ("value nvmlDeviceGetTemperature 255", GpuField.TEMPERATURE_C),
        ("value nvmlDeviceGetUtilizationRates 1000", GpuField.BUSY_FRACTION),
        ("value nvmlDeviceGetTotalEnergyConsumption 9223372036854775794", GpuField.ENERGY_J_TOTAL),
        ("value nvmlDeviceGetMemoryInfo_v2 9223372036854775794", GpuField.MEMORY_USED_BYTES),
        ("value nvmlDeviceGetCurrentClocksEventReasons 9223372036854775794", GpuField.CLOCK_REASONS),
    ],
)
async def test_an_absurd_value_is_dropped_and_called_so(
    stub: Stub, thread: NvmlThread, rule: str, field: GpuField
) -> None:
    stub.play(rule)

    sample = await read(thread)

    assert sample.cards[0].unknown[field] is Unknown.ABSURD


# -- which cards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "ids"),
    [
        ((), [CARD_0, CARD_1]),
        (("1",), [CARD_1]),
        ((CARD_1, "0"), [CARD_1, CARD_0]),
        (("GPU-00000001",), [CARD_1]),
    ],
)
async def test_cards_are_found_by_index_and_uuid(
    stub: Stub, thread: NvmlThread, devices: tuple[str, ...], ids: list[str]
) -> None:
    stub.play("cards 2")

    sample = await read(thread, *devices)

    assert [card.id for card in sample.cards] == ids


@pytest.mark.parametrize("device", ["7", "GPU-99999999", "GPU-0000000", "MIG-00000000-0000-0000-0000-000000000005"])
async def test_a_card_that_is_not_there_is_gone_and_costs_no_other(stub: Stub, thread: NvmlThread, device: str) -> None:
    stub.play("cards 2")

    sample = await read(thread, "0", device)

    healthy, missing = sample.cards
    assert healthy.unknown == {}
    assert (missing.id, set(missing.unknown.values())) == (device, {Unknown.GONE})
    assert "gpu_silent" in [finding.name for finding in sample.findings]
    assert Signal.GPU_POWER_W not in sample.values


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        ("1", [CARD_1]),
        ("1,0", [CARD_1, CARD_0]),
        (CARD_1, [CARD_1]),
        ("GPU-00000001,0", [CARD_1, CARD_0]),
        ("0,-1,1", [CARD_0]),
        (" 1 , 1", [CARD_1]),
        ("", []),
        ("NoDevFiles", []),
    ],
)
async def test_without_devices_what_cuda_would_show_is_read(
    stub: Stub, thread: NvmlThread, monkeypatch: pytest.MonkeyPatch, visible: str, ids: list[str]
) -> None:
    stub.play("cards 2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    sample = await read(thread)

    assert [card.id for card in sample.cards] == ids
    assert sample.up == bool(ids)
    assert bool(sample.detail) != sample.up


async def test_several_cards_that_nobody_named_are_a_finding(stub: Stub, thread: NvmlThread) -> None:
    stub.play("cards 2")

    unnamed, named = await read(thread), await read(thread, "0", "1")

    assert [finding.name for finding in unnamed.findings] == ["devices_unnamed"]
    assert named.findings == ()


@pytest.mark.parametrize("rights", ["whole", "slices only"])
async def test_a_mig_slice_from_cuda_visible_devices_tells_its_memory(
    stub: Stub, thread: NvmlThread, monkeypatch: pytest.MonkeyPatch, rights: str
) -> None:
    asked_of_parent = ("MigMode", "Temperature", "PowerUsage", "Name", "DeviceHandleFromMigDeviceHandle")
    refused = [f"fail-whole nvmlDeviceGet{name} 4" for name in asked_of_parent] if rights == "slices only" else []
    stub.play("mig 0 2", *refused)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SLICE_1)

    sample = await read(thread)

    (card,) = sample.cards
    assert (card.id, card.partition, card.instance) == (SLICE_1, "1g.10gb", "8")
    assert card.value(GpuField.MEMORY_TOTAL_BYTES) == 10 * GIB
    assert card.unknown[GpuField.POWER_W] is Unknown.NOT_SUPPORTED
    assert card.value(GpuField.TEMPERATURE_C) == (71 if rights == "whole" else None)


@pytest.mark.parametrize("refused", [(), ("fail-whole nvmlDeviceGetMigMode 4",)])
async def test_a_card_in_mig_mode_stands_for_its_slices(
    stub: Stub, thread: NvmlThread, refused: tuple[str, ...]
) -> None:
    stub.play("mig 0 2", *refused)

    sample = await read(thread, "0")

    assert [card.partition for card in sample.cards] == ["1g.10gb", "1g.10gb"]
    assert {card.index for card in sample.cards} == {"0"}


# -- the library comes and goes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"), [(18, "differ in version"), (4, "no permission"), (9, "not loaded"), (999, "NVML error 999")]
)
async def test_a_library_that_cannot_be_opened_is_tried_again_until_it_is_repaired(
    stub: Stub, thread: NvmlThread, ticks: Ticks, code: int, words: str
) -> None:
    source = NvmlSource(thread)
    stub.play(f"fail nvmlInitWithFlags {code}")

    broken = await source.read()
    stub.play()
    too_early = await source.read()
    ticks.advance(1.1)
    repaired = await source.read()

    assert not broken.up
    assert words in broken.detail
    assert too_early.detail == broken.detail
    assert repaired.up


async def test_openings_are_tried_ever_less_often_but_at_least_once_a_minute(
    stub: Stub, thread: NvmlThread, ticks: Ticks
) -> None:
    opened_s: list[float] = []

    def load() -> ModuleType:
        opened_s.append(ticks.now_s - 1000.0)
        raise OSError("no such driver")

    counting = NvmlThread(ticks, load)
    source = NvmlSource(counting)

    for _ in range(200):
        await source.read()
        ticks.advance(1.0)
    counting.close()

    assert opened_s == [0, 1, 3, 7, 15, 31, 63, 123, 183]


@pytest.mark.parametrize(
    ("error", "absent"),
    [(ModuleNotFoundError("pynvml"), True), (ImportError("half a package"), False), (RuntimeError("odd"), False)],
)
async def test_a_module_that_is_missing_or_broken_is_told_and_nothing_else(
    ticks: Ticks, error: Exception, *, absent: bool
) -> None:
    def load() -> ModuleType:
        raise error

    thread = NvmlThread(ticks, load)

    sample = await read(thread)
    thread.close()

    assert (sample.up, sample.absent) == (False, absent)
    assert "install nvidia-ml-py" in sample.detail


@pytest.mark.parametrize("code", [15, 16])
async def test_a_card_that_falls_off_the_bus_is_gone_and_found_again(
    stub: Stub, thread: NvmlThread, ticks: Ticks, code: int
) -> None:
    source = NvmlSource(thread, ["0", "1"])
    stub.play("cards 2", "lost 1" if code == 15 else "fail nvmlDeviceGetHandleByIndex_v2 16 1")

    lost = await source.read()
    stub.play("cards 2")
    ticks.advance(61)
    back = await source.read()

    assert set(lost.cards[1].unknown.values()) == {Unknown.GONE}
    assert lost.cards[0].unknown == {}
    assert [card.unknown for card in back.cards] == [{}, {}]


async def test_only_a_new_session_finds_a_card_again_and_sessions_are_not_opened_at_every_read(
    stub: Stub, ticks: Ticks
) -> None:
    """A module whose handles stay lost until it is opened anew, as the real library's do."""
    module, opened_s = old_module(), list[float]()

    def temperature(handle: str, sensor: int) -> int:
        if len(opened_s) < 3:
            raise OldError(15)
        return 50

    module.__dict__.update(nvmlInit=lambda: opened_s.append(ticks.now_s - 1000.0), nvmlDeviceGetTemperature=temperature)
    thread = NvmlThread(ticks, lambda: module)
    source = NvmlSource(thread)

    samples = []
    for _ in range(12):
        samples.append(await source.read())
        ticks.advance(0.5)
    thread.close()

    known = [sample.cards[0].value(GpuField.TEMPERATURE_C) is not None for sample in samples]
    assert opened_s == [0.0, 0.5, 1.5]
    assert known == [False] * 3 + [True] * 9


async def test_a_library_that_forgot_its_session_gets_another(stub: Stub, thread: NvmlThread, ticks: Ticks) -> None:
    source = NvmlSource(thread)
    await source.read()

    stub.play("fail nvmlDeviceGetCount_v2 1")
    forgotten = await source.read()
    stub.play()
    ticks.advance(1.1)
    renewed = await source.read()

    assert not forgotten.up
    assert renewed.up


def test_a_library_that_was_replaced_is_loaded_anew(library: Path, tmp_path: Path) -> None:
    mismatching = build(tmp_path, "-DMISMATCH")
    stub = Stub(tmp_path / "rules")
    code = f"""
import asyncio, os, shutil
from backends.gpu.nvml import NvmlSource, NvmlThread
now_s = [0.0]
async def main():
    source = NvmlSource(NvmlThread(lambda: now_s[0]))
    print((await source.read()).detail)
    os.remove({str(mismatching)!r})
    shutil.copy({str(library)!r}, {str(mismatching)!r})
    now_s[0] = 2.0
    print((await source.read()).up)
asyncio.run(main())
"""

    told = python(code, environ(mismatching, stub)).splitlines()

    assert "differ in version" in told[0]
    assert told[1] == "True"


READ_ONCE = """
import asyncio, json, time
from backends.gpu.nvml import NvmlSource, NvmlThread
async def main():
    sample = await NvmlSource(NvmlThread(time.monotonic), read_s=0.5).read()
    card = sample.cards[0] if sample.cards else None
    print(json.dumps({"up": sample.up, "detail": sample.detail, "absent": sample.absent,
                      "values": {} if card is None else card.values, "unknown": {} if card is None else card.unknown}))
asyncio.run(main())
"""


def test_a_host_without_the_library_has_no_gpu_and_no_fault() -> None:
    told = json.loads(python(READ_ONCE, environ(None)))

    assert (told["up"], told["absent"]) == (False, True)
    assert "not found" in told["detail"]


def test_an_older_library_costs_only_the_fields_that_it_lacks(tmp_path: Path) -> None:
    older = build(tmp_path, "-DOLD")

    told = json.loads(python(READ_ONCE, environ(older, Stub(tmp_path / "rules"))))

    assert told["unknown"] == {"memory_reserved_bytes": "no_function"}
    assert told["values"]["clock_reasons"] == 4
    assert told["values"]["heat_margin_c"] == 92 - 71


def test_a_call_that_blocks_keeps_no_process_from_ending(library: Path, tmp_path: Path) -> None:
    stub = Stub(tmp_path / "rules")
    stub.play("slow nvmlDeviceGetPowerUsage 60000")

    told = json.loads(python(READ_ONCE, environ(library, stub), timeout_s=15))

    assert told["unknown"]["power_w"] == "timed_out"
    assert told["values"]["temperature_c"] == 71


# -- slowness --------------------------------------------------------------------------------------------------------


async def test_a_slow_call_blocks_no_loop_and_costs_only_what_comes_after_it(stub: Stub) -> None:
    thread = NvmlThread(time.monotonic)
    stub.play("slow nvmlDeviceGetPowerUsage 300")
    source = NvmlSource(thread, read_s=0.05)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    async with asyncio.TaskGroup() as group:
        turning = group.create_task(turn())
        sample = await source.read()
        turning.cancel()
    thread.close()

    assert turns >= 10
    assert sample.up
    assert sample.cards[0].value(GpuField.TEMPERATURE_C) == 71
    assert sample.cards[0].unknown[GpuField.POWER_W] is Unknown.TIMED_OUT
    assert [finding.name for finding in sample.findings] == ["nvml_slow"]


async def test_a_read_that_is_late_is_waited_for_and_not_doubled(stub: Stub) -> None:
    thread = NvmlThread(time.monotonic)
    stub.play("slow nvmlDeviceGetName 150")
    source = NvmlSource(thread, read_s=0.05)

    samples = [await source.read()]
    while not samples[-1].up:
        samples.append(await source.read())
    thread.close()

    assert len(samples) <= 8
    assert samples[0].detail.startswith("NVML does not answer")
    assert samples[-1].cards[0].unknown == {}


async def test_a_call_that_was_slow_is_left_out_for_a_while(
    stub: Stub, thread: NvmlThread, ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_cards, "SLOW_CALL_S", -1.0)  # the clock stands, so every call counts as slow
    source = NvmlSource(thread)
    await source.read()
    monkeypatch.setattr(nvml_cards, "SLOW_CALL_S", 0.5)

    left_out = await source.read()
    ticks.advance(nvml_cards.LEFT_OUT_S)
    asked_again = await source.read()

    assert set(left_out.cards[0].unknown.values()) == {Unknown.TIMED_OUT}
    assert asked_again.cards[0].unknown == {}


async def test_two_engines_share_one_session(stub: Stub, thread: NvmlThread) -> None:
    stub.play("cards 2")
    first, second = NvmlSource(thread, ["0"]), NvmlSource(thread, ["1"])

    async with asyncio.TaskGroup() as group:
        reads = [group.create_task(source.read()) for source in (first, second)]

    assert [read.result().cards[0].id for read in reads] == [CARD_0, CARD_1]


# -- the two distributions of one name -------------------------------------------------------------------------------


class OldError(Exception):
    """As old modules raise them."""

    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(value)


def old_module() -> ModuleType:
    """A pynvml of long ago: names in bytes, UUIDs taken as bytes, few functions, no versions of structures."""

    def by_uuid(uuid: bytes) -> str:
        if not isinstance(uuid, bytes):
            raise TypeError("bytes or integer address expected instead of str instance")
        return "card"

    def memory(handle: str) -> SimpleNamespace:
        return SimpleNamespace(total=16 * GIB, used=4 * GIB, free=12 * GIB)

    module = ModuleType("pynvml")
    module.__dict__.update(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: "card",
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetName=lambda handle: b"Tesla T4",
        nvmlDeviceGetUUID=lambda handle: CARD_0.encode(),
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetTemperature=lambda handle, sensor: 50,
        nvmlDeviceGetPowerUsage=lambda handle: 70_000,
    )
    return module


@pytest.mark.parametrize("devices", [(), (CARD_0,)])
@pytest.mark.parametrize("versions", [False, True])
async def test_an_old_module_of_the_same_name_works_with_what_it_has(
    ticks: Ticks, devices: tuple[str, ...], *, versions: bool
) -> None:
    module = old_module()
    if versions:
        module.__dict__["nvmlMemory_v2"] = 0x02000028
    thread = NvmlThread(ticks, lambda: module)

    sample = await read(thread, *devices)
    thread.close()

    (card,) = sample.cards
    assert (card.id, card.name) == (CARD_0, "Tesla T4")
    assert card.values == {
        GpuField.MEMORY_TOTAL_BYTES: 16 * GIB,
        GpuField.MEMORY_USED_BYTES: 4 * GIB,
        GpuField.MEMORY_FREE_BYTES: 12 * GIB,
        GpuField.TEMPERATURE_C: 50,
        GpuField.POWER_W: 70,
    }
    assert set(card.unknown.values()) == {Unknown.NO_FUNCTION}


async def test_a_module_that_raises_what_it_likes_costs_one_field(ticks: Ticks) -> None:
    module = old_module()

    def undecodable(handle: str) -> str:
        return b"\xff\xfe".decode("utf-8")

    module.__dict__.update(
        nvmlDeviceGetName=undecodable,
        nvmlDeviceGetPowerUsage=lambda handle: None,
        nvmlDeviceGetMemoryInfo=lambda handle: object(),
        nvmlDeviceGetUtilizationRates=lambda handle: {"memory": 3}["gpu"],
    )
    thread = NvmlThread(ticks, lambda: module)

    sample = await read(thread)
    thread.close()

    assert (sample.cards[0].name, sample.cards[0].value(GpuField.TEMPERATURE_C)) == ("", 50)
    failed = {one for one, reason in sample.cards[0].unknown.items() if reason is Unknown.FAILED}
    assert failed == {
        GpuField.POWER_W,
        GpuField.BUSY_FRACTION,
        GpuField.MEMORY_BUSY_FRACTION,
        *MEMORY,
    }


async def test_a_module_that_cannot_even_count_is_told_and_raises_nothing(ticks: Ticks) -> None:
    module = old_module()
    module.__dict__.update(nvmlDeviceGetCount=lambda: None)
    thread = NvmlThread(ticks, lambda: module)

    sample = await read(thread)
    thread.close()

    assert (sample.up, sample.detail) == (False, "NVML cannot be read (TypeError); install nvidia-ml-py")


def test_a_module_that_warns_of_itself_is_imported_in_silence(library: Path, tmp_path: Path) -> None:
    package = tmp_path / "noisy"
    package.mkdir()
    real = Path(pynvml.__file__)
    text = "import warnings\nwarnings.warn('The pynvml package is deprecated.', FutureWarning, stacklevel=2)\n"
    (package / "pynvml.py").write_text(text + real.read_text())
    env = {
        **environ(library, Stub(tmp_path / "rules")),
        "PYTHONPATH": str(package),
        "PYTHONWARNINGS": "error::FutureWarning",
    }

    told = json.loads(python(READ_ONCE, env))

    assert told["up"] is True
