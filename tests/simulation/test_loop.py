"""The virtual loop keeps asyncio's promises, moves time by itself, and is the same run for the same seed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiohttp import ClientSession, TCPConnector, web

from gateway.replay.loop import Deadlock, Unhandled
from tests.simulation.loop import SimLoop, run

ROOT = Path(__file__).parents[2]


async def hello(_request: web.Request) -> web.Response:
    return web.Response(text="hello")


async def served(loop: SimLoop, requests: int, clients: int) -> int:
    """Ask an aiohttp server on another host over pooled connections; the number of right answers."""
    loop.network.add_host("engine", "10.0.0.2")
    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app, access_log=None)
    with loop.network.on("engine"):
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", 80).start()
    right = 0

    async def ask(session: ClientSession) -> None:
        nonlocal right
        for _ in range(requests // clients):
            async with session.get("http://engine/") as response:
                right += await response.text() == "hello"

    connector = TCPConnector(limit=clients, socket_factory=loop.network.socket_for)
    async with ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(ask(session))
    await runner.cleanup()
    return right


def test_aiohttp_serves_five_thousand_requests_in_seconds() -> None:
    begun_s = time.process_time()

    right = run(lambda loop: served(loop, 5_000, 20), seed=1)

    assert right == 5_000
    assert time.process_time() - begun_s < 5


async def a_varied_world(loop: SimLoop) -> str:
    """Timers at one instant, jitter, cancelled groups, sets of tasks: whatever could depend on more than the seed."""
    order: list[str] = []

    async def tick(number: int) -> None:
        try:
            await asyncio.sleep(number % 3)
            order.append(f"tick {number}")
            await asyncio.sleep(3600)
        finally:
            order.append(f"end {number}")

    async def interrupt() -> None:
        await asyncio.sleep(2)
        raise ConnectionError

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(tick(number))
            group.create_task(interrupt())
    except* ConnectionError:
        order.append("interrupted")
    await served(loop, 100, 5)
    for word in order:
        loop.trace.note(loop.network.now_ns, word)
    return loop.trace.digest


def test_a_seed_is_one_run_in_every_process_and_under_every_hash_seed() -> None:
    script = (
        "from tests.simulation.loop import run\n"
        "from tests.simulation.test_loop import a_varied_world\n"
        "print(run(a_varied_world, seed=7))\n"
    )

    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for hash_seed in ("0", "1", "4242")
    }

    assert digests == {run(a_varied_world, seed=7)}


def test_another_seed_is_another_run() -> None:
    assert run(a_varied_world, seed=7) != run(a_varied_world, seed=8)


def test_an_hour_costs_only_its_callbacks() -> None:
    async def main(loop: SimLoop) -> tuple[float, int]:
        await asyncio.sleep(3600)
        return loop.time(), loop.callbacks

    now_s, callbacks = run(main, seed=1)

    assert now_s == 3600.0
    assert callbacks < 10


def test_call_soon_keeps_its_order_under_every_seed() -> None:
    async def main(loop: SimLoop) -> list[int]:
        ran: list[int] = []
        for number in range(20):
            loop.call_soon(ran.append, number)
        await asyncio.sleep(0)
        return ran

    for seed in range(20):
        assert run(main, seed=seed) == list(range(20))


async def order_of_timers_at_one_instant(loop: SimLoop) -> tuple[int, ...]:
    ran: list[int] = []
    for number in range(5):
        loop.call_at(1.0, ran.append, number)
    await asyncio.sleep(2)
    return tuple(ran)


def test_the_seed_draws_the_order_of_timers_due_at_one_instant() -> None:
    orders = {run(order_of_timers_at_one_instant, seed=seed) for seed in range(20)}

    assert len(orders) > 10


def test_ties_are_first_in_first_out_without_permutation() -> None:
    orders = {run(order_of_timers_at_one_instant, seed=seed, permute=False) for seed in range(5)}

    assert orders == {(0, 1, 2, 3, 4)}


def test_a_timer_never_runs_before_its_instant_and_never_spins_on_it() -> None:
    async def main(loop: SimLoop) -> int:
        for tenth in range(1, 200):
            deadline_s = loop.time() + tenth / 10
            while loop.time() < deadline_s:
                woken = loop.create_future()
                loop.call_at(deadline_s, woken.set_result, None)
                await woken
        return loop.callbacks

    assert run(main, seed=1) < 1000


def test_cancelled_timers_neither_run_nor_stay() -> None:
    async def main(loop: SimLoop) -> tuple[float, int]:
        for _ in range(10_000):
            loop.call_later(3600, pytest.fail, "ran").cancel()
        await asyncio.sleep(1)
        return loop.time(), len(loop._timers)

    now_s, timers = run(main, seed=1)

    assert now_s == 1.0
    assert timers < 5_000


def test_a_deadlock_names_the_tasks_that_wait_and_where() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def main(_loop: SimLoop) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(waits_for_ever(), name="the stuck one")

    with pytest.raises(Deadlock, match=r"the stuck one: Event\.wait"):
        run(main, seed=1)


def test_an_exception_in_a_callback_ends_the_run() -> None:
    async def main(loop: SimLoop) -> None:
        loop.call_later(1, int, "no number")
        await asyncio.sleep(3600)

    with pytest.raises(Unhandled, match="no number"):
        run(main, seed=1)


def test_an_exception_that_nobody_awaits_ends_the_run() -> None:
    async def fails() -> None:
        raise ConnectionError("nobody listens")

    async def main(loop: SimLoop) -> None:
        loop.create_task(fails())
        await asyncio.sleep(3600)

    with pytest.raises(Unhandled, match="nobody listens"):
        run(main, seed=1)


def test_what_the_check_after_an_event_raises_ends_the_run() -> None:
    async def main(loop: SimLoop) -> None:
        def check(_host: str) -> None:
            assert loop.time() < 10, "an invariant"

        loop.after_event = check
        await asyncio.sleep(5)
        await asyncio.sleep(10)

    with pytest.raises(AssertionError, match="an invariant"):
        run(main, seed=1)


def test_a_run_that_fails_leaves_no_connection_for_a_later_test_to_stumble_over() -> None:
    lost: list[Exception | None] = []

    class Peer(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            lost.append(exc)

    async def main(loop: SimLoop) -> None:
        await loop.create_server(Peer, "0.0.0.0", 80)
        await loop.create_connection(Peer, "127.0.0.1", 80)
        await asyncio.sleep(1)
        raise LookupError("broken")

    with pytest.raises(LookupError, match="broken"):
        run(main, seed=1)

    assert lost == [None, None]


def test_an_executor_call_runs_inline_and_takes_no_time() -> None:
    async def main(loop: SimLoop) -> float:
        assert await asyncio.to_thread(sum, [1, 2, 3]) == 6
        with pytest.raises(ValueError, match="no number"):
            await loop.run_in_executor(None, int, "no number")
        return loop.time()

    assert run(main, seed=1) == 0.0


def test_a_time_out_fires_in_virtual_time() -> None:
    async def main(loop: SimLoop) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1800):
                await asyncio.Event().wait()
        return loop.time()

    assert run(main, seed=1) == 1800.0


def test_a_signal_reaches_its_handler_without_touching_the_process() -> None:
    async def main(loop: SimLoop) -> bool:
        before = signal.getsignal(signal.SIGTERM)
        stopped = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stopped.set)

        loop.send_signal(signal.SIGTERM)
        await stopped.wait()

        return signal.getsignal(signal.SIGTERM) is before

    assert run(main, seed=1)


def test_a_real_descriptor_is_refused() -> None:
    async def main(loop: SimLoop) -> None:
        with pytest.raises(RuntimeError, match="expected a socket of the simulated network"):
            loop.add_reader(0, print)

    run(main, seed=1)
