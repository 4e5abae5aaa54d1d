"""`headrace load`: put a load on any server with OpenAI's routes, and tell what its clients saw.

Traffic is a trace or made up, sent when it is due (open loop), by so many clients (closed loop), or both. Ctrl-C ends
it early and tells what was seen by then. The bar goes to standard error and only to a terminal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from backends.base import EngineAddress
from backends.connection import EnginePool
from backends.openai_compatible import OpenAICompatible
from gateway.addresses import normalise_url
from gateway.load.arrivals import Stretch, arrivals, bursts, staircase, steady
from gateway.load.client import CHAT, KEY_REMEDY, PATHS, Client, Target
from gateway.load.figures import Objectives, Record, figures, steps
from gateway.load.lengths import Workload
from gateway.load.report import ALL, Fact, Told, facts_of, shown, step_table, table, write_report
from gateway.load.run import ClosedLoop, answered, open_loop
from gateway.load.traffic import NO_CLASS, at_once, first, made_up
from gateway.replay.rows import write_rows
from gateway.replay.trace import Request, TraceError, read_trace, segment
from gateway.settings_file import SettingsError
from gateway.stop_signals import finished_before, stop_signals
from gateway.tables import table_console, uncut

DEFAULT_FOR_S = 60.0
SHOW_EVERY_S = 0.5
LATE_S = 0.02
"""A generator that is later than this with one request in a hundred says so: its figures are partly its own."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "load",
        help="put a load on a server and measure it",
        description="Put a load on any server with OpenAI's routes and tell what its clients saw.",
    )
    parser.add_argument("url", metavar="URL", help="base URL, with or without /v1")
    parser.add_argument("--model", metavar="NAME", help="model to ask for (the first that the server lists)")
    what = parser.add_argument_group(
        "what comes when (a trace, --rate, --clients, or one of the first two and --clients)"
    )
    what.add_argument("--trace", type=Path, metavar="FILE", help="CSV as for `headrace replay`, or a recorder's folder")
    what.add_argument(
        "--rate", metavar="R[,R...]", help="requests per second; several are a staircase; of a trace: times its density"
    )
    what.add_argument(
        "--step", type=float, default=30.0, metavar="SECONDS", help="of each rate of a staircase (%(default)g)"
    )
    what.add_argument(
        "--cv",
        type=float,
        default=1.0,
        metavar="X",
        help="of the gaps: 0 even, 1 Poisson, more is burstier (%(default)g)",
    )
    what.add_argument(
        "--burst", metavar="R:SECONDS:SECONDS", help="rate R for so long, then --rate for so long, in turn"
    )
    what.add_argument("--clients", type=int, default=0, metavar="N", help="clients with one request each, all the time")
    what.add_argument("--think", type=float, default=0.0, metavar="SECONDS", help="of a client between requests (0)")
    what.add_argument(
        "--ramp", type=float, default=0.0, metavar="SECONDS", help="until the rate or all clients are there (0)"
    )
    what.add_argument(
        "--from", dest="from_s", type=float, default=0.0, metavar="SECONDS", help="where to begin in a trace (0)"
    )
    what.add_argument(
        "--for", dest="for_s", type=float, metavar="SECONDS", help=f"how long ({DEFAULT_FOR_S:g}; a trace: all)"
    )
    what.add_argument("--requests", type=int, metavar="N", help="at most so many of each loop")
    size = parser.add_argument_group("requests")
    size.add_argument("--prompt-tokens", type=float, default=200.0, metavar="N", help="mean (%(default)g)")
    size.add_argument("--output-tokens", type=float, default=100.0, metavar="N", help="mean (%(default)g)")
    size.add_argument(
        "--length-cv", type=float, default=0.5, metavar="X", help="spread of both over mean (%(default)g)"
    )
    size.add_argument(
        "--class", dest="classes", action="append", metavar="NAME[=SHARE]", help="X-Headrace-Class; repeatable"
    )
    size.add_argument("--clients-class", default="", metavar="NAME", help="class of what --clients send (as --class)")
    size.add_argument("--path", choices=PATHS, default=CHAT, help="(%(default)s)")
    size.add_argument("--no-stream", action="store_true", help="ask for whole answers")
    size.add_argument("--respect-eos", action="store_true", help="do not send ignore_eos, which not every server knows")
    size.add_argument("--header", action="append", metavar="'NAME: VALUE'", help="added to every request; repeatable")
    size.add_argument(
        "--keys", type=Path, metavar="FILE", help="lines of `TENANT: KEY`; made-up requests take them in turn"
    )
    size.add_argument("--key-env", metavar="NAME", help="environment variable with the API key of everybody else")
    size.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of one request (%(default)g)")
    size.add_argument("--seed", type=int, default=1, metavar="N", help="of every draw (1)")
    tell = parser.add_argument_group("telling")
    tell.add_argument("--ttft-sla", action="append", metavar="[CLASS=]SECONDS", help="objective; repeatable")
    tell.add_argument("--tpot-sla", action="append", metavar="[CLASS=]SECONDS", help="objective; repeatable")
    tell.add_argument("--json", action="store_true", help="print JSON instead of a table")
    tell.add_argument("--rows", type=Path, metavar="FILE", help="write one CSV row a request")
    tell.add_argument(
        "--report", type=Path, metavar="FOLDER", help="write report.md, report.svg, figures.json, rows.csv"
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for. open_s: how long the open loop lasts; None: there is none, or its trace decides."""

    target: Target
    opened: Iterator[Request] | None
    closed: Iterator[Request] | None
    clients: int
    ramp_s: float
    think_s: float
    for_s: float
    objectives: Mapping[str, Objectives]
    facts: Mapping[str, Fact]
    stairs: Sequence[Stretch] = ()


def run(args: argparse.Namespace) -> int:
    """Send, then tell. 1 if nothing was answered."""
    plan = _plan(args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        told = runner.run(_load(args.model, plan))
    if args.rows is not None:
        write_rows(args.rows, told.rows)
    if args.report is not None:
        write_report(args.report, told)
    if args.json:
        print(json.dumps(told.plain(), indent=1))
    else:
        _print(told)
    _warn(told)
    return 0 if told.by_class[ALL].completed else 1


# -- what is asked for ---------------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace) -> Plan:
    _check(args)
    keys = _keys(args)
    classes = _shares(args.classes)
    workload = Workload(args.prompt_tokens, args.output_tokens, args.length_cv, args.seed)
    tenants = [tenant for tenant in keys if tenant] or ["default"]
    for_s = args.for_s if args.for_s is not None else DEFAULT_FOR_S
    opened: Iterator[Request] | None = None
    stretches: Sequence[Stretch] = ()
    if args.trace is not None:
        requests = _of_trace(args, next(iter(classes)))
        opened, for_s = iter(requests), requests[-1].arrival_s + 0.001
    elif args.rate is not None:
        stretches = _stretches(args, for_s)
        for_s = sum(one.duration_s for one in stretches)
        opened = made_up(arrivals(stretches, cv=args.cv, seed=args.seed), workload, classes=classes, tenants=tenants)
    closed: Iterator[Request] | None = None
    if args.clients:
        of = {args.clients_class: 1.0} if args.clients_class else classes
        closed = made_up(at_once(), workload, classes=of, tenants=tenants)
    target = Target(
        normalise_url(args.url, what="load"),
        args.model or "",
        path=args.path,
        stream=not args.no_stream,
        ignore_eos=not args.respect_eos,
        headers=tuple(_header(text) for text in args.header or ()),
        keys=keys,
        timeout_s=args.timeout,
    )
    return Plan(
        target,
        None if opened is None else first(opened, args.requests),
        None if closed is None else first(closed, args.requests),
        args.clients,
        args.ramp,
        args.think,
        for_s,
        _objectives(args),
        _facts(args),
        stretches if "," in (args.rate or "") else (),
    )


def _check(args: argparse.Namespace) -> None:
    if args.trace is None and args.rate is None and not args.clients:
        raise SettingsError("load: nothing to send; give --rate, --clients or --trace")
    positive = {
        "--step": args.step,
        "--for": args.for_s,
        "--requests": args.requests,
        "--prompt-tokens": args.prompt_tokens,
        "--output-tokens": args.output_tokens,
        "--timeout": args.timeout,
    }
    for name, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            raise SettingsError(f"load: {name} {value:g}: must be > 0 and finite")
    rest = {"--cv": args.cv, "--clients": args.clients, "--think": args.think, "--ramp": args.ramp,
            "--from": args.from_s, "--length-cv": args.length_cv}  # fmt: skip
    for name, value in rest.items():
        if not 0 <= value < math.inf:
            raise SettingsError(f"load: {name} {value:g}: must be >= 0 and finite")
    if args.burst is not None and (args.rate is None or args.trace is not None):
        raise SettingsError("load: --burst says what comes between stretches of --rate; give that too, and no --trace")


def _of_trace(args: argparse.Namespace, class_name: str) -> list[Request]:
    rate = _number("--rate", args.rate or "1")
    try:
        trace = read_trace(args.trace, class_name=class_name)
    except TraceError as error:
        raise SettingsError(str(error)) from None
    for_s = args.for_s if args.for_s is not None else trace[-1].arrival_s / rate + 1e-6 - args.from_s
    requests = segment(trace, rate_scale=rate, from_s=args.from_s, duration_s=for_s)
    if not requests:
        raise SettingsError(f"{args.trace}: no requests from {args.from_s:g} s on for {for_s:g} s; choose another part")
    return requests


def _stretches(args: argparse.Namespace, for_s: float) -> list[Stretch]:
    rates = [_number("--rate", text) for text in args.rate.split(",")]
    if len(rates) > 1:
        return staircase(rates, args.step)
    if args.burst is None:
        return steady(rates[0], for_s, ramp_s=args.ramp)
    parts = [_number("--burst", text) for text in args.burst.split(":")]
    if len(parts) != 3:
        raise SettingsError(f"load: --burst {args.burst}: expected RATE:SECONDS:SECONDS, as in 50:2:10")
    return bursts(rates[0], parts[0], for_s, high_s=parts[1], low_s=parts[2])


def _number(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise SettingsError(f"load: {flag} {text}: expected a number > 0")
    return value


def _shares(texts: list[str] | None) -> Mapping[str, float]:
    pairs = [text.partition("=") for text in texts or ()]
    return {name: _number("--class", share or "1") for name, _, share in pairs} or NO_CLASS


def _objectives(args: argparse.Namespace) -> Mapping[str, Objectives]:
    """By class; "" for those not named."""
    found: dict[str, dict[str, float]] = {}
    for flag, name, texts in (("--ttft-sla", "ttft_s", args.ttft_sla), ("--tpot-sla", "tpot_s", args.tpot_sla)):
        for text in texts or ():
            class_name, _, seconds = text.rpartition("=")
            found.setdefault(class_name, {})[name] = _number(flag, seconds)
    return {class_name: Objectives(**of) for class_name, of in found.items()}


def _header(text: str) -> tuple[bytes, bytes]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise SettingsError(f"load: --header {text.split(':', maxsplit=1)[0]!r}: expected 'NAME: VALUE'")
    return name.strip().lower().encode(), value.strip().encode()


def _keys(args: argparse.Namespace) -> dict[str, str]:
    """By tenant; "" for the others. Neither keys nor what a file holds instead is ever shown."""
    keys: dict[str, str] = {}
    if args.keys is not None:
        try:
            lines = args.keys.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"load: --keys {args.keys}: cannot be read ({error.__class__.__name__})") from None
        for number, line in enumerate(lines, 1):
            tenant, colon, key = (part.strip() for part in line.partition(":"))
            if line.strip() and not line.startswith("#"):
                if not (tenant and colon and key):
                    raise SettingsError(f"load: {args.keys}:{number}: expected `TENANT: KEY`")
                keys[tenant] = key
    if args.key_env is not None:
        if not os.environ.get(args.key_env):
            raise SettingsError(f"load: --key-env {args.key_env}: the environment has no such variable; export it")
        keys[""] = os.environ[args.key_env]
    return keys


def _facts(args: argparse.Namespace) -> dict[str, Fact]:
    """What was asked for."""
    rates = [_number("--rate", text) for text in (args.rate or "").split(",") if text]
    rate = rates if len(rates) > 1 else rates[0] if rates else None
    burst = [float(text) for text in args.burst.split(":")] if args.burst is not None else [None] * 3
    made_up = args.trace is None or args.clients
    asked: dict[str, Fact | None] = {
        "trace": None if args.trace is None else str(args.trace),
        "rate_rps" if args.trace is None else "rate_scale": rate,
        "step_s": args.step if len(rates) > 1 else None,
        "burst_rps": burst[0],
        "burst_s": burst[1],
        "calm_s": burst[2],
        "clients": args.clients or None,
        "think_s": args.think or None,
        "ramp_s": args.ramp or None,
        "path": args.path,
        "seed": args.seed,
        "cv": args.cv if made_up else None,
        "prompt_tokens": args.prompt_tokens if made_up else None,
        "output_tokens": args.output_tokens if made_up else None,
        "length_cv": args.length_cv if made_up else None,
        "class": " ".join(args.classes) if args.classes else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


# -- sending -------------------------------------------------------------------------------------------------------


async def _load(model: str | None, plan: Plan) -> Told:
    target = plan.target if model else await _with_model(plan.target)
    records = _Records(time.monotonic, plan.objectives)
    client = Client(target, records)
    began_s = time.monotonic()
    with stop_signals() as (stop, hurry):
        async with asyncio.TaskGroup() as group:
            showing = group.create_task(_show(plan, records, client))
            async with asyncio.TaskGroup() as senders:
                for sender in _senders(plan, client):
                    senders.create_task(finished_before(stop, sender))
            sent_s = time.monotonic()
            await finished_before(hurry, answered(client, within_s=target.timeout_s))
            showing.cancel()
    await client.close()
    ended_s = max((row.end_s for one in records.values() for row in one.rows), default=0.0)
    return _told(plan, target, records, max(ended_s, sent_s - began_s, 1e-9))


def _told(plan: Plan, target: Target, records: _Records, duration_s: float) -> Told:
    of = {name: figures([record], duration_s) for name, record in sorted(records.items())}
    together = figures(list(records.values()), duration_s)
    by_class = (
        {ALL: together} if len(of) <= 1 else {**{name or "no class": one for name, one in of.items()}, ALL: together}
    )
    facts = {"model": target.model, "lasted_s": duration_s, **plan.facts}
    rows = [row for record in records.values() for row in record.rows]
    stairs = steps(records, [one.to_rps for one in plan.stairs], plan.stairs[0].duration_s) if plan.stairs else []
    return Told(f"Load on {target.url}", facts, by_class, rows, stairs)


class _Records(dict[str, Record]):
    """A record for each class that turns up."""

    def __init__(self, clock: Callable[[], float], objectives: Mapping[str, Objectives]) -> None:
        super().__init__()
        self._clock = clock
        self._objectives = objectives
        self._origin_s = clock()

    def __missing__(self, name: str) -> Record:
        objectives = self._objectives.get(name) or self._objectives.get("") or Objectives()
        record = self[name] = Record(self._clock, objectives, origin_s=self._origin_s)
        return record


def _senders(plan: Plan, client: Client) -> Iterator[Coroutine[Any, Any, None]]:
    if plan.opened is not None:
        yield open_loop(client, plan.opened)
    if plan.closed is not None:
        loop = ClosedLoop(client, plan.closed, clients=plan.clients, ramp_s=plan.ramp_s, think_s=plan.think_s)
        yield _for(plan.for_s, loop)


async def _for(seconds: float, loop: ClosedLoop) -> None:
    try:
        async with asyncio.timeout(seconds):
            await loop.run()
    except TimeoutError:
        return


async def _with_model(target: Target) -> Target:
    """The target with the first model that the server lists."""
    key = next(iter(target.keys.values()), None)
    address = EngineAddress("target", target.url, key, key_remedy=KEY_REMEDY)
    backend = OpenAICompatible(address, EnginePool(address))
    try:
        probe = await backend.probe()
    finally:
        await backend.close()
    if not probe.models:
        remedy = "" if probe.detail.endswith(KEY_REMEDY) else "; start it, or name a model with --model"
        raise SettingsError(f"load {target.url}: {probe.detail}{remedy}")
    return replace(target, model=probe.models[0].id)


# -- telling -------------------------------------------------------------------------------------------------------


async def _show(plan: Plan, records: _Records, client: Client) -> None:
    """A bar with what is under way and how it goes, until cancelled; nothing where there is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return
    began_s = client.clock()
    columns = (TextColumn("{task.fields[text]}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=plan.for_s, text="")
        while True:
            progress.update(task, completed=client.clock() - began_s, text=bar_text(client.under_way, records))
            await asyncio.sleep(SHOW_EVERY_S)


def bar_text(under_way: int, records: Mapping[str, Record]) -> str:
    """One line: what is under way, done and failed, first tokens and tokens per second."""
    now = [record.score.figures() for record in records.values()]
    p99_s = max((one.ttft_p99_s for one in now if one.ttft_p99_s is not None), default=None)
    return (
        f"{under_way} under way, {sum(one.completed for one in now):,} done,"
        f" {sum(one.refused + one.failed for one in now):,} not, TTFT p99 {shown(p99_s)},"
        f" {sum(one.tokens_per_s for one in now):,.0f} tokens/s"
    )


def _print(told: Told) -> None:
    console = table_console()
    console.print(told.title, markup=False, highlight=False)
    console.print(", ".join(map(" ".join, facts_of(told))), markup=False, highlight=False)
    for heads, lines in (step_table(told), table(told)):
        drawn = Table()
        for number, head in enumerate(heads):
            drawn.add_column(head, justify="right" if number else "left")
        for line in lines:
            drawn.add_row(*line)
        if lines:
            console.print(uncut(drawn))


def _warn(told: Told) -> None:
    whole = told.by_class[ALL]
    for kind, text in whole.examples.items():
        said = f", the first: {text}" if text else ""
        remedy = f"; {KEY_REMEDY}" if kind == "http_401" else ""
        sys.stderr.write(f"headrace load: {kind}: {whole.errors[kind]:,} requests{said}{remedy}\n")
    if whole.late_p99_s is not None and whole.late_p99_s > LATE_S:
        sys.stderr.write(
            f"headrace load: one request in a hundred left {shown(whole.late_p99_s)} late: this machine was too busy to"
            " send in time; the times count from when requests were due\n"
        )
