"""The URL of the queue's store: one server, a set of Sentinels that know the primary, or nodes of a cluster.

    redis://[user:password@]host[:6379][/db]          rediss:// the same over TLS
    unix:///path/to/socket
    redis+sentinel://[user:password@]host[:26379],host.../service[/db]
    redis+cluster://[user:password@]host[:6379],host...

`rediss+sentinel` and `rediss+cluster` speak TLS to every node. User and password are the store's; Sentinels that ask for
their own get `?sentinel_username=...&sentinel_password=...`. Further query options go to the client library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlencode

from gateway.addresses import shown_url

SCHEMES = (
    "redis",
    "rediss",
    "unix",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+cluster",
    "rediss+cluster",
)
Node = tuple[str, int]
"""(host, port)."""

_URL = re.compile(
    r"(?P<scheme>[a-z+]*)://(?:(?P<credentials>[^/?#]*)@)?(?P<hosts>[^/?#@]*)(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?"
)
"""Read here, since the standard library takes a list of bracketed addresses for a mistake."""
_NODE = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\[\]:,\s]+)(?::(?P<port>\d{1,5}))?")
_DATABASE = re.compile(r"/?|/\d{1,9}/?", re.ASCII)
_PORTS = {"": 6379, "sentinel": 26379, "cluster": 6379}


class StoreUrlError(ValueError):
    """The URL names no store. The message says what was expected, without credentials."""


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A store's URL, read.

    one_server         what the library reads: scheme, credentials, database and options; of a set without its address
    nodes              of a set: whom to ask for the primary, in this order; () for one server
    service            the primary's name among the Sentinels; "" otherwise
    sentinel_username, sentinel_password  None: Sentinels are asked without
    """

    one_server: str = field(repr=False)
    nodes: tuple[Node, ...] = ()
    service: str = ""
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)


def parse_store_url(text: str) -> StoreUrl:
    """Read one of the forms of the module header. Raises StoreUrlError."""
    match = _URL.fullmatch(text)
    if match is None or match["scheme"] not in SCHEMES:
        raise _refused(text, f"one of {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    scheme, _, kind = match["scheme"].partition("+")
    if scheme == "unix":
        return StoreUrl(text)
    nodes = tuple(_node(text, host, _PORTS[kind]) for host in match["hosts"].split(",") if host or kind)
    if not kind:
        if len(nodes) > 1 or not _DATABASE.fullmatch(match["path"]):
            raise _refused(text, f"{scheme}://HOST:PORT/NUMBER, with one host and the number of a database")
        return StoreUrl(text)
    service, _, database = match["path"].strip("/").partition("/")
    if kind == "cluster" and service:
        raise _refused(text, "no path, since a cluster has only database 0")
    if kind == "sentinel" and not service:
        raise _refused(text, "the primary's name after the hosts, as in redis+sentinel://HOST,HOST/SERVICE")
    if database and not database.isdecimal():
        raise _refused(text, "a database number after the primary's name")
    options = {name: values[0] for name, values in parse_qs(match["query"] or "").items()}
    username, password = options.pop("sentinel_username", None), options.pop("sentinel_password", None)
    credentials = f"{match['credentials']}@" if match["credentials"] else ""
    one_server = f"{scheme}://{credentials}primary/{database}" + (f"?{urlencode(options)}" if options else "")
    return StoreUrl(one_server, nodes, unquote(service), username, password)


def shown(text: str) -> str:
    """The URL as it may be printed: without credentials and query."""
    return shown_url(text).replace("…@", "")


def _node(url: str, text: str, default_port: int) -> Node:
    match = _NODE.fullmatch(text)
    port = int(match["port"] or default_port) if match else 0
    if match is None or not 0 < port < 65536:
        raise _refused(url, "HOST or HOST:PORT, several with commas between")
    return unquote(match["host"].strip("[]")), port


def _refused(url: str, expected: str) -> StoreUrlError:
    hint = ", with / ? # and @ of a password percent-encoded" if "@" in url else ""
    return StoreUrlError(f"{shown(url)!r}: expected {expected}{hint}; correct it, or leave it out for a private Valkey")
