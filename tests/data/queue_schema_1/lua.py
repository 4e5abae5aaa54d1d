"""The scripts of `scripts/`, read from the installed package once, with the digests under which servers cache them.

`record.lua` is what they share and stands before each. A server that lost its cache (restart, SCRIPT FLUSH, failover)
answers NOSCRIPT and is sent the text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from importlib import resources

SHARED = "record"


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its whole text and the SHA-1 that EVALSHA wants."""

    name: str
    text: str = field(repr=False)
    sha: str


def load(name: str) -> Script:
    """The script `scripts/<name>.lua`, what it shares put before it."""
    folder = resources.files("tests.data.queue_schema_1").joinpath("scripts")
    shared, own = (folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in (SHARED, name))
    text = shared + own
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
