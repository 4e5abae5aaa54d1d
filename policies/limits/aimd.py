"""Sizing policy `aimd`: additive increase, multiplicative decrease of one limit an engine.

What it does: every first token inside its class's objective adds one work to the limit, as long as half of it is in
use; a late one leaves `backoff` of it, at most once in `cut_every_s`. First tokens of classes without an objective are
never late.

Inputs: first tokens, and sequences in flight as of the last control tick. After TCP, and AIMDLimit of Netflix's
concurrency-limits.

Trade-off: it counts requests, which are ten to ten thousand tokens each, and it learns of a full engine from the
requests that already suffered. On an engine short of KV memory it keeps overshooting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from policies.limits.shared import SharedLimit
from policies.schema import Policy
from policies.sizing import FirstToken, LearnedStep, Sampled, SizingEvent, Window
from policies.vocabulary import EngineView, Verdict, Work


class Aimd:
    """See the module header."""

    __slots__ = ("_cut_s", "_fields", "_limit", "_sequences")

    def __init__(self, policy: Policy) -> None:
        self._fields = fields = policy.sizing.aimd
        self._limit = SharedLimit(policy, start=fields.start, least=fields.least, most=fields.most)
        self._sequences: dict[str, int] = {}
        self._cut_s: dict[str, float] = {}

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:  # noqa: ARG002 - the contract's
        return self._limit.verdict(work, engine)

    def window(self, engine: EngineView, class_name: str) -> Window:
        return self._limit.window(engine, class_name)

    def on_event(self, event: SizingEvent, now_s: float) -> None:
        """Move an engine's limit at a first token."""
        if isinstance(event, Sampled):
            self._sequences[event.view.name] = event.view.sequences_total
        elif isinstance(event, FirstToken):
            engine, limit = event.engine, self._limit.of(event.engine)
            if event.work.deadline_s is not None and now_s > event.work.deadline_s:
                if now_s - self._cut_s.get(engine, -math.inf) >= self._fields.cut_every_s:
                    self._cut_s[engine] = now_s
                    self._limit.move(engine, limit * self._fields.backoff)
            elif 2 * self._sequences.get(engine, 0) >= limit:
                self._limit.move(engine, limit + 1)

    def learned_step(self, engine: str) -> LearnedStep | None:  # noqa: ARG002, the contract's
        """This policy does not look."""
        return None

    def snapshot(self) -> Mapping[str, object]:
        return self._limit.snapshot()

    def restore(self, state: Mapping[str, object]) -> None:
        self._limit.restore(state)

    def __repr__(self) -> str:
        return f"<Aimd {self._limit!r}>"
