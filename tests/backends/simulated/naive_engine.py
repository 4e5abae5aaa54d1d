"""The same engine written the slow and plain way, sequence by sequence and step by step, to hold the fast one against.

It shares no code with the real one but the step formula, which it spells out again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from backends.simulated.continuous import ContinuousLimits, SchedulingPolicy
from backends.simulated.step_model import StepModel


@dataclass(eq=False)
class NaiveBlock:
    name: int | None = None
    holders: int = 0


@dataclass(eq=False)
class NaiveSequence:
    number: int
    prompt: int
    output: int
    priority: int
    arrival_s: float
    abort_s: float = math.inf
    names: tuple[int, ...] = ()
    kv: int = 0
    table: list[NaiveBlock] = field(default_factory=list)
    generated: int = 0
    prefilled: bool = False
    first_s: float = math.nan
    end_s: float = math.nan
    preemptions: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated

    @property
    def urgency(self) -> tuple[int, float, int]:
        return (self.priority, self.arrival_s, self.number)


@dataclass
class NaiveEngine:
    limits: ContinuousLimits
    model: StepModel
    lookahead: bool = False
    running: list[NaiveSequence] = field(default_factory=list)
    waiting: list[NaiveSequence] = field(default_factory=list)
    steps: int = 0
    preemptions: int = 0
    recomputed: int = 0
    hits: int = 0
    free: list[NaiveBlock] = field(default_factory=list)
    known: dict[int, NaiveBlock] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = [NaiveBlock() for _ in range(self.limits.usable_blocks)]

    def run(self, arrivals: list[NaiveSequence]) -> None:
        """Play all arrivals (in order of arrival_s) to their ends."""
        coming = list(arrivals)
        taken: list[NaiveSequence] = []
        leaving = sorted((one for one in arrivals if one.abort_s < math.inf), key=lambda one: one.abort_s)
        clock_s = 0.0
        while coming or taken or self.waiting or self.running:
            self.waiting += taken
            taken = []
            while coming and coming[0].arrival_s <= clock_s:
                taken.append(coming.pop(0))
            while leaving and leaving[0].abort_s <= clock_s:
                self._drop(leaving.pop(0), coming, taken)
            if not self.lookahead or not (self.running or self.waiting):
                self.waiting += taken
                taken = []
            if not self.running and not self.waiting:
                clock_s = min(
                    [one.arrival_s for one in coming[:1]] + [one.abort_s for one in leaving[:1]], default=clock_s
                )
                if not coming and not leaving:
                    return
                continue
            clock_s = self._step(clock_s)

    def _drop(self, one: NaiveSequence, *places: list[NaiveSequence]) -> None:
        for place in (self.running, self.waiting, *places):
            if one in place:
                place.remove(one)
        self._give_back(one)

    def _give_back(self, one: NaiveSequence) -> None:
        unnamed = [block for block in one.table if block.name is None]
        named = [block for block in reversed(one.table) if block.name is not None]
        for block in unnamed + named:
            block.holders -= 1
            if not block.holders:
                self.free.append(block)
        one.table = []

    def _grow(self, one: NaiveSequence, tokens: int) -> None:
        while len(one.table) < self._need(tokens):
            block = self.free.pop(0)
            if block.name is not None:
                del self.known[block.name]
            block.name, block.holders = None, 1
            one.table.append(block)
        if self.limits.prefix_caching:
            size = self.limits.block_tokens
            for number, name in list(enumerate(one.names))[one.kv // size : tokens // size]:
                if name not in self.known:
                    one.table[number].name = name
                    self.known[name] = one.table[number]

    def _found(self, one: NaiveSequence) -> list[NaiveBlock]:
        found: list[NaiveBlock] = []
        for name in one.names:
            room = (len(found) + 1) * self.limits.block_tokens < one.tokens
            if not (self.limits.prefix_caching and room and name in self.known):
                break
            found.append(self.known[name])
        return found

    def _need(self, tokens: int) -> int:
        return math.ceil(tokens / self.limits.block_tokens)

    def _preempt(self) -> NaiveSequence:
        if self.limits.scheduling_policy is SchedulingPolicy.PRIORITY:
            victim = max(self.running, key=lambda one: one.urgency)
        else:
            victim = self.running[-1]
        self.running.remove(victim)
        self.preemptions += 1
        self.recomputed += victim.kv
        victim.preemptions += 1
        victim.kv = 0
        self._give_back(victim)
        victim.prefilled = False
        self.waiting.insert(0, victim)
        return victim

    def _step(self, clock_s: float) -> float:
        work = self._round()
        while not work:
            work = self._round()
        return self._compute(work, clock_s)

    def _round(self) -> dict[NaiveSequence, int]:
        if self.limits.scheduling_policy is SchedulingPolicy.PRIORITY:
            self.waiting.sort(key=lambda one: one.urgency)
        budget = self.limits.max_num_batched_tokens
        work: dict[NaiveSequence, int] = {}
        preempted = False
        for one in list(self.running):
            if one not in self.running:
                continue
            tokens = min(one.tokens - one.kv, budget)
            if tokens == 0:
                continue
            while self._need(one.kv + tokens) - len(one.table) > len(self.free):
                victim = self._preempt()
                preempted = True
                budget += work.pop(victim, 0)
                if victim is one:
                    break
            if one not in self.running:
                break
            self._grow(one, one.kv + tokens)
            work[one] = tokens
            budget -= tokens
        if self.limits.scheduling_policy is SchedulingPolicy.PRIORITY:
            self.waiting.sort(key=lambda one: one.urgency)
        while not preempted and self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            head = self.waiting[0]
            found = self._found(head)
            cached = len(found) * self.limits.block_tokens
            tokens = min(head.tokens - cached, budget)
            fit = head.tokens if self.limits.reserve_full_prompt else cached + tokens
            idle = sum(not block.holders for block in found)
            if self._need(fit) - len(found) + idle > len(self.free):
                break
            self.waiting.pop(0)
            self.running.append(head)
            for block in found:
                if not block.holders:
                    self.free.remove(block)
                block.holders += 1
            head.table, head.kv = found, cached
            self.hits += cached if not head.preemptions else 0
            self._grow(head, cached + tokens)
            work[head] = tokens
            budget -= tokens
        return work

    def _compute(self, work: dict[NaiveSequence, int], clock_s: float) -> float:
        end_s = clock_s + self._duration_s(work)
        self.steps += 1
        for one, tokens in work.items():
            one.kv += tokens
            if one.kv < one.tokens:
                continue
            one.generated += 1
            one.prefilled = True
            if one.generated == 1:
                one.first_s = end_s
            if one.generated == one.output:
                one.end_s = end_s
                self._give_back(one)
                self.running.remove(one)
        return end_s

    def _duration_s(self, work: dict[NaiveSequence, int]) -> float:
        m = self.model
        decoding = [one for one in work if one.prefilled]
        chunks = [(work[one], one.kv) for one in work if one not in decoding]
        n = len(decoding) + sum(tokens for tokens, _ in chunks)
        context = sum(one.kv for one in decoding)
        attention = sum(tokens * (before + tokens / 2) for tokens, before in chunks)
        step_ms = max(m.a + m.b * n, m.d + m.e * n) + m.c * context + m.f * attention + m.h0 + m.h1 * len(decoding)
        return step_ms / 1000
