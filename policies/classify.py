"""Which class a request gets, why, and by when its first token is due.

The first rule of the policy that matches decides; with none matching, the shape does: streamed or small works are
light, the rest heavy, unless the key's requests have shown who sends them (`policies.behaviour`): small ones of a program
are heavy, and ones that are too large to be small, within LEARNED_FACTOR, of a person light. The key's and the tenant's highest class then cap the answer. The reason is always recorded and
ends up in the response header and the why-record. A client that names a class that does not exist is told so (400):
guessing would run its bulk work as interactive, or the reverse.

Header values are compared, never kept: only the name of the deciding rule goes into the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Protocol

from policies.behaviour import Pattern
from policies.schema import Policy, Rule, Shape

NAMED_MAX = 64
LEARNED_FACTOR = 4
"""Times `small_prompt_tokens` and `small_max_tokens` that a person's request may have and still be light."""


class By(StrEnum):
    """What gave a class: a rule, a side of the shape, or a pattern that was learned."""

    RULE = "rule"
    STREAMED = "streamed"
    SMALL = "small"
    MANY_SEQUENCES = "many_sequences"
    LONG_PROMPT = "long_prompt"
    LONG_OUTPUT = "long_output"
    LEARNED_LOOP = "learned_loop"
    LEARNED_PERSON = "learned_person"


