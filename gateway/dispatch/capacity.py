"""How much fits now, for clients that choose their own size: GET /v1/headrace/capacity, and in every 429.

The process that leads asks its sizing policy, for inputs of just the size that is asked for. The others know no more of the
pool than its leader published, which is an answer for each of SIZES: they give the one for the next larger size, and say which
that is and how old it is. Answers are kept for KEPT_S: a burst of refusals must not cost a decision each.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Mapping
from itertools import product
from typing import Any
from urllib.parse import parse_qs

from gateway.clock import Clock
from gateway.control.policy_store import PolicyStore
from gateway.control.presence import Presence
from gateway.control.roster import Roster
from gateway.dispatch.assembly import PARTS_AT_ONCE
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import Refusal
from gateway.ingress.facts import INPUTS_MAX
from policies.admission import QUEUE_FULL
from policies.capacity import Fit, fit, largest_batch
from policies.sizing import SizingPolicy
from policies.vocabulary import Guard, Work

KEPT_S = 0.25
USUAL_PROMPT_TOKENS = 1024
PROMPT_TOKENS_MAX = 10_000_000
SIZES = (*(256 << doubled for doubled in range(16)), PROMPT_TOKENS_MAX)
"""Prompt tokens of an input, ascending: what a leader publishes answers for. USUAL_PROMPT_TOKENS is one of them."""
PUBLISH_S, SLICE_S = 0.1, 0.001
"""Of work for one publication, and without a turn for others: of a pool of very many models and engines fewer sizes are told."""
PATH = "/v1/completions"
SHED_REASONS = frozenset({"infeasible", "crowding"})
BATCH_HEADER = "x-headrace-batch-fits"
CONTEXT = "context"
"""In the place of a guard: such an input is longer than any engine of the model takes, now or later."""


class Capacity:
    """See the module header. One per process."""

    __slots__ = ("_clock", "_dispatcher", "_kept", "_presence", "_roster", "_sizing", "_store", "_told", "_told_s")

    def __init__(
        self,
        *,
        store: PolicyStore,
        roster: Roster,
        sizing: SizingPolicy,
        presence: Presence,
        dispatcher: Dispatcher,
        clock: Clock,
    ) -> None:
        self._store = store
        self._roster = roster
        self._sizing = sizing
        self._presence = presence
        self._dispatcher = dispatcher
        self._clock = clock
        self._kept: dict[tuple[str, str, int], tuple[float, Fit]] = {}
        self._told: Mapping[str, Any] = {}
        self._told_s = 0.0

    def answer(self, query: str) -> Mapping[str, object]:
        """The object at GET /v1/headrace/capacity. `prompt_tokens` in the query is the size of each input."""
        tokens = _prompt_tokens(query) if query else USUAL_PROMPT_TOKENS
        policy, leads = self._store.current, self._presence.leads
        models = sorted({model for engine in self._roster for model in engine.models})
        if not leads:
            tokens = _told_size(tokens)
        return {
            "object": "headrace.capacity",
            "policy": policy.version,
            "age_s": 0.0 if leads else round(self._clock.now_s() - self._told_s, 3) if self._told else None,
            "prompt_tokens": tokens,
            "classes": {
                name: {
                    "waiting": self._waiting(name),
                    "max_queue": one.max_queue,
                    "max_request_batch": one.inputs_max,
                    "accepted_inputs": self.accepted_inputs(name),
                    "models": {model: self._model(name, model, tokens) for model in models},
                }
                for name, one in policy.classes.items()
            },
        }

    def explain(self, refusal: Refusal, work: Work) -> None:
        """Have a 429 say how many inputs would fit now, in its header, and in its message where that helps.

        What cannot be in time fits in no size; what an engine refused is more than would start at once.
        """
        if refusal.status != 429:
            return
        fits = self.accepted_inputs(work.class_name)
        if refusal.reason == QUEUE_FULL:
            if fits:
                refusal.message += f"; a request of up to {fits} inputs would be taken now"
        elif refusal.reason in SHED_REASONS:
            fits = 0
        elif (found := self._starts(work.class_name, work.model, USUAL_PROMPT_TOKENS)) is not None:
            fits = min(fits, found[0])
        refusal.headers = (*refusal.headers, (BATCH_HEADER, str(fits)))

    def accepted_inputs(self, class_name: str) -> int:
        """Inputs of the largest request batch that would be let in now."""
        one = self._store.current.class_policy(class_name)
        return largest_batch(one, waiting=self._waiting(class_name), parts_at_once=PARTS_AT_ONCE, inputs_max=INPUTS_MAX)

    async def published(self) -> Mapping[str, object]:
        """What a leader tells the other processes; everything else on the loop has its turn meanwhile."""
        policy = self._store.current
        models = sorted({model for engine in self._roster for model in engine.models})
        sizes: dict[str, dict[str, dict[str, tuple[int, str | None]]]] = {
            name: {model: {} for model in models} for name in policy.classes
        }
        spent_s = slice_s = 0.0
        for tokens in sorted(SIZES, key=lambda size: size != USUAL_PROMPT_TOKENS):
            for name, model in product(policy.classes, models):
                if spent_s > PUBLISH_S and tokens != USUAL_PROMPT_TOKENS:
                    break
                begun_s = self._clock.now_s()
                found = self._fit(name, model, tokens)
                sizes[name][model][str(tokens)] = found.inputs, _bound_by(found)
                slice_s += self._clock.now_s() - begun_s
                if slice_s > SLICE_S:
                    spent_s, slice_s = spent_s + slice_s, 0.0
                    await asyncio.sleep(0)
        return {
            "prompt_tokens": USUAL_PROMPT_TOKENS,
            "waiting": {name: self._dispatcher.queued.depth(name) for name in policy.classes},
            "sizes": sizes,
        }

    def heard(self, told: Mapping[str, Any]) -> None:
        """What the leader told."""
        self._told, self._told_s = told, self._clock.now_s()

    def _model(self, class_name: str, model: str, tokens: int) -> Mapping[str, object]:
        starts, bound_by = self._starts(class_name, model, tokens) or (None, None)
        return {"starts_now": starts, "bound_by": bound_by}

    def _starts(self, class_name: str, model: str, tokens: int) -> tuple[int, str | None] | None:
        """Inputs that would start at once, behind what waits, and what binds behind that; None: not known here."""
        if self._presence.leads:
            found = self._fit(class_name, model, tokens)
            inputs, bound_by = found.inputs, _bound_by(found)
        else:
            told = self._told.get("sizes", {}).get(class_name, {}).get(model, {}).get(str(tokens))
            if told is None:
                return None
            inputs, bound_by = told
        order = self._store.current.precedence
        ahead = order[: order.index(class_name) + 1] if class_name in order else order
        return max(0, inputs - sum(map(self._waiting, ahead))), bound_by

    def _fit(self, class_name: str, model: str, tokens: int) -> Fit:
        now_s, key = self._clock.now_s(), (class_name, model, tokens)
        kept = self._kept.get(key)
        if kept is not None and now_s - kept[0] < KEPT_S:
            return kept[1]
        pool_s = self._clock.pool_s()
        work = Work("", class_name, "", model, PATH, pool_s, pool_s, prompt_tokens=tokens)
        found = fit(work, self._roster.views(now_s), self._sizing, pool_s)
        if len(self._kept) > 1024:
            self._kept.clear()
        self._kept[key] = now_s, found
        return found

    def _waiting(self, class_name: str) -> int:
        here = self._dispatcher.queued.depth(class_name)
        return here if self._presence.leads else max(here, int(self._told.get("waiting", {}).get(class_name, 0)))


def _told_size(tokens: int) -> int:
    """The size that the leader's answer is taken of: what starts of larger inputs starts of smaller ones."""
    return SIZES[bisect_left(SIZES, tokens)]


def _bound_by(found: Fit) -> str | None:
    return CONTEXT if found.too_long else None if found.binding is Guard.NONE else found.binding.value


def _prompt_tokens(query: str) -> int:
    """The query's prompt_tokens. Raises a 400 Refusal."""
    given = parse_qs(query).get("prompt_tokens", [str(USUAL_PROMPT_TOKENS)])[-1]
    if not given.isdecimal() or not given.isascii() or len(given) > 8 or not 0 < int(given) <= PROMPT_TOKENS_MAX:
        raise Refusal(
            400,
            f"prompt_tokens is {given[:20]!r}: expected a whole number from 1 to {PROMPT_TOKENS_MAX}",
            reason="invalid_query",
            param="prompt_tokens",
        )
    return int(given)
