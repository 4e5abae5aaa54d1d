"""Clients that leave while another gateway decides about their works: queued, granted or running, streamed or whole.

Wherever a work was, its engine is idle within two seconds and the store holds nothing of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import pytest_asyncio

from tests.end_to_end.engine_process import eventually
from tests.end_to_end.traffic import ask
from tests.end_to_end.two_engines import at_least, holds
from tests.end_to_end.two_gateways import Pool, frozen, holders, two_gateways
from tests.gateway.ingress.raw_client import RawClient
from tests.redis_servers import serving

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.many,
    pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"]),
]

PLACES = 4
"""Of bulk, on both engines together."""
LONG_TOKENS = 3000
GONE_S = 2.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    with serving("valkey-9") as store:
        async with two_gateways(
            tmp_path_factory.mktemp("pool"), store, places=PLACES // 2 + 1, for_bulk=PLACES // 2
        ) as pool:
            yield pool


@asynccontextmanager
async def asking(pool: Pool, name: str, count: int, *, stream: bool) -> AsyncIterator[list[RawClient]]:
    """So many clients of a gateway that have asked for long answers; they leave when the context ends."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RawClient(pool.gateways[name].port)) for _ in range(count)]
        for client in clients:
            await client.send(ask("bulk", tokens=LONG_TOKENS, stream=stream))
        yield clients


async def nothing_left(pool: Pool) -> bool:
    return sum(await pool.busy()) == 0 and await pool.entries() == {}


async def test_what_runs_is_aborted(pool: Pool, stream: bool) -> None:
    _, other = await pool.roles()
    async with asking(pool, other, PLACES, stream=stream):
        await eventually(lambda: all_run(pool))

    await eventually(lambda: nothing_left(pool), within_s=GONE_S)


async def test_what_waits_leaves_the_queue_and_never_runs(pool: Pool, stream: bool) -> None:
    leader, other = await pool.roles()
    async with asking(pool, leader, PLACES, stream=True) as running:
        for client in running:
            await client._until(b"data: {")  # so that its prompt is counted
        before = await started(pool)
        async with asking(pool, other, 3, stream=stream):
            await eventually(at_least(pool.gateways[leader], "headrace_queued", 3))
        await eventually(holds(pool.gateways[leader], "headrace_queued", 0), within_s=GONE_S)
        assert await pool.entries() == {"works": PLACES, "owned": PLACES, "grants": PLACES}

    await eventually(lambda: nothing_left(pool), within_s=GONE_S)
    assert await started(pool) == before


async def test_what_was_granted_but_not_taken_up_yet_leaves_its_place(pool: Pool, stream: bool) -> None:
    leader, other = await pool.roles()
    workers = (await pool.processes(other)).workers
    async with asking(pool, leader, PLACES, stream=True) as running:
        await eventually(lambda: all_run(pool))
        async with asking(pool, other, 1, stream=stream) as (leaving,):
            await eventually(at_least(pool.gateways[leader], "headrace_queued", 1))
            assert leaving.local_port in holders(pool.gateways[other].port, workers)
            async with frozen(workers):
                running[0].reset()
                await eventually(lambda: granted(pool), within_s=GONE_S)
                leaving.reset()
            await eventually(lambda: only_others_run(pool), within_s=GONE_S)

    await eventually(lambda: nothing_left(pool), within_s=GONE_S)


async def all_run(pool: Pool) -> bool:
    return sum(await pool.busy()) == PLACES


async def granted(pool: Pool) -> bool:
    """The store holds the leader's grant for the work that waited, besides those that run."""
    return "waiting" not in await pool.entries() and sum(await pool.busy()) == PLACES - 1


async def only_others_run(pool: Pool) -> bool:
    return sum(await pool.busy()) == PLACES - 1 and (await pool.entries())["works"] == PLACES - 1


async def started(pool: Pool) -> float:
    """Requests that the engines have seen, by their own counts of prompts."""
    return sum([await engine.metric("vllm:prompt_tokens_total") for engine in pool.engines])
