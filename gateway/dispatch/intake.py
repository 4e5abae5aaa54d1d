"""What a request is to the queue: its class, and the work that is ordered there instead of it."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from gateway.clock import Clock
from gateway.dispatch.affinity import Affinity
from gateway.dispatch.planner import Sink
from gateway.errors import Refusal
from gateway.exchange import Exchange
from gateway.instruments import CLASSIFIED
from gateway.telemetry import Telemetry
from policies.behaviour import Pattern
from policies.classify import By, Caller, Classified, UnknownClass, classify, placed
from policies.estimators.prefix_caches import FIRST_LEVEL_BYTES, LEVEL_ENDS_BYTES
from policies.ordering.gather import PADDED_PATHS
from policies.schema import Policy
from policies.vocabulary import Action, Decision, Work

RANK_STEP_S = 1e-6
"""Between the ranks of two parts of one request: keeps them in order, and lets nobody pass who came a moment later."""
CLIENTS_SHARE = 0.9
"""Of the time that a client says it waits: the rest is the way there and back."""
_LEARNED = frozenset({By.LEARNED_LOOP, By.LEARNED_PERSON})


class Intake:
    """See the module header. One per process."""

    def __init__(
        self,
        *,
        aliases: Mapping[str, str],
        alone_s: Callable[[str, int], float | None],
        affinity: Affinity,
        sink: Sink,
        telemetry: Telemetry,
        clock: Clock,
        work_ids: str,
    ) -> None:
        """alone_s: what a prompt of so many tokens takes to a first token on an idle engine of a model; None: not known.

        work_ids: prefix of this process's work ids, unique among the pool's processes.
        """
        self._aliases = aliases
        self._alone = alone_s
        self._affinity = affinity
        self._sink = sink
        self._telemetry = telemetry
        self._clock = clock
        self._ids = (f"{work_ids}-{number:x}" for number in itertools.count(1))

    def classified(self, exchange: Exchange, policy: Policy, pattern: Pattern | None) -> Classified:
        """The class of a request. Raises Refusal for one that is not there."""
        caller = Caller(exchange.tenant, exchange.key_id, exchange.max_class, exchange.path)
        try:
            found = classify(
                exchange.facts,
                headers=exchange.rule_headers,
                caller=caller,
                policy=policy,
                accepted_s=self._accepted_pool_s(exchange),
                alone_s=self._alone_s(exchange),
                pattern=pattern,
            )
        except UnknownClass as error:
            raise Refusal(400, str(error), reason="unknown_class", param=error.header) from None
        exchange.response_headers.append(("x-headrace-class", found.class_name))
        if found.reason.isascii():  # a rule may name a header that is not
            exchange.response_headers.append(("x-headrace-class-reason", found.reason))
        self._telemetry.add(CLASSIFIED, 1, found.class_name, found.by)
        if found.by in _LEARNED:
            now_s = self._clock.pool_s()
            self._sink(Decision(Action.CLASSIFY, now_s, policy.version, found.class_name, reason=found.reason))
        return found

    def part_of(self, whole: Classified, part: Exchange, number: int, policy: Policy) -> Classified:
        """Class and deadline of a part: the whole's, for its own size; its rank keeps the parts in order."""
        found = placed(
            whole.class_name,
            whole.reason,
            policy,
            prompt_tokens=part.facts.prompt_tokens,
            accepted_s=self._accepted_pool_s(part),
            alone_s=self._alone_s(part),
        )
        return replace(found, rank=found.rank + number * RANK_STEP_S)

    def work(self, exchange: Exchange, found: Classified, policy: Policy) -> Work:
        """What the queue will order. Raises Refusal for a stored response that is not known."""
        facts = exchange.facts
        accepted_s, deadline_s = self._accepted_pool_s(exchange), found.deadline_s
        waits_s = None if exchange.read_timeout_s is None else CLIENTS_SHARE * exchange.read_timeout_s
        if deadline_s is not None and waits_s is not None:
            # Who waits for less time than the class promises is served in that time or not at all.
            deadline_s = min(deadline_s, accepted_s + waits_s)
        pinned = None
        if facts.previous_response_id is not None:
            pinned = self._affinity.keeper(facts.previous_response_id)
        return Work(
            id=self.new_id(),
            class_name=found.class_name,
            tenant=exchange.tenant,
            model=self._aliases.get(facts.model, facts.model),
            path=exchange.path,
            accepted_s=accepted_s,
            rank=found.rank if deadline_s is None else min(found.rank, deadline_s),
            prompt_tokens=facts.prompt_tokens,
            max_tokens=facts.max_tokens,
            sequences=facts.sequences,
            deadline_s=deadline_s,
            finish_by_s=policy.finish_by_s(found.class_name, accepted_s, waits_s),
            pinned_engine=pinned,
            streams=facts.stream,
            prefix="" if exchange.path in PADDED_PATHS else _prefix(exchange.body),
        )

    def new_id(self) -> str:
        """An id that no work of the pool has."""
        return next(self._ids)

    def _alone_s(self, exchange: Exchange) -> float | None:
        facts = exchange.facts
        return self._alone(self._aliases.get(facts.model, facts.model), facts.prompt_tokens)

    def _accepted_pool_s(self, exchange: Exchange) -> float:
        return self._clock.pool_s() - (self._clock.now_s() - exchange.accepted_s)


def _prefix(body: bytes) -> str:
    """Short digests of how a long request begins: enough to tell mates, too little to tell a prompt."""
    if len(body) < 2 * FIRST_LEVEL_BYTES:
        return ""
    # Every long request pays for it: 8 us for 32 KiB, where a cryptographic digest takes 130; the last level is 512 KiB.
    view, crc, done, digests = memoryview(body), 0, 0, []
    for end in LEVEL_ENDS_BYTES:
        if end > len(body):
            break
        crc = zlib.crc32(view[done:end], crc)
        digests.append(f"{crc:08x}")
        done = end
    return ".".join(digests)
