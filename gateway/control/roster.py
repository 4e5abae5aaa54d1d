"""The engines of one pool: who they are, whether they serve, what they last said.

An `Engine` joins what is configured (an address), what is found out (kind, models, state, last sample) and what the
ledger counts into the one `EngineView` that policies read. Two writers, each of its own half: the poller writes what
it hears, the dispatcher's ledger what we sent; real traffic may only report a failed or a successful call.

State: STARTING until the first probe succeeds; DOWN after a refused connection or two failed probes in a row, unless
real traffic has succeeded since; a probe that is merely not answered in time leaves it to `gateway.control.health` (a busy
engine answers its health page late: FAI-08). UP again by a probe, once it has made a token. An engine that is up may be
out of rotation all the same: then the models that others have are withheld, and with none left it is DOWN or DRAINING.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from backends.base import UNSEEN, Backend, Measured, ModelCard, Probe, Sample, Signal, Unready
from backends.gpu.base import GPU_UNSEEN, GpuSample
from gateway.control.pulse import Pulse
from gateway.control.standing import Standing, Why
from gateway.dispatch.ledger import EngineLedger
from gateway.settings import EngineSettings
from policies.vocabulary import UNKNOWN, EngineState, EngineView, Quality, Reading

STALE_AFTER_POLLS = 3
GPU_POLL_S = 1.0
"""A GPU is read less often than an engine: it changes more slowly, and some drivers take tens of milliseconds."""
GPU_SHOWN_S = 15.0
"""A GPU sample is shown to people for so long: three times the leader's publishing, so that followers show it too."""
FAILED_PROBES_TO_DOWN = 2
_VIEWED = tuple(signal for signal in Signal if signal in EngineView.__dataclass_fields__)
"""What a view has a reading of, by the same name."""
_COUNTERS = (Signal.GENERATION_TOKENS_TOTAL, Signal.PROMPT_TOKENS_TOTAL)


