"""What a supervisor and its processes say to each other, as JSON lines on a socket pair that the child inherits.

The pair is the child's standard input: it needs no name that others could open, nothing secret stands in arguments or
environment, and its end says that the other side is gone, however it went. The first line is a `Start`; after it the
supervisor sends `Order`s and the process sends `Report`s.

Unknown fields are passed over and absent ones have defaults, so that the two sides may be of neighbouring versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter

from gateway.app import Role
from gateway.settings import Settings
from gateway.workers.merge import Told

LINE_MAX_BYTES = 64 * 1024 * 1024
"""Far above what any report holds; only so that a line is bounded."""

CHANNEL_FD = 0


@dataclass(frozen=True, slots=True)
class Start:
    """The first line.

    name         in logs: decider, or the worker's number
    settings     as JSON text, secrets included: it goes through the channel only
    public_fds   the listening sockets, inherited under the same numbers
    board_fd     of the `gateway.workers.accepting.Board`, inherited likewise; place is the worker's own on it
    """

    role: Role
    name: str
    settings: str = field(repr=False)
    public_fds: tuple[int, ...] = ()
    board_fd: int = -1
    place: int = 0

    @classmethod
    def of(cls, settings: Settings, **others: Any) -> Start:
        """A start with these settings."""
        return cls(settings=_SETTINGS.dump_json(settings).decode(), **others)

    def read_settings(self) -> Settings:
        """The settings in their one form."""
        return _SETTINGS.validate_json(self.settings)


class Do(StrEnum):
    """What a supervisor can order."""

    TELL = "tell"
    """Report everything now."""
    RETIRE = "retire"
    """Others take over: accept no connection, answer what comes on those there are, then DRAIN."""
    DRAIN = "drain"
    """Take nothing new, let what runs finish, end."""
    HURRY = "hurry"
    """End at once."""


@dataclass(frozen=True, slots=True)
class Order:
    """seq: the report that answers a TELL bears it."""

    do: Do
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a process tells, unasked a few times a second (counts and a few numbers) or in answer to TELL (all of it).

    answers       seq of the TELL, 0 for none
    up            it serves (a worker) or leads or stands by (the decider)
    leaving       it takes nothing new any more
    session       id and epoch of its session in the queue; epoch 0 for none yet
    leads_epoch   epoch of its leadership, 0 when it does not lead
    counts        what it counted since its last report
    gauges, status, policy, unready   with answers only; see `gateway.admin.api.Administered`
    """

    answers: int = 0
    up: bool = False
    leaving: bool = False
    session: tuple[str, int] = ("", 0)
    leads_epoch: int = 0
    in_flight: int = 0
    connections: int = 0
    counts: Told = field(default_factory=dict)
    gauges: Told = field(default_factory=dict)
    unready: str = ""
    status: Mapping[str, object] = field(default_factory=dict)
    policy: Mapping[str, object] = field(default_factory=dict)


Message = Start | Order | Report
_Kind = TypeVar("_Kind", Start, Order, Report)
_SETTINGS = TypeAdapter(Settings)
_ADAPTERS: Mapping[type[Message], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Start, Order, Report)}


class Channel:
    """One end. Made inside the running loop; `close` is idempotent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def on(cls, end: socket.socket) -> Channel:
        """Take over a socket of the pair."""
        return cls(*await asyncio.open_unix_connection(sock=end, limit=LINE_MAX_BYTES))

    def send(self, message: Message) -> None:
        """Write one line. To a side that is gone nothing is sent, which its reader learns from the end."""
        if not self._writer.is_closing():
            option = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
            self._writer.write(orjson.dumps(message, default=str, option=option))

    async def drained(self) -> None:
        """Wait while the other side is slow to read; not for one that is gone, which `receive` tells."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def receive(self, kind: type[_Kind]) -> _Kind | None:
        """The next line; None at the end of the channel, also within a line."""
        try:
            line = await self._reader.readuntil()
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        message: _Kind = _ADAPTERS[kind].validate_json(line)
        return message

    def close(self) -> None:
        """End it for both sides."""
        self._writer.close()
