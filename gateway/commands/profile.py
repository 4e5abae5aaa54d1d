"""`headrace profile`: measure a live engine in a few minutes, and tell what it can do and how to set it.

It sends real requests and takes the engine to its limits, so it refuses one that others use (unless told), and stops at
the first harm. `--live` asks a running gateway instead for what it has learned of an engine in service, and sends none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from backends.base import BackendError, EngineAddress, Probe
from backends.connection import EnginePool
from backends.detect import detect, make_backend
from backends.gpu.base import GpuSource
from backends.gpu.dcgm import DcgmSource
from backends.gpu.nvml import NvmlSource, NvmlThread
from gateway.addresses import normalise_url
from gateway.errors import StartError
from gateway.load.client import COMPLETIONS, KEY_REMEDY, PATHS, Client, Target
from gateway.load.score import Score
from gateway.profiling.advice import advise, plan
from gateway.profiling.document import Profiled, page, profile, write
from gateway.profiling.fit import NotEnough, fit
from gateway.profiling.limits import Workload, limits
from gateway.profiling.live import exported
from gateway.profiling.observations import Seen
from gateway.profiling.sweep import Bounds, Busy, Facts, Sweep
from gateway.settings_file import SettingsError
from gateway.tables import table_console, uncut

_BOUNDS = Bounds()
_WORKLOAD = Workload()
ERROR_MAX = 0.15
"""A fit that is typically farther off explains nothing."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "profile",
        help="measure an engine, and tell how to set it",
        description="Measure a live engine: its step model, its limits, and the settings that follow.",
    )
    parser.add_argument("url", metavar="URL", help="of the engine; with --live: of a gateway's admin listener")
    parser.add_argument("--live", metavar="ENGINE", help="export what the gateway at URL has learned of this engine")
    parser.add_argument("--model", metavar="NAME", help="model to ask for (the first that the engine lists)")
    parser.add_argument(
        "--out", type=Path, default=Path("profile"), metavar="FOLDER", help="for the files (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the profile as JSON instead of tables")
    bounds = parser.add_argument_group("bounds")
    bounds.add_argument(
        "--for",
        dest="for_s",
        type=float,
        default=_BOUNDS.for_s,
        metavar="SECONDS",
        help="begin nothing after (%(default)g)",
    )
    bounds.add_argument(
        "--max-batch", type=int, default=_BOUNDS.batch_max, metavar="N", help="requests at once (%(default)s)"
    )
    bounds.add_argument(
        "--max-prompt-tokens", type=int, default=_BOUNDS.prompt_tokens_max, metavar="N", help="(%(default)s)"
    )
    bounds.add_argument(
        "--max-ttft",
        type=float,
        default=_BOUNDS.ttft_max_s,
        metavar="SECONDS",
        help="a first token later than this ends it (%(default)g)",
    )
    bounds.add_argument(
        "--even-if-busy",
        action="store_true",
        help="measure an engine that serves others: they will notice, and so will the figures",
    )
    tuned = parser.add_argument_group("what the engine is tuned for")
    tuned.add_argument(
        "--prompt-tokens", type=int, default=_WORKLOAD.prompt_tokens, metavar="N", help="usual (%(default)s)"
    )
    tuned.add_argument(
        "--output-tokens", type=int, default=_WORKLOAD.output_tokens, metavar="N", help="usual (%(default)s)"
    )
    tuned.add_argument(
        "--tpot-sla",
        type=float,
        default=_WORKLOAD.tpot_s,
        metavar="SECONDS",
        help="bearable gap between tokens (%(default)g)",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--kv-tokens", type=int, metavar="N", help="KV memory of an engine that does not tell")
    engine.add_argument("--seats", type=int, metavar="N", help="sequences at once, if known")
    engine.add_argument("--path", choices=PATHS, default=COMPLETIONS, help="(%(default)s)")
    engine.add_argument("--key-env", metavar="NAME", help="environment variable with the engine's API key")
    engine.add_argument(
        "--gpu",
        default="auto",
        metavar="nvml|URL|none",
        help="where power and memory are read: this machine's driver, an exporter, nowhere (nvml for an engine of this machine)",
    )
    engine.add_argument("--gpu-name", default="", metavar="TEXT", help="for the profile")


def run(args: argparse.Namespace) -> int:
    """Measure, tell, write. 1 if it stopped early."""
    _check(args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if args.live is not None:
            return _kept(runner.run(exported(args.url, args.live)), args)
        found = runner.run(_measured(args))
    write(args.out, found)
    if args.json:
        print(json.dumps(profile(found), indent=1))
    else:
        _print(found, args.out)
    if found.fitted.error > ERROR_MAX:
        sys.stderr.write(
            f"headrace profile: the fit errs by {found.fitted.error:.0%} in the middle: the engine or this machine was not"
            " quiet, and the figures are not to be used; measure again\n"
        )
    return 1 if found.facts.stopped or found.fitted.error > ERROR_MAX else 0


def _kept(document: dict[str, object], args: argparse.Namespace) -> int:
    """What was learned in service, as a file."""
    text = json.dumps(document, indent=1)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "profile.json").write_text(text + "\n", encoding="utf-8")
    print(text if args.json else f"written: {args.out}/profile.json")
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, value in {
        "--for": args.for_s,
        "--max-batch": args.max_batch,
        "--max-prompt-tokens": args.max_prompt_tokens,
        "--max-ttft": args.max_ttft,
        "--prompt-tokens": args.prompt_tokens,
        "--output-tokens": args.output_tokens,
        "--tpot-sla": args.tpot_sla,
        "--kv-tokens": args.kv_tokens,
        "--seats": args.seats,
    }.items():
        if value is not None and not 0 < value < math.inf:
            raise SettingsError(f"profile: {name} {value:g}: must be > 0 and finite")
    if args.key_env is not None and not os.environ.get(args.key_env):
        raise SettingsError(f"profile: --key-env {args.key_env}: the environment has no such variable; export it")


async def _measured(args: argparse.Namespace) -> Profiled:
    url = normalise_url(args.url, what="profile")
    key = None if args.key_env is None else os.environ[args.key_env]
    address = EngineAddress("engine", url, key, sample_s=10.0, key_remedy=KEY_REMEDY)
    pool = EnginePool(address)
    async with AsyncExitStack() as stack:
        kind = await detect(pool)
        if kind is None:
            await pool.close()
            raise StartError(f"profile {url}: nothing there answers as an engine; start it, or correct the URL")
        backend = make_backend(kind, address, pool)
        stack.push_async_callback(backend.close)
        probe = await backend.probe()
        model = args.model or (probe.models[0].id if probe.models else "")
        gpu = _gpu(args.gpu, url, stack)
        client = Client(Target(url, model, path=args.path, keys={"": key or ""}), {"": Score(time.monotonic)})
        stack.push_async_callback(client.close)
        with _Bar() as (progress, task):
            sweep = Sweep(
                client,
                backend,
                _bounds(args),
                gpu=gpu,
                on_progress=lambda text, share: progress.update(task, completed=share, text=text),
            )
            try:
                seen, facts = await sweep.run()
            except Busy as busy:
                raise StartError(
                    f"profile {url}: {busy}: others use this engine, and would be slowed down; measure it when it is idle, or"
                    " say --even-if-busy"
                ) from None
            except BackendError as error:
                raise StartError(f"profile {url}: {error}") from None
        facts = replace(facts, kv_tokens=args.kv_tokens or facts.kv_tokens, seats=args.seats or facts.seats)
    return _concluded(args, seen, facts, kind=kind, model=model, probe=probe, where=url)


def _concluded(
    args: argparse.Namespace, seen: Seen, facts: Facts, *, kind: str, model: str, probe: Probe, where: str
) -> Profiled:
    try:
        fitted = fit(seen)
    except NotEnough as error:
        raise StartError(
            f"profile {where}: {error}{f' (it stopped: {facts.stopped})' if facts.stopped else ''}"
        ) from None
    workload = Workload(args.prompt_tokens, args.output_tokens, args.tpot_sla)
    found = limits(fitted.model, facts.kv_tokens, facts.seats, workload)
    return Profiled(
        model=model,
        kind=kind,
        engine=f"{kind} {probe.version}".strip(),
        where=where,
        gpu=args.gpu_name or "not told",
        day=datetime.now(UTC).date().isoformat(),
        seen=seen,
        facts=facts,
        fitted=fitted,
        workload=workload,
        limits=found,
        advice=advise(kind, plan(fitted, found, facts, workload)),
    )


def _bounds(args: argparse.Namespace) -> Bounds:
    return Bounds(args.for_s, args.max_batch, args.max_prompt_tokens, args.max_ttft, args.even_if_busy)


def _gpu(where: str, url: str, stack: AsyncExitStack) -> GpuSource | None:
    host = urlsplit(url).hostname or ""
    if where == "none" or (where == "auto" and host not in {"127.0.0.1", "localhost", "::1"}):
        return None
    if where in {"auto", "nvml"}:
        thread = NvmlThread(time.monotonic)
        stack.callback(thread.close)
        source: GpuSource = NvmlSource(thread, None)
    else:
        base = normalise_url(where, what="profile --gpu")
        pool = EnginePool(EngineAddress("gpu", base))
        source = DcgmSource(pool, None, where=base, monotonic=time.monotonic)
    stack.push_async_callback(source.close)
    return source


# -- telling -------------------------------------------------------------------------------------------------------


class _Bar:
    """The bar on standard error, where that is a terminal."""

    def __enter__(self) -> tuple[Progress, TaskID]:
        console = Console(stderr=True)
        columns = (BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._progress.start()
        return self._progress, self._progress.add_task("", total=1.0, text="is the engine idle?")

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _print(found: Profiled, folder: Path) -> None:
    console = table_console()
    fitted, facts = found.fitted, found.facts
    console.print(
        f"{found.model} on {found.engine}: {fitted.points} points in {facts.took_s:.0f} s, fitted within"
        f" {fitted.error:.1%} (median) and {fitted.worst:.1%} (worst)",
        highlight=False,
        markup=False,
    )
    _facts_table(console, found)
    table = Table(title="settings")
    for head in ("setting", "value", "why"):
        table.add_column(head)
    for one in found.advice:
        table.add_row(one.flag or one.name, one.value or "on", one.reason)
    console.print(uncut(table))
    if facts.stopped:
        console.print(f"stopped early: {facts.stopped}", highlight=False, markup=False)
    console.print(f"written: {folder}/profile.json, profile.md, profile.svg", highlight=False, markup=False)


def _facts_table(console: Console, found: Profiled) -> None:
    table = Table(title="what it can do")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for line in page(found).split("## Settings")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 2 and cells[0]:
            table.add_row(*cells)
    console.print(uncut(table))
