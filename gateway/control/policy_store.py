"""The policy in force: one frozen value, swapped whole by one assignment, kept when a newer file is wrong.

The file's *content* is read on every poll and compared. Watching inodes or modification times misses a Kubernetes
ConfigMap (a chain of symlinks of which only the middle one moves), an editor that renames over, and a restored backup
with an old date; reading a few kilobytes a second misses nothing. A changed content is taken when two polls in a row
read the same, so that a file caught half written is not taken for a shorter policy.

At start a wrong document is an error: there is no gateway without a good one. Later it is told (log, `failed`,
`problems`) and changes nothing. Decisions take `current` once and use that one value throughout.

One writer: this store alone swaps the policy. Subscribers are told synchronously, after the swap, and may not raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from gateway.clock import Clock
from gateway.logs import Log
from gateway.watched_file import regular
from policies import presets
from policies.document import parse
from policies.schema import Policy
from policies.yaml_source import TEXT_MAX, DocumentError, Problem

POLL_S = 1.0

Subscriber = Callable[[Policy, Policy], None]
"""Told (old, new) after a swap."""


class PolicyStore:
    """See the module header.

    current         the policy in force
    generation      policies put in force since the start, the first is 1
    last_success_s  pool time at which the file was last found good (taken, or seen unchanged)
    problems        what is wrong with the newest content; () when nothing is
    failed          the newest content was refused or could not be read; the gauge of that name
    """

    def __init__(
        self,
        path: Path | None,
        *,
        log: Log,
        clock: Clock,
        engines: Collection[str] | None = None,
        policy: Policy | None = None,
    ) -> None:
        """Read the policy; without a path take the one given, or the preset `balanced`.

        engines   names of the configured engines, so that windows for an unknown one are refused; None: not checked
        Raises DocumentError: with a wrong or unreadable file there is nothing to start with.
        """
        self._path = path
        self._log = log
        self._clock = clock
        self._engines = None if engines is None else frozenset(engines)
        self._subscribers: list[Subscriber] = []
        self._good = b"" if path is None else _read(path, opener=regular)
        self._judged: bytes | None = self._good
        self._changed: bytes | None = None
        self.current = (policy or presets.load()) if path is None else self._parse(self._good)
        self.generation = 1
        self.last_success_s = clock.pool_s()
        self.problems: tuple[Problem, ...] = ()

    @property
    def failed(self) -> bool:
        """True while the newest content of the file is not the one in force."""
        return bool(self.problems)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Be told of every swap from now on."""
        self._subscribers.append(subscriber)

    async def run(self) -> None:
        """Watch the file until cancelled; without a file there is nothing to watch and it returns."""
        while self._path is not None:
            await asyncio.sleep(POLL_S)
            await self.poll()

    async def poll(self) -> None:
        """Look once. What is new is taken at the second look that reads it the same."""
        if self._path is None:
            return
        loop = asyncio.get_running_loop()
        try:
            content = await loop.run_in_executor(None, partial(_read, self._path, opener=regular))
        except DocumentError as error:
            self._judged = self._changed = None
            self._refuse(error)
            return
        if content == self._good:
            self._judged, self._changed = content, None
            self._found_good()
        elif content == self._changed:
            self._judged, self._changed = content, None
            await self._take(content)
        elif content != self._judged:
            self._changed = content

    async def _take(self, content: bytes) -> None:
        """Put a content in force, or refuse it. Reading a document can take seconds, in which streams must not stand still."""
        try:
            new = await asyncio.get_running_loop().run_in_executor(None, self._parse, content)
        except DocumentError as error:
            self._refuse(error)
            return
        old, self.current = self.current, new
        self._good = content
        self.generation += 1
        self._found_good()
        self._log.info("policy taken", version=new.version, previous=old.version, generation=self.generation)
        for subscriber in self._subscribers:
            subscriber(old, new)

    def _found_good(self) -> None:
        self.problems = ()
        self.last_success_s = self._clock.pool_s()

    def _refuse(self, error: DocumentError) -> None:
        if error.problems != self.problems:
            self._log.error("policy refused, the last good one stays", version=self.current.version, reason=str(error))
        self.problems = error.problems

    def _parse(self, content: bytes) -> Policy:
        return parse(_decode(content, str(self._path)), str(self._path), engines=self._engines)

    def __repr__(self) -> str:
        state = "failed" if self.failed else "good"
        return f"<PolicyStore {self.current.version} generation={self.generation} {state}>"


def read_policy(path: Path, *, engines: Collection[str] | None = None) -> Policy:
    """A policy file as a policy. Raises DocumentError, also when the file cannot be read."""
    return parse(_decode(_read(path), str(path)), str(path), engines=engines)


def _read(path: Path, *, opener: Callable[[str, int], int] | None = None) -> bytes:
    """The file's bytes, with one more than may be when it is too long (`parse` then says so)."""
    try:
        with open(path, "rb", opener=opener) as file:
            return file.read(4 * TEXT_MAX + 1)
    except OSError as error:
        raise DocumentError([Problem(str(path), 1, "", "", f"cannot be read: {error.strerror or error}")]) from None


def _decode(content: bytes, file: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        problem = Problem(file, line, "", "", f"byte {error.start} is not UTF-8; save the file as UTF-8")
        raise DocumentError([problem]) from None
