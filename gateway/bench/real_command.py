"""`headrace bench real`: what the gateway does for interactive requests on engines that are really there.

vLLM on the CPU and llama.cpp are started here when named so; any other idle engine is given by its URL. The gateway runs in
this process, with a private Valkey, the preset `balanced`, and the objective that the engine can keep.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import uvloop
from rich.table import Table

from backends.base import BackendError, EngineAddress
from backends.connection import EnginePool
from backends.detect import detect, make_backend
from backends.openai_compatible import OpenAICompatible
from gateway.addresses import engine_at, parse_engine
from gateway.app import Gateway
from gateway.bench import vllm_cpu
from gateway.bench.real import Bench, Plan, scaled_policy
from gateway.bench.real_report import HEADS, Measured, lines_of, page, plain_of, title_of, verdict_of
from gateway.bench.scheduling import commit
from gateway.demo import llamacpp
from gateway.demo.engines import EngineDidNotStart, engine_process
from gateway.errors import StartError
from gateway.load.client import CHAT, PATHS, Target
from gateway.load.lengths import Workload
from gateway.logs import Logs
from gateway.settings import EngineSettings, GpuSettings, Settings, Timeouts
from gateway.settings_file import SettingsError
from gateway.stop_signals import heeded
from gateway.tables import table_console, uncut

PAGE = "real.md"
DRAIN_S = 3.0
STOPPED = 128 + signal.SIGTERM
VLLM_FLAGS = ("--max-model-len", "2048", "--max-num-seqs", "16", "--scheduling-policy", "priority")
STARTED: Mapping[str, tuple[Callable[[], str], tuple[str, ...], float]] = {
    "vllm": (vllm_cpu.missing, ("gateway.bench.vllm_cpu", "tiny", *VLLM_FLAGS), vllm_cpu.START_S),
    "llamacpp": (llamacpp.missing, ("gateway.demo.llamacpp", "smollm2"), 60.0),
}
"""Engines that are started here: what is missing for them, their module with its arguments, and how long they may take."""
AHEAD = "; clients and gateway go before the engine (SCHED_RR)"
_PLAN = Plan()
_USUAL: Mapping[str, object] = {
    "rounds": _PLAN.rounds,
    "for_s": _PLAN.for_s,
    "share": _PLAN.share,
    "bulk": _PLAN.bulk_clients,
    "interactive_tokens": f"{_PLAN.interactive.prompt_tokens:g}:{_PLAN.interactive.output_tokens:g}",
    "bulk_tokens": f"{_PLAN.bulk.prompt_tokens:g}:{_PLAN.bulk.output_tokens:g}",
    "path": CHAT,
    "seed": _PLAN.seed,
}
"""Options and their defaults."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the benchmark."""
    parser = subparsers.add_parser(
        "real",
        help="interactive beside bulk on real engines: alone, unprotected, protected",
        description="Measure real engines with interactive requests alone, with bulk beside them, and through the gateway.",
    )
    parser.add_argument(
        "engines",
        nargs="*",
        metavar="ENGINE",
        help=f"{' or '.join(STARTED)}, started here, KIND+ before it to be spoken to as that; or [KIND+]http://HOST:PORT of an"
        f" idle one ({' '.join(STARTED)})",
    )
    parser.add_argument("--rounds", type=int, default=_USUAL["rounds"], metavar="N", help="of three arms (%(default)s)")
    parser.add_argument(
        "--for", dest="for_s", type=float, default=_USUAL["for_s"], metavar="SECONDS", help="of an arm (%(default)g)"
    )
    parser.add_argument(
        "--share", type=float, default=_USUAL["share"], metavar="X",
        help="interactive traffic, of what the engine answers one after another (%(default)g)",
    )  # fmt: skip
    parser.add_argument("--bulk", type=int, default=_USUAL["bulk"], metavar="N", help="bulk clients (%(default)s)")
    for name in ("interactive", "bulk"):
        parser.add_argument(
            f"--{name}-tokens",
            default=_USUAL[f"{name}_tokens"],
            metavar="PROMPT:ANSWER",
            help="mean lengths (%(default)s)",
        )
    parser.add_argument("--path", choices=PATHS, default=_USUAL["path"], help="(%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=_USUAL["seed"], metavar="N", help="of arrivals and lengths (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--report", type=Path, metavar="DIR", help=f"write {PAGE} there")


def run(args: argparse.Namespace) -> int:
    """Measure engine after engine, then tell."""
    plan = _plan(args)
    names = args.engines or list(STARTED)
    facts = _facts(args)
    try:
        with _ahead_of_engines() as ahead, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            facts["machine"] += AHEAD if ahead else ""
            measured = runner.run(_measure_all(names, plan, args.path))
    except EngineDidNotStart as error:
        raise SettingsError(f"bench real: {error}") from None
    except asyncio.CancelledError:
        return STOPPED
    document = {**facts, "engines": [plain_of(one) for one in measured]}
    if args.report is not None:
        args.report.mkdir(parents=True, exist_ok=True)
        (args.report / PAGE).write_text(page(facts, plan, measured), encoding="utf-8")
    if args.json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        console = table_console()
        for one in measured:
            table = Table(title=title_of(one))
            for number, head in enumerate(HEADS):
                table.add_column(head, justify="right" if number else "left")
            for line in lines_of(one.outcome):
                table.add_row(*line)
            console.print(uncut(table))
            console.print(verdict_of(one.outcome), highlight=False)
    return 0


@contextmanager
def _ahead_of_engines() -> Iterator[bool]:
    """Give this process its turn before all others for a while; False where it may not (it takes root or CAP_SYS_NICE). On two
    cores the threads of a vLLM on the CPU kept clients waiting for up to two seconds, with a core idle: what was measured then
    was the machine's scheduler. What is started here has the usual turn."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _plan(args: argparse.Namespace) -> Plan:
    for name, value in {"--rounds": args.rounds, "--for": args.for_s, "--bulk": args.bulk}.items():
        if not 0 < value < math.inf:
            raise SettingsError(f"bench real: {name} {value:g}: must be > 0 and finite")
    if not 0 < args.share < 1:
        raise SettingsError(f"bench real: --share {args.share:g}: must be between 0 and 1, without them")
    return Plan(
        rounds=args.rounds,
        for_s=args.for_s,
        share=args.share,
        bulk_clients=args.bulk,
        interactive=_workload("--interactive-tokens", args.interactive_tokens, _PLAN.interactive),
        bulk=_workload("--bulk-tokens", args.bulk_tokens, _PLAN.bulk),
        seed=args.seed,
    )


def _workload(flag: str, text: str, usual: Workload) -> Workload:
    prompt, colon, answer = text.partition(":")
    if not (colon and prompt.isdigit() and answer.isdigit() and int(prompt) and int(answer)):
        raise SettingsError(f"bench real: {flag} {text}: expected PROMPT:ANSWER in tokens, as in 200:24")
    return Workload(float(prompt), float(answer), usual.cv, usual.seed)


# -- measuring -----------------------------------------------------------------------------------------------------


async def _measure_all(names: Sequence[str], plan: Plan, path: str) -> list[Measured]:
    """Engine after engine. SIGTERM and the end of the terminal end it as Ctrl-C does: with the engines that were started."""
    task = asyncio.current_task()
    assert task is not None
    for number in heeded(signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return [await _measure(name, plan, path) for name in names]


async def _measure(name: str, plan: Plan, path: str) -> Measured:
    began_s, load_before = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder_name:
        folder = Path(folder_name)
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(_engine(name, folder))
            address = EngineAddress(engine.name, engine.url, engine.api_key, sample_s=10.0)
            backend = await _backend(engine, address)
            stack.push_async_callback(backend.close)
            try:
                probe = await backend.probe()
            except BackendError as error:
                raise StartError(f"bench real {name}: {error}") from None
            if not probe.models:
                raise StartError(f"bench real {name}: {probe.detail or 'lists no model'}; start it first")
            keys = {"": engine.api_key or ""}
            straight = Target(engine.url, probe.models[0].id, path=path, keys=keys)
            bench = Bench(plan, backend, straight, on_step=lambda text: _say(f"{name}: {text}"))
            try:
                scale = await bench.scale()
                gateway = await stack.enter_async_context(_gateway(engine, scale.objective_s, folder))
                outcome = await bench.run(scale, Target(gateway.public_url, straight.model, path=path))
            except RuntimeError as error:
                raise StartError(f"bench real {name}: {error}") from None
    version = f"{backend.kind} {probe.version}".strip()
    return Measured(name, version, outcome, (load_before, os.getloadavg()[0]), time.monotonic() - began_s)


@asynccontextmanager
async def _engine(name: str, folder: Path) -> AsyncIterator[EngineSettings]:
    kind, plus, what = name.rpartition("+")
    if what not in STARTED:
        yield replace(parse_engine(name), gpu=GpuSettings("none"))
        return
    missing, command, start_s = STARTED[what]
    if missing():
        raise SettingsError(f"bench real: {what} is not installed; {missing()}")
    _say(f"{name}: starting")
    async with engine_process(what, command, folder, start_s=start_s) as url:
        engine = engine_at(url, name=what, kind=kind if plus else what)
        yield replace(engine, gpu=GpuSettings("none"), priority=what == "vllm" or None)


async def _backend(engine: EngineSettings, address: EngineAddress) -> OpenAICompatible:
    pool = EnginePool(address)
    kind = await detect(pool) if engine.kind == "auto" else engine.kind
    if kind is None:
        await pool.close()
        raise StartError(f"bench real {engine.url}: nothing there answers as an engine; start it, or correct the URL")
    return make_backend(kind, address, pool)


@asynccontextmanager
async def _gateway(engine: EngineSettings, objective_s: float, folder: Path) -> AsyncIterator[Gateway]:
    """A gateway with the engine behind it, once it may send there."""
    policy = folder / "policy.yaml"
    policy.write_text(scaled_policy(objective_s), encoding="utf-8")
    settings = Settings(
        listen="127.0.0.1:0",
        admin_listen="127.0.0.1:0",
        state_dir=folder / "state",
        engines=(engine,),
        policy_file=policy,
        timeouts=Timeouts(drain_s=DRAIN_S),
    )
    with (folder / "gateway.log").open("wb") as stream:
        logs = Logs(stream)
        logs.adopt_stdlib()
        try:
            async with Gateway(settings, log=logs.log, store_outlives_us=False) as gateway:
                yield gateway
        finally:
            logs.close()


def _say(text: str) -> None:
    sys.stderr.write(f"bench real: {text}\n")
    sys.stderr.flush()


def _facts(args: argparse.Namespace) -> dict[str, str]:
    words = ["headrace bench real", *args.engines]
    for flag, usual in _USUAL.items():
        value = getattr(args, flag)
        if value != usual:
            words += [
                f"--{flag.removesuffix('_s').replace('_', '-')}",
                f"{value:g}" if isinstance(value, float) else f"{value}",
            ]
    return {"command": " ".join(words), "commit": commit(), "machine": _machine()}


def _machine() -> str:
    """Processor and cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
