"""The sizing contract: how much of each class an engine may hold at once.

One contract, many policies behind it (`policies/limits/`, one file each), one contract suite for all
(`tests/contracts`). A sizing policy is a slotted object with one owner, the pool's dispatcher: it is told what
happens (`on_event`), asked synchronously before each grant (`admit`), and can be saved and restored so that a
successor leader does not start from nothing. It awaits nothing and reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from policies.vocabulary import EngineView, Outcome, Verdict, Work


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A work showed its first token on an engine. engine_ttft_s is send to first content byte, > 0."""

    work: Work
    engine: str
    engine_ttft_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """An attempt ended on an engine; `outcome` is the work's final one, None when the work goes on elsewhere."""

    work: Work
    engine: str
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The control tick: the engine's view as of its last poll. `queued` is works waiting in our queue, by class."""

    view: EngineView
    queued: Mapping[str, int] = field(default_factory=dict)


SizingEvent = FirstToken | Finished | Sampled


@dataclass(frozen=True, slots=True)
class Window:
    """What one class may have in flight on one engine now, for display and metrics. None: no such cap.

    tokens is the cap on KV tokens in flight, requests the cap on works in flight.
    """

    requests: int | None = None
    tokens: int | None = None


class SizingPolicy(Protocol):
    """See the module header. All times are pool-clock seconds."""

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
        """May `engine` take `work` now? Pure in effect: asking twice changes nothing."""
        ...

    def window(self, engine: EngineView, class_name: str) -> Window:
        """The window in force for one class on one engine."""
        ...

    def on_event(self, event: SizingEvent, now_s: float) -> None:
        """Learn from what happened. Events of one engine arrive in order."""
        ...

    def snapshot(self) -> Mapping[str, object]:
        """JSON-ready learned state; {} for a policy that learns nothing."""
        ...

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over a predecessor's snapshot; unknown fields are ignored, so that N and N+1 interoperate."""
        ...
