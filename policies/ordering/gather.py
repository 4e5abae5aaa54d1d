"""Works that gain from going to an engine together, next to each other.

*Lengths*: engines that pad (embeddings, rerank, scores) make every input of a batch as long as the longest, so inputs of
one length bucket, a power of two of tokens, go together. *Prefixes*: works whose requests begin alike share a prefix in
the engine's cache, for as long as it is there, so they go one after another.

Within one class, tenant and model only. The oldest work leads, its mates follow it; a work is overtaken by younger mates of
older works, and by none once it is the oldest, so nobody starves.
"""

from __future__ import annotations

from policies.vocabulary import Work

PADDED_PATHS = frozenset(
    {
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/score",
        "/v1/score",
    }
)
"""Routes whose engines run a batch as one padded array."""


def gathered(works: list[Work]) -> list[Work]:
    """Works in their order, each kind of them moved up to its first. O(n)."""
    if not any(work.prefix or work.path in PADDED_PATHS for work in works):
        return works
    groups: dict[object, list[Work]] = {}
    for work in works:
        groups.setdefault(_kind(work), []).append(work)
    return [work for group in groups.values() for work in group]


def length_bucket(work: Work) -> int:
    """Inputs of one bucket are less than twice as long as each other: the number of bits of their mean length in tokens."""
    return (work.prompt_tokens // work.sequences).bit_length()


def _kind(work: Work) -> object:
    """What mates have in common; the work's own id where nothing is gained."""
    if work.path in PADDED_PATHS:
        return work.path, length_bucket(work)
    return (work.path, work.prefix.partition(".")[0]) if work.prefix else work.id
