"""The guards of `token_ledger`: each a value against a threshold, on one engine as it would be with one work more.

Plain functions of values: `Scene` is what is there, `Asked` what would come. Memory, seats and gaps bound
every class; heat, and what delays the first tokens of others, only works that have no objective themselves ("patient").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.estimators.step_model import StepModel
from policies.estimators.survival import HORIZONS
from policies.limits.fixed import taken
from policies.limits.token_ledger.account import NOTHING, Forecast
from policies.limits.token_ledger.load import UrgentLoad
from policies.schema import TokenLedgerSizing
from policies.vocabulary import EngineView, Guard, GuardReading

KV_SHARE = 0.97
"""Of KV memory, for patient works. Urgent ones may use the rest: a refusal is a late answer, and bulk stops in time."""
URGENT_SHARE = 0.85
"""Of what is expected to come within the first horizon, that an urgent work has to find room for besides itself. Engines preempt in
return: 8 works in 14 runs of kv-tight's stretches at 0.65, 3 at 0.85, 1 at 1."""
PIPE_SHARE = 0.25
"""Part of a TTFT objective that pending prompts of urgent works may take; the others wait where their order can change."""
PIPE_TOKENS = 8192
"""Of a class that promises a slowdown, so many may be pending at least: the most that engines take into one step. What was learned of
that is not used: with a thin pipe no first token tells that an engine takes more."""
STALL_SHARE = 0.15
"""Part of the shortest objective that patient prompts may take, where that is more than stall_s."""
ALONE_FACTOR = 1.5
"""What an empty engine cannot do in time is not patient work's fault: its threshold is no lower than this times that."""
GAP_SHARE = 0.95
"""Of an objective on gaps, that works which can wait may bring it to: answers differ around the mean."""
MOST_DOUBT = 0.3
MEMORY_DRIFT = 0.02


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An urgent work that might arrive right now. tokens: to compute of a long prompt (p95) of the class with the tightest
    objective; None: no such class. objective_s: of that class for so many; None: none is set. alone_factor: see `alone_factor`.
    Where the class promises a slowdown, usual_s: what 95 % of its first tokens would have taken of late without patient works;
    slowdown: the promise; None: no such promise."""

    tokens: float | None = None
    objective_s: float | None = None
    alone_factor: float = ALONE_FACTOR
    usual_s: float = 0.0
    slowdown: float | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """One engine now, with what is placed in this round.

    held_tokens, capacity_tokens   of KV memory; None: the engine never told
    rest_tokens                    of those held, what no entry of the account holds: foreign, or of other processes
    means, variances               the columns of `account`
    reserve_tokens                 kept free for urgent works to come, and for what stale telemetry may hide
    pending_urgent, _patient       prompt tokens to be computed yet
    queued_tokens                  prompt tokens to compute of urgent works in our queue, as of the last tick
    sequences, patient             in flight, and those of works without an objective
    urgent_sequences, _tokens      of the others, as of the last tick
    hypothesis                     the urgent work for whose sake patient ones wait
    tpot_s                         the tightest gap; None: none is set
    seats, patient_seats           by the engine's own word; those that works without an objective may take, told or found;
                                   None: not known
    usual_memory_fraction          the least GPU memory in use that was ever seen here
    ttft_factor                    times the predicted first token, by those of late
    oversize_due                   time for one prompt that the hypothetical work would be late behind
    """

    held_tokens: float
    rest_tokens: float
    capacity_tokens: float | None
    means: Forecast
    variances: Forecast
    reserve_tokens: float
    pending_urgent: float
    pending_patient: float
    queued_tokens: float
    sequences: int
    patient: int
    urgent_sequences: int
    urgent_tokens: float
    hypothesis: Hypothesis
    tpot_s: float | None
    gap_s: float | None
    window: int
    bound_tokens: float | None
    seats: int | None
    patient_seats: int | None
    usual_memory_fraction: float | None
    ttft_factor: float
    oversize_due: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """One work more. prompt_tokens: that memory will hold; computed_tokens: those of them that take time; means: by HORIZONS,
    its own; variances: by columns, those of all works once it is here."""

    prompt_tokens: int
    computed_tokens: int
    sequences: int
    objective_s: float | None
    means: Forecast
    variances: Forecast


def kv(scene: Scene, asked: Asked, z: float, *, patient: bool) -> tuple[GuardReading, float] | None:
    """The safe-batch test: does all that is here and this work, grown for each horizon, fit with chance 1 - risk?

    Urgent works are asked for URGENT_SHARE of the first horizon, and for what is expected until then: who is to wait for them
    has stopped being let in, and something that runs comes to an end; a refusal is a late answer for sure. Returns the
    reading at the horizon that needs the most, and the steps to overflow: the first horizon that fails.
    """
    if scene.capacity_tokens is None:
        return None
    needs = needed(scene, asked, z, patient=patient)
    threshold = KV_SHARE * scene.capacity_tokens if patient else scene.capacity_tokens
    steps = next((float(at) for at, need in zip(HORIZONS, needs, strict=True) if need > threshold), math.inf)
    if patient:
        return _reading(Guard.KV, max(needs), threshold), steps
    soon = scene.held_tokens + asked.prompt_tokens + URGENT_SHARE * (scene.means[0] + asked.means[0])
    return _reading(Guard.KV, min(soon, needs[0]), threshold), steps


def needed(scene: Scene, asked: Asked, z: float, *, patient: bool) -> list[float]:
    """KV tokens for each horizon, by whichever column bounds them better; patient works leave the reserve free."""
    count = len(HORIZONS)
    rest, held, sqrt = scene.rest_tokens, scene.held_tokens, math.sqrt
    more = asked.prompt_tokens + (scene.reserve_tokens if patient else 0.0)
    spread = [z * sqrt(variance) if variance > 0 else 0.0 for variance in asked.variances]
    return [
        more + mean + min(held + grown + spread_grown, rest + then + spread_then)
        for mean, grown, then, spread_grown, spread_then in zip(
            asked.means, scene.means[:count], scene.means[count:], spread[:count], spread[count:], strict=True
        )
    ]


def bound(scene: Scene, asked: Asked) -> GuardReading | None:
    """A silent engine: tokens in flight against what it was found to bear."""
    if scene.bound_tokens is None:
        return None
    return _reading(Guard.STALE, scene.held_tokens + asked.prompt_tokens + asked.means[0], scene.bound_tokens)


def seats(scene: Scene, asked: Asked, *, patient: bool) -> GuardReading | None:
    """Patient works leave seats for urgent ones, and are bound by what they hold, not by what is free."""
    held, most = (scene.patient, scene.patient_seats) if patient else (scene.sequences, scene.seats)
    return None if most is None else _reading(Guard.SEATS, held + taken(asked.sequences, most), most)


def window(scene: Scene, asked: Asked) -> GuardReading:
    """Sequences of patient works against what was found to be safe."""
    return _reading(Guard.WINDOW, scene.patient + taken(asked.sequences, scene.window), scene.window)


def patient_seats(seats: int, urgent_peak: int) -> int:
    """Seats for works without an objective: all but what urgent works take at their peak, at least an eighth and at most
    half of them. Whoever finds no seat free waits for the end of somebody's answer."""
    return max(1, seats - max(1, seats // 8, min(urgent_peak, seats // 2)))


def gaps(scene: Scene, asked: Asked, model: StepModel, *, patient: bool) -> GuardReading | None:
    """The gap between tokens with one work more, against the tightest objective; for a patient work as measured too. What is
    measured has the prompts in it that were taken in meanwhile, and an urgent work that waits for them to pass is late."""
    if scene.tpot_s is None:
        return None
    predicted = model.step_s(scene.sequences + asked.sequences, scene.held_tokens + asked.prompt_tokens)
    if patient:
        return _reading(Guard.TPOT, max(predicted, scene.gap_s or 0.0), GAP_SHARE * scene.tpot_s)
    return _reading(Guard.TPOT, predicted, scene.tpot_s)


def knee(scene: Scene, asked: Asked, model: StepModel, fields: TokenLedgerSizing) -> GuardReading:
    """A step against an empty engine's."""
    step_s = model.step_s(scene.sequences + asked.sequences, scene.held_tokens + asked.prompt_tokens)
    return _reading(Guard.KNEE, step_s, fields.knee_ratio * model.base_s)


def first_token(scene: Scene, asked: Asked, model: StepModel, fields: TokenLedgerSizing) -> GuardReading | None:
    """An urgent work with a long prompt that arrives right after this one: its predicted first token. What came later than
    predicted of late makes it longer; what came earlier does not let more in. A prompt that is too long for that by itself has
    leave to make one late, when nothing else is pending and it is time: it would never be let in."""
    pending = scene.pending_urgent + scene.pending_patient + scene.queued_tokens
    there = scene.sequences + asked.sequences, scene.held_tokens
    found = urgent_behind(pending + asked.computed_tokens, *there, scene.hypothesis, model, fields, scene.ttft_factor)
    if found is None:
        return None
    value, threshold = found
    if value > threshold and scene.oversize_due and not pending:
        empty = urgent_behind(0.0, *there, scene.hypothesis, model, fields, scene.ttft_factor)
        if empty is not None and empty[0] <= threshold:
            threshold = value
    return _reading(Guard.TTFT, value, threshold)


def urgent_behind(  # noqa: PLR0917 - the first three are what a first token is predicted from
    pending_tokens: float,
    sequences: float,
    held_tokens: float,
    hypothesis: Hypothesis,
    model: StepModel,
    fields: TokenLedgerSizing,
    ttft_factor: float,
) -> tuple[float, float] | None:
    """(predicted first token of the hypothetical urgent work behind so much, what it may take); None: there is no such work."""
    if hypothesis.tokens is None or hypothesis.objective_s is None:
        return None
    doubt = _doubt(model, ttft_factor)
    value = doubt * model.ttft_s(pending_tokens + hypothesis.tokens, sequences, held_tokens)
    alone = doubt * max(alone_s(hypothesis.tokens, model), hypothesis.usual_s)
    return value, max(fields.caution * hypothesis.objective_s, hypothesis.alone_factor * alone)


def _doubt(model: StepModel, ttft_factor: float) -> float:
    """Times a predicted first token, for the sake of those that come later than predicted."""
    return (1 + min(MOST_DOUBT, model.error)) * max(1.0, ttft_factor)


def load(scene: Scene, asked: Asked, model: StepModel, urgent: UrgentLoad) -> GuardReading | None:
    """How many times longer works that can wait make a step with one long urgent prompt; see `load`. Of classes that promise a
    slowdown."""
    hypothesis = scene.hypothesis
    if hypothesis.slowdown is None or not hypothesis.tokens:
        return None
    tokens = min(hypothesis.tokens, float(model.budget_tokens))
    prompt_s = model.prefill_s_per_token * tokens
    without_s = model.step_s(scene.urgent_sequences, scene.urgent_tokens) + prompt_s
    with_s = model.step_s(scene.sequences + asked.sequences, scene.held_tokens + asked.prompt_tokens) + prompt_s
    allowed = urgent.may_be_slower(without_s, tokens, hypothesis.slowdown)
    return _reading(Guard.LOAD, with_s / without_s, allowed)


def alone_s(prompt_tokens: float, model: StepModel) -> float:
    """To the first token of a prompt that the engine has to itself."""
    return model.ttft_s(prompt_tokens, 1, prompt_tokens)


def alone_factor(slowdown: float | None, fields: TokenLedgerSizing) -> float:
    """Times what an empty engine takes that are let happen whatever the objective: ALONE_FACTOR, or less where the class
    promises less. Of a promised slowdown the part beyond 1 is what others may take, and `caution` of that is predicted."""
    return ALONE_FACTOR if slowdown is None else min(ALONE_FACTOR, 1 + fields.caution * (slowdown - 1))


def stall(scene: Scene, asked: Asked, model: StepModel, fields: TokenLedgerSizing) -> GuardReading:
    """Prefill time of patient prompts that are pending. One by itself may take longer: `first_token` judges it, and on a
    slow engine every prompt is long."""
    value = (scene.pending_patient + asked.computed_tokens) * model.prefill_s_per_token
    threshold = stall_threshold_s(scene, fields)
    return _reading(Guard.STALL, value, threshold if scene.pending_patient else max(threshold, value))


def longest_tokens(scene: Scene, model: StepModel, fields: TokenLedgerSizing, z: float) -> float:
    """No patient work with a longer prompt, none of it cached, is let in, whatever its tenant and however short its answer;
    inf: none is too long."""
    found = math.inf
    if scene.capacity_tokens is not None:
        nothing = Asked(0, 0, 0, None, NOTHING[: len(HORIZONS)], scene.variances)
        found = KV_SHARE * scene.capacity_tokens - max(needed(scene, nothing, z, patient=True))
    if scene.pending_patient and model.prefill_s_per_token > 0:
        found = min(found, stall_threshold_s(scene, fields) / model.prefill_s_per_token - scene.pending_patient)
    hypothesis, there = scene.hypothesis, (scene.sequences + 1, scene.held_tokens)
    pending = scene.pending_urgent + scene.pending_patient + scene.queued_tokens
    behind = urgent_behind(pending, *there, hypothesis, model, fields, scene.ttft_factor)
    if behind is not None and hypothesis.tokens is not None and (pending or not scene.oversize_due):
        most = model.pending_tokens(behind[1] / _doubt(model, scene.ttft_factor), *there)
        found = min(found, most - pending - hypothesis.tokens)
    return found


def pipe(scene: Scene, asked: Asked, model: StepModel) -> GuardReading:
    """The thin pipe: time until the urgent prompts that are pending have their first tokens, without this work's, so that
    one always fits. It is no thinner than what a long prompt (p95) takes by itself: an engine that needs most of the
    objective for one prompt would else stand idle between two. The same for all works of one objective, so that a refused one
    refuses every longer one."""
    pending = scene.pending_urgent
    value = model.ttft_s(pending, scene.sequences, scene.held_tokens) if pending else 0.0
    usual = scene.hypothesis.tokens or 0.0
    if scene.hypothesis.slowdown is not None:  # its objective is about one prompt: steps would be nearly empty
        usual = max(usual, float(PIPE_TOKENS))
    usual_s = model.ttft_s(usual, scene.sequences, scene.held_tokens)
    return _reading(Guard.STALL, value, max(PIPE_SHARE * (asked.objective_s or math.inf), usual_s))


def memory(view: EngineView, scene: Scene, fields: TokenLedgerSizing) -> GuardReading | None:
    """Memory of the GPU, where it is told. An engine that fills its GPU on purpose is judged by how far its use has risen
    since."""
    free = view.gpu_memory_free_fraction
    if not free.known or free.value is None:
        return None
    usual = 0.0 if scene.usual_memory_fraction is None else scene.usual_memory_fraction
    return _reading(Guard.VRAM, 1 - free.value, max(1 - fields.memory_headroom, usual + MEMORY_DRIFT))


def heat(view: EngineView, fields: TokenLedgerSizing) -> list[GuardReading]:
    """Heat and power of the GPU, as far as they are told, for patient works: a hot card gets cooler by less of what can
    wait, and whoever is promised an answer is not late for its sake."""
    found = []
    margin_c, power = view.gpu_heat_margin_c, view.gpu_power_fraction
    if margin_c.known and margin_c.value is not None:
        found.append(_reading(Guard.THERMAL, -margin_c.value, -fields.heat_margin_c))
    if fields.power_at is not None and power.known and power.value is not None:
        found.append(_reading(Guard.POWER, power.value, fields.power_at))
    return found


def stall_threshold_s(scene: Scene, fields: TokenLedgerSizing) -> float:
    return max(fields.stall_s, STALL_SHARE * (scene.hypothesis.objective_s or 0.0))


def _reading(guard: Guard, value: float, threshold: float) -> GuardReading:
    return GuardReading(guard, value, threshold, value <= threshold)