@dataclass(slots=True)
class Engine:
    """One engine. `backend` is None until its kind is known.

    reach      what its pages say: STARTING, UP or DOWN; `state` is that and its standing together
    gone       nothing listens at its address: what waits there waits in vain
    withheld   of its models, those that it gets no work for because others in rotation have them
    pulse      what this process's own calls to it say
    frozen     signals that stand still though they should not, and for how long; findings: what is wrong with what it says
    asked_s   monotonic time before the sample was asked for; -inf for one that another process asked for
    """

    settings: EngineSettings
    ledger: EngineLedger
    poll_s: float
    backend: Backend | None = None
    state: EngineState = EngineState.STARTING
    reach: EngineState = EngineState.STARTING
    gone: bool = False
    detail: str = "not probed yet"
    version: str = ""
    cards: tuple[ModelCard, ...] = ()
    models: frozenset[str] = frozenset()
    withheld: frozenset[str] = frozenset()
    standing: Standing = field(default_factory=Standing)
    pulse: Pulse = field(default_factory=Pulse)
    sample: Sample = UNSEEN
    counted_s: float = -math.inf
    frozen: Mapping[Signal, float] = field(default_factory=dict)
    findings: Mapping[str, str] = field(default_factory=dict)
    asked_s: float = -math.inf
    gpu: GpuSample = GPU_UNSEEN
    failed_probes: int = 0
    silent_probes: int = 0
    draining: bool = False
    last_success_s: float = -math.inf
    _view: EngineView | None = field(default=None, repr=False)
    _view_key: tuple[object, ...] = field(default=(), repr=False)
    _read: dict[str, Reading] = field(default_factory=dict, repr=False)
    _said: tuple[object, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def kind(self) -> str:
        return self.settings.kind if self.backend is None else self.backend.kind

    @property
    def reachable(self) -> bool:
        """Its pages say that it serves."""
        return self.reach is EngineState.UP

    @property
    def offered(self) -> frozenset[str]:
        """The models that it may get work for."""
        return self.models - self.withheld

    @property
    def counts_tokens(self) -> bool:
        """Its page has a counter that moves while it works."""
        return any(self.sample.value(counter) is not None for counter in _COUNTERS)

    def heard(self, probe: Probe, now_s: float) -> None:
        """Take a probe's answer."""
        if probe.ready:
            self.failed_probes = self.silent_probes = 0
            self.gone = False
            self.version = probe.version
            self.cards = probe.models
            self.models = frozenset(card.id for card in probe.models)
            self.detail = self.standing.detail
            if not self.standing.unproved:
                self.reach = EngineState.UP
            self.settle()
            return
        self.detail = probe.detail
        if probe.unready is Unready.SILENT:
            self.silent_probes += 1
            return
        self.silent_probes = 0
        self.failed_probes += 1
        recently_served = now_s - self.last_success_s < 2 * FAILED_PROBES_TO_DOWN * self.poll_s
        if self.failed_probes >= FAILED_PROBES_TO_DOWN and not recently_served:
            self.lost(probe.detail, now_s, gone=probe.unready is Unready.REFUSED)

    def refused(self, detail: str, now_s: float) -> None:
        """Nothing listens at the engine's address any more: no need to wait for a second sign."""
        self.failed_probes = FAILED_PROBES_TO_DOWN
        self.lost(detail, now_s, gone=True)

    def lost(self, detail: str, now_s: float, *, gone: bool = False) -> None:
        """It is down."""
        self.detail = detail
        if self.reach is not EngineState.STARTING:
            self.reach = EngineState.DOWN
            self.gone = gone
            self.standing.lost(now_s)
        self.settle()

    def sampled(self, sample: Sample, now_s: float, *, asked_s: float = -math.inf) -> None:
        """Take a sample, and note when its counters last moved."""
        for counter in _COUNTERS:
            if sample.value(counter) != self.sample.value(counter):
                self.counted_s = now_s
        self.sample, self.asked_s = sample, asked_s

    def withhold(self, models: frozenset[str]) -> None:
        """Get no work for these models from now on."""
        self.withheld = models
        self.settle()

    def drain(self) -> None:
        """No new work, whatever it says of itself: its machine will be taken."""
        self.draining = True
        self.settle()

    def settle(self) -> None:
        """Make `state` what reach and standing say together."""
        if self.reach is not EngineState.UP:
            self.state = self.reach
        elif self.draining:
            self.state = EngineState.DRAINING
        elif self.offered or self.standing.why is None:
            self.state = EngineState.UP
        else:
            self.state = EngineState.DRAINING if self.standing.why is Why.DRAINING else EngineState.DOWN

    def served(self, now_s: float) -> None:
        """A real call ended well."""
        self.last_success_s = now_s

    def view(self, now_s: float) -> EngineView:
        """The engine as policies see it; cached until the ledger, the sample or the state changes.

        now_s is monotonic. Ages are as of the last rebuild, which the control tick forces.
        """
        key = (self.ledger.version, self.sample.taken_s, self.gpu.taken_s, self.state, self.models, self.withheld)
        if self._view is None or key != self._view_key:
            self._view = self._build_view(now_s)
            self._view_key = key
        return self._view

    def gpu_shown(self, now_s: float) -> GpuSample:
        """The GPU sample as people may see it: without what it says once nobody has renewed it for GPU_SHOWN_S."""
        sample = self.gpu
        if now_s - sample.taken_s <= GPU_SHOWN_S or sample is GPU_UNSEEN:
            return sample
        return GpuSample(sample.taken_s, sample.source, f"not read for {now_s - sample.taken_s:.0f} s")

    def _build_view(self, now_s: float) -> EngineView:
        ledger = self.ledger
        return EngineView(
            name=self.settings.name,
            state=self.state,
            models=self.offered,
            in_flight=dict(ledger.in_flight),
            extra_sequences=dict(ledger.extra_sequences),
            on_credit=ledger.on_credit,
            kv_tokens=ledger.kv_tokens,
            prefill_tokens=ledger.prefill_tokens,
            placed_tokens={},
            spot=self.settings.spot,
            canary=self.settings.canary,
            speaks=_nothing if self.backend is None else self.backend.speaks,
            **self._readings(now_s),
        )

    def _readings(self, now_s: float) -> Mapping[str, Reading]:
        """What it says, as of its last word or the last control tick: the dearest part of a view by far."""
        said = (self.sample, self.gpu, self.frozen, self.cards, self.ledger.refreshed)
        if said != self._said:
            self._said = said
            readings = {signal.value: self._reading(signal, now_s) for signal in _VIEWED}
            self._read = {name: one for name, one in readings.items() if one is not UNKNOWN}
            self._read["max_model_len"] = self._max_model_len()
        return self._read

    def _reading(self, signal: Signal, now_s: float) -> Reading:
        """Of a GPU from its own telemetry, else from an engine that tells of its GPU itself."""
        measured = self.gpu.values.get(signal)
        if measured is not None:
            return _read(measured, now_s - self.gpu.taken_s, GPU_POLL_S)
        measured = self.sample.values.get(signal)
        if measured is None:
            return UNKNOWN
        reading = _read(measured, now_s - self.sample.taken_s, self.poll_s)
        still_s = self.frozen.get(signal)
        if still_s is None or reading.value is None:
            return reading
        return Reading(reading.value, max(reading.age_s, still_s), Quality.FROZEN)

    def _max_model_len(self) -> Reading:
        lengths = [card.max_model_len for card in self.cards if card.max_model_len is not None]
        return Reading(float(max(lengths)), 0.0, Quality.FRESH) if lengths else UNKNOWN

    def __repr__(self) -> str:
        works = sum(self.ledger.in_flight.values())
        return f"<Engine {self.name} {self.kind} {self.state.value} in_flight={works}>"


class Roster:
    """All engines of a pool, by name; fixed at start."""

    __slots__ = ("_engines",)

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._engines: Mapping[str, Engine] = {engine.name: engine for engine in engines}

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def __contains__(self, name: str) -> bool:
        return name in self._engines

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    def views(self, now_s: float) -> list[EngineView]:
        """Views of all engines, in configured order."""
        return [engine.view(now_s) for engine in self._engines.values()]

    def serving(self, model: str, path: str) -> list[Engine]:
        """Engines that are up, list the model and speak the path."""
        return [
            engine
            for engine in self._engines.values()
            if engine.state is EngineState.UP
            and model in engine.offered
            and engine.backend is not None
            and engine.backend.speaks(path)
        ]

    def knows(self, model: str) -> bool:
        """True when some engine has ever listed the model."""
        return any(model in engine.models for engine in self._engines.values())

    def any_up(self) -> bool:
        return any(engine.state is EngineState.UP for engine in self._engines.values())


def _read(measured: Measured, age_s: float, poll_s: float) -> Reading:
    if measured.value is None:
        return Reading(None, age_s, Quality.ABSURD)
    fresh = age_s <= STALE_AFTER_POLLS * poll_s
    return Reading(measured.value, age_s, Quality.FRESH if fresh else Quality.STALE)


def _nothing(_path: str) -> bool:
    return False
