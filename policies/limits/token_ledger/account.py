"""What one engine holds of ours, and what it will: the state that the guards of `token_ledger` read.

Every attempt that we hear of one by one has an entry with its forecast, mean and variance, in two columns for each of
HORIZONS: how many tokens it still makes by then, and how many it then holds, which is nothing once it has ended. The first
is what memory needs if nobody ends, the second forgets the peak on the way there; either bounds what will be needed, the
first better for few steps and the second for many. The sums are kept as works come, show a first token and go, so that an
admission looks at no single work; every control tick, which brings new token counts, makes all of them anew. Works that
the view counts beyond the entries (placed in this round, or running in other processes) weigh what their class weighs on average.

A tenant's lengths go together (CORRELATION), so its variance counts more the more works it has here: for n of one tenant
with variances that sum to V it is V·(1 + CORRELATION·(n - 1)).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from policies.estimators.correction import Correction
from policies.estimators.offset import OffsetFilter
from policies.estimators.pace import taken_in_factor
from policies.estimators.step_model import StepModel, ttft_steps
from policies.estimators.survival import HORIZONS, Key, Lengths, levels
from policies.limits.token_ledger.load import UrgentLoad
from policies.sizing import FirstToken, Running
from policies.vocabulary import EngineView, Work

COLUMNS = 2 * len(HORIZONS)
NOTHING = (0.0,) * COLUMNS
CORRELATION = 0.1
GAP_WINDOW_S = 1.0
GAP_WEIGHT = 0.2
"""Of one window's gap in `lately_gap_s`: an objective on gaps is about the mean of an answer, which runs for seconds."""
LEAST_STEPS = 4.0
SPLIT_SHARE = 0.3
"""Of the prompts taken in during a window, at most so much may have been pending at its ends: what part of those was taken
in meanwhile nobody knows."""
PEAK_KEPT_S = 600
"""Seconds of which the peak of the urgent classes' memory is remembered."""
UNHINDERED_KEPT = 1024
LEAST_UNHINDERED = 20
FIRST_TOKENS_S = 10.0
UNHINDERED = 1.25
"""A work behind which no more than so many times its own prompt is pending tells of the engine and not of the queue in it."""
LEAST_FIRST_TOKENS = 5
WHOLE_AFTER_S = 30.0
"""Answers that are told whole teach how long steps take while no first token was seen for so long: they say less exactly, what ran
beside them for all their time being known at its ends alone."""
LATE_SHARE = 0.9
"""Of the time allowed, in the engine alone: more is late."""

Forecast = tuple[float, ...]
AttemptKey = tuple[str, int]


def forecast(work: Work, shown_tokens: int, keys: Iterable[Key], lengths: Lengths) -> tuple[Forecast, Forecast]:
    """(means, variances) of a work's columns, its sequences together."""
    survival, sequences = lengths.of(keys), work.sequences
    shown = shown_tokens / sequences
    held = work.prompt_tokens / sequences + shown
    means, variances, survives = survival.ahead(shown)
    if work.max_tokens is not None and work.max_tokens - shown < HORIZONS[-1]:
        left = max(0.0, work.max_tokens - shown)
        mean, variance, _ = survival.growth(shown, left)
        inside = sum(horizon < left for horizon in HORIZONS)
        beyond = len(HORIZONS) - inside
        means = means[:inside] + (mean,) * beyond
        variances = variances[:inside] + (variance,) * beyond
        survives = survives[:inside] + (0.0,) * beyond
    then = [(held + horizon) * runs for horizon, runs in zip(HORIZONS, survives, strict=True)]
    spread = [(held + horizon) * one * (1 - runs) for horizon, one, runs in zip(HORIZONS, then, survives, strict=True)]
    if sequences == 1:
        return (*means, *then), (*variances, *spread)
    return (
        tuple(sequences * one for one in (*means, *then)),
        tuple(sequences * one for one in (*variances, *spread)),
    )


def newcomer(work: Work, keys: Iterable[Key], lengths: Lengths) -> tuple[Forecast, Forecast]:
    """(means, variances) by HORIZONS of a work that is not here yet: what it makes. Its prompt is counted by itself."""
    means, variances = forecast(work, 0, keys, lengths)
    return means[: len(HORIZONS)], variances[: len(HORIZONS)]


