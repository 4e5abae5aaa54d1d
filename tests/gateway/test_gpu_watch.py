"""GPUs beside engines: what is read becomes views and metrics, what is wrong is told once, and followers know it too."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from backends.base import Measured, Sample, Signal
from backends.gpu.base import GPU_UNSEEN, GpuField, GpuReading, GpuSample, Unknown, reading
from backends.gpu.combine import combined
from gateway.clock import PoolClock
from gateway.control import gpu_watch
from gateway.control.gpu_watch import GpuWatch, gpu_source_kind
from gateway.control.herald import Herald, OpenKind, _told
from gateway.control.presence import Presence
from gateway.control.roster import GPU_POLL_S, GPU_SHOWN_S, STALE_AFTER_POLLS, Engine, Roster
from gateway.dispatch.ledger import Ledger
from gateway.logs import Log
from gateway.queue.base import InFlight, Queue, Session
from gateway.settings import EngineSettings, GpuSettings
from gateway.settings_file import read_file
from gateway.telemetry import Telemetry
from policies.vocabulary import Quality, Work
from policies.yaml_source import DocumentError

GIB = 1024.0**3


class Lines:
    """A log that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append(("info", event, fields))

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append(("warning", event, fields))

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(level, event) for level, event, _ in self.lines]


class Scripted:
    """A source that gives these samples and then nothing more."""

    source = "nvml"

    def __init__(self, samples: Sequence[GpuSample]) -> None:
        self._samples = list(samples)
        self.exhausted = asyncio.Event()
        self.closed = False

    async def read(self) -> GpuSample:
        if not self._samples:
            self.exhausted.set()
            await asyncio.Event().wait()
        return self._samples.pop(0)

    async def close(self) -> None:
        self.closed = True


def card(**raw: float | Unknown) -> GpuReading:
    healthy: dict[GpuField, float | Unknown] = {
        GpuField.MEMORY_TOTAL_BYTES: 80 * GIB,
        GpuField.MEMORY_USED_BYTES: 60 * GIB,
        GpuField.MEMORY_FREE_BYTES: 20 * GIB,
        GpuField.TEMPERATURE_C: 80,
        GpuField.HEAT_MARGIN_C: 12,
        GpuField.POWER_W: 600,
        GpuField.POWER_LIMIT_W: 800,
        GpuField.ENERGY_J_TOTAL: 5000,
        GpuField.CLOCK_REASONS: 0x4,
    }
    return reading("GPU-a", {**healthy, **{GpuField(name): value for name, value in raw.items()}})


def sample(at_s: float, *cards: GpuReading) -> GpuSample:
    return combined("nvml", at_s, cards or (card(),))


def engine(url: str = "http://127.0.0.1:8000", gpu: GpuSettings = GpuSettings()) -> Engine:
    return Engine(EngineSettings("e1", url, gpu=gpu), Ledger()["e1"], poll_s=0.5)


