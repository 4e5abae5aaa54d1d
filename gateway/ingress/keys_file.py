"""The API keys file: read strictly, watched, swapped whole; the last good one stays in force.

    - tenant: search
      sha256: "9f86d0..."          # SHA-256 of the key in hex; `headrace key new search` prints both
      max_class: interactive       # optional: the highest class the key may use
      id: search-2026              # optional: what metrics and logs call it; default: the digest's first 8 digits

The content is read on every poll and compared, not the inode or the mtime: a Kubernetes secret is a symlink that moves,
editors rename over, and the file is small. At start a bad file is an error; later it is told and changes nothing, so
that a slip of the pen does not lock everybody out or let everybody in. An empty list is refused for the same reason.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from gateway.ingress.auth import Key, KeyRing
from gateway.logs import Log
from gateway.watched_file import regular
from policies.yaml_source import DocumentError, Finding, Problem, load

POLL_S = 2.0
FILE_MAX_BYTES = 1024 * 1024

_Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._:@/-]+$")]


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One list entry of the file."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    tenant: _Name
    sha256: Annotated[str, Field(pattern=r"^[0-9A-Fa-f]{64}$", description="SHA-256 of the key, 64 hex digits")]
    max_class: Annotated[str, Field(max_length=64)] = ""
    id: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._:@/-]*$")] = ""


class KeysFile:
    """See the module header. `current` is swapped by one assignment, by `run` alone.

    failed       the newest content was refused (or could not be read)
    generation   how many contents have been taken, >= 1
    """

    def __init__(self, path: Path, log: Log) -> None:
        """Raises DocumentError: without a good file at start there is no gateway."""
        self._path = path
        self._log = log
        content = _read(path)
        self._seen: bytes | None = content
        self.current = parse(content, str(path))
        self.failed = False
        self.generation = 1

    def __repr__(self) -> str:
        return f"<KeysFile generation={self.generation} {self.current!r}{' failed' if self.failed else ''}>"

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.poll()

    async def poll(self) -> None:
        """Look once, and take what is new and good."""
        loop = asyncio.get_running_loop()
        seen, self._seen = self._seen, None  # of what cannot be read
        try:
            content = self._seen = await loop.run_in_executor(None, _read, self._path)
            if content == seen:
                return
            # A thousand keys take half a second to read, in which streams must not stand still.
            self.current = await loop.run_in_executor(None, parse, content, str(self._path))
        except DocumentError as error:
            self.failed = True
            self._log.error("keys file refused, the last good one stays", reason=str(error), repeat_key="keys file")
            return
        self.failed = False
        self.generation += 1
        self._log.info("keys file taken", keys=len(self.current), generation=self.generation)


def parse(content: bytes, file: str) -> KeyRing:
    """The key ring that a file's content describes. Raises DocumentError with every problem."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(file, f"byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    entries = load(text, list[KeyEntry], file, check=_check)
    return KeyRing(
        Key(entry.tenant, bytes.fromhex(entry.sha256), entry.id or entry.sha256[:8].lower(), entry.max_class)
        for entry in entries
    )


def _check(entries: list[KeyEntry]) -> list[Finding]:
    findings: list[Finding] = []
    if not entries:
        findings.append(((), "an empty list", "list at least one key, or leave out keys_file to serve without keys"))
    first: dict[str, int] = {}
    for number, entry in enumerate(entries):
        if not _HEX.fullmatch(entry.sha256):
            continue
        if first.setdefault(entry.sha256.lower(), number) != number:
            expectation = f"must differ from entry {first[entry.sha256.lower()]}; one key belongs to one tenant"
            findings.append(((number, "sha256"), "repeated", expectation))
    return findings


_HEX = re.compile(r"[0-9A-Fa-f]{64}")


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=regular) as file:
            content = file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(str(path), f"cannot be read: {error.strerror or error}") from None
    if len(content) > FILE_MAX_BYTES:
        raise _unreadable(str(path), f"longer than {FILE_MAX_BYTES} bytes; split the tenants over gateways")
    return content


def _unreadable(file: str, what: str) -> DocumentError:
    return DocumentError([Problem(file, 1, "", "", what)])