@dataclass(slots=True)
class Entry:
    """One attempt. `behind` is what its first token is predicted from: prompt tokens to compute, its own included, the
    sequences and the tokens that were there when it was granted; `without_patient`: the same, had nothing without an
    objective been there; None: nothing was. `assumed`: no first token was seen, but it must have been made by
    now; an answer that is not streamed shows none before its end. `arrived_tokens`: as `Account` had counted when it was granted."""

    work: Work
    keys: tuple[Key, Key, Key]
    urgent: bool
    behind: tuple[float, float, float]
    without_patient: tuple[float, float, float] | None
    granted_s: float
    shown_tokens: int = 0
    prefilled: bool = False
    assumed: bool = False
    window_tokens: int | None = None
    arrived_tokens: int = 0
    means: Forecast = NOTHING
    variances: Forecast = NOTHING


@dataclass(slots=True)
class Tenancy:
    """A tenant's works on the engine, and the sums of their variances."""

    works: int = 0
    variances: list[float] = field(default_factory=lambda: [0.0] * COLUMNS)


@dataclass(slots=True)
class Sums:
    """What the entries add up to. held: prompt and shown tokens; sequences: that the works decode; assumed: prompts without a
    first token that must have had it; pending_prompts: the other prompts without one; pending_urgent, _patient: what of these is
    to be computed, not being cached. variances: with every tenant's correlation in them."""

    works: dict[str, int] = field(default_factory=dict)
    means: list[float] = field(default_factory=lambda: [0.0] * COLUMNS)
    variances: list[float] = field(default_factory=lambda: [0.0] * COLUMNS)
    tenants: dict[str, Tenancy] = field(default_factory=dict)
    held_tokens: int = 0
    sequences: int = 0
    pending_urgent: int = 0
    pending_patient: int = 0
    pending_prompts: int = 0
    assumed: int = 0

    @staticmethod
    def of(entries: Iterable[Entry]) -> Sums:
        """All sums at once, O(entries)."""
        sums = Sums()
        for entry in entries:
            tenancy = sums._add(entry, 1)
            tenancy.works += 1
            tenancy.variances = [a + b for a, b in zip(tenancy.variances, entry.variances, strict=True)]
        for tenancy in sums.tenants.values():
            factor = 1 + CORRELATION * (tenancy.works - 1)
            sums.variances = [a + factor * b for a, b in zip(sums.variances, tenancy.variances, strict=True)]
        return sums

    def count(self, entry: Entry, sign: int) -> None:
        """Add an entry with its forecast, or take it out, O(1)."""
        tenancy = self._add(entry, sign)
        others = tenancy.works if sign > 0 else tenancy.works - 1
        factor = 1 + CORRELATION * others
        before, own = tenancy.variances, entry.variances
        alone = before if sign > 0 else [a - b for a, b in zip(before, own, strict=True)]
        if others:
            self.variances = [
                total + sign * (factor * one + CORRELATION * other)
                for total, one, other in zip(self.variances, own, alone, strict=True)
            ]
        else:
            self.variances = [total + sign * one for total, one in zip(self.variances, own, strict=True)]
        tenancy.works += sign
        tenancy.variances = [a + b for a, b in zip(before, own, strict=True)] if sign > 0 else alone
        if not tenancy.works:
            del self.tenants[entry.work.tenant]

    def variances_with(self, tenant: str, own: Forecast, variances: Sequence[float]) -> Forecast:
        """Variances by columns once one work more of the tenant is here, O(1). own: the work's, by HORIZONS; variances:
        those of all that is there now."""
        tenancy = self.tenants.get(tenant)
        if tenancy is None:
            return tuple([total + one for total, one in zip(variances, own + own, strict=True)])
        factor = 1 + CORRELATION * tenancy.works
        return tuple(
            [
                total + factor * one + CORRELATION * other
                for total, one, other in zip(variances, own + own, tenancy.variances, strict=True)
            ]
        )

    def _add(self, entry: Entry, sign: int) -> Tenancy:
        """All but variances."""
        work = entry.work
        self.held_tokens += sign * (work.prompt_tokens + entry.shown_tokens)
        self.sequences += sign * work.sequences
        self.works[work.class_name] = self.works.get(work.class_name, 0) + sign
        if not entry.prefilled:
            self.prefill(entry, sign)
        if sign > 0:
            self.means = [a + b for a, b in zip(self.means, entry.means, strict=True)]
        else:
            self.means = [a - b for a, b in zip(self.means, entry.means, strict=True)]
        tenancy = self.tenants.get(work.tenant)
        if tenancy is None:
            tenancy = self.tenants[work.tenant] = Tenancy()
        return tenancy

    def prefill(self, entry: Entry, sign: int) -> None:
        """Count a prompt as pending, or no more."""
        work = entry.work
        if entry.assumed:
            self.assumed += sign * work.prompt_tokens
            return
        if entry.urgent:
            self.pending_urgent += sign * work.computed_tokens
        else:
            self.pending_patient += sign * work.computed_tokens
        self.pending_prompts += sign * work.prompt_tokens


