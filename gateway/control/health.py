"""Whether an engine works, judged by what moves, and whether it may leave the rotation for it.

A health page is answered by a web server; an engine behind it may be frozen, paused, shutting down or broken, and say 200
all the while. So an engine leaves the rotation when

    failing     answers broke: several in a row, or most of the recent ones while another engine's are good
    stalled     streams wait there, none of them moves, and neither do the engine's own token counters
    draining    it said that it is shutting down
    asleep      it says that its weights are unloaded
    silent      its pages do not answer, and no real answer came either

and returns when it has made a token: a real stream that moved is enough for a stalled one, else a generation that tries
it out, soon at first and later after each new fall. What succeeds in real traffic counts more than any probe.

Nobody is thrown out for nothing: an engine leaves only while another one with a model of its is in good standing; more than
half of them leave only while that one has been seen to work within PROVEN_S; and a model that no other engine in rotation
has is never withheld. All engines slow at once is load, not an outage.

After Envoy's outlier detection (ejection, its cap, and panic), with progress in place of status codes alone. Leader only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from backends.base import Signal
from gateway.control.roster import Engine
from gateway.control.standing import Why
from gateway.queue.base import Vitals

BLIND_FACTOR = 3.0
"""An engine without token counters is given so many times longer: its own queue may hold our streams for good reason."""
SLOWEST_PREFILL_TOKENS_PER_S = 1000.0
"""A prompt may take so long without any sign; a slower engine that loses its turn by this only returns with its token."""
SILENT_GRACE_S = 10.0
LOST_S = 60.0
"""An engine whose pages and answers have been silent for so long is down, whoever else there is."""
PROVEN_S = 10.0
HALF_LIFE_S = 10.0
ANEW_S = 2.0
"""A process that has not judged for so long did not lead meanwhile."""
_NOTHING = Vitals()


@dataclass(slots=True)
class _Record:
    """What was heard of one engine's calls, of all processes. Times are pool time."""

    heard: dict[object, Vitals] = field(default_factory=dict)
    in_a_row: int = 0
    good: float = 0.0
    bad: float = 0.0
    faded_s: float = 0.0
    alive_s: float = -math.inf
    waiting_s: float = math.inf
    draining: bool = False
    silent_since_s: float = math.inf
    probation: bool = False
    kept: Why | None = None

    def take(self, told: Mapping[object, Vitals], pool_s: float, *, anew: bool) -> None:
        """Fold in what each process tells now; this process's own under None. anew: judging begins."""
        fading = 0.5 ** (max(0.0, pool_s - self.faded_s) / HALF_LIFE_S)
        self.good, self.bad, self.faded_s = self.good * fading, self.bad * fading, pool_s
        served = failed = draining = 0
        self.waiting_s = math.inf
        for process, now in told.items():
            # What other processes had counted before we began to judge is past.
            before = now if anew and process is not None else self.heard.get(process, _NOTHING)
            served += max(0, now.served - before.served)
            failed += max(0, now.failed - before.failed)
            draining += max(0, now.draining - before.draining)
            if now.moved_ms:
                self.alive_s = max(self.alive_s, now.moved_ms / 1000)
            if now.waiting_ms:
                self.waiting_s = min(self.waiting_s, now.waiting_ms / 1000)
        self.heard = dict(told)
        self.draining = draining > 0
        self.good += served
        self.bad += failed
        if served:
            self.in_a_row = 0
            self.probation = False
            self.alive_s = max(self.alive_s, pool_s)
        else:
            self.in_a_row += failed

    def forget_ends(self) -> None:
        """What broke while it was away was not done by whoever serves there next."""
        self.in_a_row, self.bad, self.good = 0, 0.0, 0.0

    @property
    def failing_share(self) -> float:
        return self.bad / (self.good + self.bad) if self.good + self.bad >= 1 else 0.0


