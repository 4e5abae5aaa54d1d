"""The policy document's shape, and the frozen `Policy` that every decision reads.

One declaration serves four readers: the checker (types and ranges, through pydantic), the decisions (plain frozen
dataclasses, attribute access only), `headrace policy show`, and docs/policies.md (a test compares them). A field is
here only when something acts on it.

A class is defined by its fields and never by its name: one with a TTFT objective is ordered by deadline, one without
waits for room but is guarded by `min_share` and `max_age_s`. Fractions are 0 to 1, times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from policies.vocabulary import Work

Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
SecondsFromZero = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(strict=True, gt=0, le=1000, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Times = Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)]
DegreesFromZero = Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, gt=0, lt=1, allow_inf_nan=False)]
Tolerance = Annotated[float, Field(strict=True, ge=1, le=10, allow_inf_nan=False)]
Ratio = Annotated[float, Field(strict=True, gt=1, le=1000, allow_inf_nan=False)]
Limit = Annotated[int, Field(strict=True, ge=2, le=1_000_000)]
Count = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]
CountFromZero = Annotated[int, Field(strict=True, ge=0, le=10_000_000)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1, max_length=256)]
Name = Annotated[str, Field(strict=True, pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
TenantName = Annotated[str, Field(strict=True, min_length=1, max_length=128)]

STRICT = ConfigDict(extra="forbid")

URGENT_BATCH = 8
"""Inputs of one work of a class with a TTFT objective: its first tokens come as fast as one prompt's, nearly."""
PATIENT_BATCH = 64
"""Inputs of one work of a class without: enough to fill an engine, few enough to end before the next decision matters."""


USUAL_BASE_S = 0.02
USUAL_PROMPT_TOKENS_PER_S = 15_000.0


def usual_alone_s(prompt_tokens: int) -> float:
    """What a prompt takes to its first token on an idle engine of which nothing is known: an 8B model on one A100."""
    return USUAL_BASE_S + prompt_tokens / USUAL_PROMPT_TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class Degrade:
    """What a work that cannot be in time is turned into. Left out: that stays as it is.

    model        another model, as engines know it; used where an engine serves it
    max_tokens   the longest answer; a shorter limit of the client's stays
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    model: Text | None = None
    max_tokens: Count | None = None


@dataclass(frozen=True, slots=True)
class ClassPolicy:
    """How the works of one class are treated.

    ttft_sla_s                time from accepted to first token that a client is promised; None: no objective
    ttft_sla_per_1k_tokens_s  added to it per 1,000 prompt tokens, since a long prompt cannot be fast
    ttft_slowdown             instead of both: times what the prompt is predicted to take on an idle engine
    tpot_sla_s                mean gap between tokens that its answers may have; None: no objective
    max_request_batch         prompts, texts or documents that one work may carry; a request with more is split.
                              None: 8 with an objective, 64 without
    on_infeasible             with an objective: what becomes of works that cannot be in time. "late": they go last; "shed":
                              they are answered 429; "degrade": they try once more as `degrade` says, and are late then
    degrade                   what on_infeasible: degrade makes of a work
    max_queue                 works that may wait; the next one is shed with 429
    max_wait_s                longest wait in our queue before a work is answered 503
    max_age_s                 without an objective: works about to be older go first; None: none does
    deadline_s                without an objective: time from accepted to the end of the answer that is promised; None: none
    preemptible               without an objective: running works may be given up, and begun anew, for those with one
    min_share                 without an objective: part of what is in flight that it is entitled to while it waits
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    ttft_sla_s: Seconds | None = None
    ttft_sla_per_1k_tokens_s: SecondsFromZero = 0.0
    ttft_slowdown: Ratio | None = None
    tpot_sla_s: Seconds | None = None
    max_request_batch: Count | None = None
    on_infeasible: Literal["late", "shed", "degrade"] = "late"
    degrade: Degrade = Degrade()
    max_queue: Count = 1000
    max_wait_s: Seconds = 120.0
    max_age_s: Seconds | None = 120.0
    deadline_s: Seconds | None = None
    min_share: Share = 0.05
    preemptible: Flag = True

    @property
    def has_ttft_objective(self) -> bool:
        """True for a class whose works are ordered by deadline."""
        return self.ttft_sla_s is not None or self.ttft_slowdown is not None

    @property
    def inputs_max(self) -> int:
        """`max_request_batch`, or what it comes to."""
        return self.max_request_batch or (URGENT_BATCH if self.has_ttft_objective else PATIENT_BATCH)

    def ttft_objective_s(self, prompt_tokens: int, alone_s: float | None = None) -> float | None:
        """Seconds from accepted to the first token's deadline for a prompt of this size; None without objective.

        alone_s   what the prompt takes on an idle engine, for `ttft_slowdown`; None: not known, what is usual
        """
        if self.ttft_slowdown is not None:
            return self.ttft_slowdown * (usual_alone_s(prompt_tokens) if alone_s is None else alone_s)
        if self.ttft_sla_s is None:
            return None
        return self.ttft_sla_s + self.ttft_sla_per_1k_tokens_s * prompt_tokens / 1000


