"""The words the decision core speaks: what waits, what an engine looks like, what was decided and why.

Every value here is immutable and free of I/O, so that the same decision can be made from live traffic, from a
recorded trace in virtual time, or in a test. Metrics, the recorder, the why-records and the console read only
these types.

Times are seconds on the *pool clock* (this process's estimate of Redis TIME, see `gateway.clock`): the one clock
that every process sharing a pool agrees on. Token counts of prompts are estimates until an engine reports usage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple


class Quality(StrEnum):
    """How far a reading can be trusted. Anything but FRESH must not be read as a plain number."""

    FRESH = "fresh"
    STALE = "stale"
    MISSING = "missing"
    FROZEN = "frozen"
    ABSURD = "absurd"


@dataclass(frozen=True, slots=True)
class Reading:
    """One signal of an engine as a policy sees it: never a bare number, since unknown is not zero.

    value    in the unit the field's name says; None when never seen or dropped as absurd
    age_s    seconds since it was measured; inf when never seen
    """

    value: float | None
    age_s: float
    quality: Quality

    @property
    def known(self) -> bool:
        """True when the value may be used as it stands."""
        return self.quality is Quality.FRESH and self.value is not None


UNKNOWN = Reading(None, math.inf, Quality.MISSING)


class BodyAt(StrEnum):
    """Who can produce a work's body again: the process that holds its socket, or the blob store."""

    OWNER = "owner"
    BLOB = "blob"


