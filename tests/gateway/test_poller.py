"""What a poll makes of an engine: state, models, samples that age, and who answers after an outage."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

import pytest

from backends.base import (
    Backend,
    BackendError,
    Call,
    Capabilities,
    EngineRequest,
    Measured,
    ModelCard,
    Probe,
    Receiver,
    Sample,
    Signal,
)
from gateway.control.poller import Poller
from gateway.control.roster import Engine, Roster
from gateway.dispatch.ledger import EngineLedger
from gateway.settings import EngineSettings
from policies.vocabulary import EngineState, Quality

READY = Probe(ready=True, models=(ModelCard("m", {"id": "m"}),))
AWAY = Probe(ready=False, detail="no answer")


@dataclass
class FakeClock:
    time_s: float = 100.0

    def now_s(self) -> float:
        return self.time_s

    def pool_s(self) -> float:
        return self.time_s


@dataclass
class FakeBackend:
    """Answers as it is told."""

    kind: str = "vllm"
    name: str = "e"
    probes: list[Probe] = field(default_factory=list)
    samples: list[Sample | BackendError] = field(default_factory=list)
    trials: list[str] = field(default_factory=list)
    tried: int = 0
    closed: bool = False
    capabilities: Capabilities = field(default_factory=Capabilities)

    def speaks(self, path: str) -> bool:
        return path.startswith("/v1/")

    def call(self, request: EngineRequest, receiver: Receiver) -> Call:
        raise AssertionError("a poll calls no work route")

    async def probe(self) -> Probe:
        return self.probes.pop(0)

    async def try_generation(self, within_s: float) -> str:
        self.tried += 1
        return self.trials.pop(0) if self.trials else ""

    async def sample(self) -> Sample:
        said = self.samples.pop(0)
        if isinstance(said, BackendError):
            raise said
        return said

    async def close(self) -> None:
        self.closed = True


class Bench:
    """One engine, its poller, and the backends that the next openings find."""

    def __init__(self, *found: FakeBackend | None) -> None:
        self.clock = FakeClock()
        self.engine = Engine(EngineSettings("e", "http://e"), EngineLedger(), poll_s=0.5)
        self.found = list(found)
        self.heard = 0
        self.poller = Poller(
            Roster([self.engine]),
            self._open,
            clock=self.clock,
            poll_s=0.5,
            rng=random.Random(1),
            active=lambda: True,
            on_heard=self._heard,
        )

    async def poll(self) -> None:
        await self.poller.once(5.0)

    async def _open(self, _engine: Engine) -> Backend | None:
        return self.found.pop(0)

    def _heard(self, _engine: Engine) -> None:
        self.heard += 1


def sample(taken_s: float, running: float) -> Sample:
    return Sample(taken_s, {Signal.RUNNING: Measured(running, "vllm:num_requests_running")})


async def test_an_engine_that_does_not_answer_yet_stays_starting() -> None:
    bench = Bench(None)

    await bench.poll()

    assert bench.engine.state is EngineState.STARTING
    assert bench.heard == 0


async def test_a_ready_engine_is_up_with_its_models_and_sample() -> None:
    bench = Bench(FakeBackend(probes=[READY], samples=[sample(100.0, 3)]))

    await bench.poll()

    assert bench.engine.state is EngineState.UP
    assert bench.engine.models == {"m"}
    assert bench.engine.view(100.0).running.value == 3


async def test_a_late_scrape_ages_the_last_sample_and_drops_nothing() -> None:
    bench = Bench(
        FakeBackend(probes=[READY, READY], samples=[sample(100.0, 3), BackendError("e: /metrics: no answer")])
    )
    await bench.poll()

    bench.clock.time_s += 5
    await bench.poll()

    bench.engine.ledger.refresh()
    running = bench.engine.view(bench.clock.time_s).running
    assert bench.engine.state is EngineState.UP
    assert (running.value, running.quality) == (3, Quality.STALE)


async def test_one_failed_probe_is_no_outage_and_two_are() -> None:
    bench = Bench(FakeBackend(probes=[READY, AWAY, AWAY], samples=[sample(100.0, 0)]))
    await bench.poll()

    await bench.poll()
    after_one = bench.engine.state
    await bench.poll()

    assert after_one is EngineState.UP
    assert bench.engine.state is EngineState.DOWN


async def test_real_traffic_that_succeeds_outweighs_failed_probes() -> None:
    bench = Bench(FakeBackend(probes=[READY, AWAY, AWAY, AWAY], samples=[sample(100.0, 0)]))
    await bench.poll()
    bench.engine.served(bench.clock.time_s)

    for _ in range(3):
        await bench.poll()

    assert bench.engine.state is EngineState.UP


@pytest.mark.parametrize(("answers", "kept"), [("vllm", True), ("tgi", False)])
async def test_what_answers_after_an_outage_is_recognised_anew(answers: str, *, kept: bool) -> None:
    first = FakeBackend(probes=[READY, AWAY, AWAY, READY], samples=[sample(100.0, 1), sample(101.0, 2)])
    second = FakeBackend(kind=answers, samples=[sample(101.0, 2)])
    bench = Bench(first, second)
    for _ in range(3):
        await bench.poll()
    before = bench.engine.state

    await bench.poll()

    assert (before, bench.engine.state) == (EngineState.DOWN, EngineState.UP)
    assert (bench.engine.backend is first) == kept
    assert (first.closed, second.closed) == (not kept, kept)


async def test_whoever_begins_to_lead_polls_at_once() -> None:
    bench = Bench(FakeBackend(probes=[READY], samples=[sample(100.0, 1.0)]))
    bench.poller._poll_s = 60.0
    polling = asyncio.create_task(bench.poller.run())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not bench.heard

    bench.poller.wake()

    async with asyncio.timeout(5.0):
        while not bench.heard:
            await asyncio.sleep(0)
    polling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await polling
