"""A wire between a gateway and its store that a test can cut and heal, as the network does it.

Cut, nothing is refused and nothing is reset: connections stay open and carry no byte, and new ones are not answered.
Healed, what was on its way arrives, as TCP sends it again.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class Wire:
    """A loopback port that leads to a store's unix socket for as long as the context lasts."""

    def __init__(self, store_url: str) -> None:
        self._socket = urlsplit(store_url).path
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.wait([asyncio.ensure_future(self._server.wait_closed()), *self._tasks])

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        store = None
        try:
            await self._whole.wait()
            from_store, store = await asyncio.open_unix_connection(self._socket)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, store))
                group.create_task(self._carry(from_store, writer))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for end in (writer, store):
                if end is not None:
                    end.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await self._whole.wait()
            writer.write(data)
            await writer.drain()
        writer.write_eof()
