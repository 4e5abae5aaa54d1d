"""Reads every engine's GPUs: one task an engine, beside the poller and as slow as a driver likes.

Only a pool's leader reads; the others take what it publishes (`gateway.control.herald`). Each sample replaces the one
before, also when it says that nothing could be read: a temperature of a minute ago protects nobody. Energy is added up
here, since it needs to know whether the engine was at work; another leader starts its sum anew.

What is wrong is logged when it begins or changes, not at every read.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from backends.base import Measured, Signal
from backends.gpu.base import GpuSample, GpuSource, Unknown
from backends.gpu.energy import Energy, EnergyMeter
from gateway.addresses import Listen
from gateway.clock import Clock
from gateway.control.roster import GPU_POLL_S, Engine
from gateway.logs import Log
from gateway.settings import EngineSettings

NO_NEWS: Final = frozenset({Unknown.NOT_TOLD})
"""Reasons that nobody is warned of: an exporter shows what its operator chose."""


def gpu_source_kind(settings: EngineSettings) -> str:
    """What the settings mean: nvml, dcgm or none."""
    gpu = settings.gpu
    if gpu.source != "auto":
        return gpu.source
    if gpu.url is not None:
        return "dcgm"
    return "nvml" if Listen(urlsplit(settings.url).hostname or "", 0).loopback else "none"


class GpuWatch:
    """See the module header.

    sources   engines that are not among them are not read
    active    whether to read now
    on_energy told of joules used since it was last told: engine, while it had work, while it had none
    """

    def __init__(
        self,
        sources: Sequence[tuple[Engine, GpuSource]],
        *,
        clock: Clock,
        rng: random.Random,
        active: Callable[[], bool],
        on_energy: Callable[[str, float, float], None],
        log: Log,
    ) -> None:
        self._watched = [_Watched(engine, source) for engine, source in sources]
        self._clock = clock
        self._rng = rng
        self._active = active
        self._on_energy = on_energy
        self._log = log

    async def run(self) -> None:
        """Read all until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watched in self._watched:
                group.create_task(self._read_forever(watched), name=f"gpu {watched.engine.name}")

    async def close(self) -> None:
        """Close the sources."""
        for watched in self._watched:
            await watched.source.close()

    def idle_power_w(self, engine: Engine) -> float | None:
        """Mean power of an engine's GPUs while it had no work, None when that was not seen yet."""
        return next((one.meter.total.idle_power_w for one in self._watched if one.engine is engine), None)

    async def _read_forever(self, watched: _Watched) -> None:
        while True:
            if self._active():
                await self._read(watched)
            await asyncio.sleep(GPU_POLL_S * self._rng.uniform(0.9, 1.1))

    async def _read(self, watched: _Watched) -> None:
        sample = await watched.source.read()
        self._tell(watched, sample)
        if sample.up:
            before = watched.meter.total
            energy = watched.meter.add(sample.cards, sample.taken_s, busy=_has_work(watched.engine, sample.taken_s))
            self._on_energy(watched.engine.name, energy.busy_j - before.busy_j, energy.idle_j - before.idle_j)
            sample = _with_energy(sample, energy)
        watched.engine.gpu = sample

    def _tell(self, watched: _Watched, sample: GpuSample) -> None:
        told = (sample.detail, tuple(finding.name for finding in sample.findings), _part_unknown(sample))
        if told == watched.told:
            return
        was_up, watched.told = watched.told is not None and not watched.told[0], told
        name = watched.engine.name
        if not sample.up:
            # On a machine without a GPU nothing is wrong, as long as nobody asked for one.
            quiet = sample.absent and watched.engine.settings.gpu.source == "auto" and not was_up
            (self._log.info if quiet else self._log.warning)(
                "no gpu telemetry", engine=name, reason=sample.detail, repeat_key=f"gpu {name}"
            )
            return
        unknown = told[2]
        if unknown or sample.findings:
            self._log.warning(
                "gpu telemetry is partial" if unknown else "gpu finding",
                engine=name,
                unknown=[f"{card}: {field} {reason}" for card, field, reason in unknown],
                findings=[finding.detail for finding in sample.findings],
                repeat_key=f"gpu {name}",
            )
        else:
            self._log.info("gpu telemetry found", engine=name, gpus=[card.id for card in sample.cards])

    def __repr__(self) -> str:
        return f"<GpuWatch {', '.join(f'{one.engine.name}: {one.source!r}' for one in self._watched)}>"


class _Watched:
    """One engine, its source, and what was last logged of it."""

    __slots__ = ("engine", "meter", "source", "told")

    def __init__(self, engine: Engine, source: GpuSource) -> None:
        self.engine = engine
        self.source = source
        self.meter = EnergyMeter()
        self.told: tuple[str, tuple[str, ...], tuple[tuple[str, str, str], ...]] | None = None


def _part_unknown(sample: GpuSample) -> tuple[tuple[str, str, str], ...]:
    """Card, field and reason of what is expected of a GPU and not there; what a source never tells is no news."""
    return tuple(
        (card.id, field.value, reason.value)
        for card in sample.cards
        for field, reason in card.unknown.items()
        if reason not in NO_NEWS
    )


def _with_energy(sample: GpuSample, energy: Energy) -> GpuSample:
    total = Measured(energy.total_j, f"{sample.source}:energy")
    return replace(sample, values={**sample.values, Signal.GPU_ENERGY_J_TOTAL: total})


def _has_work(engine: Engine, now_s: float) -> bool:
    """Something of ours runs there, or something at all. What others may start without asking is no work yet."""
    view = engine.view(now_s)
    return any(map(engine.ledger.running, view.in_flight)) or bool(view.running.value)