async def watched(
    one: Engine, samples: Sequence[GpuSample], monkeypatch: pytest.MonkeyPatch, *, work_from: int | None = None
) -> tuple[Lines, GpuWatch, list[tuple[float, float]]]:
    """Watch an engine until these samples are taken; what was logged, and the energy told of."""
    monkeypatch.setattr(gpu_watch, "GPU_POLL_S", 0.0)
    source, lines, energy = Scripted(samples), Lines(), list[tuple[float, float]]()
    watch = GpuWatch(
        [(one, source)],
        clock=PoolClock(lambda: 0.0, offset_s=0.0),
        rng=random.Random(1),
        active=lambda: True,
        on_energy=lambda _name, busy_j, idle_j: energy.append((busy_j, idle_j)),
        log=cast("Log", lines),
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(watch.run())
        await source.exhausted.wait()
        running.cancel()
    await watch.close()
    assert source.closed
    return lines, watch, energy


async def test_what_is_read_is_what_policies_see(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()

    await watched(one, [sample(10.0)], monkeypatch)

    view = one.view(10.5)
    assert view.gpu_memory_free_fraction.value == 0.25
    assert view.gpu_power_fraction.value == 0.75
    assert view.gpu_heat_margin_c.value == 12
    assert view.gpu_throttled.value == 1
    assert (view.gpu_power_w.value, view.gpu_energy_j_total.value) == (600, 0)
    assert view.gpu_busy_fraction.quality is Quality.MISSING


async def test_an_old_reading_is_stale_and_an_absurd_one_has_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()

    await watched(one, [sample(10.0, card(power_w=1e9))], monkeypatch)

    assert one.view(10.5).gpu_power_w.quality is Quality.ABSURD
    one.gpu = sample(11.0)
    later_s = 11.0 + STALE_AFTER_POLLS * GPU_POLL_S + 0.1
    assert one.view(later_s).gpu_power_w.quality is Quality.STALE


async def test_an_engine_that_tells_of_its_gpu_itself_is_believed_where_nothing_else_tells() -> None:
    one = engine()
    one.sample = Sample(10.0, {Signal.GPU_POWER_FRACTION: Measured(0.4, "engine")})

    alone = one.view(10.1).gpu_power_fraction.value
    one.gpu = sample(10.0)

    assert (alone, one.view(10.1).gpu_power_fraction.value) == (0.4, 0.75)


async def test_a_lost_source_takes_its_values_away_and_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    lost = GpuSample(12.0, "nvml", "NVML error 18: mismatch")

    lines, _, _ = await watched(one, [sample(10.0), sample(11.0), lost, lost, sample(14.0)], monkeypatch)

    assert lines.events == [
        ("info", "gpu telemetry found"),
        ("warning", "no gpu telemetry"),
        ("info", "gpu telemetry found"),
    ]
    one.gpu = lost
    assert not one.view(12.0).gpu_power_w.known


@pytest.mark.parametrize(("source", "level"), [("auto", "info"), ("nvml", "warning")])
async def test_a_machine_without_a_gpu_is_only_a_fault_where_one_was_expected(
    monkeypatch: pytest.MonkeyPatch, source: str, level: str
) -> None:
    absent = GpuSample(1.0, "nvml", "libnvidia-ml.so.1 not found", absent=True)

    lines, _, _ = await watched(engine(gpu=GpuSettings(source)), [absent, absent], monkeypatch)

    assert lines.events == [(level, "no gpu telemetry")]


async def test_unsupported_fields_are_warned_of_once_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    unified = card(memory_total_bytes=Unknown.NOT_SUPPORTED, memory_used_bytes=Unknown.NOT_SUPPORTED)

    lines, _, _ = await watched(engine(), [sample(1.0, unified), sample(2.0, unified)], monkeypatch)

    ((level, _, fields),) = lines.lines
    assert level == "warning"
    assert "GPU-a: memory_used_bytes not_supported" in fields["unknown"]


async def test_energy_is_told_busy_and_idle_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    idle = [sample(float(at_s), card(energy_j_total=5000.0 + 70 * at_s)) for at_s in (1, 2, 3)]
    _, watch, energy = await watched(one, idle, monkeypatch)
    assert energy == [(0, 0), (0, 70), (0, 70)]
    assert watch.idle_power_w(one) == 70

    one.ledger.add(Work("w", "bulk", "t", "m", "/v1/completions", 0.0, 0.0), 1, 0.0)
    busy = [sample(float(at_s), card(energy_j_total=5000.0 + 500 * at_s)) for at_s in (4, 5)]
    _, watch, energy = await watched(one, busy, monkeypatch)

    assert energy == [(0, 0), (500, 0)]
    assert one.view(5.0).gpu_energy_j_total.value == 500
    assert watch.idle_power_w(one) is None


async def test_what_others_may_start_without_asking_is_no_work_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    one.ledger.elsewhere(
        Session("w1", 1), {"interactive": InFlight(2, 512, 512)}, {"interactive": InFlight(2, 512, 512)}
    )
    reads = [sample(float(at_s), card(energy_j_total=5000.0 + 70 * at_s)) for at_s in (1, 2, 3)]

    _, watch, _ = await watched(one, reads, monkeypatch)

    assert watch.idle_power_w(one) == 70


async def test_only_a_leader_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "GPU_POLL_S", 0.0)
    one, looked = engine(), asyncio.Event()

    def follows() -> bool:
        looked.set()
        return False

    watch = GpuWatch(
        [(one, Scripted([sample(1.0)]))],
        clock=PoolClock(lambda: 0.0, offset_s=0.0),
        rng=random.Random(1),
        active=follows,
        on_energy=lambda *_: None,
        log=cast("Log", Lines()),
    )

    async with asyncio.TaskGroup() as group:
        running = group.create_task(watch.run())
        await looked.wait()
        running.cancel()

    assert one.gpu is GPU_UNSEEN


def test_what_nobody_renews_is_not_shown_for_long() -> None:
    one = engine()
    one.gpu = sample(100.0)

    shown, forgotten = one.gpu_shown(100.0 + GPU_SHOWN_S), one.gpu_shown(100.1 + GPU_SHOWN_S)

    assert shown is one.gpu
    assert (forgotten.up, forgotten.detail) == (False, "not read for 15 s")
    assert engine().gpu_shown(1e6) is GPU_UNSEEN


async def test_a_follower_sees_what_the_leader_saw() -> None:
    async def nothing() -> Mapping[str, object]:
        return {}

    leader, follower = engine(), engine()
    leader.gpu = sample(100.0)
    herald = Herald(
        cast("Queue", None),
        cast("Presence", None),
        Roster([follower]),
        PoolClock(lambda: 7.0, offset_s=0.0),
        open_kind=cast("OpenKind", None),
        learned=nothing,
        restore=lambda _learned: None,
        on_heard=lambda _engine: None,
        on_learned=lambda _learned: None,
    )

    await herald._adopt(follower, orjson.loads(orjson.dumps(_told(leader, 100.5))), 7.0)

    ours, theirs = leader.view(100.5), follower.view(7.0)
    assert theirs.gpu_power_w == ours.gpu_power_w
    assert theirs.gpu_memory_free_fraction == ours.gpu_memory_free_fraction


def test_every_card_has_its_metrics_and_what_is_unknown_has_none() -> None:
    telemetry = Telemetry(version="0")
    piece = reading("MIG-b", {GpuField.MEMORY_FREE_BYTES: GIB}, partition="1g.10gb")

    telemetry.gpu("e1", combined("nvml", 1.0, (card(), piece)), idle_power_w=75.0)

    page = telemetry.render()[0].decode()
    assert 'headrace_gpu_telemetry_up{engine="e1"} 1.0' in page
    assert 'headrace_gpu_power_watts{engine="e1",gpu="GPU-a",partition=""} 600.0' in page
    assert 'headrace_gpu_memory_free_bytes{engine="e1",gpu="MIG-b",partition="1g.10gb"} 1.073741824e+09' in page
    assert 'headrace_gpu_clock_reason{engine="e1",gpu="GPU-a",partition="",reason="sw_power_cap"} 1.0' in page
    assert 'headrace_gpu_idle_power_watts{engine="e1"} 75.0' in page
    assert 'headrace_gpu_power_watts{engine="e1",gpu="MIG-b"' not in page


def test_metrics_of_a_card_that_left_leave_with_it_and_the_outage_is_a_zero() -> None:
    telemetry = Telemetry(version="0")
    telemetry.gpu("e1", sample(1.0), idle_power_w=None)

    telemetry.gpu("e1", GpuSample(2.0, "nvml", "lost"), idle_power_w=None)

    page = telemetry.render()[0].decode()
    assert 'headrace_gpu_telemetry_up{engine="e1"} 0.0' in page
    assert "GPU-a" not in page


def test_an_engine_without_a_source_has_no_gpu_metrics() -> None:
    telemetry = Telemetry(version="0")

    telemetry.gpu("e1", GPU_UNSEEN, idle_power_w=None)

    assert 'engine="e1"' not in telemetry.render()[0].decode()


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "gpu", "kind"),
    [
        ("http://127.0.0.1:8000", GpuSettings(), "nvml"),
        ("http://localhost:8000", GpuSettings(), "nvml"),
        ("http://[::1]:8000", GpuSettings(), "nvml"),
        ("http://gpu7:8000", GpuSettings(), "none"),
        ("http://gpu7:8000", GpuSettings(url="http://gpu7:9400"), "dcgm"),
        ("http://127.0.0.1:8000", GpuSettings(url="http://gpu7:9400"), "dcgm"),
        ("http://127.0.0.1:8000", GpuSettings("none"), "none"),
        ("http://gpu7:8000", GpuSettings("nvml", ("0",)), "nvml"),
    ],
)
def test_where_gpus_are_read_follows_from_the_settings(url: str, gpu: GpuSettings, kind: str) -> None:
    assert gpu_source_kind(EngineSettings("e", url, gpu=gpu)) == kind


