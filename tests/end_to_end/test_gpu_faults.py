"""A real gateway on machines whose GPUs are absent, partial, slow or broken: it starts, serves and says so."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.backends.gpu.stub import ROOT, Stub, build, environ
from tests.end_to_end.conftest import SHORT_TIMEOUTS, StartGateway
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import ScriptedEngine
from tests.end_to_end.test_first_light import chat
from tests.gateway.ingress.raw_client import RawClient

UP = 'headrace_gpu_telemetry_up{engine="e0"}'
CARD = 'engine="e0",gpu="GPU-00000000-0000-0000-0000-000000000000",partition=""'
SLICE = "MIG-00000000-0000-0000-0000-000000000001"
WITHIN_S = 15.0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    return Stub(tmp_path / "rules")


def config(engine: ScriptedEngine, gpu: str = "{}") -> str:
    return f"engines:\n  - {{name: e0, url: '{engine.url}', gpu: {gpu}}}\n{SHORT_TIMEOUTS}"


@asynccontextmanager
async def gateway_on(
    start_gateway: StartGateway, library: Path | None, stub: Stub, gpu: str = "{}", **more: str
) -> AsyncIterator[GatewayProcess]:
    """A gateway before one engine, on a machine with this library."""
    changed = {**environ(library, stub), **more}
    async with ScriptedEngine() as engine, start_gateway(config(engine, gpu), environ=changed) as gateway:
        yield gateway


async def until(gateway: GatewayProcess, series: str, value: float | None) -> dict[str, float]:
    """The first page on which a series has this value; None: on which it is not."""
    async with asyncio.timeout(WITHIN_S):
        while (page := await gateway.metrics()).get(series) != value:
            await asyncio.sleep(0.05)
    return page


async def serves(gateway: GatewayProcess) -> bool:
    async with RawClient(gateway.port) as client:
        return (await client.ask(chat())).status == 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    library: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[GatewayProcess, Stub]]:
    """One gateway that started beside a healthy card, for faults that come while it runs."""
    folder = tmp_path_factory.mktemp("gateway")
    stub = Stub(folder / "rules")
    async with ScriptedEngine() as engine:
        async with GatewayProcess(folder, config(engine), environ=environ(library, stub)) as gateway:
            yield gateway, stub


@pytest.mark.parametrize("library_there", [False, True])
async def test_a_gateway_serves_without_gpu_telemetry_and_says_why(
    start_gateway: StartGateway, library: Path, stub: Stub, *, library_there: bool
) -> None:
    stub.play("slow nvmlInitWithFlags 30000")
    async with gateway_on(start_gateway, library if library_there else None, stub) as gateway:
        assert await serves(gateway)

        page = await until(gateway, UP, 0)

        assert not [series for series in page if series.startswith("headrace_gpu_power")]
        detail = (await gateway.status())["engines"][0]["gpu"]["detail"]
        assert detail.startswith(
            "NVML does not answer" if library_there else "NVML error 12: libnvidia-ml.so.1 not found"
        )
        assert gateway.log.count("no gpu telemetry") == 1


async def test_a_repaired_driver_is_picked_up(start_gateway: StartGateway, library: Path, stub: Stub) -> None:
    stub.play("fail nvmlInitWithFlags 18")
    async with gateway_on(start_gateway, library, stub) as gateway:
        await until(gateway, UP, 0)
        assert await serves(gateway)
        assert "differ in version" in gateway.log

        stub.play()
        page = await until(gateway, UP, 1)

        assert page[f"headrace_gpu_power_watts{{{CARD}}}"] == 512.345
        assert page[f"headrace_gpu_memory_free_bytes{{{CARD}}}"] == 19.5 * 1024**3


@pytest.mark.asyncio(loop_scope="module")
async def test_unified_memory_costs_only_the_memory_figures_and_one_warning(
    running: tuple[GatewayProcess, Stub],
) -> None:
    gateway, stub = running
    total = f"headrace_gpu_memory_total_bytes{{{CARD}}}"
    await until(gateway, total, 80 * 1024**3)

    stub.play("fail nvmlDeviceGetMemoryInfo 3", "fail nvmlDeviceGetMemoryInfo_v2 3")
    page = await until(gateway, total, None)

    assert page[UP] == 1
    assert page[f"headrace_gpu_temperature_celsius{{{CARD}}}"] == 71
    assert not [series for series in page if series.startswith("headrace_gpu_memory")]
    assert gateway.log.count("gpu telemetry is partial") == 1
    assert "memory_total_bytes not_supported" in gateway.log


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("fault", ["lost 0", "fail nvmlDeviceGetCount_v2 999", "fail nvmlDeviceGetHandleByIndex_v2 4"])
async def test_a_gpu_that_vanishes_while_the_gateway_runs_takes_its_numbers_along_and_returns(
    running: tuple[GatewayProcess, Stub], fault: str
) -> None:
    gateway, stub = running
    stub.play()
    await until(gateway, UP, 1)

    stub.play(fault)
    page = await until(gateway, UP, 0)
    assert f"headrace_gpu_power_watts{{{CARD}}}" not in page
    assert await serves(gateway)

    stub.play()
    await until(gateway, UP, 1)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_driver_that_hangs_delays_no_request_and_no_shutdown(running: tuple[GatewayProcess, Stub]) -> None:
    gateway, stub = running
    stub.play("slow nvmlDeviceGetPowerUsage 60000")
    page = await until(gateway, 'headrace_gpu_finding{engine="e0",finding="nvml_slow"}', 1)

    began_s = time.monotonic()
    assert await serves(gateway)
    assert time.monotonic() - began_s < 1.0
    assert page[f"headrace_gpu_temperature_celsius{{{CARD}}}"] == 71
    assert await gateway.stop(signal.SIGTERM) == 0
    assert time.monotonic() - began_s < 10.0


async def test_a_mig_slice_of_cuda_visible_devices_shows_its_memory_under_its_label(
    start_gateway: StartGateway, library: Path, stub: Stub
) -> None:
    stub.play("mig 0 2", "fail-whole nvmlDeviceGetMigMode 4", "fail-whole nvmlDeviceGetTemperature 4")
    async with gateway_on(start_gateway, library, stub, CUDA_VISIBLE_DEVICES=SLICE) as gateway:
        page = await until(gateway, UP, 1)

        of_gpu = {series for series in page if series.startswith("headrace_gpu_") and "gpu=" in series}
        assert {re.sub(r"^(\w+)\{.*", r"\1", series) for series in of_gpu} == {
            f"headrace_gpu_memory_{part}_bytes" for part in ("total", "used", "free", "reserved")
        } | {
            "headrace_gpu_temperature_limit_celsius",
            "headrace_gpu_temperature_margin_celsius",
            "headrace_gpu_clock_reason",
        }
        assert page[f'headrace_gpu_memory_total_bytes{{engine="e0",gpu="{SLICE}",partition="1g.10gb"}}'] == 10 * 1024**3


async def test_a_missing_python_module_costs_only_the_telemetry(
    start_gateway: StartGateway, library: Path, stub: Stub, tmp_path: Path
) -> None:
    (tmp_path / "pynvml.py").write_text("raise ModuleNotFoundError(\"No module named 'pynvml'\")\n")
    async with gateway_on(start_gateway, library, stub, PYTHONPATH=str(tmp_path)) as gateway:
        await until(gateway, UP, 0)

        assert "pynvml is missing" in (await gateway.status())["engines"][0]["gpu"]["detail"]
        assert await serves(gateway)


@asynccontextmanager
async def exporter(library: Path, stub: Stub, *args: str) -> AsyncIterator[str]:
    """`headrace gpu-exporter` as a process; its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway.cli",
        "gpu-exporter",
        "--listen",
        "127.0.0.1:0",
        *args,
        stdout=PIPE,
        stderr=PIPE,
        env=environ(library, stub),
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(WITHIN_S):
            found = re.search(rb"listening on (http://\S+)", await process.stdout.readline())
        assert found is not None, (await process.communicate())[1].decode()
        yield found[1].decode()
    finally:
        process.terminate()
        assert await process.wait() == 0


