"""`headrace bench real`: the whole of it on the virtual loop, before a simulated engine that is short of seats."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen
from sys import executable

import pytest
import structlog

from backends.base import BackendError, EngineAddress, Sample, Signal
from backends.base import Measured as Reading
from backends.connection import EnginePool
from backends.simulated.config import SimulatedConfig
from backends.simulated.profiles import EngineOptions
from backends.simulated.server import SimulatedServer
from backends.vllm import Vllm
from gateway.app import Gateway
from gateway.bench.real import Arm, Bench, Outcome, Plan, scaled_policy
from gateway.bench.real_report import Measured, lines_of, page, plain_of, verdict_of
from gateway.cli import main
from gateway.clock import PoolClock
from gateway.load.client import Target
from gateway.load.lengths import Workload
from gateway.queue.memory_queue import MemoryQueue
from gateway.settings import EngineSettings, GpuSettings, Settings
from policies.document import parse
from tests.simulation.loop import SimLoop, run

ENGINE_PORT, PUBLIC_PORT = 8000, 8080
SEATS = 4
PLAN = Plan(
    rounds=1,
    for_s=5.0,
    lead_s=1.0,
    share=0.5,
    bulk_clients=6,
    interactive=Workload(100, 8, 0.5, 1),
    bulk=Workload(50, 40, 0.5, 2),
    probe_requests=5,
)


def played(folder: Path, plan: Plan = PLAN, *, model: str = "sim", steps: list[str] | None = None) -> Outcome:
    """A bench's outcome, gateway and all, in virtual time."""

    async def play(loop: SimLoop) -> Outcome:
        config = SimulatedConfig(
            model="sim", profile="rtx4090_llama31_8b_tp1", options=EngineOptions(max_num_seqs=SEATS)
        )
        server = SimulatedServer(config, host="0.0.0.0", port=ENGINE_PORT, wall_s=loop.time)
        for name, address in (("engine", "10.0.0.2"), ("here", "10.0.0.3")):
            loop.network.add_host(name, address)
        with loop.network.on("engine"):
            await server.__aenter__()
        with loop.network.on("here"):
            url = f"http://10.0.0.2:{ENGINE_PORT}"
            at = EngineAddress("engine", url)
            backend = Vllm(at, EnginePool(at), monotonic=loop.time)
            straight = Target(url, model, path="/v1/completions")
            on_step = (lambda _text: None) if steps is None else steps.append
            bench = Bench(plan, backend, straight, clock=loop.time, on_step=on_step)
            try:
                scale = await bench.scale()
                policy = folder / "policy.yaml"
                policy.write_text(scaled_policy(scale.objective_s))
                settings = Settings(
                    listen=f"0.0.0.0:{PUBLIC_PORT}",
                    admin_listen="127.0.0.1:8081",
                    allow_no_keys=True,
                    engines=(EngineSettings("engine", url, "vllm", gpu=GpuSettings("none")),),
                    policy_file=policy,
                )
                clock = PoolClock(loop.time, offset_s=0.0)
                queue = MemoryQueue(lambda: int(1000 * clock.pool_s()))
                log = structlog.get_logger()
                rng = random.Random(1)
                async with Gateway(settings, log=log, queue=queue, clock=clock, rng=rng, sole=True):
                    return await bench.run(scale, replace(straight, url=f"http://10.0.0.3:{PUBLIC_PORT}"))
            finally:
                await backend.close()
                await server.close()

    return run(play, seed=1)


def test_every_step_is_named_and_the_time_is_forecast(tmp_path: Path) -> None:
    steps: list[str] = []

    played(tmp_path, replace(PLAN, rounds=2), steps=steps)

    assert steps == [
        "scale, a warm-up round and 2 rounds of 3 arms: 1 min at least",
        "scale: one request after another",
        "scale: bulk beside interactive requests, to warm the engine up",
        "scale: interactive requests alone, for the objective",
        *(f"warm-up round, {arm}" for arm in ("alone", "unprotected", "protected")),
        *(f"round 1 of 2, {arm}" for arm in ("unprotected", "protected", "alone")),
        *(f"round 2 of 2, {arm}" for arm in ("protected", "alone", "unprotected")),
    ]


def test_the_least_time_is_that_of_all_arms() -> None:
    plan = Plan(rounds=2, for_s=30.0, lead_s=5.0)

    assert plan.least_s == 5 + 3 * 30 + 3 * (3 * 30 + 2 * 5)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return played(tmp_path_factory.mktemp("real"))


def test_bulk_takes_the_seats_of_an_engine_by_itself_and_the_gateway_keeps_one_free(outcome: Outcome) -> None:
    alone, unprotected, protected = (outcome.sides[arm] for arm in Arm)

    assert alone.figures.ttft.p95_s is not None
    assert unprotected.figures.ttft.p95_s is not None
    assert protected.figures.ttft.p95_s is not None
    assert unprotected.figures.ttft.p95_s > 4 * alone.figures.ttft.p95_s
    assert protected.figures.ttft.p95_s < 0.5 * unprotected.figures.ttft.p95_s
    assert outcome.ttft_ratio == protected.figures.ttft.p95_s / alone.figures.ttft.p95_s


def test_every_arm_has_the_same_interactive_requests(outcome: Outcome) -> None:
    sent = {arm: side.figures.sent for arm, side in outcome.sides.items()}
    prompts = {arm: side.figures.prompt_tokens_per_s for arm, side in outcome.sides.items()}

    assert len(set(sent.values())) == 1
    assert len(set(prompts.values())) == 1
    assert sent[Arm.ALONE] > 10
    assert [side.figures.errors for side in outcome.sides.values()] == [{}, {}, {}]


