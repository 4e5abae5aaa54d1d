"""One gateway process a test file, in front of scripted engines that each test plays as it likes.

Starting a gateway takes about a second, so the tests of a file share it; what a test changes (the engines' scripts) is
put back before the next one. A test that needs other settings starts its own with `start_gateway`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.end_to_end.dialects import TGI, TGI_MODEL, Way
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import MODEL, ScriptedEngine, hello
from tests.gateway.ingress.raw_client import Answer, RawClient

SHORT_TIMEOUTS = """\
poll_s: 0.2
health: {failures: 100000, silence_s: 100000}  # engines that a test breaks stay where they are for the next one
timeouts:
  connect_s: 1
  first_byte_s: 3
  inter_token_s: 2
  total_s: 60
  queue_headers_after_s: 1
  keepalive_comment_s: 1
  nonstream_wait_s: 4
  stalled_client_s: 5
  request_head_s: 3
  request_body_s: 3
  drain_s: 10
"""

StartGateway = Callable[..., GatewayProcess]


@dataclass
class Stage:
    """A gateway before two engines that both serve MODEL; `first` alone serves "only-first", `second` "only-second".

    `tgi` speaks TGI's own routes and serves TGI_MODEL, which is also what a body without a model gets there.
    """

    gateway: GatewayProcess
    first: ScriptedEngine
    second: ScriptedEngine
    tgi: ScriptedEngine

    @property
    def port(self) -> int:
        return self.gateway.port

    def engine_for(self, way: Way) -> ScriptedEngine:
        """The only engine that gets a way's requests."""
        return self.tgi if way is TGI else self.first

    async def ask(self, request: bytes) -> Answer:
        """One answer on a connection of its own."""
        async with RawClient(self.port) as client:
            return await client.ask(request)


def engines_yaml(*engines: ScriptedEngine) -> str:
    """The `engines:` part of a settings file; engine keys are k-0, k-1, ..."""
    lines = [
        f"  - name: e{number}\n    url: {engine.url}\n    api_key: engine-key-{number}"
        for number, engine in enumerate(engines)
    ]
    return "\n".join(["engines:", *lines, ""])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(ScriptedEngine(models=[MODEL, "only-first"]))
        second = await stack.enter_async_context(ScriptedEngine(models=[MODEL, "only-second"]))
        tgi = await stack.enter_async_context(ScriptedEngine(models=[TGI_MODEL], metrics="tgi_queue_size 0\n"))
        config = f"{engines_yaml(first, second, tgi)}tgi_default_model: {TGI_MODEL}\n{SHORT_TIMEOUTS}"
        gateway = await stack.enter_async_context(GatewayProcess(tmp_path_factory.mktemp("gateway"), config))
        yield Stage(gateway, first, second, tgi)


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared_stage: Stage) -> AsyncIterator[Stage]:
    """The file's gateway, its engines playing `hello` and their records empty."""
    for engine in (shared_stage.first, shared_stage.second, shared_stage.tgi):
        engine.play = hello
        engine.requests.clear()
        engine.wires.clear()
        engine.aborted = engine.most_active = 0
    yield shared_stage


@pytest.fixture
def start_gateway(tmp_path: Path) -> StartGateway:
    """A maker of gateways with settings of their own, for `async with start_gateway(yaml_text) as gateway`."""

    def start(config: str, **options: object) -> GatewayProcess:
        return GatewayProcess(tmp_path / "gateway", config, **options)  # type: ignore[arg-type]

    return start
