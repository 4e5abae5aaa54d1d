"""A sweep does no harm: it leaves busy engines alone, and stops at the first thing that goes wrong with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from backends.base import BackendError, Measured, ModelCard, Probe, Sample, Signal
from backends.simulated.profiles import EngineOptions
from gateway.load.client import Client, Target
from gateway.load.score import Score
from gateway.profiling.sweep import Bounds, Busy, Sweep
from tests.gateway.profiling.virtual_engine import Card, swept


class Told:
    """An engine's pages, as a test writes them."""

    def __init__(self, samples: Sequence[dict[Signal, float]], *, ready: bool = True) -> None:
        self._samples = list(samples)
        self._ready = ready

    async def sample(self) -> Sample:
        values = self._samples.pop(0) if len(self._samples) > 1 else self._samples[0]
        return Sample(0.0, {signal: Measured(value, "test") for signal, value in values.items()})

    async def probe(self) -> Probe:
        return Probe(self._ready, (ModelCard("m", {}, 4096),), detail="" if self._ready else "it is loading")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.profiling.sweep.LOOK_S", 0.01)


@pytest.fixture
async def nobody() -> AsyncIterator[Client]:
    """A client for sweeps that must not send."""
    client = Client(Target("http://127.0.0.1:9", "m"), {"": Score(asyncio.get_running_loop().time)})
    yield client
    assert client.sent == 0
    await client.close()


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([{Signal.RUNNING: 3, Signal.WAITING: 1}], "it runs 3 and has 1 waiting"),
        (
            [{Signal.GENERATION_TOKENS_TOTAL: 100}, {Signal.GENERATION_TOKENS_TOTAL: 140}],
            "it made 40 tokens while nothing was sent to it",
        ),
    ],
)
async def test_an_engine_that_serves_others_is_left_alone(
    samples: list[dict[Signal, float]], said: str, nobody: Client
) -> None:
    with pytest.raises(Busy, match=said):
        await Sweep(nobody, Told(samples), Bounds()).run()


async def test_an_engine_that_is_not_ready_is_told(nobody: Client) -> None:
    with pytest.raises(BackendError, match="it is loading"):
        await Sweep(nobody, Told([{}], ready=False), Bounds()).run()


def test_a_failing_answer_ends_the_sweep_with_what_it_said() -> None:
    seen, facts = swept(Bounds(), model="nope")

    assert facts.stopped.startswith("an answer failed (http_404): The model `nope` does not exist")
    assert seen.alone == ()


def test_others_are_no_matter_when_told_so() -> None:
    with pytest.raises(Busy, match="it runs 1 and has 0 waiting"):
        swept(Bounds(), busy=True)

    seen, _ = swept(Bounds(batch_max=1, prompt_tokens_max=100, even_if_busy=True), busy=True)

    assert seen.alone


def test_the_time_allowed_ends_it() -> None:
    seen, facts = swept(Bounds(for_s=3.0, prompt_tokens_max=2000))

    assert facts.stopped == "the time allowed (3 s) is over"
    assert 3 < facts.took_s < 4
    assert seen.alone


def test_preemptions_end_the_sweep_and_tell_the_size_of_the_memory() -> None:
    _, facts = swept(
        Bounds(batch_max=16, prompt_tokens_max=200),
        options=EngineOptions(kv_tokens=1024, max_model_len=512),
        untold={Signal.KV_CAPACITY_TOKENS},
    )

    assert "its KV memory is full" in facts.stopped
    assert facts.kv_tokens == pytest.approx(1024, rel=0.5)


def test_first_tokens_that_take_too_long_end_the_sweep() -> None:
    _, facts = swept(Bounds(batch_max=1, ttft_max_s=0.25, prompt_tokens_max=8000))

    assert facts.stopped == "1 first tokens took more than 0.25 s: the engine is at its limit"


def test_where_a_gpu_is_visible_power_and_free_memory_are_kept() -> None:
    seen, facts = swept(Bounds(batch_max=4, prompt_tokens_max=300), gpu=Card())

    assert facts.vram_free_fraction == pytest.approx(0.12)
    assert facts.idle_power_w == pytest.approx(100.0)
    assert [one.power_w for one in seen.together] == pytest.approx([100.0] * len(seen.together))
