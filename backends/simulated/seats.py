"""What every scheduler does alike: counting who runs and who waits, aborting, finishing.

How memory is taken and given back differs, so `_release` is the scheduler's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from backends.simulated.decode_batch import DecodeBatch
from backends.simulated.scheduler import Totals
from backends.simulated.sequence import Event, EventKind, Sequence, SequenceState


class Seats(ABC):
    """The running set in order of admission, the count of those who wait, and the batch that decodes."""

    def __init__(self, totals: Totals, *, block_tokens: int) -> None:
        self._totals = totals
        self._batch = DecodeBatch(block_tokens)
        self._running: dict[Sequence, None] = {}
        self._waiting = 0
        self._aborting: list[Sequence] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return self._waiting

    def abort(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.WAITING:
            self._waiting -= 1
        elif sequence.state is SequenceState.RUNNING:
            self._aborting.append(sequence)
        else:
            return
        sequence.state = SequenceState.ABORTED

    def settle_aborts(self) -> None:
        for sequence in self._aborting:
            if sequence in self._running:
                self._release(sequence)
        self._aborting.clear()

    @abstractmethod
    def _release(self, sequence: Sequence) -> None:
        """Take seat, memory and place in the batch away from a running sequence."""

    def _seat(self, sequence: Sequence, now_s: float) -> None:
        """Move a sequence, already taken from its queue, into the running set."""
        self._waiting -= 1
        self._running[sequence] = None
        sequence.state = SequenceState.RUNNING
        if sequence.preemptions == 0:
            sequence.scheduled_s = now_s

    def _end_prefill(self, sequence: Sequence, now_s: float, events: list[Event]) -> None:
        """Give the token that a finished prefill yields; then let the sequence decode, or end."""
        sequence.add_token()
        self._totals.generation_tokens += 1
        if sequence.generated_tokens == 1:
            self._totals.prompt_tokens += sequence.prompt_tokens
            sequence.first_token_s = now_s
            if sequence.state is SequenceState.RUNNING:
                events.append(Event(now_s, EventKind.FIRST_TOKEN, sequence))
        if sequence.generated_tokens >= sequence.output_tokens:
            self._finish((sequence,), now_s, events)
        else:
            self._batch.join(sequence)

    def _finish(self, ended: Iterable[Sequence], now_s: float, events: list[Event]) -> None:
        """Let go of sequences that have made all their tokens; an aborted one leaves without an event."""
        for sequence in ended:
            self._release(sequence)
            if sequence.state is SequenceState.RUNNING:
                sequence.state = SequenceState.FINISHED
                sequence.finished_s = now_s
                self._totals.finished += 1
                events.append(Event(now_s, EventKind.FINISHED, sequence))
