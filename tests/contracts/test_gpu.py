"""What every GPU source promises, over the stub library and recorded pages: `backends.gpu.base.GpuSource`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from backends.base import EngineAddress, Signal
from backends.connection import EnginePool
from backends.gpu.base import GpuField, GpuSample, GpuSource
from backends.gpu.dcgm import DcgmSource
from backends.gpu.dcgm_page import page
from backends.gpu.nvml import NvmlSource, NvmlThread
from gateway.commands.gpu_exporter import exporter_app
from tests.backends.gpu.stub import Stub, build

KINDS = ["nvml", "exporter"]
FAULTS = {
    "two healthy cards": ("cards 2",),
    "unified memory": ("fail nvmlDeviceGetMemoryInfo 3", "fail nvmlDeviceGetMemoryInfo_v2 3"),
    "virtual": ("fail nvmlDeviceGetPowerUsage 3", "fail nvmlDeviceGetTemperature 3"),
    "absurd": ("value nvmlDeviceGetPowerUsage 4294967295", "value nvmlDeviceGetUtilizationRates 300"),
    "a lost card": ("cards 2", "lost 1"),
    "slices": ("mig 0 3",),
    "slices without rights on the card": (
        "mig 0 2",
        "fail-whole nvmlDeviceGetMigMode 4",
        "fail-whole nvmlDeviceGetTemperature 4",
    ),
    "odd millijoules": ("value nvmlDeviceGetTotalEnergyConsumption 98765432101",),
}
OUTAGES = {
    "mismatch": ("fail nvmlInitWithFlags 18",),
    "no permission": ("fail nvmlInitWithFlags 4",),
    "no driver": ("fail nvmlInitWithFlags 9",),
    "no card": ("cards 0",),
    "all cards lost": ("lost 0",),
}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> None:
    ctypes.CDLL(str(build(tmp_path_factory.mktemp("nvml"))))


@pytest.fixture
def stub(library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub(tmp_path / "rules")
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


@asynccontextmanager
async def opened(kind: str, *devices: str) -> AsyncIterator[GpuSource]:
    """A source of that kind; the exporter's is the DCGM source over HTTP from `headrace gpu-exporter`'s application."""
    thread = NvmlThread(lambda: 50.0)
    local = NvmlSource(thread, devices or None)
    try:
        if kind == "nvml":
            yield local
            return
        runner = web.AppRunner(exporter_app(local, host="node-1"))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        remote = DcgmSource(EnginePool(EngineAddress("e gpu", url)), where=url, monotonic=lambda: 50.0)
        try:
            yield remote
        finally:
            await remote.close()
            await runner.cleanup()
    finally:
        thread.close()


async def read(kind: str, *devices: str) -> GpuSample:
    async with opened(kind, *devices) as source:
        return await source.read()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_every_field_is_a_finite_value_or_a_reason(stub: Stub, kind: str, fault: str) -> None:
    stub.play(*FAULTS[fault])

    sample = await read(kind)

    assert sample.up
    assert (sample.detail, sample.absent, sample.taken_s) == ("", False, 50.0)
    for card in sample.cards:
        assert {*card.values, *card.unknown} == set(GpuField)
        assert not card.values.keys() & card.unknown.keys()
        assert all(math.isfinite(value) for value in card.values.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outage", OUTAGES)
async def test_an_outage_is_a_sample_that_says_why(stub: Stub, kind: str, outage: str) -> None:
    stub.play(*OUTAGES[outage])

    sample = await read(kind)

    assert not sample.up
    assert sample.detail
    assert sample.values == {}


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_exporter_tells_a_gateway_elsewhere_what_nvml_tells_one_here(stub: Stub, fault: str) -> None:
    stub.play(*FAULTS[fault])

    here, there = await read("nvml"), await read("exporter")

    told = [card for card in here.cards if card.values]
    assert [card.values for card in there.cards] == [card.values for card in told]
    assert [
        (card.id, card.index, card.name, card.partition, card.instance, card.pci_bus_id) for card in there.cards
    ] == [(card.id, card.index, card.name, card.partition, card.instance, card.pci_bus_id) for card in told]
    assert {card.host for card in there.cards} == {"node-1"}
    if told == list(here.cards) and fault != "absurd":
        assert {one: measured.value for one, measured in there.values.items()} == {
            one: measured.value for one, measured in here.values.items()
        }


async def test_the_exporters_page_is_one_that_prometheus_reads(stub: Stub) -> None:
    stub.play("cards 2", "mig 1 2")
    sample = await read("nvml")

    families = {family.name: family for family in text_string_to_metric_families(page(sample, host='a"b\\c').decode())}

    assert families["DCGM_FI_DEV_GPU_TEMP"].type == "gauge"
    assert families["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"].type == "counter"
    used = families["DCGM_FI_DEV_FB_USED"].samples
    assert [sample.value for sample in used] == [60 * 1024, 4 * 1024, 4 * 1024]
    assert used[0].labels == {
        "gpu": "0",
        "UUID": "GPU-00000000-0000-0000-0000-000000000000",
        "pci_bus_id": "00000000:01:00.0",
        "device": "nvidia0",
        "modelName": "Stub H100",
        "Hostname": 'a"b\\c',
    }
    assert (used[1].labels["GPU_I_PROFILE"], used[1].labels["GPU_I_ID"]) == ("1g.10gb", "7")


async def test_a_named_card_is_the_only_one_that_the_exporter_shows(stub: Stub) -> None:
    stub.play("cards 2")

    sample = await read("exporter", "1")

    assert [card.index for card in sample.cards] == ["1"]
    assert sample.values[Signal.GPU_POWER_W].value == 512.345
