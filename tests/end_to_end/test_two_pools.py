"""Two pools in one Redis Cluster: each has its node, its leader, its queue and its engines, and neither knows the other."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.queue.keys import keys
from tests.end_to_end.engine_process import eventually, simulated
from tests.end_to_end.gateway_process import GatewayProcess
from tests.redis_topologies import Node, cluster

pytestmark = pytest.mark.many

POOLS = ("chat", "code")
"""Their slots are on different nodes of a cluster of three."""


async def test_pools_of_one_cluster_are_decided_apart_and_the_loss_of_ones_node_leaves_the_other(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        store = stack.enter_context(cluster())
        for node in store.nodes:  # by default a cluster that has lost a slot serves none
            node.client().config_set("cluster-require-full-coverage", "no")
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=20.0))
        gateways = {}
        for pool in POOLS:
            engine = await stack.enter_async_context(simulated(tmp_path, model=f"of-{pool}"))
            config = (
                f"engines: [{{name: e1, url: '{engine.url}'}}]\npool: {pool}\nredis_url: {store.url}\npoll_s: 0.2\n"
            )
            gateways[pool] = await stack.enter_async_context(GatewayProcess(tmp_path / pool, config))
        for gateway in gateways.values():
            await gateway.until_ready()

        async def status(pool: str, model: str) -> int:
            body = {"model": model, "prompt": "water", "max_tokens": 3}
            return (await http.post(f"{gateways[pool].public_url}/v1/completions", json=body)).status_code

        nodes = {pool: store.primary_of(keys(pool)[0]) for pool in POOLS}
        assert nodes["chat"] is not nodes["code"]
        for pool in POOLS:
            assert (await gateways[pool].metrics())[f'headrace_leader{{pool="{pool}"}}'] == 1
            assert [await status(pool, f"of-{other}") for other in POOLS] == [
                200 if pool == other else 404 for other in POOLS
            ]
            names = list(map(str, nodes[pool].client().keys("hr:*")))
            assert names
            assert all(f"{{{pool}}}" in name for name in names)

        nodes["chat"].kill()

        await eventually(lambda: _knows_of_a_loss(nodes["code"]))
        await eventually(lambda: _cut_off(gateways["chat"]))
        assert await status("code", "of-code") == 200
        assert (await gateways["code"].metrics())['headrace_leader{pool="code"}'] == 1


def _knows_of_a_loss(node: Node) -> bool:
    info: Any = node.client().cluster("info")
    return int(info["cluster_slots_fail"]) > 0


async def _cut_off(gateway: GatewayProcess) -> bool:
    return (await gateway.metrics())["headrace_redis_up"] == 0
