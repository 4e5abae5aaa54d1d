"""Every key that a pool has in Redis: the one table, and how names become parts of keys and members.

All keys of a pool carry its name as their hash tag, so that Redis Cluster keeps them in one slot, and every script gets
all of them as KEYS in the order of `TABLE`: no script builds a key. Two things are sorted by more than one
number (a work by class, tenant and rank; a grant by session and sequence), so those are sets of equal score whose
*members* sort bytewise. That keeps the number of keys fixed however many tenants and sessions there are, and a
look-ahead reads just the range that it needs.

The schema number stands in the key, and every process of a pool speaks one schema, so that the pool has one leader. What
may change without raising it (members, fields and columns that are new), how a pool moves on from N to N+1 and why
an N that comes late is refused: docs/decisions/0009-one-schema-per-pool-at-a-time.md.

Names (class, tenant, session, engine) come from configuration and are percent-encoded: the encoded form is ASCII
without "/", tab or newline, which are the separators. A work's id is always the last part and needs no encoding. No
prompt, no API key and no other text of a client is part of a key; ids of works are members, never keys.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote

from gateway.queue.base import SETTLED_KEEP_MS, Session

SCHEMA = 1
LEADER_KEEP_MS = 86_400_000
"""A pool that nobody leads for so long is forgotten; long after every validity has run out."""


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the table.

    holds       what is in it, member or field first
    owner       whose work it is that entries leave again; "" for a key that lives by its lifetime alone
    lifetime_ms None: gone when its last entry is; else expires so long after its last change
    """

    name: str
    type: str
    holds: str
    owner: str
    lifetime_ms: int | None = None


TABLE = (
    Key("sessions", "hash", "<session> -> renewed_ms, expires_ms, report", "the process; else the leader's sweep"),
    Key("leader", "hash", "leader, epoch, expires_ms, fresh_until_ms, seq", "", LEADER_KEEP_MS),
    Key("works", "hash", "<id> -> state line, work as JSON", "the work's session; the blob store for orphans"),
    Key("waiting", "zset", "<class>/<tenant>/<rank>/<id>, score 0", "as works"),
    Key("depths", "hash", "<class>/<tenant> and <class> -> waiting works", "as works"),
    Key("owned", "zset", "<session>/<id>, score 0", "as works"),
    Key("grants", "zset", "<session>/<seq>/<id>, score 0", "as works"),
    Key("settled", "zset", "<session>/<id>, score settled_ms * 1000 + attempt", "", 2 * SETTLED_KEEP_MS),
    Key("swept", "zset", "<kind>/<session or work>, score seq", "", 2 * SETTLED_KEEP_MS),
    Key("credits", "hash", "<session> -> epoch, given_ms, credits as JSON", "the session; else the leader's sweep"),
    Key("snapshot", "hash", "epoch, version, content", "", LEADER_KEEP_MS),
    Key("told", "zset", "<session>/<seq>, a renewal's events as JSON, score seq", "", 2 * SETTLED_KEEP_MS),
)


@lru_cache(maxsize=4096)
def encoded(name: str) -> str:
    """A configured name as part of a key or member."""
    return quote(name, safe="")


def prefix(pool: str) -> str:
    """What every key and channel of a pool begins with."""
    return f"hr:{{{encoded(pool)}}}:{SCHEMA}:"


def schema_key(pool: str) -> str:
    """The one key without a schema number: the pool's schema, a string; absent means 1. Only a release past it writes it."""
    return f"hr:{{{encoded(pool)}}}:schema"


def answer_key(pool: str, digest: str) -> str:
    """What is remembered of one request with an Idempotency-Key (`gateway.idempotency.answers`): a string with a lifetime.
    Not in the table: no script of the queue touches it, and there are as many as requests."""
    return f"hr:{{{encoded(pool)}}}:answer:{digest}"


def keys(pool: str) -> tuple[str, ...]:
    """All keys of a pool, in the order of `TABLE`, and its schema's."""
    return (*(prefix(pool) + key.name for key in TABLE), schema_key(pool))


def pool_channel(pool: str) -> str:
    """The pool's bell: new or freed work."""
    return prefix(pool) + "bell"


def session_channel(pool: str, session: Session) -> str:
    """A session's bell: new grants."""
    return f"{prefix(pool)}bell:{session_part(session)}"


def session_part(session: Session) -> str:
    """(id, epoch) as one part, so that a restarted process with the same id is another owner."""
    return f"{encoded(session.id)}/{session.epoch}"


def session_of(part: str) -> tuple[str, int]:
    """The encoded id and the epoch of `session_part`."""
    name, _, epoch = part.rpartition("/")
    return name, int(epoch)


@lru_cache(maxsize=4096)
def session_from(part: str) -> Session:
    """The session of `session_part`. Each of a look-ahead's works names its owner, and they are few."""
    name, epoch = session_of(part)
    return Session(unquote(name), epoch)


def rank_part(rank: float) -> str:
    """A rank as 16 hexadecimal digits that sort as the numbers do.

    Raises ValueError for NaN, which has no place in an order.
    """
    if math.isnan(rank):
        msg = "rank nan: expected a number; compute the rank from the deadline or the time of acceptance"
        raise ValueError(msg)
    (bits,) = struct.unpack(">Q", struct.pack(">d", rank + 0.0))
    return f"{(bits ^ _ALL_BITS) if bits & _SIGN_BIT else (bits | _SIGN_BIT):016x}"


def rank_of(part: str | bytes) -> float:
    """The rank that `rank_part` wrote."""
    bits = int(part, 16)
    bits = (bits & ~_SIGN_BIT) if bits & _SIGN_BIT else (bits ^ _ALL_BITS)
    (rank,) = struct.unpack(">d", struct.pack(">Q", bits))
    return float(rank)


_SIGN_BIT = 1 << 63
_ALL_BITS = (1 << 64) - 1