class HealthWatch:
    """See the module header.

    failures    broken answers in a row that put an engine out; silence_s: how long its streams may be still
    vitals      of an engine, by process
    on_change   told of each engine that leaves (why) or returns (None) or would have left if it could (kept)
    """

    def __init__(
        self,
        engines: Iterable[Engine],
        *,
        failures: int,
        silence_s: float,
        vitals: Callable[[Engine], Mapping[object, Vitals]],
        on_change: Callable[[Engine, Why | None, str, bool], None],
    ) -> None:
        self._engines = tuple(engines)
        self._failures = failures
        self._silence_s = silence_s
        self._vitals = vitals
        self._on_change = on_change
        self._judged_s = -math.inf
        self._records: dict[str, _Record] = {engine.name: _Record() for engine in self._engines}
        self._told: dict[str, Why | None] = {engine.name: None for engine in self._engines}

    def judge(self, *, pool_s: float, now_s: float) -> None:
        """Look at every engine once. O(engines², but only for those under suspicion)."""
        anew = now_s - self._judged_s > ANEW_S
        self._judged_s = now_s
        suspects: dict[str, tuple[Why, str]] = {}
        for engine in self._engines:
            record = self._records[engine.name]
            record.take(self._vitals(engine), pool_s, anew=anew)
            if not (engine.reachable and engine.standing.good):
                record.forget_ends()
                self._consider_return(engine, record, pool_s=pool_s, now_s=now_s)
            else:
                suspect = self._suspect(engine, record, pool_s=pool_s, now_s=now_s)
                if suspect is not None:
                    suspects[engine.name] = suspect
        for engine in self._engines:
            if engine.name in suspects:
                self._put_out(engine, suspects, pool_s=pool_s, now_s=now_s)
            else:
                self._records[engine.name].kept = None
        self._withhold()
        for engine in self._engines:
            self._tell(engine)

    def alive_s(self, engine: Engine) -> float:
        """Pool time at which something of an answer last came from it, in any process; -inf for never."""
        return self._records[engine.name].alive_s

    # -- suspicion -------------------------------------------------------------------------------------------------

    def _suspect(self, engine: Engine, record: _Record, *, pool_s: float, now_s: float) -> tuple[Why, str] | None:
        if record.draining:
            return Why.DRAINING, "it says that it is shutting down"
        if engine.sample.value(Signal.ASLEEP):
            return Why.ASLEEP, "it says that it sleeps"
        allowed = 1 if record.probation else self._failures
        if record.in_a_row >= allowed:
            return Why.FAILING, f"{record.in_a_row} answers in a row broke"
        if record.bad >= self._failures and record.failing_share >= 0.5:
            return Why.FAILING, f"{record.failing_share:.0%} of its recent answers broke"
        return self._silent(engine, record, pool_s=pool_s, now_s=now_s) or self._stalled(
            engine, record, pool_s=pool_s, now_s=now_s
        )

    def _silent(self, engine: Engine, record: _Record, *, pool_s: float, now_s: float) -> tuple[Why, str] | None:
        if engine.silent_probes < 2:
            record.silent_since_s = math.inf
            return None
        record.silent_since_s = min(record.silent_since_s, pool_s)
        still_s = pool_s - max(record.alive_s, record.silent_since_s - SILENT_GRACE_S)
        if still_s > LOST_S:
            engine.lost(engine.detail, now_s)
        return (Why.SILENT, engine.detail) if still_s > SILENT_GRACE_S else None

    def _stalled(self, engine: Engine, record: _Record, *, pool_s: float, now_s: float) -> tuple[Why, str] | None:
        if record.waiting_s == math.inf:
            return None
        works = max(1, sum(engine.ledger.in_flight.values()))
        bound_s = self._silence_s + engine.ledger.prefill_tokens / works / SLOWEST_PREFILL_TOKENS_PER_S
        if not engine.counts_tokens:
            bound_s *= BLIND_FACTOR
        still_s = pool_s - max(record.alive_s, record.waiting_s)
        counted_s = now_s - engine.counted_s
        if min(still_s, counted_s) <= bound_s:
            return None
        detail = f"its streams have been still for {still_s:.0f} s"
        running = engine.sample.value(Signal.RUNNING)
        if running == 0:
            detail += ", and it says that it runs none of them; is it paused?"
        return Why.STALLED, detail

    # -- out and in ------------------------------------------------------------------------------------------------

    def _put_out(self, engine: Engine, suspects: Mapping[str, tuple[Why, str]], *, pool_s: float, now_s: float) -> None:
        why, detail = suspects[engine.name]
        record = self._records[engine.name]
        if not engine.reachable or not self._may_leave(engine, suspects, pool_s):
            if record.kept is not why:
                record.kept = why
                self._on_change(engine, why, detail, True)
            return
        record.kept = None
        record.forget_ends()
        engine.standing.leave(why, detail, pool_s=pool_s, now_s=now_s)

    def _may_leave(self, engine: Engine, suspects: Mapping[str, object], pool_s: float) -> bool:
        peers = [one for one in self._engines if one.reachable and one.models & engine.models]
        sound = [one for one in peers if one is not engine and one.standing.good and one.name not in suspects]
        out = sum(not one.standing.good for one in peers)
        few = 2 * (out + 1) <= len(peers)
        proven = any(pool_s - self._records[one.name].alive_s < PROVEN_S for one in sound)
        return bool(sound) and (few or proven)

    def _consider_return(self, engine: Engine, record: _Record, *, pool_s: float, now_s: float) -> None:
        standing = engine.standing
        if standing.trial_due_s == math.inf:  # taken over from a leader that had put it out
            standing.trial_due_s = now_s
        if standing.why is Why.STALLED and record.alive_s > standing.since_s:
            standing.back(pool_s)

    def _withhold(self) -> None:
        """An engine that is out keeps the models that nobody in rotation has."""
        for engine in self._engines:
            if engine.standing.why is None:
                withheld: frozenset[str] = frozenset()
            else:
                others = [
                    one.models for one in self._engines if one is not engine and one.reachable and one.standing.good
                ]
                withheld = engine.models & frozenset().union(*others)
            engine.withhold(withheld)

    def _tell(self, engine: Engine) -> None:
        why, record = engine.standing.why, self._records[engine.name]
        if why is not self._told[engine.name]:
            if why is None:
                record.probation = self._told[engine.name] is Why.FAILING
            self._told[engine.name] = why
            self._on_change(engine, why, engine.standing.detail, False)

    def __repr__(self) -> str:
        out = {engine.name: engine.standing.why.value for engine in self._engines if engine.standing.why is not None}
        return f"<HealthWatch {len(self._engines)} engines, out: {out or 'none'}>"