async def test_a_remote_engine_needs_only_the_exporter(start_gateway: StartGateway, library: Path, stub: Stub) -> None:
    stub.play("cards 2")
    async with (
        exporter(library, stub, "--devices", "1") as url,
        gateway_on(start_gateway, None, stub, f"{{source: dcgm, url: '{url}/metrics'}}") as gateway,
    ):
        page = await until(gateway, UP, 1)

        there = CARD.replace("GPU-00000000", "GPU-00000001")
        assert page[f"headrace_gpu_power_limit_watts{{{there}}}"] == 700
        assert page[f'headrace_gpu_clock_reason{{{there},reason="sw_power_cap"}}'] == 1

        stub.play("fail nvmlDeviceGetCount_v2 999", "lost 1")
        await until(gateway, UP, 0)


async def test_the_exporter_says_on_its_pages_that_it_has_no_gpu(library: Path, stub: Stub) -> None:
    stub.play("fail nvmlInitWithFlags 18")
    async with exporter(library, stub) as url, httpx.AsyncClient(trust_env=False) as client:
        page, health = await client.get(f"{url}/metrics"), await client.get(f"{url}/health")

    assert (page.status_code, page.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert page.text.splitlines()[-1] == "headrace_gpu_exporter_up 0"
    assert (health.status_code, "differ in version" in health.text) == (503, True)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--devices", "first"], "expected an index, GPU-<uuid> or MIG-<uuid>"),
        (["--listen", "nowhere"], "expected host:port"),
    ],
)
async def test_what_the_exporter_cannot_do_is_told_in_a_line(args: list[str], words: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.cli", "gpu-exporter", *args, stdout=PIPE, stderr=PIPE, cwd=ROOT
    )

    _, told = await process.communicate()

    assert process.returncode == 2
    assert words in told.decode()
    assert b"Traceback" not in told
