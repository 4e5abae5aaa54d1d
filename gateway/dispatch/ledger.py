"""What we have in flight on each engine, counted by us: exact about what was sent, ahead of any polled metric.

The dispatcher adds a work *before* anything is awaited and removes it when its attempt ends, so that two decisions in
one loop turn can never both take the last place. Generated tokens are read from the relays' live counters on each
`refresh` (every control tick), not on every chunk: the hot path only bumps its own integer.

Attempts that run in this process are entries of their own for as long as they run. An attempt granted to another
process is an entry until that process's report includes it, and part of that session's sums from then on; unspent
credit is in the sums as well. A process that does not lead keeps its own entries only.

Sums are kept incrementally and equal a recomputation after any sequence of events (tests/gateway/test_ledger.py).
One writer: the process's dispatcher.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gateway.queue.base import Claimed, InFlight, Place, Session
from policies.preemption import Victim
from policies.sizing import Running
from policies.vocabulary import Work

BLOCK_TOKENS = 16
"""KV block size assumed where an engine does not tell its own (vLLM's default)."""


class Progress(Protocol):
    """A live counter of one attempt; the relay bumps it, the ledger reads it."""

    @property
    def output_tokens(self) -> int: ...

    @property
    def recallable(self) -> bool:
        """Nothing of it has reached its client: it could begin anew, and nobody would see."""
        ...

    def recall(self) -> None:
        """Give the attempt up; its owner puts the work back into the queue. Only while `recallable`."""
        ...


@dataclass(slots=True)
class Entry:
    """One attempt in flight. kv_tokens is its share of the engine's sum at the last refresh, in whole blocks.

    output_tokens   shown by the last refresh
    recalled   it is being given up
    taken_s   since then it is for this process to run: a grant that its owner took up, or credit of ours; inf: it is not
    claimed   whose it is, and the grant's place in that session's order; None: it runs (or will) in this process
    """

    work: Work
    granted_s: float
    claimed: Claimed | None = None
    progress: Progress | None = None
    kv_tokens: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    prefilled: bool = False
    taken_s: float = math.inf
    recalled: bool = False

    @property
    def taken(self) -> bool:
        return self.taken_s < math.inf


@dataclass(slots=True)
class EngineLedger:
    """The sums of one engine. `version` grows with every change, so that a cached view knows when it is old, and
    `refreshed` with every control tick."""

    block_tokens: int = BLOCK_TOKENS
    entries: dict[tuple[str, int], Entry] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)
    kv_tokens: int = 0
    prefill_tokens: int = 0
    version: int = 0
    refreshed: int = 0
    allowed: dict[str, int] = field(default_factory=dict)
    allowed_kv_tokens: int = 0
    allowed_prefill_tokens: int = 0
    extra_sequences: dict[str, int] = field(default_factory=dict)
    on_credit: int = 0
    _counted_in: int = BLOCK_TOKENS
    _elsewhere: dict[Session, tuple[Mapping[str, InFlight], Mapping[str, InFlight], bool]] = field(default_factory=dict)

    def add(self, work: Work, attempt: int, now_s: float) -> None:
        """Count an attempt from its grant on."""
        key = (work.id, attempt)
        if key in self.entries:
            raise ValueError(f"attempt {key} is in the ledger already: each (work, attempt) is counted once")
        entry = Entry(work, now_s, None, None, self._whole_blocks(work, 0), work.prompt_tokens)
        self.entries[key] = entry
        self._count(work.class_name, 1, entry.kv_tokens, entry.prefill_tokens)
        if work.sequences > 1:
            self.extra_sequences[work.class_name] = self.extra_sequences.get(work.class_name, 0) + work.sequences - 1
        self.version += 1

    def first_token(self, work_id: str, attempt: int) -> None:
        """The prompt has been prefilled: it no longer counts as pending prefill. Idempotent."""
        entry = self.entries.get((work_id, attempt))
        if entry is not None and not entry.prefilled:
            self.prefill_tokens -= entry.prefill_tokens
            entry.prefill_tokens = 0
            entry.prefilled = True
            self.version += 1

    def attach(self, work_id: str, attempt: int, progress: Progress) -> None:
        """Let `refresh` read this attempt's live token counter."""
        entry = self.entries.get((work_id, attempt))
        if entry is not None:
            entry.progress = progress

    def recallable(self) -> list[Victim]:
        """Attempts of this process that could be given up; none while some are."""
        entries = self.entries
        if any(entry.recalled for entry in entries.values()):
            return []
        return [
            Victim(entry.work, attempt, entry.granted_s, entry.kv_tokens)
            for (_, attempt), entry in entries.items()
            if entry.progress is not None and entry.progress.recallable
        ]

    def recall(self, work_id: str, attempt: int) -> None:
        """Give an attempt up. Its end is told like any other's."""
        entry = self.entries.get((work_id, attempt))
        if entry is not None and entry.progress is not None:
            entry.recalled = True
            entry.progress.recall()

    def remove(self, work_id: str, attempt: int) -> bool:
        """Forget an attempt. False when it was not there (already removed)."""
        entry = self.entries.pop((work_id, attempt), None)
        if entry is None:
            return False
        self._count(entry.work.class_name, -1, -entry.kv_tokens, -entry.prefill_tokens)
        if entry.work.sequences > 1:
            self.extra_sequences[entry.work.class_name] -= entry.work.sequences - 1
        self.version += 1
        return True

    def elsewhere(
        self, session: Session, sums: Mapping[str, InFlight], allowed: Mapping[str, InFlight], *, lost: bool = False
    ) -> None:
        """Replace what another session is taken to have here, by class; {} when it is gone.

        sums      what runs and what may be started at any moment
        allowed   which part of `sums` may be started, but was not reported as running
        lost      nobody hears of it any more: what it is only allowed may run as well as not
        """
        told = (sums, allowed, lost)
        before = self._elsewhere.pop(session, _NONE)
        if sums:
            self._elsewhere[session] = (dict(sums), dict(allowed), lost)
        if told != before:
            self._replace(*before, -1)
            self._replace(*told, 1)
            self.version += 1

    def entries_of(self, class_name: str) -> int:
        """Attempts of a class that run in this process."""
        return sum(one.taken and one.work.class_name == class_name for one in self.entries.values())

    def sent_by(self, by_s: float) -> int:
        """Attempts of this process that were sent by then."""
        return sum(one.progress is not None and one.taken_s <= by_s for one in self.entries.values())

    def running(self, class_name: str) -> int:
        """Works of a class in flight, without what is only allowed."""
        return self.in_flight.get(class_name, 0) - self.allowed.get(class_name, 0)

    def _replace(self, sums: Mapping[str, InFlight], allowed: Mapping[str, InFlight], lost: bool, sign: int) -> None:
        for class_name, one in sums.items():
            self._count(class_name, sign * one.works, sign * one.kv_tokens, sign * one.prefill_tokens)
        for class_name, one in allowed.items():
            self.allowed[class_name] = self.allowed.get(class_name, 0) + sign * one.works
            self.on_credit += 0 if lost else sign * one.works
            self.allowed_kv_tokens += sign * one.kv_tokens
            self.allowed_prefill_tokens += sign * one.prefill_tokens

    def sessions_elsewhere(self) -> list[Session]:
        """Sessions that have sums here."""
        return list(self._elsewhere)

    def _count(self, class_name: str, works: int, kv_tokens: int, prefill_tokens: int) -> None:
        left = self.in_flight.get(class_name, 0) + works
        if left:
            self.in_flight[class_name] = left
        else:
            self.in_flight.pop(class_name, None)
        self.kv_tokens += kv_tokens
        self.prefill_tokens += prefill_tokens

    def refresh(self) -> None:
        """Take the live counters over into the sums: O(works in flight), once per control tick."""
        resized = self._counted_in != self.block_tokens
        self._counted_in = self.block_tokens
        for entry in self.entries.values():
            progress = entry.progress
            if progress is None:
                continue
            output_tokens = progress.output_tokens
            if output_tokens != entry.output_tokens or resized:
                entry.output_tokens = output_tokens
                kv_tokens = self._whole_blocks(entry.work, output_tokens)
                self.kv_tokens += kv_tokens - entry.kv_tokens
                entry.kv_tokens = kv_tokens
        self.version += 1
        self.refreshed += 1

    def progress(self) -> Iterator[Running]:
        """Every attempt that is counted one by one, as of the last refresh, in the order of their grants."""
        for (_, attempt), entry in self.entries.items():
            yield Running(entry.work, attempt, entry.output_tokens, entry.prefilled)

    def _whole_blocks(self, work: Work, output_tokens: int) -> int:
        block = self.block_tokens
        per_sequence = -(-(work.prompt_tokens + output_tokens) // (work.sequences * block)) * block
        return per_sequence * work.sequences


class Ledger:
    """All engines of one pool."""

    __slots__ = ("_engines",)

    def __init__(self) -> None:
        self._engines: dict[str, EngineLedger] = {}

    def __getitem__(self, engine: str) -> EngineLedger:
        """The engine's sums; an engine never seen starts at nothing."""
        found = self._engines.get(engine)
        if found is None:
            found = self._engines[engine] = EngineLedger()
        return found

    def __iter__(self) -> Iterator[tuple[str, EngineLedger]]:
        return iter(self._engines.items())

    def engine_of(self, work_id: str, attempt: int) -> str | None:
        """Where an attempt is counted; None: nowhere."""
        key = (work_id, attempt)
        return next((name for name, ledger in self._engines.items() if key in ledger.entries), None)

    def refresh(self) -> None:
        for ledger in self._engines.values():
            ledger.refresh()

    def running_here(self, since_s: float = -math.inf) -> dict[Place, InFlight]:
        """Sums of the attempts of this process that were begun since then, by place, as its session reports them.

        A claim whose answer is not there is not among them: it may be another's work, and where it was made the store
        knows of it.
        """
        sums: dict[Place, InFlight] = {}
        for name, ledger in self._engines.items():
            by_class: dict[str, list[int]] = {}
            for entry in ledger.entries.values():
                if since_s <= entry.taken_s < math.inf:
                    class_name = entry.work.class_name
                    one = by_class.get(class_name)
                    if one is None:
                        one = by_class[class_name] = [0, 0, 0]
                    one[0] += 1
                    one[1] += entry.kv_tokens
                    one[2] += entry.prefill_tokens
            sums.update({(name, class_name): InFlight(*one) for class_name, one in by_class.items()})
        return sums

    def taken_over(self, session: Session, grants_seq: float) -> list[tuple[str, Entry]]:
        """Take out the entries of another session up to that grant, and return them with their engines."""
        taken: list[tuple[str, Entry]] = []
        for name, ledger in self._engines.items():
            for (work_id, attempt), entry in list(ledger.entries.items()):
                claimed = entry.claimed
                if claimed is not None and claimed.owner == session and claimed.seq <= grants_seq:
                    ledger.remove(work_id, attempt)
                    taken.append((name, entry))
        return taken

    def claimed_before(self, pool_s: float) -> list[tuple[EngineLedger, tuple[str, int], Entry]]:
        """Entries of other sessions that were granted before then and are in no report yet."""
        return [
            (ledger, key, entry)
            for ledger in self._engines.values()
            for key, entry in ledger.entries.items()
            if entry.claimed is not None and entry.granted_s < pool_s
        ]

    def claimed(self) -> dict[Session, None]:
        """Sessions that have entries of their own here."""
        entries = (entry for ledger in self._engines.values() for entry in ledger.entries.values())
        return {entry.claimed.owner: None for entry in entries if entry.claimed is not None}

    def only_here(self) -> list[Entry]:
        """Keep nothing but this process's own attempts, as one that does not lead; returns the other entries."""
        dropped: list[Entry] = []
        for ledger in self._engines.values():
            for (work_id, attempt), entry in list(ledger.entries.items()):
                if entry.claimed is not None:
                    ledger.remove(work_id, attempt)
                    dropped.append(entry)
            for session in ledger.sessions_elsewhere():
                ledger.elsewhere(session, {}, {})
        return dropped

    def __repr__(self) -> str:
        parts = (f"{name}={sum(one.in_flight.values())}" for name, one in self._engines.items())
        return f"<Ledger in flight: {' '.join(parts) or 'none'}>"


_NONE: tuple[Mapping[str, InFlight], Mapping[str, InFlight], bool] = ({}, {}, False)
