"""One sequence in the virtual engine, and the events an engine tells of it.

The progress of a decoding sequence is not stored but derived: it joined a `DecodeBatch` at some step with so many
tokens, and has gained one per step since. That is what lets an engine step cost the same for 1 and for 500 sequences.

A sequence carries its true output length. That is the engine's knowledge and nobody else's: no policy, no view and
no metric may show it before the sequence has ended.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from backends.simulated.decode_batch import DecodeBatch


class SequenceState(StrEnum):
    """Where a sequence is in the engine. RUNNING holds a seat and KV; a preempted one is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


class Sequence:
    """One prompt and the answer it will get.

    prompt_tokens         >= 1
    output_tokens         true length of the answer, >= 1; the engine cuts it at its max_model_len
    max_tokens            the limit the client set, >= output_tokens; what a reserving scheduler sets aside
    priority              lower is sooner, under the priority policy only
    cached_prompt_tokens  leading prompt tokens said to be found in the prefix cache, by an engine that has none itself
    block_ids             of the prompt's full blocks, for the prefix cache (see `blocks`)
    shared_ids            of the blocks that it holds; the scheduler's
    number                order of arrival at its engine; breaks ties of arrival_s
    taken_s               end of the step under way when it came, at which the engine takes arrivals up; NaN before
    scheduled_s, first_token_s, finished_s   engine clock; NaN until it happened
    """

    __slots__ = (
        "_batch",
        "_generated",
        "_joined_step",
        "_kv_tokens",
        "arrival_s",
        "block_ids",
        "cached_prompt_tokens",
        "finished_s",
        "first_token_s",
        "id",
        "join_number",
        "max_tokens",
        "number",
        "output_tokens",
        "preemptions",
        "priority",
        "prompt_tokens",
        "scheduled_s",
        "shared_ids",
        "state",
        "taken_s",
    )

    def __init__(
        self,
        id: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int | None = None,
        priority: int = 0,
        cached_prompt_tokens: int = 0,
        block_ids: tuple[int, ...] = (),
    ) -> None:
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError(
                f"sequence {id}: prompt_tokens {prompt_tokens} and output_tokens {output_tokens}: both >= 1"
            )
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_tokens = output_tokens if max_tokens is None else max(max_tokens, output_tokens)
        self.priority = priority
        self.cached_prompt_tokens = cached_prompt_tokens
        self.block_ids = block_ids
        self.shared_ids: list[int] = []
        self.state = SequenceState.WAITING
        self.arrival_s = math.nan
        self.taken_s = math.nan
        self.scheduled_s = math.nan
        self.first_token_s = math.nan
        self.finished_s = math.nan
        self.preemptions = 0
        self.number = 0
        self.join_number = -1
        self._kv_tokens = 0
        self._generated = 0
        self._batch: DecodeBatch | None = None
        self._joined_step = 0

    @property
    def generated_tokens(self) -> int:
        """Tokens of the answer produced so far; a preemption does not take them back."""
        if self._batch is None:
            return self._generated
        return self._generated + self._batch.steps - self._joined_step

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values are held in the engine's memory; 0 while waiting."""
        if self._batch is None:
            return self._kv_tokens
        return self._kv_tokens + self._batch.steps - self._joined_step

    @property
    def decoding(self) -> bool:
        """True while it gains one token per decode step."""
        return self._batch is not None

    @property
    def prefill_target_tokens(self) -> int:
        """What a prefill must compute before the next token: prompt, and after a preemption the answer so far."""
        return self.prompt_tokens + self.generated_tokens

    def hold_kv(self, tokens: int) -> None:
        """Set the KV tokens held, outside a decode batch."""
        self._kv_tokens = tokens

    def add_token(self) -> None:
        """Count the token that ends a prefill."""
        self._generated += 1

    def attach(self, batch: DecodeBatch, number: int) -> None:
        """Start deriving progress from `batch`; `number` names this membership."""
        self._batch = batch
        self._joined_step = batch.steps
        self.join_number = number

    def detach(self) -> None:
        """Freeze progress where it stands."""
        self._generated = self.generated_tokens
        self._kv_tokens = self.kv_tokens
        self._batch = None
        self.join_number = -1

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id} {self.state} prompt={self.prompt_tokens} "
            f"generated={self.generated_tokens} kv={self.kv_tokens} preemptions={self.preemptions}>"
        )


class EventKind(StrEnum):
    """What an engine tells: a sequence showed its first token, lost its KV, or ended."""

    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Event(NamedTuple):
    """One thing that happened at `time_s` on the engine's clock. Events come in time order."""

    time_s: float
    kind: EventKind
    sequence: Sequence
