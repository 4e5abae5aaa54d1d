"""Writes request heads for one engine: target, Host, credentials, framing.

What is the same for every request to an engine (Host, credentials, the coding we ask for) is rendered once. Fields
that belong to the hop or to the engine are ours alone, so they are dropped from what the caller passes on.

Nothing that the caller passes can end a line early: a head with a stray CR, LF or NUL is refused, whoever sent it.
Credentials in the base URL (`http://user:pass@host`) become a Basic authorization, a query there (`?api-version=1`)
is added to every target, and neither shows in any message.
"""

from __future__ import annotations

import base64
import re
from ipaddress import ip_address
from typing import Final
from urllib.parse import unquote, urlsplit

from backends.base import EngineAddress, EngineRequest

_OURS: Final = frozenset(
    (
        b"accept-encoding",
        b"authorization",
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    ),
)
_METHOD: Final = re.compile(rb"[A-Z]+")
_TARGET: Final = re.compile(rb"/[\x21-\x7e\x80-\xff]*")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class RequestHeads:
    """Where one engine is, and how a request to it begins.

    host      name or address literal to connect to, without brackets
    literal   host is an IP address, so that there is nothing to resolve
    """

    __slots__ = ("_fixed", "_fixed_line_ends", "_prefix", "_query", "host", "literal", "port", "secure")

    def __init__(self, address: EngineAddress) -> None:
        try:
            url = urlsplit(address.base_url)
            port = url.port
            host = url.hostname
        except ValueError:
            raise _bad_address(address) from None
        if url.scheme not in _DEFAULT_PORTS or not host or url.fragment:
            raise _bad_address(address)
        self.secure = url.scheme == "https"
        self.port: int = _DEFAULT_PORTS[url.scheme] if port is None else port
        self.literal = _is_literal(host)
        try:
            self.host: str = host if self.literal else host.encode("idna").decode("ascii")
        except UnicodeError:
            raise _bad_address(address) from None
        self._prefix = url.path.rstrip("/").encode()
        self._query = url.query.encode()

        authority = f"[{self.host}]" if ":" in self.host else self.host
        if self.port != _DEFAULT_PORTS[url.scheme]:
            authority = f"{authority}:{self.port}"
        fixed = [f"host: {authority}".encode(), b"accept-encoding: identity"]
        if address.api_key is not None:
            fixed.append(b"authorization: Bearer " + address.api_key.encode())
        elif url.username is not None:
            pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
            fixed.append(b"authorization: Basic " + base64.b64encode(pair.encode()))
        self._fixed = b"\r\n".join(fixed)
        self._fixed_line_ends = len(fixed) - 1
        whole = _lines_whole(self._fixed, self._fixed_line_ends)
        if not whole or not _TARGET.fullmatch(self._prefix + b"/" + self._query):
            raise _bad_address(address)

    def render(self, request: EngineRequest) -> bytes:
        """The request's head, up to and including the blank line. Raises ValueError for what cannot be sent."""
        target = self._prefix + request.target
        if self._query:
            target += (b"&" if b"?" in target else b"?") + self._query
        if not _METHOD.fullmatch(request.method) or not _TARGET.fullmatch(target):
            raise ValueError("method or target of a request: must be upper-case and begin with /, without spaces")
        lines = [b"%b %b HTTP/1.1" % (request.method, target), self._fixed]
        lines.extend(b"%b: %b" % field for field in request.headers if field[0] not in _OURS)
        lines.append(b"content-length: %d\r\n\r\n" % len(request.body))
        head = b"\r\n".join(lines)
        if not _lines_whole(head, len(lines) + 1 + self._fixed_line_ends):
            raise ValueError("a request header field: must hold no CR, LF or NUL; drop it before it gets here")
        return head


def _lines_whole(head: bytes, line_ends: int) -> bool:
    """True when the head has just the line ends that we wrote: one scan per byte value for all fields together."""
    return head.count(b"\n") == line_ends and head.count(b"\r") == line_ends and b"\0" not in head


def _is_literal(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _bad_address(address: EngineAddress) -> ValueError:
    # The URL itself may hold a password, so that it is named by its engine only.
    return ValueError(
        f"address of engine {address.name}: base_url must be http(s)://host[:port][/prefix] and api_key one line; "
        "correct its settings"
    )
