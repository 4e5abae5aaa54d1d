"""The sizing contract: how much of each class an engine may hold at once.

One contract, many policies behind it (`policies/limits/`, one file each), one contract suite for all
(`tests/contracts`). A sizing policy is a slotted object with one owner, the pool's dispatcher: it is told what
happens (`on_event`), asked synchronously before each grant (`admit`), and can be saved and restored so that a
successor leader does not start from nothing. It awaits nothing and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from policies.vocabulary import EngineView, Outcome, Verdict, Work


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A work showed its first token on an engine. engine_ttft_s is send to first content byte, > 0."""

    work: Work
    engine: str
    engine_ttft_s: float
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Finished:
    """An attempt ended on an engine; `outcome` is the work's final one, None when the work goes on elsewhere."""

    work: Work
    engine: str
    outcome: Outcome | None
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Granted:
    """A work was given to an engine and counts there from now on. attempt is 1 for the first try."""

    work: Work
    engine: str
    attempt: int


class Running(NamedTuple):
    """One attempt in flight, as far as its tokens are known here. A tuple: one is made of every attempt at every tick.

    shown_tokens    output shown so far; 0 for one whose owner does not tell
    prefilled       its first token has been seen
    """

    work: Work
    attempt: int
    shown_tokens: int
    prefilled: bool


@dataclass(frozen=True, slots=True)
class Progressed:
    """The control tick, before `Sampled`: every attempt on the engine that is counted one by one, and how far it is.

    Complete: an attempt that is not named is counted one by one no more, whatever was heard of it. What the view counts
    beyond these runs in other processes, and is known by its sums only.

    running   to be read once, while the event is told: who does not read it costs nothing
    """

    engine: str
    running: Iterable[Running]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The control tick: the engine's view as of its last poll. `queued` is works waiting in our queue, by class; `late`
    those of them whose first token is late (`policies.schema.Policy.late`)."""

    view: EngineView
    queued: Mapping[str, int] = field(default_factory=dict)
    late: Mapping[str, int] = field(default_factory=dict)


SizingEvent = Granted | FirstToken | Finished | Progressed | Sampled


@dataclass(frozen=True, slots=True)
class Window:
    """What one class may have in flight on one engine now, for display and metrics. None: no such cap.

    tokens is the cap on KV tokens in flight, requests the cap on works in flight. steps_to_overflow is the engine's: the
    smallest number of its steps for which KV memory is forecast not to suffice, inf for none; None: not forecast.
    """

    requests: int | None = None
    tokens: int | None = None
    steps_to_overflow: float | None = None


@dataclass(frozen=True, slots=True)
class LearnedStep:
    """What was learned of how long an engine's steps take, in seconds. error: typical, relative; seen: observations;
    ttft_factor: times what the steps say, by the first tokens of the last half minute."""

    base_s: float
    per_sequence_s: float
    per_context_token_s: float
    per_prompt_token_s: float
    error: float
    seen: int
    ttft_factor: float = 1.0


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

    def learned_step(self, engine: str) -> LearnedStep | None:
        """How fast the engine of that name was found to be; None where nothing was seen, or this policy does not look."""
        ...

    def snapshot(self) -> Mapping[str, object]:
        """JSON-ready learned state; {} for a policy that learns nothing."""
        ...

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over a predecessor's snapshot; unknown fields are ignored, so that N and N+1 interoperate."""
        ...


def least(class_name: str, now_s: float) -> Work:
    """The smallest work that a class could have: where there is no room for it, there is none for any."""
    return Work("", class_name, "", "", "", now_s, now_s, max_tokens=1)
