"""A virtual engine in the place of a real one: takes attempts, tells their first token and end, answers polls.

Fed by events, not by tokens: the loop wakes it at the next time at which a sequence can show something new, and an hour
costs as many callbacks as there were events. What the gateway may know of it comes in two ways only, as with a real
engine: the tokens it relays, and a `Sample` twice a second with the signals of a vLLM page and of a GPU. The step model
and true lengths stay inside.

It can be killed (whoever runs there is told, whoever comes is refused), started again empty, and deprived of its
telemetry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, KeysView
from dataclasses import dataclass, field

from backends.base import BackendError, Capabilities, Measured, ModelCard, Probe, Sample, Signal
from backends.simulated.continuous import ContinuousScheduler
from backends.simulated.engine import Engine
from backends.simulated.profiles import EngineOptions, Profile, build_engine
from backends.simulated.sequence import EventKind, Sequence
from gateway.replay.loop import VirtualLoop

MODEL = "sim"
SOURCE = "virtual engine"
CAPABILITIES = Capabilities(include_usage=True)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine of a replayed pool.

    interrupted_at_s     a spot machine that is taken away then, for good; it is told notice_s before
    killed_at_s          it dies then, unannounced, and is back, empty, after down_s
    silent_s             (from, until): its metrics are not to be had
    """

    name: str
    profile: Profile
    options: EngineOptions = field(default_factory=EngineOptions)
    interrupted_at_s: float | None = None
    notice_s: float = 0.0
    killed_at_s: float | None = None
    down_s: float = 60.0
    silent_s: tuple[float, float] | None = None


class Attempt:
    """One sequence on an engine, as whoever sent it follows it; also the ledger's live counter of its tokens.

    whole   its answer is not streamed: nothing of it is seen before its end, and until then it can begin anew
    """

    __slots__ = ("_host", "lost_tokens", "on_end", "on_first_token", "on_recall", "sent_s", "sequence", "whole")

    def __init__(
        self,
        host: EngineHost,
        sequence: Sequence,
        sent_s: float,
        on_first_token: Callable[[Attempt], None],
        on_end: Callable[[Attempt, bool], None],
        *,
        whole: bool,
    ) -> None:
        """on_end is told True for a finished answer, False for an engine that died."""
        self.whole = whole
        self._host = host
        self.sequence = sequence
        self.sent_s = sent_s
        self.on_first_token = on_first_token
        self.on_end = on_end
        self.on_recall: Callable[[], object] | None = None
        self.lost_tokens = 0

    @property
    def recallable(self) -> bool:
        """Whoever sent it would send it again, and its client has seen nothing of it."""
        return self.on_recall is not None and (self.whole or not self.output_tokens)

    def recall(self) -> None:
        """The gateway gives it up; whoever sent it is told at the loop's next turn."""
        if self.on_recall is not None:
            self.lose()
            self._host.abort(self)
            self._host.call_soon(self.on_recall)
            self.on_recall = None

    def lose(self) -> None:
        """Note what its end throws away: of prompt and answer, what has been computed."""
        self._host.catch_up()
        sequence = self.sequence
        made = sequence.prompt_tokens + sequence.generated_tokens if sequence.generated_tokens else 0
        self.lost_tokens = max(sequence.kv_tokens, made)

    @property
    def output_tokens(self) -> int:
        """Tokens that the gateway has seen by now."""
        if self.whole:
            return 0
        self._host.catch_up()
        return self.sequence.generated_tokens


