"""What we have in flight on each engine, counted by us: exact about what was sent, ahead of any polled metric.

The dispatcher adds a work *before* anything is awaited and removes it when its attempt ends, so that two decisions in
one loop turn can never both take the last place. Generated tokens are read from the relays' live counters on each
`refresh` (every control tick), not on every chunk: the hot path only bumps its own integer.

Sums are kept incrementally and equal a recomputation after any sequence of events (tests/gateway/test_ledger.py).
One writer: the pool's dispatcher.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from gateway.queue.base import InFlight
from policies.vocabulary import Work

BLOCK_TOKENS = 16
"""KV block size assumed where an engine does not tell its own (vLLM's default)."""


class Progress(Protocol):
    """A live counter of one attempt; the relay bumps it, the ledger reads it."""

    output_tokens: int


@dataclass(slots=True)
class Entry:
    """One attempt in flight. kv_tokens is its share of the engine's sum at the last refresh, in whole blocks."""

    work: Work
    granted_s: float
    progress: Progress | None = None
    kv_tokens: int = 0
    prefill_tokens: int = 0


@dataclass(slots=True)
class EngineLedger:
    """The sums of one engine. `version` grows with every change, so that a cached view knows when it is old."""

    block_tokens: int = BLOCK_TOKENS
    entries: dict[tuple[str, int], Entry] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)
    kv_tokens: int = 0
    prefill_tokens: int = 0
    last_grant_s: float = float("-inf")
    version: int = 0

    def add(self, work: Work, attempt: int, now_s: float) -> None:
        """Count an attempt from its grant on."""
        key = (work.id, attempt)
        if key in self.entries:
            raise ValueError(f"attempt {key} is in the ledger already: each (work, attempt) is counted once")
        entry = Entry(work, now_s, None, self._whole_blocks(work, 0), work.prompt_tokens)
        self.entries[key] = entry
        self.in_flight[work.class_name] = self.in_flight.get(work.class_name, 0) + 1
        self.kv_tokens += entry.kv_tokens
        self.prefill_tokens += entry.prefill_tokens
        self.last_grant_s = now_s
        self.version += 1

    def first_token(self, work_id: str, attempt: int) -> None:
        """The prompt has been prefilled: it no longer counts as pending prefill. Idempotent."""
        entry = self.entries.get((work_id, attempt))
        if entry is not None and entry.prefill_tokens:
            self.prefill_tokens -= entry.prefill_tokens
            entry.prefill_tokens = 0
            self.version += 1

    def attach(self, work_id: str, attempt: int, progress: Progress) -> None:
        """Let `refresh` read this attempt's live token counter."""
        entry = self.entries.get((work_id, attempt))
        if entry is not None:
            entry.progress = progress

    def remove(self, work_id: str, attempt: int) -> bool:
        """Forget an attempt. False when it was not there (already removed)."""
        entry = self.entries.pop((work_id, attempt), None)
        if entry is None:
            return False
        left = self.in_flight[entry.work.class_name] - 1
        if left:
            self.in_flight[entry.work.class_name] = left
        else:
            del self.in_flight[entry.work.class_name]
        self.kv_tokens -= entry.kv_tokens
        self.prefill_tokens -= entry.prefill_tokens
        self.version += 1
        return True

    def refresh(self) -> None:
        """Take the live counters over into the sums: O(works in flight), once per control tick."""
        for entry in self.entries.values():
            if entry.progress is not None:
                kv_tokens = self._whole_blocks(entry.work, entry.progress.output_tokens)
                self.kv_tokens += kv_tokens - entry.kv_tokens
                entry.kv_tokens = kv_tokens
        self.version += 1

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

    def refresh(self) -> None:
        for ledger in self._engines.values():
            ledger.refresh()

    def report(self) -> dict[tuple[str, str], InFlight]:
        """(engine, class) -> sums, as a session reports them with its renewal."""
        sums: dict[tuple[str, str], InFlight] = {}
        for name, ledger in self._engines.items():
            for entry in ledger.entries.values():
                key = (name, entry.work.class_name)
                was = sums.get(key, InFlight())
                sums[key] = InFlight(
                    was.works + 1, was.kv_tokens + entry.kv_tokens, was.prefill_tokens + entry.prefill_tokens
                )
        return sums

    def __repr__(self) -> str:
        parts = (f"{name}={sum(one.in_flight.values())}" for name, one in self._engines.items())
        return f"<Ledger in flight: {' '.join(parts) or 'none'}>"
