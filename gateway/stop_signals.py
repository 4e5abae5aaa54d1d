"""SIGTERM and Ctrl-C as events: the first asks to finish, the second to hurry.

Both signals mean the same, so that a container, a service manager and a person at a terminal are answered alike.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals(*more: signal.Signals) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Events for the first and the second stop signal while the context lasts; a third one has its usual effect.

    more   signals that mean the same here: the end of the terminal (SIGHUP), for those whose engines would outlive it
    """
    loop = asyncio.get_running_loop()
    numbers = (*STOP_SIGNALS, *heeded(*more))
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if not first.is_set():
            first.set()
        else:
            second.set()
            remove()

    def remove() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield first, second
    finally:
        remove()


def heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """Those that whoever started us did not have ignored, as `nohup` does with SIGHUP."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


async def finished_before(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Do the work; False when the event came first, and the work was cancelled."""
    async with asyncio.TaskGroup() as group:
        doing = group.create_task(work)
        waiting = group.create_task(event.wait())
        await asyncio.wait([doing, waiting], return_when=asyncio.FIRST_COMPLETED)
        finished = doing.done()
        doing.cancel()
        waiting.cancel()
    return finished


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM as KeyboardInterrupt, as Ctrl-C is anyway: for commands without a loop, in the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
