"""The contract between the engine's clock and the way one kind of engine fills its steps.

The clock (`engine.Engine`) knows how long a step takes; a scheduler knows who is in it. Three stand behind this
contract: `continuous` (vLLM V1), `reserved` (TGI) and `static` (the batch of the textbooks, for comparison).

A scheduler awaits nothing and reads no clock. Between `plan` and `commit` a step is under way: what it will compute
is fixed, its memory is taken, and arrivals and aborts wait for its end, as they do in the real engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from backends.simulated.sequence import Event, Sequence


class Chunk(NamedTuple):
    """A piece of one sequence's prefill: tokens computed in this step, KV tokens held before it."""

    sequence: Sequence
    tokens: int
    before: int


class Plan(NamedTuple):
    """One step: the prefill pieces, and whether the decoding sequences take part."""

    chunks: tuple[Chunk, ...]
    decodes: bool


@dataclass(slots=True)
class Totals:
    """Counters since start. Shared by an engine and its scheduler; only they write.

    prompt_tokens       prompts whose prefill is done, counted once each, cached part included
    queried_prompt_tokens, cached_prompt_tokens   of admitted prompts, and of these found in the prefix cache
    recomputed_tokens   KV tokens thrown away by preemptions, which had to be or will be computed again
    padded_tokens       tokens computed for nobody (static batches only)
    busy_s, energy_j    time spent in steps, and its energy where the profile has a power curve
    """

    steps: int = 0
    prompt_tokens: int = 0
    queried_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    padded_tokens: int = 0
    finished: int = 0
    busy_s: float = 0.0
    energy_j: float = 0.0


class Scheduler(Protocol):
    """See the module header. `events` is the engine's list; a scheduler appends, in order."""

    @property
    def running(self) -> int:
        """Sequences with a seat."""
        ...

    @property
    def waiting(self) -> int:
        """Sequences without one, preempted ones included."""
        ...

    @property
    def decoding(self) -> int:
        """Rows that a decode step computes (in a static batch padding too)."""
        ...

    @property
    def context_tokens(self) -> int:
        """KV tokens that a decode step reads."""
        ...

    @property
    def kv_used_fraction(self) -> float:
        """Memory taken, 0..1, as this kind of engine counts it."""
        ...

    def check(self, sequence: Sequence) -> None:
        """Raise ValueError for a sequence that could never run."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        ...

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence: at once while it waits, else at `settle_aborts`. Idempotent, safe after the end."""
        ...

    def settle_aborts(self) -> None:
        """Free what aborted sequences hold. Only between steps."""
        ...

    def plan(self, now_s: float, events: list[Event]) -> Plan:
        """Begin a step at now_s: admit, preempt, take memory. Only when somebody runs or waits; never empty."""
        ...

    def commit(self, plan: Plan, now_s: float, events: list[Event]) -> None:
        """End the step at now_s: everybody in it has its token or its piece of prefill."""
        ...

    def steady_steps(self) -> int:
        """How many steps from now are sure to be pure decode by the same sequences; 0 when the next is not.

        The last of them may end sequences. Holds as long as nothing is added or aborted.
        """
        ...

    def run_steady(self, steps: int, now_s: float, events: list[Event]) -> None:
        """Do what `steps` rounds of plan and commit would, the last ending at now_s; steps <= steady_steps()."""
        ...
