"""What must hold of a pool's keys at any moment: every key has an owner or a lifetime, and the indexes agree."""

from __future__ import annotations

from collections import Counter
from typing import cast

from redis.asyncio import Redis

from gateway.queue.keys import TABLE, prefix


async def check_keys(client: Redis, pool: str) -> None:
    """Fail for a key that is not in the table, has neither owner nor lifetime, or disagrees with the works."""
    start = prefix(pool)
    pattern = start.replace("[", r"\[") + "*"
    found = {str(key, "ascii") async for key in client.scan_iter(match=pattern, count=1000) if isinstance(key, bytes)}
    by_key = {start + key.name: key for key in TABLE}
    assert found <= set(by_key), f"keys that the table does not have: {found - set(by_key)}"
    for name in found:
        key = by_key[name]
        assert await client.type(name) == key.type.encode()
        assert key.owner or 0 < await client.pttl(name) <= (key.lifetime_ms or 0), (
            f"{name} has no owner and no lifetime"
        )
    await _check_indexes(client, start)


async def _check_indexes(client: Redis, start: str) -> None:
    works = {
        work_id: text.partition(b"\n")[0].split(b"\t")
        for work_id, text in (await _hash(client, start + "works")).items()
    }
    sessions = await _hash(client, start + "sessions")
    waiting, owned, grants, depths = set(), set(), set(), Counter[bytes]()
    for work_id, (state, owner, _attempt, body, queue, rank, _epoch, _engine, _expires, seq, *_) in works.items():
        if owner:
            assert owner in sessions, f"work {work_id!r} belongs to {owner!r}, which is no session"
            owned.add(owner + b"/" + work_id)
        else:
            assert body == b"b", f"work {work_id!r} has no owner, and its body is with its owner"
        if state == b"w":
            waiting.add(queue + b"/" + rank + b"/" + work_id)
            depths.update((queue, queue.partition(b"/")[0]))
        else:
            grants.add(b"%s/%016d/%s" % (owner, int(seq), work_id))
    credited = set(await _hash(client, start + "credits"))
    assert credited <= set(sessions), f"credits of what is no session: {credited - set(sessions)}"
    assert set(await client.zrange(start + "waiting", 0, -1)) == waiting
    assert set(await client.zrange(start + "owned", 0, -1)) == owned
    assert set(await client.zrange(start + "grants", 0, -1)) == grants
    assert {queue: int(depth) for queue, depth in (await _hash(client, start + "depths")).items()} == depths


async def _hash(client: Redis, name: str) -> dict[bytes, bytes]:
    return cast("dict[bytes, bytes]", await client.hgetall(name))