class EngineHost:
    """See the module header. Serves as the `Backend` that poller and views ask; requests come through `send`."""

    kind = "vllm"
    capabilities = CAPABILITIES

    def __init__(self, spec: EngineSpec, loop: VirtualLoop, *, origin_s: float) -> None:
        """origin_s: the loop's time at which the replay's clock shows 0."""
        self.spec = spec
        self.name = spec.name
        self.up = True
        self._loop = loop
        self._origin_s = origin_s
        self._attempts: dict[Sequence, Attempt] = {}
        self._ended: list[tuple[Attempt, bool]] = []
        self._shown: list[tuple[EventKind, Sequence]] = []
        self._wake_at_s = math.inf
        self._wake_handle: object = None
        self._caught_up_ns = -1
        self._past_preemptions = 0
        self._past_recomputed_tokens = 0
        self._past_energy_j = 0.0
        self._polled_s = loop.time()
        self._polled_busy_s = self._polled_energy_j = 0.0
        self._boot()

    # -- requests ------------------------------------------------------------------------------------------------------

    def send(
        self,
        sequence: Sequence,
        on_first_token: Callable[[Attempt], None],
        on_end: Callable[[Attempt, bool], None],
        *,
        whole: bool = False,
    ) -> Attempt:
        """Start a sequence. An engine that is down answers by on_end, at the loop's next turn.

        Raises ValueError for a sequence that could never run here.
        """
        attempt = Attempt(self, sequence, self._loop.time(), on_first_token, on_end, whole=whole)
        if not self.up:
            self._loop.call_soon(on_end, attempt, False)
            return attempt
        self.engine.submit(sequence, self._now_s())
        self._caught_up_ns = -1
        self._attempts[sequence] = attempt
        self._rearm()
        return attempt

    def call_soon(self, callback: Callable[[], object]) -> None:
        """At the loop's next turn."""
        self._loop.call_soon(callback)

    def abort(self, attempt: Attempt) -> None:
        """Give an attempt up; nothing more is told of it."""
        if self._attempts.pop(attempt.sequence, None) is not None and self.up:
            self.engine.abort(attempt.sequence, self._now_s())
            self._caught_up_ns = -1
            self._rearm()

    def kill(self) -> None:
        """Die: what ran here has failed."""
        self.catch_up()
        self._past_preemptions += self.engine.totals.preemptions
        self._past_recomputed_tokens += self.engine.totals.recomputed_tokens
        self._past_energy_j += self.engine.totals.energy_j
        self.up = False
        lost, self._attempts = list(self._attempts.values()), {}
        for attempt in lost:
            attempt.lose()
        self._shown.clear()
        self._boot()
        for attempt in lost:
            attempt.on_end(attempt, False)

    def start(self) -> None:
        """Come up again, empty."""
        self._boot()
        self.up = True

    def catch_up(self) -> None:
        """Bring the engine to the present; what it shows by then is told at the loop's next turn."""
        now_ns = self._loop.now_ns
        if now_ns == self._caught_up_ns:  # asked for each of its sequences, many times a tick
            return
        self._caught_up_ns = now_ns
        events = self.engine.advance(self._now_s())
        if events:
            if not self._shown:
                self._loop.call_soon(self._tell)
            self._shown.extend((event.kind, event.sequence) for event in events)

    # -- what is known of it -------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> ContinuousScheduler:
        scheduler = self.engine.scheduler
        assert isinstance(scheduler, ContinuousScheduler)
        return scheduler

    @property
    def preemptions(self) -> int:
        """Since the start of the replay, over all lives of the engine."""
        return self._past_preemptions + self.engine.totals.preemptions

    @property
    def recomputed_tokens(self) -> int:
        return self._past_recomputed_tokens + self.engine.totals.recomputed_tokens

    @property
    def energy_j(self) -> float | None:
        """None where the profile has no power curve."""
        if self.spec.profile.power_model is None:
            return None
        return self._past_energy_j + self.engine.totals.energy_j

    @property
    def sequences(self) -> KeysView[Sequence]:
        """What runs and waits here for the gateway, in the order in which it came."""
        return self._attempts.keys()

    def step_left_s(self) -> float:
        """Until the step under way ends; 0 when none is."""
        step_end_s = self.engine._step_end_s
        return max(0.0, step_end_s - self._now_s()) if step_end_s < math.inf else 0.0

    def speaks(self, path: str) -> bool:
        del path
        return True

    async def probe(self) -> Probe:
        if not self.up:
            return Probe(ready=False, detail="connection refused")
        card = ModelCard(MODEL, {"id": MODEL}, self.scheduler.limits.max_model_len)
        return Probe(ready=True, models=(card,), version="virtual")

    async def try_generation(self, within_s: float) -> str:
        """It makes tokens whenever it is up; the one for a trial is not worth a step."""
        del within_s
        return "" if self.up else "connection refused"

    async def sample(self) -> Sample:
        since_s = self._loop.time() - self._origin_s
        if self.spec.silent_s is not None and self.spec.silent_s[0] <= since_s < self.spec.silent_s[1]:
            raise BackendError(f"engine {self.name}: /metrics does not answer")
        self.catch_up()
        scheduler, totals = self.scheduler, self.engine.totals
        values = {
            Signal.RUNNING: float(scheduler.running),
            Signal.WAITING: float(scheduler.waiting),
            Signal.KV_USED_FRACTION: scheduler.kv_used_fraction,
            Signal.KV_CAPACITY_TOKENS: float(scheduler.limits.usable_blocks * scheduler.limits.block_tokens),
            Signal.KV_BLOCK_TOKENS: float(scheduler.limits.block_tokens),
            Signal.PREEMPTIONS_TOTAL: float(totals.preemptions),
            Signal.PROMPT_TOKENS_TOTAL: float(totals.prompt_tokens),
            Signal.GENERATION_TOKENS_TOTAL: float(totals.generation_tokens),
            Signal.PREFIX_HITS_TOTAL: float(totals.cached_prompt_tokens),
            Signal.START_TIME_S: self._started_s,
            **self._gpu(),
        }
        return Sample(self._loop.time(), {name: Measured(value, SOURCE) for name, value in values.items()})

    async def close(self) -> None:
        """Nothing is open."""

    def _gpu(self) -> dict[Signal, float]:
        """Energy, and busy and power over the time since the last poll; a step that is under way is counted when it began."""
        now_s, totals, power = self._loop.time(), self.engine.totals, self.spec.profile.power_model
        passed_s = now_s - self._polled_s
        if passed_s <= 0:
            return {}
        busy = (totals.busy_s - self._polled_busy_s) / passed_s
        found = {Signal.GPU_BUSY_FRACTION: min(1.0, max(0.0, busy))}
        if power is not None:
            watts = (totals.energy_j - self._polled_energy_j) / passed_s
            found[Signal.GPU_POWER_FRACTION] = min(1.0, max(0.0, watts / (power.p0 + power.dp)))
            found[Signal.GPU_ENERGY_J_TOTAL] = self._past_energy_j + totals.energy_j
        self._polled_s, self._polled_busy_s, self._polled_energy_j = now_s, totals.busy_s, totals.energy_j
        return found

    # -- time ----------------------------------------------------------------------------------------------------------

    def _boot(self) -> None:
        self.engine: Engine = build_engine(self.spec.profile, self.spec.options)
        self._started_s = self._loop.time()
        self._caught_up_ns = -1
        self._polled_busy_s = self._polled_energy_j = 0.0
        self._rearm()

    def _now_s(self) -> float:
        """Engine time: since it started."""
        return self._loop.time() - self._started_s

    def _rearm(self) -> None:
        """Have the loop wake us at the next event. An earlier wake that is set already finds nothing and sets this."""
        next_s = self.engine.next_event_s()
        if next_s < math.inf:
            at_s = self._started_s + next_s
            if at_s < self._wake_at_s:
                self._wake_at_s = at_s
                self._wake_handle = handle = object()
                self._loop.call_at(at_s, self._on_wake, handle)

    def _on_wake(self, handle: object) -> None:
        if handle is not self._wake_handle:
            return
        self._wake_at_s = math.inf
        self.catch_up()
        self._tell()
        self._rearm()

    def _tell(self) -> None:
        shown, self._shown = self._shown, []
        for kind, sequence in shown:
            attempt = self._attempts.get(sequence)
            if attempt is None:
                continue
            if kind is EventKind.FIRST_TOKEN:
                attempt.on_first_token(attempt)
            elif kind is EventKind.FINISHED:
                del self._attempts[sequence]
                attempt.on_end(attempt, True)

    def __repr__(self) -> str:
        return f"<EngineHost {self.name} {'up' if self.up else 'down'} {self.engine!r}>"
