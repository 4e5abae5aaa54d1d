"""The client of the queue's store: what redis-py is told, for any form of URL that `store_url` knows.

Making one opens no connection, so that this is also how a URL and its options are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisError

from gateway.queue.keys import keys
from gateway.queue.primary import Primary, Service, Slot, ToPrimary, ToPrimaryTls
from gateway.queue.store_url import StoreUrl, StoreUrlError, parse_store_url, shown

CONNECT_TIMEOUT_S = 1.0


def connect(url: str, *, pool: str = "default") -> Redis:
    """A client with settings that are safe for a queue, for any form of URL that `store_url` knows.

    No retries and no time-out of the library's own: `RedisQueue` bounds each command as a whole.
    pool   the queue's; of a cluster its slot says which node to go to
    Raises StoreUrlError.
    """
    store = parse_store_url(url)
    options: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": False,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": 0,
    }
    try:
        asked = parse_url(store.one_server)
        if own := sorted(asked.keys() & _OWN):
            raise StoreUrlError(f"{shown(url)!r}: {own[0]} after the ? is for the queue itself to say; leave it out")
        options |= asked
        options.get("connection_class", Connection)(**{key: options[key] for key in options if key not in _OF_THE_POOL})
        if store.nodes:
            options |= _to_primary(store, pool, options)
        connections = ConnectionPool(**options)
    except StoreUrlError:
        raise
    except (AttributeError, TypeError, ValueError, RedisError):  # what redis-py's constructors raise for one or another
        raise StoreUrlError(
            f"{shown(url)!r}: redis-py does not take all its options after the ?; correct them, or leave them out"
        ) from None
    client: Redis = Redis.from_pool(connections)
    return client


_OF_THE_POOL = frozenset({"connection_class", "max_connections"})
_OWN = frozenset(
    {
        "credential_provider",
        "decode_responses",
        "encoding",
        "protocol",
        "redis_connect_func",
        "retry_on_error",
        "retry_on_timeout",
        "socket_timeout",
    }
)
"""How answers are read, and how long they are waited for: with other values the scripts' answers would be misread. And what
takes a function, which no URL has."""


def _to_primary(store: StoreUrl, pool: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What makes the connections of a client go to the primary of a set of nodes."""
    of_the_store = {"host", "port", "db", "connection_class", "max_connections"}
    asking = {name: value for name, value in options.items() if name not in of_the_store}
    kind = options.get("connection_class", Connection)
    if store.service:
        asking |= {"username": store.sentinel_username, "password": store.sentinel_password}
    question = Service(store.service) if store.service else Slot(key_slot(keys(pool)[0].encode()))
    return {
        "connection_class": ToPrimaryTls if kind is SSLConnection else ToPrimary,
        "primary": Primary(question, store.nodes, kind, asking),
    }
