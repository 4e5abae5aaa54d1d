"""Connections to whichever node is the primary now, as Sentinels or the nodes of a cluster tell it.

A pool's keys are in one slot, so of a cluster as of a Sentinel set the queue needs exactly one node at a time. It is asked
for whenever a connection is made, not kept: after a failover the queue drops its connections, and the next ones go where
the primary is by then. No command is sent twice, no table of slots is held, and subscriptions follow likewise. (The
library's own cluster client repeats commands and subscribes elsewhere.)

Nodes are asked one after the other, the one that answered last first; of a cluster also those that it named. One that
is silent costs NODE_TIMEOUT_S, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.queue.store_url import Node

NODE_TIMEOUT_S = 0.4
NODES_MAX = 64


class PrimaryUnknown(RedisConnectionError):
    """No node could be asked or knew the primary. The message says what the last one said."""


class Question(Protocol):
    """What a node is asked, and what its answer means."""

    @property
    def words(self) -> tuple[str, ...]:
        """The command."""
        ...

    def read(self, answer: Any, asked: Node) -> tuple[Node | None, Sequence[Node]]:
        """The primary, None when the node does not know it, and others that can be asked next time."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """The primary of one service of a Sentinel set."""

    name: str

    @property
    def words(self) -> tuple[str, ...]:
        return "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name

    def read(self, answer: Any, asked: Node) -> tuple[Node | None, Sequence[Node]]:
        del asked  # a Sentinel says the whole address
        return (None if answer is None else (answer[0].decode(), int(answer[1]))), ()


@dataclass(frozen=True, slots=True)
class Slot:
    """The node of a cluster that serves one slot."""

    number: int

    @property
    def words(self) -> tuple[str, ...]:
        return "CLUSTER", "SLOTS"

    def read(self, answer: Any, asked: Node) -> tuple[Node | None, Sequence[Node]]:
        primary = None
        nodes: list[Node] = []
        for first, last, *serving in answer:
            # A node that does not know its own address names none: it is where it was asked.
            found = [(host.decode() if host else asked[0], int(port)) for host, port, *_ in serving]
            nodes += found
            if first <= self.number <= last and found:
                primary = found[0]
        return primary, nodes


class Primary:
    """The primary that a question finds, through any of the nodes."""

    def __init__(
        self, question: Question, nodes: Sequence[Node], kind: type[Connection], options: dict[str, Any]
    ) -> None:
        """kind and options: of the connections on which nodes are asked."""
        self._question = question
        self._given = self._nodes = tuple(nodes)
        self._kind = kind
        self._options = options

    async def address(self) -> Node:
        """Host and port. Raises PrimaryUnknown, or AuthenticationError when we may not ask."""
        why = "no node to ask"
        for node in self._nodes:
            try:
                async with asyncio.timeout(NODE_TIMEOUT_S):
                    answer = await self._ask(node)
            except AuthenticationError:
                raise
            except (RedisError, OSError) as error:
                why = str(error) or f"{node[0]}:{node[1]} did not answer within {NODE_TIMEOUT_S} s"
                continue
            primary, others = self._question.read(answer, node)
            if primary is not None:
                self._nodes = tuple(dict.fromkeys((node, *others, *self._given)))[:NODES_MAX]
                return primary
            why = f"{node[0]}:{node[1]} does not know {self._question}"
        raise PrimaryUnknown(why)

    async def _ask(self, node: Node) -> Any:
        connection = self._kind(host=node[0], port=node[1], **self._options)
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            await connection.send_command(*self._question.words)
            return await connection.read_response()
        finally:
            await connection.disconnect(nowait=True)

    def __repr__(self) -> str:
        return f"<Primary of {self._question} nodes={len(self._nodes)}>"


class ToPrimary(Connection):
    """A connection that asks where to go each time it connects."""

    def __init__(self, *, primary: Primary, **named: Any) -> None:
        self._primary = primary
        super().__init__(**named)

    async def connect(self) -> None:
        """Connect to the primary of this moment."""
        if not self.is_connected:
            self.host, self.port = await self._primary.address()
        await super().connect()  # type: ignore[no-untyped-call]


class ToPrimaryTls(ToPrimary, SSLConnection):
    """The same over TLS."""
