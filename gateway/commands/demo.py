"""`headrace demo`: two simulated engines of different size, the gateway, and real traffic through it.

Everything runs here and ends with it: the engines are processes of their own, the gateway with its private Valkey
lives in this one, under the policy that `headrace serve` has by default, and the clients speak HTTP to its public port.
Ctrl-C (or `--for SECONDS`) ends all of it with what it came to, exit 0.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import uvloop
from rich.console import Console

from gateway.app import Gateway
from gateway.demo import llamacpp
from gateway.demo.engines import EngineDidNotStart, engine_process, real, simulated
from gateway.demo.ports import free_port
from gateway.demo.show import Show, Stage
from gateway.logs import Log, Logs
from gateway.settings import EngineSettings, GpuSettings, Settings, Timeouts
from gateway.settings_file import SettingsError
from gateway.stop_signals import stop_signals

MODEL = "sim-8b"
REAL_MODEL = "smollm2"
PROFILES = {"big": "h100_llama31_8b_tp1", "small": "rtx4090_llama31_8b_tp1"}
DRAIN_S = 3.0
READ_S = 300.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser("demo", help="see it work: two simulated engines and real traffic")
    parser.add_argument("--for", dest="for_s", type=float, metavar="SECONDS", help="end by itself after so long")
    parser.add_argument("--rate", type=float, default=1.0, metavar="X", help="interactive traffic, times the trace (1)")
    parser.add_argument("--bulk", type=int, default=96, metavar="N", help="bulk clients, one request each (96)")
    parser.add_argument("--port", type=int, default=8080, help="public port; the next free one if it is taken (8080)")
    parser.add_argument("--real", action="store_true", help="add SmolLM2-135M on llama.cpp, whose answers are text")


def run(args: argparse.Namespace) -> int:
    """Run the demo until Ctrl-C, or until its time is over."""
    if not (0 < args.rate < math.inf and args.bulk >= 0 and (args.for_s is None or 0 < args.for_s < math.inf)):
        raise SettingsError("demo: --rate and --for must be > 0 and finite, --bulk must be >= 0")
    if not 0 < args.port < 65_535:
        raise SettingsError(f"demo: --port {args.port}: must be 1 to 65534; the next one is the admin listener's")
    if args.real and llamacpp.missing():
        raise SettingsError(f"demo --real: llama.cpp or its model is not installed; {llamacpp.missing()}")
    with tempfile.TemporaryDirectory(prefix="headrace-") as name, (Path(name) / "gateway.log").open("wb") as stream:
        logs = Logs(stream)
        logs.adopt_stdlib()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_demo(args, Path(name), logs.log))
        except EngineDidNotStart as error:
            raise SettingsError(str(error)) from None
        finally:
            logs.close()
    return 0


async def _demo(args: argparse.Namespace, folder: Path, log: Log) -> None:
    with stop_signals(signal.SIGHUP) as (stop, _hurry):
        async with _engines(folder, with_real=args.real) as engines:
            settings = _settings(args.port, folder, engines)
            async with Gateway(settings, log=log, store_outlives_us=False) as gateway, _session() as session:
                stage = Stage(
                    public_url=gateway.public_url,
                    admin_url=gateway.admin_url,
                    model=MODEL,
                    rate=args.rate,
                    bulk_clients=args.bulk,
                    chat_model=REAL_MODEL if args.real else "",
                )
                show = Show(stage, session, console := _Console())
                await _play_until(stop, args.for_s, show)
                console.print("\n".join(show.closing), soft_wrap=True, markup=False, highlight=False)


async def _play_until(stop: asyncio.Event, for_s: float | None, show: Show) -> None:
    """Play until the stop signal or the end of the time; an error of the show is raised."""
    async with asyncio.TaskGroup() as group:
        play = group.create_task(show.play())
        stopped = group.create_task(stop.wait())
        await asyncio.wait([play, stopped], timeout=for_s, return_when=asyncio.FIRST_COMPLETED)
        play.cancel()
        stopped.cancel()


class _Console(Console):
    """One that takes a reader's leaving for an error like others; by itself it ends the process, and not what that started."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - called where that error is handled


@asynccontextmanager
async def _engines(folder: Path, *, with_real: bool) -> AsyncIterator[tuple[EngineSettings, ...]]:
    async with AsyncExitStack() as stack:
        started = []
        for name, profile in PROFILES.items():
            command = simulated(model=MODEL, profile=profile)
            url = await stack.enter_async_context(engine_process(name, command, folder))
            started.append(EngineSettings(name, url, "vllm", gpu=GpuSettings("none")))
        if with_real:
            url = await stack.enter_async_context(engine_process("real", real(model=REAL_MODEL), folder))
            started.append(EngineSettings("real", url, "llamacpp"))
        yield tuple(started)


def _settings(port: int, folder: Path, engines: tuple[EngineSettings, ...]) -> Settings:
    public = free_port(port)
    admin = free_port(port + 1, taken={public})
    return Settings(
        listen=f"127.0.0.1:{public}",
        admin_listen=f"127.0.0.1:{admin}",
        state_dir=folder / "state",
        engines=engines,
        timeouts=Timeouts(drain_s=DRAIN_S),
    )


def _session() -> aiohttp.ClientSession:
    """A session for any number of requests at once, patient with those that wait in the queue."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_read=READ_S)
    )
