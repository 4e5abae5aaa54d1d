"""The loop of a replay: time jumps to the next timer, order is that of setting, and nothing goes wrong in silence."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from gateway.replay.loop import Deadlock, Unhandled, VirtualLoop, run


def test_an_hour_passes_in_no_time_and_timers_come_in_order() -> None:
    seen: list[tuple[float, str]] = []

    def note(name: str) -> None:
        seen.append((asyncio.get_running_loop().time(), name))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for delay_s, name in ((3600.0, "late"), (0.5, "b"), (0.5, "c"), (0.25, "a")):
            loop.call_later(delay_s, note, name)
        await asyncio.sleep(3600.5)

    begun_s = time.perf_counter()
    run(main())

    assert seen == [(0.25, "a"), (0.5, "b"), (0.5, "c"), (3600.0, "late")]
    assert time.perf_counter() - begun_s < 1.0


def test_time_outs_and_cancellation_are_asyncios_own() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.0):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert run(main()) == 7.0


def test_cancelled_timers_do_not_pile_up() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for _ in range(10_000):
            loop.call_later(1e6, print).cancel()
            await asyncio.sleep(0)
        return len(loop._timers)

    assert run(main()) < 300


def test_waiting_for_nothing_is_a_deadlock_that_says_who_waits() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match=r"at 0\.000000 s every task waits(.|\n)*test_virtual_loop"):
        run(main())


def test_an_exception_in_a_callback_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: 1 / 0)
        await asyncio.sleep(2.0)

    with pytest.raises(Unhandled, match=r"at 1\.000000 s"):
        run(main())


def test_another_thread_is_refused() -> None:
    refused: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def elsewhere() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                refused.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    run(main())

    assert refused
    assert "one thread" in refused[0]