class Account:
    """See the module header. One per engine."""

    __slots__ = (
        "_arrived_tokens",
        "_gap_pending",
        "_gap_prompts",
        "_gap_since_s",
        "_lengths",
        "_peak_sequences",
        "_peaks",
        "_told_s",
        "_unhindered",
        "_urgent",
        "correction",
        "entries",
        "first_tokens",
        "gap_s",
        "lately_gap_s",
        "offset",
        "step",
        "sums",
        "urgent_load",
        "urgent_peak_sequences",
        "urgent_peak_tokens",
        "urgent_sequences",
        "urgent_tokens",
        "usual_s",
    )

    def __init__(self, urgent: frozenset[str], lengths: Lengths) -> None:
        self._urgent, self._lengths = urgent, lengths
        self.entries: dict[AttemptKey, Entry] = {}
        self.sums = Sums()
        self.step = StepModel()
        self.correction = Correction()
        self.offset = OffsetFilter()
        self.urgent_tokens = 0
        self.urgent_peak_tokens = 0.0
        self.urgent_sequences = self.urgent_peak_sequences = 0
        self.gap_s: float | None = None
        self.lately_gap_s: float | None = None
        self.first_tokens: deque[tuple[float, float, bool]] = deque()
        self._unhindered: deque[float] = deque(maxlen=UNHINDERED_KEPT)
        self.usual_s = 0.0
        self.urgent_load = UrgentLoad()
        self._peaks: deque[int] = deque(maxlen=PEAK_KEPT_S)
        self._peak_sequences: deque[int] = deque(maxlen=PEAK_KEPT_S)
        self._gap_since_s: float | None = None
        self._gap_prompts = 0
        self._gap_pending = 0
        self._arrived_tokens = 0
        self._told_s = -math.inf

    # -- what comes and goes -------------------------------------------------------------------------------------------

    def granted(self, work: Work, attempt: int, now_s: float) -> Entry:
        """Count an attempt. Idempotent."""
        key = (work.id, attempt)
        found = self.entries.get(key)
        if found is not None:
            return found
        sums = self.sums
        pending = sums.pending_urgent + sums.pending_patient + work.computed_tokens
        keys = levels(work.tenant, work.class_name, work.model)
        entry = Entry(
            work,
            keys,
            work.class_name in self._urgent,
            (pending, sums.sequences, sums.held_tokens),
            self._without_patient(work.computed_tokens),
            now_s,
        )
        entry.means, entry.variances = forecast(work, 0, keys, self._lengths)
        self._arrived_tokens += work.computed_tokens
        entry.arrived_tokens = self._arrived_tokens
        self.entries[key] = entry
        sums.count(entry, 1)
        return entry

    def first_token(self, event: FirstToken, now_s: float) -> None:
        entry = self.entries.get((event.work.id, event.attempt))
        if entry is None or entry.prefilled:
            return
        self.sums.prefill(entry, -1)
        entry.prefilled = True
        self._told_s = now_s
        self._gap_prompts += entry.work.computed_tokens
        if entry.behind[0] <= UNHINDERED * entry.work.computed_tokens:
            self.correction.saw(event.engine_ttft_s, self.step.ttft_s(*entry.behind), now_s)
        self.step.saw_first_token(event.engine_ttft_s, *entry.behind)
        work = event.work
        if work.deadline_s is not None and work.deadline_s > work.accepted_s:
            allowed_s = max(work.deadline_s - work.accepted_s, self.usual_s)
            # The engine's part alone: what a work waited in our queue no cut of what runs can bring back.
            self.first_tokens.append((now_s, event.engine_ttft_s / allowed_s, self._by_patient(entry, allowed_s)))

    def note_unhindered(self, computed_tokens: int, now_s: float) -> None:
        """A work of a class that promises a slowdown was granted: keep what its first token would take had no patient work been
        there. What waits in our queue may wait for their sake, and does not count."""
        pending = self.sums.pending_urgent
        self._unhindered.append(self.step.ttft_s(pending, self.urgent_sequences, self.urgent_tokens))
        self.urgent_load.granted(computed_tokens, now_s)

    def look_at_unhindered(self) -> float:
        """What 95 % of the noted works' first tokens would have taken at most; 0 for few."""
        ordered = sorted(self._unhindered)
        self.usual_s = ordered[int(0.95 * (len(ordered) - 1))] if len(ordered) >= LEAST_UNHINDERED else 0.0
        return self.usual_s

    def _without_patient(self, computed_tokens: int) -> tuple[float, float, float] | None:
        """`Entry.without_patient` of a work that is granted now; what urgent works hold is a tick old."""
        sums = self.sums
        if all(name in self._urgent or not count for name, count in sums.works.items()):
            return None
        return sums.pending_urgent + computed_tokens, self.urgent_sequences, self.urgent_tokens

    def _by_patient(self, entry: Entry, allowed_s: float) -> bool:
        """Whether fewer works without an objective could have made this first token early enough, as far as is known."""
        if entry.without_patient is None:
            return False
        return not self.step.sure or self.step.ttft_s(*entry.without_patient) <= LATE_SHARE * allowed_s

    def ended(self, work_id: str, attempt: int) -> Entry | None:
        """Forget an attempt; None if it was not known."""
        entry = self.entries.pop((work_id, attempt), None)
        if entry is not None:
            self.sums.count(entry, -1)
        return entry

    def whole_answer(self, entry: Entry, output_tokens: int, now_s: float) -> None:
        """An attempt whose answer was not streamed came to its good end: learn from the whole time where no first tokens tell.
        One without tokens (an embedding) is there as soon as its prompt is taken in."""
        if entry.prefilled or now_s - self._told_s < WHOLE_AFTER_S:
            return
        total_s, (pending, sequences, held) = now_s - entry.granted_s, entry.behind
        if output_tokens < 1:
            self.step.saw_first_token(total_s, pending, sequences, held)
            return
        steps = ttft_steps(pending, self.step.budget_tokens) + output_tokens - 1
        sums = self.sums
        later = self._arrived_tokens - entry.arrived_tokens - sums.pending_urgent - sums.pending_patient
        average = (sequences + sums.sequences) / 2, (held + sums.held_tokens) / 2
        self.step.saw_gap(total_s / steps, *average, (pending + max(0, later)) / steps)

    def progressed(self, running: Iterable[Running], now_s: float) -> None:
        """Take over how far each attempt is, and make all sums anew."""
        known, entries = self.entries, {}
        for one in running:
            key = (one.work.id, one.attempt)
            entry = known.get(key) or self.granted(one.work, one.attempt, now_s)
            entry.shown_tokens = one.shown_tokens
            entry.prefilled = one.prefilled
            if not one.prefilled:
                waited_s, first_s = now_s - entry.granted_s, self.step.ttft_s(*entry.behind)
                entry.assumed = waited_s > taken_in_factor(streams=one.work.streams) * first_s
                if entry.assumed and not one.shown_tokens:
                    entry.shown_tokens = self._unseen_tokens(one.work, waited_s - first_s)
            entries[key] = entry
        self.entries = entries
        self._look_at_gaps(now_s)
        self.refresh()
        while self.first_tokens and self.first_tokens[0][0] < now_s - FIRST_TOKENS_S:
            self.first_tokens.popleft()

    def _unseen_tokens(self, work: Work, decoding_s: float) -> int:
        """What an answer that is not streamed has come to by now: a token a step, within its limit."""
        step_s = self.step.step_s(self.sums.sequences, self.sums.held_tokens)
        made = decoding_s / step_s if step_s > 0 else 0.0
        return work.sequences * int(made if work.max_tokens is None else min(made, work.max_tokens))

    def refresh(self) -> None:
        """All forecasts and sums from the entries, O(works)."""
        self.urgent_tokens = self.urgent_sequences = 0
        for entry in self.entries.values():
            entry.means, entry.variances = forecast(entry.work, entry.shown_tokens, entry.keys, self._lengths)
            if entry.urgent:
                self.urgent_sequences += entry.work.sequences
                self.urgent_tokens += entry.work.prompt_tokens + entry.shown_tokens
        self.sums = Sums.of(self.entries.values())

    def note_peak(self, now_s: float) -> None:
        """Once a second: what the urgent classes hold; its 95th percentile over ten minutes is their peak."""
        self.urgent_load.look(now_s)
        self._peaks.append(self.urgent_tokens)
        self._peak_sequences.append(self.urgent_sequences)
        at = int(0.95 * (len(self._peaks) - 1))
        self.urgent_peak_tokens = float(sorted(self._peaks)[at])
        self.urgent_peak_sequences = sorted(self._peak_sequences)[at]

    def _look_at_gaps(self, now_s: float) -> None:
        """Learn steps from the tokens that works made in a window: who decoded all through it made one a step."""
        since_s = self._gap_since_s
        if since_s is not None and now_s - since_s < GAP_WINDOW_S:
            return
        pending = sum(one.work.computed_tokens for one in self.entries.values() if not (one.prefilled or one.assumed))
        made = [
            entry.shown_tokens - entry.window_tokens
            for entry in self.entries.values()
            if entry.window_tokens is not None and entry.work.sequences == 1
        ]
        if since_s is not None and made:
            steps = median(made)
            decoding = [entry for entry in self.entries.values() if entry.prefilled]
            if steps >= LEAST_STEPS:
                self.gap_s = (now_s - since_s) / steps
                before_s = self.gap_s if self.lately_gap_s is None else self.lately_gap_s
                self.lately_gap_s = before_s + GAP_WEIGHT * (self.gap_s - before_s)
                if self._gap_pending + pending <= SPLIT_SHARE * self._gap_prompts:
                    held = sum(entry.work.prompt_tokens + entry.shown_tokens for entry in decoding)
                    sequences = sum(entry.work.sequences for entry in decoding)
                    self.step.saw_gap(self.gap_s, sequences, held, self._gap_prompts / steps)
        self._gap_since_s, self._gap_prompts, self._gap_pending = now_s, 0, pending
        for entry in self.entries.values():
            entry.window_tokens = entry.shown_tokens if entry.prefilled else None

    def lateness(self, share: float) -> float | None:
        """Of the latest works that had a deadline, the engine's part of the time allowed, as a quantile; None of few. Those
        that fewer works without an objective would not have helped count as early: no cut of these helps them."""
        if len(self.first_tokens) < LEAST_FIRST_TOKENS:
            return None
        ordered = sorted(used if by_patient else 0.0 for _, used, by_patient in self.first_tokens)
        return ordered[int(share * (len(ordered) - 1))]

    # -- what there is beyond the entries ------------------------------------------------------------------------------

    def beyond(self, view: EngineView) -> list[tuple[str, int]]:
        """Works that the view counts and that are no entries, by class, in the order of names."""
        works = self.sums.works
        return [
            (name, more) for name in sorted(view.in_flight) if (more := view.in_flight[name] - works.get(name, 0)) > 0
        ]

    def pending(self, view: EngineView, beyond: Sequence[tuple[str, int]]) -> tuple[float, float]:
        """Prompt tokens to be computed yet: of urgent works, of all others. Of prompts that are no entries, and that no round has
        placed, nobody here knows what is cached nor whose they are: they are others' once anything of others is there."""
        sums, placed = self.sums, view.placed_tokens
        urgent = sums.pending_urgent + sum(tokens for name, tokens in placed.items() if name in self._urgent)
        patient = sums.pending_patient + sum(tokens for name, tokens in placed.items() if name not in self._urgent)
        more = max(0, view.prefill_tokens - sums.pending_prompts - sums.assumed - sum(placed.values()))
        if any(name not in self._urgent for name, _ in beyond):
            return urgent, patient + more
        return urgent + more, patient

    def restarted(self) -> None:
        """The engine is a new process: its memory is empty, its machine is the same."""
        self.offset = OffsetFilter()

    def __repr__(self) -> str:
        return f"<Account works={len(self.entries)} {self.step!r} {self.offset!r}>"