@dataclass(frozen=True, slots=True)
class Rule:
    """One classify rule: all conditions that are given must hold. `*` in model and path matches any characters.

    class_name   class of the works that match
    class_from   instead: the request header whose value names the class
    header       header names with the values that they must have ("*": any value)
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    class_name: Annotated[Name | None, Field(alias="class")] = None
    class_from: Text | None = None
    header: Mapping[Text, Text] = field(default_factory=dict)
    service_tier: Text | None = None
    tenant: Text | None = None
    key_id: Text | None = None
    model: Text | None = None
    path: Text | None = None
    stream: Flag | None = None
    prompt_tokens_at_least: Count | None = None
    prompt_tokens_at_most: CountFromZero | None = None
    max_tokens_at_least: Count | None = None
    max_tokens_at_most: CountFromZero | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides when no rule matches: streamed or small works are light, the rest are heavy.

    light, heavy    classes for the two; None: the most urgent class, and the first without an objective
    small_*         all three bounds must hold for a work that is not streamed to be small (inclusive);
                    a work without max_tokens counts as within small_max_tokens
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    light: Name | None = None
    heavy: Name | None = None
    small_prompt_tokens: CountFromZero = 8192
    small_max_tokens: CountFromZero = 4096
    small_sequences: Count = 8


@dataclass(frozen=True, slots=True)
class Classify:
    """Which class a request gets: the first rule that matches, else its shape.

    rules   None: the X-Headrace-Class header, service_tier flex to the shape's heavy class, priority to the light one
    learn   where no rule matches, let the way in which a key's requests come and go correct the shape
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    rules: tuple[Rule, ...] | None = None
    shape: Shape = Shape()
    learn: Flag = True


