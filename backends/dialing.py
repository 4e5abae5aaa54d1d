"""Opens one connection to a host, racing its addresses (RFC 8305, "happy eyeballs").

A name may have an IPv6 address that leads nowhere. So the addresses are tried alternating between families, the next
one starting 250 ms after the last or as soon as it failed, and the first to answer wins. asyncio's own loop can do
that, uvloop's cannot, and a virtual loop need not: so the race is run here, over `getaddrinfo` and `create_connection`,
which all of them have. Names are resolved each time: an engine that moved is found on the next connect.

The caller bounds the whole by a time-out and cancels it at will; losers are closed, never left behind.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import chain, zip_longest
from typing import Final, TypeVar, cast

from backends.base import FailureKind

STAGGER_S: Final = 0.25

ProtocolT = TypeVar("ProtocolT", bound=asyncio.BaseProtocol)
Opened = tuple[asyncio.BaseTransport, ProtocolT]


async def dial(
    loop: asyncio.AbstractEventLoop,
    factory: Callable[[], ProtocolT],
    host: str,
    port: int,
    *,
    literal: bool,
    tls: ssl.SSLContext | None,
) -> ProtocolT:
    """Connect and return the protocol, its connection_made called.

    literal   host is an address: nothing to resolve, nobody to race
    Raises OSError (gaierror for the name, SSLError for TLS) of the last address that failed.
    """

    async def open_one(address: str) -> Opened[ProtocolT]:
        if tls is None:
            return await loop.create_connection(factory, address, port)
        return await loop.create_connection(factory, address, port, ssl=tls, server_hostname=host)

    addresses = [host] if literal else await _resolve(loop, host, port)
    _, protocol = await (open_one(addresses[0]) if len(addresses) == 1 else _race(loop, open_one, addresses))
    return protocol


def failure_of(error: Exception, *, secure: bool) -> tuple[FailureKind, str]:
    """The kind of a failed dial, and a sentence that names no address."""
    if isinstance(error, socket.gaierror | UnicodeError):
        return FailureKind.NAME_UNRESOLVED, "host name does not resolve"
    if isinstance(error, ssl.SSLError):
        return FailureKind.TLS, f"TLS handshake failed: {error.reason or type(error).__name__}"
    if isinstance(error, TimeoutError):
        return FailureKind.CONNECT_TIMEOUT, "no answer to the connection attempt"
    if secure and isinstance(error, ConnectionResetError | ConnectionAbortedError):
        return FailureKind.TLS, "connection broken off in the TLS handshake"
    return FailureKind.CONNECT_REFUSED, f"could not connect: {_reason(error)}"


def _reason(error: Exception) -> str:
    """An OSError's name without its text, which quotes addresses."""
    return type(error).__name__ if type(error) is not OSError else f"OSError {error.errno}"


async def _resolve(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[str]:
    """Addresses of a name, families taking turns, the resolver's first choice first."""
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys((family, str(sockaddr[0])) for family, _, _, _, sockaddr in found)
    if not addresses:
        raise socket.gaierror(socket.EAI_NONAME, "no address")
    first_family = next(iter(addresses))[0]
    preferred = [address for family, address in addresses if family == first_family]
    others = [address for family, address in addresses if family != first_family]
    return [address for address in chain.from_iterable(zip_longest(preferred, others)) if address is not None]


async def _race(
    loop: asyncio.AbstractEventLoop,
    open_one: Callable[[str], Coroutine[None, None, Opened[ProtocolT]]],
    addresses: list[str],
) -> Opened[ProtocolT]:
    """Owns one task per address under way; whatever way it ends, none of them runs on and none stays connected."""
    waiting = deque(addresses)
    running: set[asyncio.Task[Opened[ProtocolT]]] = set()
    winner: asyncio.Task[Opened[ProtocolT]] | None = None
    try:
        while winner is None:
            if waiting:
                running.add(loop.create_task(open_one(waiting.popleft())))
            done, _ = await asyncio.wait(
                running, timeout=STAGGER_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            winner = next((task for task in done if task.exception() is None), None)
            failed = {task for task in done if task.exception() is not None}
            running -= failed
            if winner is None and not running and not waiting:
                return failed.pop().result()  # raises: the last one's error
        await _call_off(running - {winner})
        return winner.result()
    except BaseException:
        await _call_off(running)
        raise


async def _call_off(running: set[asyncio.Task[Opened[ProtocolT]]]) -> None:
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    for task in running:
        if not task.cancelled() and task.exception() is None:  # it had connected just then
            transport, _ = task.result()
            cast("asyncio.Transport", transport).abort()  # uvloop's transports are none by inheritance