class RequestFacts(Protocol):
    """The few fields of a body that a rule may look at; see `gateway.exchange.Facts`."""

    @property
    def model(self) -> str: ...
    @property
    def stream(self) -> bool: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def sequences(self) -> int: ...
    @property
    def service_tier(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks and where. max_class is the highest class of the API key; "" for any."""

    tenant: str = "default"
    key_id: str = ""
    max_class: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class Classified:
    """The class of a work and what follows from it.

    reason       e.g. "rule 2: service_tier", "shape: streamed"; "capped by key" is added where that was so
    deadline_s   pool time by which the first token is due; None for a class without a TTFT objective
    rank         place inside the (class, tenant): the deadline, or else the time of acceptance; low first
    by           the reason as one of few words
    """

    class_name: str
    reason: str
    deadline_s: float | None
    rank: float
    by: By = By.RULE


class UnknownClass(ValueError):
    """A request names a class that the policy does not have: answer 400. The message names the known ones."""

    def __init__(self, header: str, value: str, known: tuple[str, ...]) -> None:
        shown = "".join(character for character in value if character.isprintable())[:NAMED_MAX]
        super().__init__(f"{header} '{shown}': must be one of {', '.join(known)}; name one of them or leave it out")
        self.header = header


def classify(
    facts: RequestFacts,
    *,
    headers: Mapping[str, str],
    caller: Caller,
    policy: Policy,
    accepted_s: float,
    alone_s: float | None = None,
    pattern: Pattern | None = None,
) -> Classified:
    """Give a request its class.

    headers      lower-case names, credentials removed
    accepted_s   pool time at which the gateway took responsibility; deadline and rank count from it
    alone_s      what the prompt takes to its first token on an idle engine; None: not known
    pattern      what the key's requests look like, None for nothing that could be told
    Raises UnknownClass.
    """
    ruled = _by_rule(facts, headers, caller, policy)
    if ruled is not None:
        class_name, reason, by = *ruled, By.RULE
    else:
        class_name, reason, by = _by_shape(facts, policy.classify.shape)
        if policy.classify.learn and pattern is not None:
            class_name, reason, by = _learned(facts, pattern, policy.classify.shape) or (class_name, reason, by)
    for cap, source in ((caller.max_class, "key"), (policy.tenant(caller.tenant).highest_class, "tenant")):
        capped = _capped(class_name, cap or "", policy)
        if capped != class_name:
            class_name, reason = capped, f"{reason}; capped by {source}"
    return placed(
        class_name,
        reason,
        policy,
        prompt_tokens=facts.prompt_tokens,
        accepted_s=accepted_s,
        alone_s=alone_s,
        by=by,
    )


def placed(
    class_name: str,
    reason: str,
    policy: Policy,
    *,
    prompt_tokens: int,
    accepted_s: float,
    alone_s: float | None = None,
    by: By = By.RULE,
) -> Classified:
    """What follows from a class for a work of that size."""
    objective_s = policy.class_policy(class_name).ttft_objective_s(prompt_tokens, alone_s)
    deadline_s = None if objective_s is None else accepted_s + objective_s
    return Classified(class_name, reason, deadline_s, accepted_s if deadline_s is None else deadline_s, by)


def _by_rule(facts: RequestFacts, headers: Mapping[str, str], caller: Caller, policy: Policy) -> tuple[str, str] | None:
    for number, rule in enumerate(policy.classify.rules or (), start=1):
        if not _matches(rule, facts, headers, caller):
            continue
        if rule.class_from is None:
            return rule.class_name or policy.precedence[-1], f"rule {number}: {_conditions(rule)}"
        value = headers.get(rule.class_from.lower(), "").strip()
        if not value:
            continue
        if value.lower() not in policy.classes:
            raise UnknownClass(rule.class_from, value, policy.precedence)
        return value.lower(), f"rule {number}: {rule.class_from}"
    return None


def _by_shape(facts: RequestFacts, shape: Shape) -> tuple[str, str, By]:
    light, heavy = shape.light or "", shape.heavy or ""
    if facts.stream:
        return light, "shape: streamed", By.STREAMED
    if facts.sequences > shape.small_sequences:
        return heavy, f"shape: more than {shape.small_sequences} sequences", By.MANY_SEQUENCES
    if facts.prompt_tokens > shape.small_prompt_tokens:
        return heavy, f"shape: estimated at more than {shape.small_prompt_tokens} prompt tokens", By.LONG_PROMPT
    if facts.max_tokens is not None and facts.max_tokens > shape.small_max_tokens:
        return heavy, f"shape: more than {shape.small_max_tokens} output tokens asked for", By.LONG_OUTPUT
    return light, "shape: small", By.SMALL


def _learned(facts: RequestFacts, pattern: Pattern, shape: Shape) -> tuple[str, str, By] | None:
    """Another class than the shape's, where the key's pattern says so; a streamed request always has a reader."""
    _, _, by = _by_shape(facts, shape)
    if pattern is Pattern.LOOP and by is By.SMALL:
        return (
            shape.heavy or "",
            "learned: a program keeps requests in flight, reads no stream, never leaves",
            By.LEARNED_LOOP,
        )
    bearable = (
        facts.prompt_tokens <= LEARNED_FACTOR * shape.small_prompt_tokens
        and (facts.max_tokens or 0) <= LEARNED_FACTOR * shape.small_max_tokens
    )
    if pattern is Pattern.PERSON and by in {By.LONG_PROMPT, By.LONG_OUTPUT} and bearable:
        return shape.light or "", "learned: a person's pace", By.LEARNED_PERSON
    return None


def _matches(rule: Rule, facts: RequestFacts, headers: Mapping[str, str], caller: Caller) -> bool:
    """All conditions given hold; a rule with none matches everything."""
    return (
        (rule.service_tier is None or rule.service_tier == facts.service_tier)
        and (rule.tenant is None or rule.tenant == caller.tenant)
        and (rule.key_id is None or rule.key_id == caller.key_id)
        and (rule.stream is None or rule.stream == facts.stream)
        and (rule.model is None or fnmatchcase(facts.model, rule.model))
        and (rule.path is None or fnmatchcase(caller.path, rule.path))
        and _within(facts.prompt_tokens, rule.prompt_tokens_at_least, rule.prompt_tokens_at_most)
        and _within(facts.max_tokens, rule.max_tokens_at_least, rule.max_tokens_at_most)
        and all(_header_matches(headers.get(name.lower()), wanted) for name, wanted in rule.header.items())
    )


def _within(value: int | None, at_least: int | None, at_most: int | None) -> bool:
    """An unknown value is inside no bound: unknown is not zero."""
    if at_least is None and at_most is None:
        return True
    return value is not None and (at_least is None or value >= at_least) and (at_most is None or value <= at_most)


def _header_matches(value: str | None, wanted: str) -> bool:
    return value is not None and (wanted == "*" or value.strip().lower() == wanted.lower())


def _conditions(rule: Rule) -> str:
    """Names of the conditions a rule has, for the reason."""
    names = [
        name
        for name in ("service_tier", "tenant", "key_id", "model", "path", "stream")
        if getattr(rule, name) is not None
    ]
    names += ["prompt_tokens"] * (rule.prompt_tokens_at_least is not None or rule.prompt_tokens_at_most is not None)
    names += ["max_tokens"] * (rule.max_tokens_at_least is not None or rule.max_tokens_at_most is not None)
    return ", ".join([*names, *rule.header]) or "always"


def _capped(class_name: str, highest: str, policy: Policy) -> str:
    """The class, or `highest` where that is less urgent. A cap that the policy does not know is its last class."""
    if not highest:
        return class_name
    order = policy.precedence
    cap = order.index(highest) if highest in order else len(order) - 1
    return order[max(cap, order.index(class_name))]
