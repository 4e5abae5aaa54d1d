"""What the leader publishes of the engines and of what it has learned, and how the others follow it.

Only the leader polls engines. Every other process has the same engines configured and takes their state, models and
last sample from the leader's snapshot, so that it can list models, tell clients what is not there, and open the right
adapter. A successor restores what was learned. A change of an engine's state or models is published at once, the rest
every PUBLISH_S.

A snapshot holds no engine address and no credential; an engine that is not configured here is passed over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from backends.base import Backend, Measured, ModelCard, Priority, Sample, Signal
from backends.gpu.plain import gpu_from_plain, gpu_to_plain
from gateway.clock import Clock
from gateway.control.presence import Presence
from gateway.control.roster import Engine, Roster
from gateway.queue.base import Queue, QueueUnavailable, Snapshot
from policies.vocabulary import EngineState

PUBLISH_S = 5.0
LOOK_S = 0.25

OpenKind = Callable[[Engine, str], Awaitable[Backend]]
"""Makes the adapter of a kind for an engine; closes one of another kind first."""


class Herald:
    """See the module header.

    learned   what a leader has learned, JSON-ready; restore takes a predecessor's over, on_learned hears a leader's
    """

    __slots__ = (
        "_clock",
        "_engines_told",
        "_epoch",
        "_followed",
        "_learned",
        "_news",
        "_on_heard",
        "_on_learned",
        "_open",
        "_presence",
        "_publish_due_s",
        "_published",
        "_queue",
        "_restore",
        "_roster",
        "_version",
    )

    def __init__(
        self,
        queue: Queue,
        presence: Presence,
        roster: Roster,
        clock: Clock,
        *,
        open_kind: OpenKind,
        learned: Callable[[], Awaitable[Mapping[str, object]]],
        restore: Callable[[Mapping[str, object]], None],
        on_heard: Callable[[Engine], None],
        on_learned: Callable[[Mapping[str, object]], None],
    ) -> None:
        self._queue = queue
        self._presence = presence
        self._roster = roster
        self._clock = clock
        self._open = open_kind
        self._learned = learned
        self._restore = restore
        self._on_heard = on_heard
        self._on_learned = on_learned
        self._version = 0
        self._followed = 0
        self._published = 0
        self._epoch = 0
        self._engines_told: list[object] = []
        self._publish_due_s = -math.inf
        self._news = asyncio.Event()

    def there_is(self, version: int) -> None:
        """A renewal told which snapshot is the newest."""
        if version != self._version:
            self._version = version
            self._news.set()

    async def run(self) -> None:
        """Publish or follow, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            await self.once()

    async def once(self) -> None:
        """Do what is due now. A store that does not answer is tried again at the next look."""
        try:
            if self._presence.leads:
                await self._lead()
            else:
                self._epoch = 0
                await self._follow()
        except QueueUnavailable:
            return

    async def _lead(self) -> None:
        epoch = self._presence.epoch
        if self._epoch != epoch:
            await self._follow(restore=True)
            self._epoch = epoch
            self._publish_due_s = -math.inf
        now_s = self._clock.now_s()
        engines = [
            (engine.kind, engine.state, engine.models, engine.withheld, engine.standing.why, engine.gone)
            for engine in self._roster
        ]
        if engines == self._engines_told and now_s < self._publish_due_s:
            return
        learned = await self._learned()
        version = max(self._version + 1, self._presence.now_ms())
        content = orjson.dumps(
            {"engines": [_told(engine, now_s) for engine in self._roster], "learned": learned},
            option=orjson.OPT_NON_STR_KEYS,
        )
        snapshot = Snapshot(version, content)
        if await self._queue.publish(snapshot, epoch=epoch, now_ms=self._presence.now_ms()):
            self._version = self._followed = self._published = version
            self._engines_told = list(engines)
            self._publish_due_s = now_s + PUBLISH_S

    async def _follow(self, *, restore: bool = False) -> None:
        """Take the newest snapshot. restore: also what its leader had learned, unless that was this process."""
        restore = restore and self._version != self._published
        if self._version == self._followed and not restore:
            return
        snapshot = await self._queue.snapshot()
        if snapshot is None:
            return
        content = orjson.loads(snapshot.content)
        now_s = self._clock.now_s()
        for told in content.get("engines", []) if snapshot.version != self._followed else ():
            if told.get("name") in self._roster:
                engine = self._roster[told["name"]]
                await self._adopt(engine, told, now_s)
                self._on_heard(engine)
        if restore:
            self._restore(content.get("learned", {}))
        else:
            self._on_learned(content.get("learned", {}))
        self._version = self._followed = snapshot.version

    async def _adopt(self, engine: Engine, told: Mapping[str, Any], now_s: float) -> None:
        kind = str(told["kind"])
        if kind != "auto" and (engine.backend is None or engine.backend.kind != kind):
            engine.backend = await self._open(engine, kind)
        if engine.backend is not None:
            priority = told.get("priority", "")
            capabilities = engine.backend.capabilities
            engine.backend.capabilities = replace(capabilities, priority=Priority(priority) if priority else None)
        engine.cards = tuple(ModelCard(card["id"], card["raw"], card.get("max_model_len")) for card in told["cards"])
        engine.models = frozenset(card.id for card in engine.cards)
        engine.version = str(told["version"])
        engine.detail = str(told["detail"])
        engine.state = EngineState(told["state"])
        engine.reach = EngineState(told.get("reach", told["state"]))
        engine.gone = bool(told.get("gone"))
        engine.withheld = frozenset(told.get("withheld", ()))
        engine.standing.adopt(told.get("why", ""), unproved=bool(told.get("unproved")))
        values = {
            Signal(name): Measured(value, source)
            for name, (value, source) in told["sample"].items()
            if name in _SIGNALS
        }
        engine.sampled(Sample(now_s - float(told["sample_age_s"] or 0.0), values), now_s)
        engine.frozen = {Signal(name): still_s for name, still_s in told.get("frozen", {}).items() if name in _SIGNALS}
        engine.findings = told.get("findings", {})
        engine.gpu = gpu_from_plain(told.get("gpu"), now_s)


def _told(engine: Engine, now_s: float) -> dict[str, object]:
    """One engine as it is published."""
    sample = engine.sample
    return {
        "name": engine.name,
        "kind": engine.kind,
        "state": engine.state.value,
        "reach": engine.reach.value,
        "gone": engine.gone,
        "withheld": sorted(engine.withheld),
        "why": "" if engine.standing.why is None else engine.standing.why.value,
        "unproved": engine.standing.unproved,
        "detail": engine.detail,
        "version": engine.version,
        "priority": "" if engine.backend is None else engine.backend.capabilities.priority or "",
        "cards": [{"id": card.id, "raw": card.raw, "max_model_len": card.max_model_len} for card in engine.cards],
        "sample": {signal.value: [measured.value, measured.source] for signal, measured in sample.values.items()},
        "sample_age_s": now_s - sample.taken_s if sample.values else None,
        "frozen": {signal.value: still_s for signal, still_s in engine.frozen.items()},
        "findings": dict(engine.findings),
        "gpu": gpu_to_plain(engine.gpu, now_s),
    }


_SIGNALS = frozenset(signal.value for signal in Signal)
