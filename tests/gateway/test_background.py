"""Contexts that own tasks, left with an error while something else fails on the way out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest

from gateway.background import Background
from gateway.queue.base import Session
from gateway.queue.batcher import Batcher
from gateway.queue.memory_queue import MemoryQueue


def batcher() -> Batcher:
    return Batcher(MemoryQueue(lambda: 0), session=lambda: Session("one", 1), now_ms=lambda: 0)


@pytest.mark.parametrize("context", [Background, batcher])
async def test_a_stop_that_is_told_twice_leaves_a_chain_of_errors_that_ends(
    context: Callable[[], AbstractAsyncContextManager[object]],
) -> None:
    first, second = asyncio.CancelledError("first"), asyncio.CancelledError("second")

    async def stopped_again() -> None:
        raise second

    async def left() -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(context())
            stack.push_async_callback(stopped_again)
            raise first

    with pytest.raises(asyncio.CancelledError) as caught:
        await left()

    assert caught.value is second
    assert (second.__context__, first.__context__) == (first, None)
