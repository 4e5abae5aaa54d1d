"""What each engine's prefix cache probably holds: the beginnings of the requests that it was sent of late.

A work's `prefix` names the first 1, 2, 4, ... KiB of its request, each level by a digest of all up to there. What two works
share is the longest level that both have, so a conversation finds the engine of its earlier turns, and requests with one
long instruction find each other. Engines tell nothing of what they keep: the digests sent to one are forgotten in the order
in which they were last used, DIGESTS_KEPT of them, and an engine that started anew is believed warm until then.
"""

from __future__ import annotations

from collections import OrderedDict

from policies.vocabulary import Work

BYTES_PER_TOKEN = 4
FIRST_LEVEL_BYTES = 1024
LEVELS = 6
"""The last one is 32 KiB."""
DIGESTS_KEPT = 8192
"""Of one engine."""


def level_tokens(level: int) -> int:
    """Prompt tokens in the beginning that a level names."""
    return (FIRST_LEVEL_BYTES << level) // BYTES_PER_TOKEN


class PrefixCaches:
    """See the module header. One per pool, its owner is the dispatcher."""

    __slots__ = ("_sent",)

    def __init__(self) -> None:
        self._sent: dict[str, OrderedDict[tuple[str, str], None]] = {}

    def granted(self, engine: str, work: Work) -> None:
        """The work was sent there."""
        if not work.prefix:
            return
        sent = self._sent.get(engine)
        if sent is None:
            sent = self._sent[engine] = OrderedDict()
        for digest in work.prefix.split("."):
            sent[work.model, digest] = None
            sent.move_to_end((work.model, digest))
        while len(sent) > DIGESTS_KEPT:
            sent.popitem(last=False)

    def tokens(self, engine: str, work: Work) -> int:
        """Leading prompt tokens of the work that the engine probably has."""
        sent = self._sent.get(engine)
        if not sent:
            return 0
        found = 0
        for level, digest in enumerate(work.prefix.split(".")):
            if (work.model, digest) not in sent:
                break
            found = level_tokens(level)
        return min(found, work.prompt_tokens)

    def __repr__(self) -> str:
        return f"<PrefixCaches {' '.join(f'{name}={len(sent)}' for name, sent in sorted(self._sent.items()))}>"