@dataclass(frozen=True, slots=True)
class Work:
    """One schedulable unit: what the queue orders and the dispatcher places. Carries no prompt text.

    path            engine route, e.g. "/v1/chat/completions"; an engine gets only paths that it speaks
    model           model name as the engine knows it (aliases already resolved)
    prompt_tokens   estimate, >= 0, over all prompts of the request
    max_tokens      the client's output limit per sequence; None when it set none
    sequences       sequences the engine will decode for it (prompts x n), >= 1
    accepted_s      pool time at which the gateway took responsibility
    deadline_s      pool time by which the first token is due; None for a class without a TTFT objective
    finish_by_s     of a class without one: pool time by which the whole answer is due; None: at any time
    rank            order inside its (class, tenant), low first; the queue orders by nothing else
    attempt         tries already made, >= 0
    streams         its answer is streamed: a first token is seen when it is made, and not only with the last
    prefix          how its request begins: digests of its first 1, 2, 4, ... KiB with dots between, "" for a short one; two
                    with an equal digest probably share so much of their prompts
    cached_tokens   of its prompt, what predictions count on finding in the prefix cache of the engine that it is asked about,
                    or granted for; in the queue nobody knows which, and it is 0. They take memory, and no time
    pinned_engine   only this engine will do (a stored response lives there); None: any
    avoid           engines that already failed this work
    """

    id: str
    class_name: str
    tenant: str
    model: str
    path: str
    accepted_s: float
    rank: float
    prompt_tokens: int = 0
    max_tokens: int | None = None
    sequences: int = 1
    deadline_s: float | None = None
    attempt: int = 0
    body: BodyAt = BodyAt.OWNER
    pinned_engine: str | None = None
    avoid: frozenset[str] = frozenset()
    prefix: str = ""
    finish_by_s: float | None = None
    streams: bool = True
    cached_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the engine has to take in; >= 0."""
        return self.prompt_tokens - self.cached_tokens


def _any_path(_path: str) -> bool:
    return True


class EngineState(StrEnum):
    """Whether an engine may be given work."""

    UP = "up"
    STARTING = "starting"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine as the policies see it: polled readings beside the gateway's own ledger, never mixed.

    The ledger half (in_flight, kv_tokens, prefill_tokens) is exact about what *we* sent and runs ahead of the
    polled half, which is seconds old. Holds nothing the outside could not know: no true output length, no
    parameter of the engine's step model.

    in_flight        works sent and not ended, and works that other processes may start without asking, by class name
    on_credit        how many of these nobody is known to run: credit and floors of processes that are heard of
    extra_sequences  sequences that these works decode beyond one each, by class name, where we count works one by one
    kv_tokens        prompt + generated tokens of our works in flight, in whole blocks
    prefill_tokens   prompt tokens of our works that have shown no first token yet
    placed_tokens    those of them that are counted here by `with_more` alone, by class name
    preemptions_total, prompt_tokens_total, generation_tokens_total   the engine's counters, since it started
    prefix_hits_total   prompt tokens that it found in its prefix cache, since it started
    start_time_s     of the engine's process, on a clock of its own: only a change of it means something
    gpu_busy_fraction, gpu_power_fraction   of the time, and of the power limit, of the busiest and hungriest GPU
    gpu_heat_margin_c                       degrees that the hottest GPU is below the temperature at which it slows down
    gpu_memory_free_fraction                of the GPU with the least; gpu_memory_free_bytes: n times that GPU's
    gpu_power_w, gpu_temperature_c          summed over the engine's GPUs, and of the hottest
    gpu_throttled                           1 while some GPU holds its clocks down for heat or power, else 0
    gpu_slowed                              1 while some GPU does so to protect itself, else 0: its power cap alone does not count
    gpu_energy_j_total                      used since the pool's leader began to measure; falls when another leads
    spot             its machine may be taken away by its owner at short notice
    canary           part of the works that could run there that may, 1 for all
    speaks           whether the engine serves a path natively; an engine gets only works whose path it speaks
    """

    name: str
    state: EngineState
    models: frozenset[str]
    in_flight: Mapping[str, int] = field(default_factory=dict)
    kv_tokens: int = 0
    prefill_tokens: int = 0
    kv_used_fraction: Reading = UNKNOWN
    kv_capacity_tokens: Reading = UNKNOWN
    running: Reading = UNKNOWN
    waiting: Reading = UNKNOWN
    seats: Reading = UNKNOWN
    max_model_len: Reading = UNKNOWN
    kv_block_tokens: Reading = UNKNOWN
    preemptions_total: Reading = UNKNOWN
    prompt_tokens_total: Reading = UNKNOWN
    generation_tokens_total: Reading = UNKNOWN
    prefix_hits_total: Reading = UNKNOWN
    start_time_s: Reading = UNKNOWN
    gpu_busy_fraction: Reading = UNKNOWN
    gpu_power_fraction: Reading = UNKNOWN
    gpu_heat_margin_c: Reading = UNKNOWN
    gpu_memory_free_fraction: Reading = UNKNOWN
    gpu_memory_free_bytes: Reading = UNKNOWN
    gpu_power_w: Reading = UNKNOWN
    gpu_temperature_c: Reading = UNKNOWN
    gpu_throttled: Reading = UNKNOWN
    gpu_slowed: Reading = UNKNOWN
    gpu_energy_j_total: Reading = UNKNOWN
    extra_sequences: Mapping[str, int] = field(default_factory=dict)
    placed_tokens: Mapping[str, int] = field(default_factory=dict)
    on_credit: int = 0
    spot: bool = False
    canary: float = 1.0
    speaks: Callable[[str], bool] = field(default=_any_path, compare=False, repr=False)

    @property
    def in_flight_total(self) -> int:
        """Works of every class that are counted here."""
        return sum(self.in_flight.values())

    @property
    def idle(self) -> bool:
        """Nothing of ours runs here. What others may start without asking does not keep an engine busy."""
        return self.in_flight_total <= self.on_credit

    def sequences(self, class_name: str) -> int:
        """Sequences of a class's works here: what they take of a window, and of an engine's seats."""
        return self.in_flight.get(class_name, 0) + self.extra_sequences.get(class_name, 0)

    @property
    def sequences_total(self) -> int:
        """Sequences of all works here."""
        return sum(self.in_flight.values()) + sum(self.extra_sequences.values())

    def with_more(self, work: Work, works: int = 1) -> EngineView:
        """The engine once so many works like this one have been placed here, before anything is sent."""
        name, computed_tokens = work.class_name, works * work.computed_tokens
        extra = self.extra_sequences
        if work.sequences > 1:
            extra = {**extra, name: extra.get(name, 0) + works * (work.sequences - 1)}
        return replace(
            self,
            in_flight={**self.in_flight, name: self.in_flight.get(name, 0) + works},
            extra_sequences=extra,
            kv_tokens=self.kv_tokens + works * work.prompt_tokens,
            prefill_tokens=self.prefill_tokens + computed_tokens,
            placed_tokens={**self.placed_tokens, name: self.placed_tokens.get(name, 0) + computed_tokens},
        )


class Guard(StrEnum):
    """Names of the guards that may bind a decision (architecture.md, section 3)."""

    NONE = "none"
    KV = "kv"
    VRAM = "vram"
    SEATS = "seats"
    TTFT = "ttft"
    STALL = "stall"
    TPOT = "tpot"
    KNEE = "knee"
    POWER = "power"
    THERMAL = "thermal"
    ENERGY = "energy"
    LOAD = "load"
    SHARE = "share"
    STALE = "stale"
    CREDIT = "credit"
    WINDOW = "window"


