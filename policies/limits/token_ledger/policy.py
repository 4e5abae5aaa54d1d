"""Sizing policy `token_ledger`: may one work more start here, by what is held, what will be, and who waits behind it.

What it does: before each grant it asks the guards with the engine as it would be. A work without a TTFT objective is
bound by all of them and by a window that grows only while they pass; a work with one by those that keep the engine sound
(memory, seats, gaps), and by a thin pipe: its order stays ours to change until the engine has use for it.

Inputs: the ledger's works one by one, polled KV memory and counters, first tokens and gaps. It never sees true lengths or
an engine's parameters; both are learned (`policies.estimators`). An engine that tells nothing is a black box.

Trade-off: it believes in distributions of lengths per tenant, class and model. After a sudden change of them it is wrong
until works of the new kind have run, and the window and the cuts have to bear that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

from policies.estimators.step_model import StepModel
from policies.estimators.survival import HORIZONS, Key, Lengths, levels
from policies.limits.fixed import whole_seats
from policies.limits.heat import Heat, heat, known
from policies.limits.token_ledger import guards
from policies.limits.token_ledger.account import LATE_SHARE, Account, Forecast, newcomer
from policies.limits.token_ledger.black_box import BlackBox
from policies.limits.token_ledger.energy import Bursts, EnergyCurve
from policies.limits.token_ledger.found_seats import FoundSeats
from policies.limits.token_ledger.guards import Asked, Hypothesis, Scene
from policies.limits.token_ledger.reserve import Reserve, Shocks
from policies.limits.token_ledger.window import Growth
from policies.schema import Policy
from policies.sizing import Finished, FirstToken, Granted, LearnedStep, Sampled, SizingEvent, Window
from policies.vocabulary import EngineView, Guard, GuardReading, Quality, Result, Verdict, Work

REBUILD_S = 5.0
KEYS_A_TICK = 128
"""Tables of lengths that a tick makes anew, 0.1 ms each."""
PROMPTS_KEPT = 256
KINDS_KEPT = 4096
USUAL_PROMPT_TOKENS = 1024
SILENT_S = 10.0
STALE_POLLS = 3
STALE_SHARE = 0.1
PEAK_SHARE = 0.35
"""Of what urgent works held at their peak of ten minutes and do not now: where answers get longer all of them hold more, and
no arrival tells. Cell kv-tight and five other stretches: 0, 0.35 and 0.5 have 2,767, 2,734 and 2,691 bulk tokens/s at attainment
0.994, 0.996 and 0.996; with answers twice as long from the middle of the run 0.953, 0.968 and 0.968."""
OVERSIZE_EVERY_S = 20.0
PREEMPTED_FACTOR = 0.7
PREEMPTED_HOLD_S = 5.0
CAREFUL_S = 300.0
HOT_FACTOR = 0.9
HOT_EVERY_S = 10.0
HOT_REMEMBERED_S = 300.0
"""So long after a card was hot the window comes back by small steps: what it adds is felt half a minute later."""


class TokenLedger:
    """See the module header."""

    __slots__ = (
        "_engines",
        "_fields",
        "_fresh",
        "_kinds",
        "_lengths",
        "_newcomers",
        "_objectives",
        "_policy",
        "_prompts",
        "_rebuilt_s",
        "_shocks",
        "_ticked_s",
        "_tpot_s",
        "_z",
        "_z_careful",
    )

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._fields = policy.sizing.token_ledger
        self._z = NormalDist().inv_cdf(1 - self._fields.kv_risk)
        self._z_careful = NormalDist().inv_cdf(1 - self._fields.kv_risk / 2)
        self._objectives = frozenset(name for name, one in policy.classes.items() if one.has_ttft_objective)
        self._tpot_s = min((one.tpot_sla_s for one in policy.classes.values() if one.tpot_sla_s), default=None)
        self._lengths = Lengths()
        self._newcomers: dict[tuple[str, str, str, int | None, int], tuple[Forecast, Forecast]] = {}
        self._engines: dict[str, _Engine] = {}
        self._prompts: dict[str, deque[Work]] = {}
        self._shocks = Shocks([USUAL_PROMPT_TOKENS]) if self._objectives else None
        self._kinds: dict[str, Key] = {}
        self._fresh: dict[str, tuple[Forecast, Forecast]] = {}
        self._rebuilt_s = self._ticked_s = -math.inf

    # -- the contract --------------------------------------------------------------------------------------------------

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
        """Every guard that binds the work's class, with value and threshold. An idle engine takes any one work, unless it is kept
        for a dense batch."""
        mine = self._of(engine.name)
        seen = mine.seen
        if seen is None or seen[0] is not engine or seen[1] != now_s:
            seen = mine.seen = (engine, now_s, self._scene(mine, engine, now_s))
        scene = seen[2]
        late = self._policy.late(work, now_s)
        readings, steps = self._ask(mine, work, engine, scene, late=late)
        if engine.idle:
            readings = [
                one
                if one.guard is Guard.ENERGY
                else GuardReading(one.guard, one.value, max(one.value, one.threshold), True)
                for one in readings
            ]
        first_s = None
        if work.class_name in self._objectives:
            pending = scene.pending_urgent + scene.pending_patient + work.computed_tokens
            first_s = scene.ttft_factor * mine.account.step.ttft_s(pending, scene.sequences + 1, scene.held_tokens)
        if all(one.passed for one in readings):
            return Verdict(admitted=True, guards=tuple(readings), steps_to_overflow=steps, first_token_s=first_s)
        longest = math.inf
        if first_s is None and not engine.idle:
            z = self._z_careful if mine.careful else self._z
            longest = guards.longest_tokens(scene, mine.account.step, self._fields, z)
        return Verdict(False, tuple(readings), steps, first_s, longest)

    def window(self, engine: EngineView, class_name: str) -> Window:
        """Works with an objective are bound by tokens and seats; the others by the window as well."""
        mine = self._of(engine.name)
        seats = mine.seats(engine)
        capacity = engine.kv_capacity_tokens.value
        tokens = None if capacity is None else int(guards.KV_SHARE * capacity)
        if class_name in self._objectives:
            return Window(requests=told_seats(engine), tokens=tokens, steps_to_overflow=mine.steps_to_overflow)
        limit = int(mine.growth.limit)
        peak = mine.account.urgent_peak_sequences
        requests = limit if seats is None else min(limit, guards.patient_seats(seats, peak))
        return Window(requests=requests, tokens=tokens, steps_to_overflow=mine.steps_to_overflow)

    def on_event(self, event: SizingEvent, now_s: float) -> None:
        """Learn from what happened."""
        self._of(event.view.name if isinstance(event, Sampled) else event.engine).seen = None
        if isinstance(event, Sampled):
            self._sampled(event, now_s)
        elif isinstance(event, Granted):
            self._granted(event, now_s)
        elif isinstance(event, FirstToken):
            mine = self._of(event.engine)
            mine.answered = True
            mine.account.first_token(event, now_s)
        elif isinstance(event, Finished):
            self._finished(event, now_s)
        else:
            self._of(event.engine).account.progressed(event.running, now_s)

    def learned_step(self, engine: str) -> LearnedStep | None:
        mine = self._engines.get(engine)
        if mine is None or not mine.account.step.observations:
            return None
        step = mine.account.step
        base_s, sequence_s, context_s, prompt_s = step.theta
        return LearnedStep(base_s, sequence_s, context_s, prompt_s, step.error, step.observations, mine.ttft_factor)

    def snapshot(self) -> Mapping[str, object]:
        return {
            "lengths": self._lengths.snapshot(),
            "engines": {
                name: {"limit": one.growth.limit, "new": one.growth.new, "step": one.account.step.snapshot()}
                for name, one in self._engines.items()
            },
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over what a predecessor learned; what cannot be read is left out. What runs is told at the next tick."""
        lengths, engines = state.get("lengths"), state.get("engines")
        if isinstance(lengths, Mapping):
            self._lengths.restore(lengths)
            self._fresh.clear()
            self._newcomers.clear()
        if isinstance(engines, Mapping):
            for name, one in engines.items():
                if isinstance(one, Mapping):
                    self._of(str(name)).restore(one, self._fields.most)

    # -- what is asked -------------------------------------------------------------------------------------------------

    def _ask(
        self, mine: _Engine, work: Work, engine: EngineView, scene: Scene, *, late: bool = False
    ) -> tuple[list[GuardReading], float | None]:
        """(readings, steps to overflow as `Verdict` has it). late: its objective is missed, and it must not make others miss theirs."""
        fields, model, account = self._fields, mine.account.step, mine.account
        patient = work.class_name not in self._objectives
        means, variances = self._newcomer(work)
        asked = Asked(
            prompt_tokens=work.prompt_tokens,
            computed_tokens=work.computed_tokens,
            sequences=work.sequences if scene.sequences else 1,
            objective_s=self._policy.objective_s(work),
            means=means,
            variances=account.sums.variances_with(work.tenant, variances, scene.variances),
        )
        z = self._z_careful if mine.careful else self._z
        memory = guards.kv(scene, asked, z, patient=patient or late)
        found = [
            None if memory is None else memory[0],
            guards.bound(scene, asked) if patient else None,
            guards.seats(scene, asked, patient=patient),
            guards.gaps(scene, asked, model, patient=patient or late),
        ]
        if patient:
            found += [
                guards.window(scene, asked),
                guards.first_token(scene, asked, model, fields),
                guards.load(scene, asked, model, account.urgent_load),
                guards.stall(scene, asked, model, fields),
                guards.knee(scene, asked, model, fields),
                mine.energy(scene.sequences + asked.sequences),
            ]
        elif late:
            found += [guards.first_token(scene, asked, model, fields), guards.stall(scene, asked, model, fields)]
        else:
            found.append(guards.pipe(scene, asked, model))
        found.append(guards.memory(engine, scene, fields))
        if patient or late:
            found += guards.heat(engine, fields)
        return [one for one in found if one is not None], None if memory is None else memory[1]

    def _scene(self, mine: _Engine, engine: EngineView, now_s: float) -> Scene:
        account = mine.account
        beyond = account.beyond(engine)
        means, variances = account.sums.means, account.sums.variances
        if beyond:
            for name, more in beyond:
                own_means, own_variances = self._fresh_of(name)
                means = [one + more * own for one, own in zip(means, 2 * own_means, strict=True)]
                variances = [one + more * own for one, own in zip(variances, 2 * own_variances, strict=True)]
        pending_urgent, pending_patient = account.pending(engine, beyond)
        capacity = mine.capacity_tokens
        if capacity is None and engine.kv_capacity_tokens.known:  # told since the last tick
            capacity = engine.kv_capacity_tokens.value
        held = float(engine.kv_tokens)
        reserve = 0.0
        if capacity is not None:
            held = account.offset.used_tokens(held, capacity)
            below_peak = account.urgent_peak_tokens - account.urgent_tokens
            kept = max(mine.reserve.tokens, PEAK_SHARE * below_peak)
            reserve = self._fields.reserve * kept + STALE_SHARE * capacity * mine.missed_polls
        sequences, seats = engine.sequences_total, mine.seats(engine)
        return Scene(
            held_tokens=held,
            rest_tokens=held - account.sums.held_tokens,
            capacity_tokens=capacity,
            means=tuple(means),
            variances=tuple(variances),
            reserve_tokens=reserve,
            pending_urgent=pending_urgent,
            pending_patient=pending_patient,
            queued_tokens=mine.queued_tokens,
            sequences=sequences,
            patient=sequences - sum(map(engine.sequences, self._objectives)),
            urgent_sequences=account.urgent_sequences,
            urgent_tokens=account.urgent_tokens,
            hypothesis=mine.hypothesis,
            tpot_s=self._tpot_s,
            gap_s=account.lately_gap_s,
            window=int(mine.growth.limit),
            bound_tokens=mine.black_box.limit_tokens if mine.silent else None,
            seats=told_seats(engine),
            patient_seats=None if seats is None else guards.patient_seats(seats, account.urgent_peak_sequences),
            usual_memory_fraction=mine.usual_memory_fraction,
            ttft_factor=account.correction.factor(now_s),
            oversize_due=now_s - mine.oversize_s >= OVERSIZE_EVERY_S,
        )

    def _newcomer(self, work: Work) -> tuple[Forecast, Forecast]:
        """The columns of a work to come, kept until lengths are looked at again: they are the same for its kind."""
        kind = (work.tenant, work.class_name, work.model, work.max_tokens, work.sequences)
        found = self._newcomers.get(kind)
        if found is None:
            if len(self._newcomers) >= KINDS_KEPT:
                self._newcomers.clear()
            keys = levels(work.tenant, work.class_name, work.model)
            found = self._newcomers[kind] = newcomer(work, keys, self._lengths)
        return found

    def _fresh_of(self, class_name: str) -> tuple[Forecast, Forecast]:
        """What one work of a class of which nothing more is known will make."""
        found = self._fresh.get(class_name)
        if found is None:
            keys = (self._kinds[class_name],) if class_name in self._kinds else ()
            found = newcomer(Work("", class_name, "", "", "", 0.0, 0.0), keys, self._lengths)
            self._fresh[class_name] = found
        return found

    # -- what is learned -----------------------------------------------------------------------------------------------

    def _of(self, engine: str) -> _Engine:
        found = self._engines.get(engine)
        if found is None:
            fields = self._fields
            found = _Engine(Account(self._objectives, self._lengths), Growth(float(fields.start), float(fields.most)))
            found.bursts = None if fields.burst_wait_s is None else Bursts(fields.burst_wait_s)
            found.hypothesis = self._hypothesis(found.account.step)
            self._engines[engine] = found
        return found

    def _granted(self, event: Granted, now_s: float) -> None:
        mine, work = self._of(event.engine), event.work
        entry = mine.account.granted(work, event.attempt, now_s)
        if self._policy.class_policy(work.class_name).ttft_slowdown is not None:
            mine.account.note_unhindered(work.computed_tokens, now_s)
        self._kinds[work.class_name] = (work.class_name, work.model)
        prompts = self._prompts.get(work.class_name)
        if prompts is None:
            prompts = self._prompts[work.class_name] = deque(maxlen=PROMPTS_KEPT)
        prompts.append(work)
        if work.class_name in self._objectives:
            mine.reserve.granted(now_s)
        if work.class_name not in self._objectives or self._policy.late(work, now_s):
            model = mine.account.step
            found = guards.urgent_behind(*entry.behind, mine.hypothesis, model, self._fields, mine.ttft_factor)
            if found is not None and found[0] > found[1]:
                mine.oversize_s = now_s

    def _finished(self, event: Finished, now_s: float) -> None:
        mine, outcome, work = self._of(event.engine), event.outcome, event.work
        entry = mine.account.ended(work.id, event.attempt)
        keys = levels(work.tenant, work.class_name, work.model)
        if outcome is not None and (outcome.output_tokens or outcome.result is Result.COMPLETED):
            mine.answered = True  # an embedding has no tokens to show
        if entry is not None and not work.streams and outcome is not None and outcome.result is Result.COMPLETED:
            mine.account.whole_answer(entry, outcome.output_tokens // work.sequences, now_s)
        if outcome is None or not outcome.output_tokens:
            if entry is not None and entry.shown_tokens:
                self._lengths.ended(keys, entry.shown_tokens // work.sequences, censored=True)
            return
        each = outcome.output_tokens // work.sequences
        cut_off = work.max_tokens is not None and each >= work.max_tokens
        self._lengths.ended(keys, max(1, each), censored=cut_off or outcome.result is not Result.COMPLETED)

    def _sampled(self, event: Sampled, now_s: float) -> None:
        view = event.view
        mine = self._of(view.name)
        account = mine.account
        if now_s != self._ticked_s:
            self._ticked_s = now_s
            self._look_at_lengths(now_s)
        mine.hear(view, now_s)
        mine.ttft_factor = account.correction.factor(now_s)
        if now_s - mine.noted_s >= 1.0:
            mine.noted_s = now_s
            account.note_peak(now_s)
        mine.queued_tokens = sum(
            max(0, event.queued.get(name, 0) - event.late.get(name, 0)) * _mean(self._prompts.get(name))
            for name in sorted(self._objectives)
        )
        self._look_at_reserve(mine, view, now_s)
        worst = max((used for _, used, _ in account.first_tokens), default=None)
        following = self._next(event)
        if mine.silent:
            asks = 0.0 if following is None else following.prompt_tokens + self._newcomer(following)[0][0]
            mine.black_box.tick(view.kv_tokens, worst=worst, gap_s=account.gap_s, now_s=now_s, next_tokens=asks)
        self._move_window(mine, event, now_s, sequences=1 if following is None else following.sequences)

    def _look_at_reserve(self, mine: _Engine, view: EngineView, now_s: float) -> None:
        """A tick: how much memory patient works leave free for urgent ones to come."""
        capacity, hypothesis, account = mine.capacity_tokens, mine.hypothesis, mine.account
        if capacity is None or self._shocks is None or hypothesis.tokens is None or hypothesis.objective_s is None:
            return
        sums, step = account.sums, account.step
        pending = sum(account.pending(view, account.beyond(view))) + mine.queued_tokens + hypothesis.tokens
        held = account.offset.used_tokens(view.kv_tokens, capacity)
        first_s = max(1.0, mine.ttft_factor) * step.ttft_s(pending, view.sequences_total, held)
        ahead_s = HORIZONS[0] * step.step_s(sums.sequences, sums.held_tokens)
        mine.reserve.look(
            self._shocks,
            ending_per_s=(sums.held_tokens - sums.means[len(HORIZONS)]) / ahead_s,
            patience_s=max(0.0, self._fields.caution * hypothesis.objective_s - first_s),
            spare_tokens=(1 - guards.KV_SHARE) * capacity,
            risk=self._fields.kv_risk,
            now_s=now_s,
        )

    def _next(self, event: Sampled) -> Work | None:
        """Of the first class without an objective in which works wait, the latest that was granted: the next is probably like it.
        None: none waits, or none was granted yet."""
        names = (name for name in self._policy.classes if name not in self._objectives and event.queued.get(name))
        prompts = self._prompts.get(next(names, ""))
        return prompts[-1] if prompts else None

    def _move_window(self, mine: _Engine, event: Sampled, now_s: float, *, sequences: int) -> None:
        """Grow, hold or shrink by what the guards say of a usual work without an objective. sequences: of the next one."""
        view, growth = event.view, mine.growth
        names = [name for name in self._policy.classes if name not in self._objectives]
        queued = [name for name in names if event.queued.get(name)]
        held = sum(map(view.sequences, names))
        if mine.preempted:
            mine.preempted = False
            if growth.cut(PREEMPTED_FACTOR, held=held, now_s=now_s, hold_s=PREEMPTED_HOLD_S):
                mine.careful = now_s - mine.preempted_s < CAREFUL_S
                mine.preempted_s = now_s
        elif mine.careful and now_s - mine.preempted_s >= CAREFUL_S:
            mine.careful = False
        late = mine.account.lateness(0.9)
        if late is not None and late > LATE_SHARE:
            growth.cut(PREEMPTED_FACTOR, held=held, now_s=now_s)
        if not names:
            return
        name = queued[0] if queued else names[0]
        usual = Work("", name, "", self._kinds.get(name, ("", ""))[1], "", now_s, now_s)
        scene = self._scene(mine, view, now_s)
        readings, mine.steps_to_overflow = self._ask(mine, usual, view, scene)
        failed = [one.guard for one in readings if not one.passed and one.guard is not Guard.WINDOW]
        mine.look_at_energy(view, queued=sum(event.queued.get(name, 0) for name in names), held=held, now_s=now_s)
        warmth = self._heat(view)
        if warmth is Heat.HOT:
            mine.hot_s = now_s
            growth.cut(HOT_FACTOR, held=held, now_s=now_s, dead_s=HOT_EVERY_S, least=float(self._fields.start))
        if growth.new and not mine.answered:
            return  # by the clock it would be large before a slow engine has shown how slow it is
        clear = not failed and warmth is Heat.COOL and not mine.missed_polls
        slowly = now_s - mine.hot_s < HOT_REMEMBERED_S
        growth.tick(held=held, backlog=bool(queued), clear=clear, now_s=now_s, slowly=slowly, sequences=sequences)

    def _heat(self, view: EngineView) -> Heat:
        fields = self._fields
        return heat(
            known(view.gpu_heat_margin_c),
            known(view.gpu_power_fraction),
            known(view.gpu_slowed),
            heat_margin_c=fields.heat_margin_c,
            power_at=fields.power_at,
        )

    def _look_at_lengths(self, now_s: float) -> None:
        """Once a tick: a part of the tables anew, all of them in REBUILD_S."""
        if now_s - self._rebuilt_s >= REBUILD_S:
            self._rebuilt_s = now_s
            self._lengths.begin(
                (entry.keys, entry.shown_tokens // entry.work.sequences)
                for _, one in sorted(self._engines.items())
                for entry in one.account.entries.values()
            )
            self._look_at_prompts()
        if self._lengths.go_on(KEYS_A_TICK):
            self._fresh.clear()
            self._newcomers.clear()

    def _look_at_prompts(self) -> None:
        urgent = [work.prompt_tokens for name in self._objectives for work in self._prompts.get(name, ())]
        if urgent:
            self._shocks = Shocks(urgent)
        for one in self._engines.values():
            one.hypothesis = self._hypothesis(one.account.step, one.account.look_at_unhindered())

    def _hypothesis(self, step: StepModel, usual_s: float = 0.0) -> Hypothesis:
        """The urgent work that is the hardest to serve in time on an engine of such steps: a long one (p95). usual_s: of
        classes that promise a slowdown."""
        found: list[tuple[float, float, str]] = []
        for name in sorted(self._objectives):
            prompts = self._prompts.get(name)
            tokens = _long(work.computed_tokens for work in prompts) if prompts else float(USUAL_PROMPT_TOKENS)
            one = self._policy.class_policy(name)
            objective_s = one.ttft_objective_s(int(tokens), guards.alone_s(tokens, step))
            if objective_s is not None:
                found.append((tokens, objective_s, name))
        if not found:
            return Hypothesis()
        tokens, objective_s, name = min(found, key=lambda one: (one[1] / (1 + one[0]), one))
        slowdown = self._policy.class_policy(name).ttft_slowdown
        return Hypothesis(tokens, objective_s, guards.alone_factor(slowdown, self._fields), usual_s, slowdown)

    def __repr__(self) -> str:
        windows = " ".join(f"{name}={one.growth.limit:.1f}" for name, one in sorted(self._engines.items()))
        return f"<TokenLedger {windows or 'new'}>"


@dataclass(slots=True)
class _Engine:
    """What is kept of one engine besides its account. silent: it tells nothing of its memory, or no more; answered: a token
    of it has been seen, or a good answer without any."""

    account: Account
    growth: Growth
    black_box: BlackBox = field(default_factory=BlackBox)
    found_seats: FoundSeats = field(default_factory=FoundSeats)
    curve: EnergyCurve = field(default_factory=EnergyCurve)
    bursts: Bursts | None = None
    reserve: Reserve = field(default_factory=Reserve)
    capacity_tokens: float | None = None
    silent: bool = True
    answered: bool = False
    missed_polls: float = 0.0
    queued_tokens: float = 0.0
    hypothesis: Hypothesis = field(default_factory=Hypothesis)
    oversize_s: float = -math.inf
    hot_s: float = -math.inf
    ttft_factor: float = 1.0
    noted_s: float = -math.inf
    steps_to_overflow: float | None = None
    seen: tuple[EngineView, float, Scene] | None = None
    preempted: bool = False
    preempted_s: float = -math.inf
    careful: bool = False
    usual_memory_fraction: float | None = None
    _told_s: float = -math.inf
    _preemptions: float | None = None
    _started_s: float | None = None

    def hear(self, view: EngineView, now_s: float) -> None:
        """Take in a tick's view: how old it is, whether it is the same process, memory, preemptions."""
        used, capacity = view.kv_used_fraction, view.kv_capacity_tokens
        if capacity.value is not None and capacity.quality in (Quality.FRESH, Quality.STALE):
            self.capacity_tokens = capacity.value
        if used.value is not None:
            self._told_s = now_s - used.age_s
        age_s = now_s - self._told_s  # a page that lacks the number once, or has nonsense there, is a missed poll
        period_s = self.account.offset.period_s
        silent = self.capacity_tokens is None or age_s > SILENT_S
        self.missed_polls = 0.0 if silent else max(0.0, age_s / period_s - STALE_POLLS)
        if silent and not self.silent and self.capacity_tokens is not None:
            self.black_box.begin(view.kv_tokens, guards.KV_SHARE * self.capacity_tokens)
        self.silent = silent
        self._look_for_restart(view)
        self.found_seats.hear(view, now_s)
        # Prompts that must have been taken in, though their answers show nothing yet, are in the engine's memory.
        pending = max(0, view.prefill_tokens - self.account.sums.assumed)
        self.account.offset.tick(view.kv_tokens, now_s, pending=pending)
        if used.known and used.value is not None and self.capacity_tokens is not None:
            self.account.offset.polled(used.value * self.capacity_tokens, now_s - age_s)
        self._count_preemptions(view)
        free = view.gpu_memory_free_fraction
        if free.known and free.value is not None:
            usual = self.usual_memory_fraction
            self.usual_memory_fraction = 1 - free.value if usual is None else min(usual, 1 - free.value)

    def seats(self, view: EngineView) -> int | None:
        """As the engine tells them, else as they were found; None: neither."""
        told = told_seats(view)
        return self.found_seats.value if told is None else told

    def _look_for_restart(self, view: EngineView) -> None:
        started = view.start_time_s
        if not started.known or started.value is None:
            return
        if self._started_s is not None and abs(started.value - self._started_s) > 1:
            self.account.restarted()
            self.growth = Growth(min(self.growth.limit, 4.0), self.growth.most)
            self._preemptions = None
            self.usual_memory_fraction = None
            self.found_seats = FoundSeats()
        self._started_s = started.value

    def _count_preemptions(self, view: EngineView) -> None:
        total = view.preemptions_total
        if not total.known or total.value is None:
            return
        if self._preemptions is not None and total.value > self._preemptions:
            self.preempted = True
        self._preemptions = total.value

    def look_at_energy(self, view: EngineView, *, queued: int, held: int, now_s: float) -> None:
        """A tick: learn what tokens cost, and open or close for works without an objective."""
        if self.bursts is None:
            return
        joules, tokens = known(view.gpu_energy_j_total), known(view.generation_tokens_total)
        if joules is not None and tokens is not None:
            self.curve.saw(joules, tokens, view.sequences_total, now_s)
        self.bursts.tick(queued=queued, held=held, efficient=self.curve.efficient(), now_s=now_s)

    def energy(self, sequences: int) -> GuardReading | None:
        """Closed: how many works are lacking for an efficient batch; open: joules of a token past the best batch."""
        if self.bursts is None:
            return None
        if not self.bursts.open:
            return GuardReading(Guard.ENERGY, self.bursts.lacking, 0, passed=False)
        joules = self.curve.past_best(sequences)
        return None if joules is None else GuardReading(Guard.ENERGY, *joules, joules[0] <= joules[1])

    def restore(self, state: Mapping[str, object], most: int) -> None:
        limit, new, step = state.get("limit"), state.get("new"), state.get("step")
        if isinstance(limit, int | float) and math.isfinite(limit):
            self.growth.limit = min(max(1.0, float(limit)), float(most))
        if isinstance(new, bool):
            self.growth.new = new
        if isinstance(step, Mapping):
            self.account.step.restore(step)


def told_seats(view: EngineView) -> int | None:
    """Seats by the engine's own word. They bind urgent works too; what was found does not, since it may be too few: past it
    an urgent work waits in the engine at worst, and that more runs is how a wrong number is corrected."""
    return whole_seats(view.seats.value, view.seats.quality)


def _long(tokens: Iterable[int]) -> float:
    """Of some prompts, p95."""
    ordered = sorted(tokens)
    return float(ordered[int(0.95 * (len(ordered) - 1))])


def _mean(prompts: deque[Work] | None) -> float:
    """Prompt tokens to compute."""
    return sum(work.computed_tokens for work in prompts) / len(prompts) if prompts else float(USUAL_PROMPT_TOKENS)
