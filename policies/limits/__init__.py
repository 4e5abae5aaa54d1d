"""Sizing policies, one a file, behind the contract of `policies.sizing`; and the registry that names them.

The name in the policy document (`sizing.policy`) is the key here. `FollowingSizing` is what the dispatcher holds: it
stands in front of whichever policy the document names and follows the document when it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from policies.limits.aimd import Aimd
from policies.limits.fixed import FixedLimits
from policies.limits.gradient import Gradient
from policies.limits.rules import Rules
from policies.limits.token_ledger import TokenLedger
from policies.schema import Policy
from policies.sizing import LearnedStep, SizingEvent, SizingPolicy, Window
from policies.vocabulary import EngineView, Verdict, Work

LIMITS: Mapping[str, Callable[[Policy], SizingPolicy]] = {
    "fixed": FixedLimits,
    "aimd": Aimd,
    "gradient": Gradient,
    "rules": Rules,
    "token_ledger": TokenLedger,
}
"""Name in the document -> what makes it from the policy."""


def build(policy: Policy) -> SizingPolicy:
    """The sizing policy that the document names, knowing nothing yet."""
    return LIMITS[policy.sizing.policy](policy)


class FollowingSizing:
    """The sizing policy in force. `adopt` puts a new document in force; what was learned goes along by name."""

    __slots__ = ("_inner", "_name")

    def __init__(self, policy: Policy) -> None:
        self._name = policy.sizing.policy
        self._inner = build(policy)

    def adopt(self, policy: Policy) -> None:
        """Follow a new policy. The same kind of sizing keeps its learned state; another kind starts anew."""
        inner = build(policy)
        if policy.sizing.policy == self._name:
            inner.restore(self._inner.snapshot())
        self._inner, self._name = inner, policy.sizing.policy

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
        return self._inner.admit(work, engine, now_s)

    def window(self, engine: EngineView, class_name: str) -> Window:
        return self._inner.window(engine, class_name)

    def on_event(self, event: SizingEvent, now_s: float) -> None:
        self._inner.on_event(event, now_s)

    def learned_step(self, engine: str) -> LearnedStep | None:
        return self._inner.learned_step(engine)

    def snapshot(self) -> Mapping[str, object]:
        """The learned state under the policy's name, so that a leader with another policy leaves it alone."""
        return {self._name: self._inner.snapshot()}

    def restore(self, state: Mapping[str, object]) -> None:
        mine = state.get(self._name)
        if isinstance(mine, Mapping):
            self._inner.restore(mine)

    def __repr__(self) -> str:
        return f"<FollowingSizing {self._inner!r}>"