class GuardReading(NamedTuple):
    """One guard's value against its threshold at the moment of a decision; `passed` is value <= threshold. A tuple: ten are
    made for every engine that a work is offered to."""

    guard: Guard
    value: float
    threshold: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """A sizing policy's answer to "may this engine take this work now?", with every guard it consulted.

    steps_to_overflow   with the work on the engine: the fewest of its steps for which KV memory is forecast not to
                        suffice; inf for none, None where nothing is forecast
    first_token_s       predicted from now to the work's first token; None where it is not, or does not matter to its class
    longest_tokens      a work of the same class with more prompt tokens, none of them cached, is refused here as well, until a
                        prompt has been taken in or something has ended; inf: not known
    """

    admitted: bool
    guards: tuple[GuardReading, ...] = ()
    steps_to_overflow: float | None = None
    first_token_s: float | None = None
    longest_tokens: float = math.inf

    @staticmethod
    def of(
        readings: Iterable[GuardReading], steps_to_overflow: float | None = None, first_token_s: float | None = None
    ) -> Verdict:
        """Admitted when every reading passed. Of several readings of one guard the one with the least room is told."""
        found: dict[Guard, GuardReading] = {}
        for one in readings:
            before = found.get(one.guard)
            if before is None or one.threshold - one.value < before.threshold - before.value:
                found[one.guard] = one
        return Verdict(
            all(one.passed for one in found.values()), tuple(found.values()), steps_to_overflow, first_token_s
        )

    @property
    def binding(self) -> Guard:
        """The first guard that refused, else NONE."""
        for reading in self.guards:
            if not reading.passed:
                return reading.guard
        return Guard.NONE


class Action(StrEnum):
    """What a decision did."""

    CLASSIFY = "classify"
    DISPATCH = "dispatch"
    SHED = "shed"
    PREEMPT = "preempt"


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision and its reasons: the record behind the metric, the log, the response header and the console.

    engine is "" and work_id is "" where the decision names none. policy_version is the content hash of the one
    policy snapshot it was made under. steps_to_overflow and first_token_s are the engine's, see `Verdict`;
    cached_tokens is what its prefix cache probably holds of the prompt, known to be so or not.
    """

    action: Action
    at_s: float
    policy_version: str
    class_name: str = ""
    engine: str = ""
    work_id: str = ""
    binding: Guard = Guard.NONE
    guards: tuple[GuardReading, ...] = ()
    reason: str = ""
    steps_to_overflow: float | None = None
    first_token_s: float | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DispatchBatch:
    """What one round sends to one engine together, and why not more.

    works      by class name
    sequences  that the engine will decode for them
    binding    the guard that refused the last work that was asked for and found no room there; NONE: none did
    """

    at_s: float
    engine: str
    works: Mapping[str, int]
    sequences: int
    prompt_tokens: int
    binding: Guard = Guard.NONE


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave for one work to start on one engine.

    epoch        the leader's epoch; an owner refuses one below the highest it has seen
    attempt      1 for the first try; (work_id, attempt) names one attempt
    expires_s    pool time after which the owner must not start it
    """

    work_id: str
    engine: str
    epoch: int
    attempt: int
    expires_s: float


class Result(StrEnum):
    """How a work ended. Exactly one per accepted work."""

    COMPLETED = "completed"
    CLIENT_ERROR = "client_error"
    CANCELLED = "cancelled"
    SHED = "shed"
    ENGINE_FAILED = "engine_failed"
    TIMED_OUT = "timed_out"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one work, written once, by its owner.

    reason           a short stable word: a shed reason, a failed timer's name, an engine fault's kind; "" if none
    status           HTTP status the client saw (499: it left before any)
    prompt_tokens    from usage when the engine sent it, else the estimate
    output_tokens    from usage, else the counted token-bearing events
    queued_s         accepted to granted; None when never granted
    ttft_s           accepted to first content byte written to the client; None when there was none
    engine_ttft_s    sent to first content byte from the engine, last attempt; None when there was none
    total_s          accepted to settled
    cached_tokens    of the prompt, found in the engine's prefix cache, from usage; None when the engine did not say
    """

    work_id: str
    class_name: str
    tenant: str
    model: str
    engine: str
    result: Result
    reason: str
    status: int
    attempts: int
    prompt_tokens: int
    output_tokens: int
    total_s: float
    queued_s: float | None = None
    ttft_s: float | None = None
    engine_ttft_s: float | None = None
    cached_tokens: int | None = None