@dataclass(frozen=True, slots=True)
class EngineWindows:
    """Windows of one engine that differ. Classes left out keep their proportion of `total`."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    total: Count | None = None
    windows: Mapping[Name, Count] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FixedSizing:
    """Windows that do not move: works in flight per engine.

    total      works of all classes together on one engine
    windows    per class; one left out gets `total` with a TTFT objective, else its part of a quarter of `total`
    engines    engines that differ, by name
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    total: Count = 64
    windows: Mapping[Name, Count] = field(default_factory=dict)
    engines: Mapping[Text, EngineWindows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AimdSizing:
    """One limit an engine, up by one and down by a part, on first tokens inside and outside their objective.

    start, least, most   works of all classes in flight on one engine
    backoff              what is left of the limit after a late first token
    cut_every_s          at most one cut in this time: the effect of a cut takes that long to show
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    start: Limit = 16
    least: Limit = 4
    most: Limit = 512
    backoff: Fraction = 0.9
    cut_every_s: SecondsFromZero = 2.0


@dataclass(frozen=True, slots=True)
class GradientSizing:
    """One limit an engine, from how first tokens of now compare with those of the long run (Gradient2).

    start, least, most   works of all classes in flight on one engine
    headroom             works added at each sample, so that the limit can grow while latency stands
    tolerance            times the long-run latency that count as no queueing
    smoothing            part of a new limit that is taken over at a sample
    long_samples         samples over which the long run is averaged
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    start: Limit = 20
    least: Limit = 4
    most: Limit = 512
    headroom: Count = 4
    tolerance: Tolerance = 1.5
    smoothing: Fraction = 0.2
    long_samples: Count = 600


@dataclass(frozen=True, slots=True)
class RulesSizing:
    """The operators' table: one limit an engine, judged every change_every_s. Any shrink wins over hold, hold over grow.

    start, least, most      works of all classes in flight on one engine
    grow_by, shrink_to      part added (at least one work), and what is left
    gpu_busy_below          row 1: the GPU is idle at times; grow if works are queued
    agree_within            row 1: arrivals and completions over agree_over_s differ by less than this part: hold
    kv_free_above           row 2: free KV memory that lets grow
    kv_hold_from, _to       row 2: used KV memory that lets hold
    runout_steps            row 2: engine steps within which free KV memory must not run out, else shrink
    dead_time_s             what telemetry and engine take to show a change; the least horizon of a projection
    heat_margin_c           row 4: degrees below the slow-down temperature that count as at the limit
    power_at                row 4: part of the power limit that counts as at the limit
    queue_short, queue_long row 5: works waiting in our queue
    kv_free_below           row 5: free KV memory that is tight
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    start: Limit = 8
    least: Limit = 4
    most: Limit = 512
    change_every_s: Seconds = 1.0
    grow_by: Fraction = 0.05
    shrink_to: Fraction = 0.7
    gpu_busy_below: Share = 0.7
    agree_within: Share = 0.1
    agree_over_s: Seconds = 30.0
    kv_free_above: Share = 0.3
    kv_hold_from: Share = 0.4
    kv_hold_to: Share = 0.6
    runout_steps: Count = 5
    dead_time_s: Seconds = 2.0
    heat_margin_c: DegreesFromZero = 3.0
    power_at: Share = 0.95
    queue_short: CountFromZero = 4
    queue_long: CountFromZero = 64
    kv_free_below: Share = 0.1


@dataclass(frozen=True, slots=True)
class TokenLedgerSizing:
    """KV tokens held and still to come, against what the engine has; the rest is learned.

    start, most          works without TTFT objective in flight on one engine: at first, and at most
    kv_risk              chance of running out of KV memory that one admission may take
    reserve              times the KV memory kept free for urgent works to come that keeps those late for it within kv_risk
    caution              part of the TTFT objective that a prompt arriving now may be predicted to need behind bulk
    stall_s              time that prompts without objective may hold up everything else
    knee_ratio           times an empty engine's step that a step may take; throughput is 1 - 1/ratio of the most
    memory_headroom      part of GPU memory to be kept free, where the engine leaves so much
    heat_margin_c        degrees below the slow-down temperature that count as at the limit
    power_at             part of the GPU's power limit past which bulk is cut back; None: power does not matter
    burst_wait_s         longest that bulk is kept so that it runs in dense batches, which cost the least energy a token;
                         None: energy does not matter
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    start: Limit = 4
    most: Limit = 1024
    kv_risk: Fraction = 0.01
    reserve: Times = 1.0
    caution: Fraction = 0.7
    stall_s: Seconds = 0.15
    knee_ratio: Ratio = 6.0
    memory_headroom: Share = 0.1
    heat_margin_c: DegreesFromZero = 3.0
    power_at: Fraction | None = None
    burst_wait_s: Seconds | None = None


@dataclass(frozen=True, slots=True)
class Sizing:
    """Which sizing policy decides the windows, and the fields of each."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    policy: Literal["fixed", "aimd", "gradient", "rules", "token_ledger"] = "fixed"
    fixed: FixedSizing = FixedSizing()
    aimd: AimdSizing = AimdSizing()
    gradient: GradientSizing = GradientSizing()
    rules: RulesSizing = RulesSizing()
    token_ledger: TokenLedgerSizing = TokenLedgerSizing()


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant's treatment; a tenant that is not named gets the defaults.

    weight          its part of what a class without objective gets, against other tenants' weights
    highest_class   its works get no class more urgent than this; None: any
    max_in_flight   its works on all engines of a pool together; None: no cap
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    weight: Weight = 1.0
    highest_class: Name | None = None
    max_in_flight: Count | None = None


@dataclass(frozen=True, slots=True)
class PolicyDocument:
    """A policy file as written. `version` is the schema's number, not the policy's."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    version: Literal[1]
    classes: Annotated[Mapping[Name, ClassPolicy], Field(min_length=1, max_length=32)]
    classify: Classify = Classify()
    sizing: Sizing = Sizing()
    tenants: Mapping[TenantName, Tenant] = field(default_factory=dict)


_ANY_TENANT = Tenant()
_UNNAMED_CLASS = ClassPolicy(min_share=0.0)

PRESSING_FRACTION = 0.9
"""Part of max_age_s after which a work is pressing: the rest is the time in which it is got started."""
PATIENCE_FRACTION = 0.25
"""Of max_wait_s, for a work whose first token is late."""
SLACK_FRACTION = 0.25
"""Of the time that a whole answer may take: with less of it left its work goes before others that can wait."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One whole policy, frozen: take it once per decision. Everything left out of the document is filled in.

    version      content hash of the document's text, 12 hex digits
    classes      by name, in the order of the document
    precedence   class names, most urgent first: by their objective, then those without one in the document's order
    """

    version: str
    classes: Mapping[str, ClassPolicy]
    classify: Classify
    sizing: Sizing
    tenants: Mapping[str, Tenant]
    precedence: tuple[str, ...]

    def class_policy(self, name: str) -> ClassPolicy:
        """The class's fields; defaults (no objective) for a class that a newer document no longer names."""
        return self.classes.get(name, _UNNAMED_CLASS)

    def tenant(self, name: str) -> Tenant:
        """The tenant's fields, defaults when the document does not name it."""
        return self.tenants.get(name, _ANY_TENANT)

    def objective_s(self, work: Work) -> float | None:
        """Seconds from acceptance that the work's first token may take; None without an objective.

        What depends on engines was predicted when the work was accepted, and is its deadline.
        """
        one = self.class_policy(work.class_name)
        if one.ttft_slowdown is not None and work.deadline_s is not None:
            return work.deadline_s - work.accepted_s
        return one.ttft_objective_s(work.prompt_tokens)

    def due_s(self, work: Work) -> float:
        """Pool time at which a work is due: its first token's deadline, or when it reaches max_age_s; inf for never."""
        one = self.class_policy(work.class_name)
        if one.has_ttft_objective:
            return math.inf if work.deadline_s is None else work.deadline_s
        return math.inf if one.max_age_s is None else work.accepted_s + one.max_age_s

    def overdue(self, work: Work, now_s: float) -> bool:
        """True for a work without TTFT objective that is about to reach its class's max_age_s, or has."""
        one = self.classes.get(work.class_name, _UNNAMED_CLASS)
        if one.max_age_s is None or one.has_ttft_objective:
            return False
        return now_s - work.accepted_s >= PRESSING_FRACTION * one.max_age_s

    @property
    def relative(self) -> frozenset[str]:
        """Classes that promise a slowdown: what can be had depends on who else is there, and there is no moment after which an
        answer is late for good. Their works are served by deadline, and none is given up."""
        return frozenset(name for name, one in self.classes.items() if one.ttft_slowdown is not None)

    def late(self, work: Work, now_s: float) -> bool:
        """True for a work whose first token is late already: it goes before nobody's any more, who can still be in time.

        Only until a quarter of its class's max_wait_s has passed: after that it is urgent again, so that it ends as a late
        answer and not as none.
        """
        if work.deadline_s is None or now_s <= work.deadline_s:
            return False
        relative = self.class_policy(work.class_name).ttft_slowdown is not None
        return not relative and not self._patience_over(work, now_s)

    def late_for_long(self, work: Work, now_s: float) -> bool:
        """True for a late work that is urgent again."""
        return work.deadline_s is not None and now_s > work.deadline_s and self._patience_over(work, now_s)

    def _patience_over(self, work: Work, now_s: float) -> bool:
        return now_s - work.accepted_s >= PATIENCE_FRACTION * self.class_policy(work.class_name).max_wait_s

    def place_of(self, class_name: str) -> int:
        """How early a class's turn comes; one that the policy no longer names comes last."""
        order = self.precedence
        return order.index(class_name) if class_name in order else len(order)

    def finish_by_s(self, class_name: str, accepted_s: float, client_waits_s: float | None) -> float | None:
        """Pool time by which the whole answer is due: the class's deadline, or the client's end of patience where that is
        sooner. None for a class with a TTFT objective, and for one without a deadline: a client that names a short time must
        not overtake others by that alone."""
        one = self.class_policy(class_name)
        if one.has_ttft_objective or one.deadline_s is None:
            return None
        return accepted_s + (one.deadline_s if client_waits_s is None else min(one.deadline_s, client_waits_s))

    def any_overdue(self, works: Iterable[Work], now_s: float) -> bool:
        """Whether one of the works is `overdue`."""
        latest_s = {
            name: now_s - PRESSING_FRACTION * one.max_age_s
            for name, one in self.classes.items()
            if one.max_age_s is not None and not one.has_ttft_objective
        }
        return any(work.class_name in latest_s and work.accepted_s <= latest_s[work.class_name] for work in works)

    def __repr__(self) -> str:
        return f"<Policy {self.version} classes={','.join(self.precedence)} sizing={self.sizing.policy}>"
