"""A sweep of a simulated engine in virtual time: the real HTTP of both sides, in memory, without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from backends.base import EngineAddress, Sample, Signal
from backends.connection import EnginePool
from backends.gpu.base import GpuField, GpuSample, GpuSource, reading
from backends.gpu.combine import combined
from backends.simulated.config import SimulatedConfig
from backends.simulated.profiles import EngineOptions
from backends.simulated.server import SimulatedServer
from backends.vllm import Vllm
from gateway.load.client import COMPLETIONS, Client, Target
from gateway.load.score import Score
from gateway.profiling.observations import Seen
from gateway.profiling.sweep import Bounds, Facts, Sweep
from gateway.replay.trace import Request
from tests.simulation.loop import SimLoop, run

PORT = 8000
PROFILE = "rtx4090_llama31_8b_tp1"


class Silent(Vllm):
    """An engine that does not tell some of its signals."""

    untold: Collection[Signal] = ()

    async def sample(self) -> Sample:
        found = await super().sample()
        return Sample(found.taken_s, {name: one for name, one in found.values.items() if name not in self.untold})


class Card:
    """A GPU that draws 100 W and has an eighth of its memory free."""

    source = "nvml"

    async def read(self) -> GpuSample:
        raw = {
            GpuField.POWER_W: 100.0,
            GpuField.MEMORY_TOTAL_BYTES: 100.0,
            GpuField.MEMORY_USED_BYTES: 88.0,
            GpuField.MEMORY_FREE_BYTES: 12.0,
        }
        return combined("nvml", asyncio.get_running_loop().time(), (reading("GPU-a", raw),))

    async def close(self) -> None:
        """Nothing to let go of."""


def swept(
    bounds: Bounds,
    *,
    profile: str = PROFILE,
    options: EngineOptions = EngineOptions(),
    untold: Collection[Signal] = (),
    gpu: GpuSource | None = None,
    model: str = "sim",
    busy: bool = False,
) -> tuple[Seen, Facts]:
    """What a sweep sees of an engine of that profile. busy: somebody else decodes there."""

    async def main(loop: SimLoop) -> tuple[Seen, Facts]:
        config = SimulatedConfig(model="sim", profile=profile, options=options)
        server = SimulatedServer(config, host="0.0.0.0", port=PORT, wall_s=loop.time)
        loop.network.add_host("engine", "10.0.0.2")
        loop.network.add_host("here", "10.0.0.3")
        with loop.network.on("engine"):
            await server.__aenter__()
        with loop.network.on("here"):
            address = EngineAddress("engine", f"http://10.0.0.2:{PORT}")
            backend = Silent(address, EnginePool(address), monotonic=loop.time)
            backend.untold = untold
            client, other = _client(loop, address.base_url, model), _client(loop, address.base_url, "sim")
            if busy:
                other.send(Request(0.0, 20, 10_000), loop.time())
                await asyncio.sleep(1)
            try:
                return await Sweep(client, backend, bounds, gpu=gpu).run()
            finally:
                await client.close()
                await other.close()
                await backend.close()
                await server.close()

    return run(main, seed=1)


def _client(loop: SimLoop, url: str, model: str) -> Client:
    return Client(Target(url, model, path=COMPLETIONS), {"": Score(loop.time)}, clock=loop.time)