def gpu_of(text: str, folder: Path) -> GpuSettings:
    file = folder / "headrace.yaml"
    file.write_text(f"engines:\n  - url: http://gpu7:8000\n    gpu: {text}\n")
    return read_file(file, {}).engines[0].gpu


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", GpuSettings()),
        ("{source: none}", GpuSettings("none")),
        ("{source: nvml, devices: [0, '1']}", GpuSettings("nvml", ("0", "1"))),
        ("{devices: [GPU-8932f937, MIG-1-2]}", GpuSettings("auto", ("GPU-8932f937", "MIG-1-2"))),
        ("{source: dcgm, url: 'http://gpu7:9400/metrics'}", GpuSettings("dcgm", None, "http://gpu7:9400")),
        ("{url: 'http://gpu7:9400/'}", GpuSettings("auto", None, "http://gpu7:9400")),
    ],
)
def test_the_file_says_where_gpus_are_read(text: str, expected: GpuSettings, tmp_path: Path) -> None:
    assert gpu_of(text, tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{source: dcgm}", "needs the exporter's url"),
        ("{source: nvml, url: 'http://gpu7:9400'}", "only for source dcgm"),
        ("{devices: []}", "at least 1"),
        ("{devices: [first]}", "expected an index, GPU-<uuid> or MIG-<uuid>"),
        ("{devices: [-1]}", "expected an index, GPU-<uuid> or MIG-<uuid>"),
        ("{source: cuda}", "source"),
        ("{url: 'gpu7:9400'}", "expected http://HOST:PORT"),
    ],
)
def test_a_mistake_in_the_gpu_settings_is_told_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"headrace.yaml:3: ") as told:
        gpu_of(text, tmp_path)

    assert words in str(told.value)
