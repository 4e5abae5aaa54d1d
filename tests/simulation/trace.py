"""A running hash of what a simulation did, by which two runs are told to be the same."""

from __future__ import annotations

import hashlib


class Trace:
    """A running hash over everything that happened: two runs are the same run when their digests are equal."""

    __slots__ = ("_hash", "_turns", "noted")

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        self._turns = 0
        self.noted = 0

    def turn(self, now_ns: int, ready: int) -> None:
        """Fold in one turn of the loop. Python hashes integers alike in every process."""
        self.noted += 1
        self._turns = hash((self._turns, now_ns, ready))

    def note(self, now_ns: int, *words: object) -> None:
        """Fold one event in. `words` must not hold addresses, ids of processes or anything else foreign to the seed."""
        self.noted += 1
        self._hash.update(f"{now_ns} {words}\n".encode())

    @property
    def digest(self) -> str:
        whole = self._hash.copy()
        whole.update(str(self._turns).encode())
        return whole.hexdigest()

    def __repr__(self) -> str:
        return f"<Trace {self.digest} after {self.noted} events>"
