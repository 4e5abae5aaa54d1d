"""Tasks that run for as long as their owner's context lasts, and end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class Background:
    """A TaskGroup whose tasks run for ever and are cancelled when its context ends."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self._group.create_task(coroutine, name=name))

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            await leave(self._group, kind, error, trace)  # perhaps the group's own doing: a task has failed
        else:
            await self._group.__aexit__(None, None, None)


async def leave(
    group: asyncio.TaskGroup, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Leave a group for a context of ours. A group raises anew what it was left with; of an error that came up during an exit,
    an exit stack then makes its own cause, and seeks the end of that chain for ever."""
    try:
        await group.__aexit__(kind, error, trace)
    except BaseException as raised:
        if raised is not error:
            raise