def test_bulk_counts_what_its_clients_got_while_interactive_requests_came(outcome: Outcome) -> None:
    alone, unprotected, protected = (outcome.sides[arm] for arm in Arm)
    step_s = 0.0175

    assert alone.bulk_tokens_per_s is None
    assert unprotected.bulk_tokens_per_s is not None
    assert protected.bulk_tokens_per_s is not None
    assert 0.5 * SEATS / step_s < unprotected.bulk_tokens_per_s < SEATS / step_s
    assert outcome.bulk_ratio == protected.bulk_tokens_per_s / unprotected.bulk_tokens_per_s
    assert (unprotected.bulk_errors, protected.bulk_errors) == ({}, {})


def test_the_load_and_the_objective_follow_from_what_the_engine_does_alone(outcome: Outcome) -> None:
    scale, alone = outcome.scale, outcome.sides[Arm.ALONE]

    assert scale.rate_rps == PLAN.share / scale.request_s
    assert 0.1 < scale.request_s < 0.3
    assert alone.figures.ttft.p95_s is not None
    assert scale.objective_s == pytest.approx(PLAN.slack * alone.figures.ttft.p95_s, rel=0.3)


def test_a_request_that_fails_ends_it_with_what_the_engine_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="8 of 8 requests failed: http_404 The model `nope` does not exist"):
        played(tmp_path, model="nope")


class Other:
    """An engine that others use, or that has died."""

    def __init__(self, says: Sample | BackendError) -> None:
        self.says = says

    async def sample(self) -> Sample:
        if isinstance(self.says, BackendError):
            raise self.says
        return self.says


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (Sample(0.0, {Signal.RUNNING: Reading(2.0, "running")}), "still ran requests after 30 s without ours"),
        (BackendError("engine e1: GET /metrics: connect_refused"), "connect_refused; it has to last until the end"),
    ],
)
def test_an_engine_that_does_not_come_to_rest_ends_it_with_the_reason(says: Sample | BackendError, told: str) -> None:
    async def play(loop: SimLoop) -> None:
        bench = Bench(PLAN, Other(says), Target("http://10.0.0.2:8000", "sim"), clock=loop.time)
        await bench._idle()

    with pytest.raises(RuntimeError, match=told):
        run(play, seed=1)


def test_the_policy_is_the_preset_with_another_objective() -> None:
    policy = parse(scaled_policy(1.25), "scaled")

    assert policy.classes["interactive"].ttft_sla_s == 1.25
    assert policy.sizing.policy == "token_ledger"


def test_page_and_document_tell_the_ratios_and_what_they_were_measured_on(outcome: Outcome) -> None:
    measured = Measured("vllm", "vllm 0.32.0", outcome, (0.5, 1.5), 60.0)
    facts = {"command": "headrace bench real vllm", "commit": "abc", "machine": "a processor, 2 cores"}

    text = page(facts, PLAN, [measured])
    document = json.loads(json.dumps(plain_of(measured)))

    assert "`headrace bench real vllm`, commit `abc`, on a processor, 2 cores" in text
    assert verdict_of(outcome) in text
    assert [line[0] for line in lines_of(outcome)] == ["alone", "unprotected", "protected"]
    assert document["ttft_ratio"] == outcome.ttft_ratio
    assert len(document["arms"]["protected"]["rounds_p95_s"]) == PLAN.rounds


def test_figures_of_clients_that_could_not_send_in_time_are_not_to_be_used(outcome: Outcome) -> None:
    protected = outcome.sides[Arm.PROTECTED]
    late = replace(protected, figures=replace(protected.figures, late_p99_s=0.5))

    busy = replace(outcome, sides={**outcome.sides, Arm.PROTECTED: late})

    assert "NOT TO BE USED" not in verdict_of(outcome)
    assert "NOT TO BE USED: clients were 500.0 ms late" in verdict_of(busy)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "0"], "--rounds 0: must be > 0"),
        (["--share", "1"], "--share 1: must be between 0 and 1"),
        (["--bulk-tokens", "200"], "--bulk-tokens 200: expected PROMPT:ANSWER"),
        (["http://127.0.0.1:9"], "bench real http://127.0.0.1:9: nothing there answers as an engine"),
        (["gpu1"], "expected [NAME=][KIND+]http://HOST:PORT"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "real", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.many
@pytest.mark.timeout(300)
def test_the_command_measures_an_engine_over_real_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rounds", "1", "--for", "3", "--interactive-tokens", "50:8", "--bulk-tokens", "50:40", "--bulk", "4"]
    with Popen([executable, "-m", "gateway.cli", "simulate", "--listen", "127.0.0.1:0"], stdout=PIPE, text=True) as one:
        try:
            assert one.stdout is not None
            url = one.stdout.readline().removeprefix("listening on ").strip()
            code = main(["bench", "real", url, *words, "--json", "--report", str(tmp_path)])
        finally:
            one.terminate()

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["command"] == f"headrace bench real {url} {' '.join(words[:4])} --bulk 4 {' '.join(words[4:8])}"
    assert found["engines"][0]["arms"]["protected"]["figures"]["completed"] > 0
    assert found["engines"][0]["arms"]["protected"]["bulk_tokens_per_s"] > 0
    assert (tmp_path / "real.md").read_text().startswith("# What it does on real engines")
