"""What an operator is told of a gateway: the gauges of a metrics page, readiness, the status page, the policy in force.

It reads what the parts know when it is asked, and changes nothing. People are shown what runs: credit that other
processes hold, which a decision counts as used, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace

from backends.gpu.plain import gpu_to_plain
from backends.simulated.step_model import StepModel
from gateway.clock import PoolClock
from gateway.control.gpu_watch import GpuWatch
from gateway.control.needs import as_plain, rows
from gateway.control.policy_store import PolicyStore
from gateway.control.presence import Presence
from gateway.control.roster import Engine, Roster
from gateway.dispatch.dispatcher import Dispatcher
from gateway.ingress.server import Ingress
from gateway.instruments import (
    BODIES_HELD,
    CLOCK_ERROR,
    CONNECTIONS,
    ENGINE_FINDING,
    ENGINE_OUT,
    LEADER,
    LEADER_EPOCH,
    PREDICTION_ERROR,
    PROFILE_DRIFT,
    REDIS_UP,
    TTFT_FACTOR,
)
from gateway.profiling.live import drift
from gateway.telemetry import Telemetry
from policies.document import effective
from policies.placement import eligible
from policies.schema import Policy
from policies.sizing import SizingPolicy
from policies.vocabulary import Decision, EngineView


class Overview:
    """See the module header, and `gateway.admin.api.Administered`."""

    def __init__(
        self,
        *,
        pool: str,
        store: PolicyStore,
        roster: Roster,
        sizing: SizingPolicy,
        presence: Presence,
        dispatcher: Dispatcher,
        gpu_watch: GpuWatch,
        ingress: Ingress,
        clock: PoolClock,
        profiles: Mapping[str, StepModel],
        decisions: Iterable[Decision],
        public_url: Callable[[], str],
    ) -> None:
        """profiles: the stored step models, by engine. decisions: the latest, as the caller keeps them."""
        self._pool = pool
        self._store = store
        self._roster = roster
        self._sizing = sizing
        self._presence = presence
        self._dispatcher = dispatcher
        self._gpu_watch = gpu_watch
        self._ingress = ingress
        self._clock = clock
        self._profiles = profiles
        self._decisions = decisions
        self._public_url = public_url

    # -- the admin API -------------------------------------------------------------------------------------------------

    def unready(self) -> str:
        """See `gateway.admin.api.Administered`."""
        if not self._presence.connected:
            return f"queue: {self._presence.last_error or 'not connected'}"
        if not self._roster.any_up():
            details = "; ".join(f"{engine.name}: {engine.detail or engine.state.value}" for engine in self._roster)
            return f"no engine is ready: {details or 'none is configured'}"
        return ""

    def status(self) -> Mapping[str, object]:
        """See `gateway.admin.api.Administered`."""
        now_s = self._clock.now_s()
        return {
            "public_url": self._public_url(),
            "policy_version": self._store.current.version,
            "leads": self._presence.leads,
            "queued": {name: self._dispatcher.queued.depth(name) for name in self._store.current.classes},
            "engines": [self._engine_status(engine, now_s) for engine in self._roster],
            "dispatch_batches": [asdict(batch) for batch in self._dispatcher.planner.latest_batches],
            "decisions": [_told(decision) for decision in self._decisions],
        }

    def policy(self) -> Mapping[str, object]:
        """See `gateway.admin.api.Administered`."""
        return {
            "version": self._store.current.version,
            "generation": self._store.generation,
            "reload_failed": self._store.failed,
            "last_error": [str(problem) for problem in self._store.problems],
            "policy": effective(self._store.current),
        }

    # -- metrics -------------------------------------------------------------------------------------------------------

    def refresh(self, telemetry: Telemetry) -> None:
        """Bring the gauges up to now, before a page of metrics is written."""
        now_s = self._clock.now_s()
        for engine in self._roster:
            view = _running_only(engine, engine.view(now_s))
            windows = {name: self._sizing.window(view, name) for name in self._store.current.classes}
            seen = engine.sample.values
            if self._presence.leads:
                telemetry.engine_counts(view)
            telemetry.engine(view, windows, sample_age_s=now_s - engine.sample.taken_s if seen else None)
            telemetry.gpu(engine.name, engine.gpu_shown(now_s), idle_power_w=self._gpu_watch.idle_power_w(engine))
            telemetry.set(PROFILE_DRIFT, self._drift(engine.name), engine.name)
            learned = self._sizing.learned_step(engine.name)
            known = learned if learned is not None and learned.seen else None
            telemetry.set(PREDICTION_ERROR, None if known is None else known.error, engine.name)
            telemetry.set(TTFT_FACTOR, None if known is None else known.ttft_factor, engine.name)
        out = [(engine.name, engine.standing.why) for engine in self._roster]
        telemetry.set_only(ENGINE_OUT, {(name, why): 1 for name, why in out if why is not None})
        telemetry.set_only(
            ENGINE_FINDING, {(engine.name, finding): 1 for engine in self._roster for finding in engine.findings}
        )
        policy = self._store.current
        self._refresh_queue(telemetry, policy)
        telemetry.policy(
            policy.version,
            generation=self._store.generation,
            reload_failed=self._store.failed,
            objectives={name: of.ttft_sla_s for name, of in policy.classes.items() if of.ttft_sla_s is not None},
        )
        telemetry.set(CONNECTIONS, self._ingress.open_connections)
        telemetry.set(BODIES_HELD, self._ingress.bodies_held_bytes)
        telemetry.set(REDIS_UP, int(self._presence.connected and not self._presence.failing))
        telemetry.set(LEADER, int(self._presence.leads), self._pool)
        telemetry.set(LEADER_EPOCH, self._presence.epoch or None, self._pool)
        telemetry.set(CLOCK_ERROR, self._clock.error_s)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _engine_status(self, engine: Engine, now_s: float) -> dict[str, object]:
        view = _running_only(engine, engine.view(now_s))
        learned = self._sizing.learned_step(engine.name)
        return {
            "name": engine.name,
            "kind": engine.kind,
            "state": view.state,
            "detail": engine.detail,
            "out_of_rotation": engine.standing.why,
            "priority": "" if engine.backend is None else engine.backend.capabilities.priority,
            **as_plain(rows(engine, view), engine.findings),
            "withheld": sorted(engine.withheld),
            "version": engine.version,
            "models": sorted(engine.models),
            "in_flight": dict(view.in_flight),
            "windows": {name: asdict(self._sizing.window(view, name)) for name in self._store.current.classes},
            "kv_tokens": view.kv_tokens,
            "prefill_tokens": view.prefill_tokens,
            "kv_used_fraction": view.kv_used_fraction.value,
            "running": view.running.value,
            "waiting": view.waiting.value,
            "kv_capacity_tokens": view.kv_capacity_tokens.value,
            "seats": view.seats.value,
            "learned_step": None if learned is None else asdict(learned),
            "gpu": gpu_to_plain(engine.gpu_shown(now_s), now_s),
        }

    def _drift(self, engine: str) -> float | None:
        """How far what was learned of an engine is from its stored profile; None: no profile, or little was learned."""
        stored, learned = self._profiles.get(engine), self._sizing.learned_step(engine)
        return None if stored is None or learned is None else drift(stored, learned)

    def _refresh_queue(self, telemetry: Telemetry, policy: Policy) -> None:
        """What waits, and by what: the guards are asked of each engine for a typical work of each class."""
        pool_s = self._clock.pool_s()
        telemetry.queue(
            {name: self._dispatcher.queued.depth(name) for name in policy.classes},
            {name: pool_s - work.accepted_s for name, work in self._dispatcher.queued.oldest().items()},
            by_tenant=self._dispatcher.queued.by_tenant,
        )
        asked = [work for name in policy.classes if (work := self._dispatcher.queued.typical(name)) is not None]
        views = self._roster.views(self._clock.now_s()) if self._presence.leads else ()
        telemetry.guards(
            {
                (view.name, work.class_name): self._sizing.admit(work, view, pool_s)
                for work in asked
                for view in views
                if eligible(work, view)
            }
        )

    def __repr__(self) -> str:
        return f"<Overview engines={len(self._roster)} {self._presence!r}>"


def _told(decision: Decision) -> Mapping[str, object]:
    return {**asdict(decision), "guards": [reading._asdict() for reading in decision.guards]}


def _running_only(engine: Engine, view: EngineView) -> EngineView:
    """The view without credit that other processes hold: people are shown what runs, not what may be started."""
    ledger = engine.ledger
    return replace(
        view,
        in_flight={name: works for name in view.in_flight if (works := ledger.running(name))},
        kv_tokens=view.kv_tokens - ledger.allowed_kv_tokens,
        prefill_tokens=view.prefill_tokens - ledger.allowed_prefill_tokens,
    )
