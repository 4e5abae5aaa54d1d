"""`headrace replay`: a trace against a policy and a pool of profiled engines, in virtual time.

An hour of traffic takes seconds, and the same seed gives the same rows on any machine. Prints a table, or JSON with
`--json`; the progress bar goes to standard error and only to a terminal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from backends.simulated.profiles import EngineOptions, load_profile, profile_names
from gateway.control.policy_store import read_policy
from gateway.logs import Logs
from gateway.replay.alone import alone
from gateway.replay.figures import Figures, figures
from gateway.replay.host import EngineSpec
from gateway.replay.picture import picture
from gateway.replay.rows import COMPLETED, write_rows
from gateway.replay.trace import TraceError, read_lengths, read_trace, segment
from gateway.replay.world import Backlog, Plan, Played, replay
from gateway.settings_file import SettingsError
from gateway.tables import table_console, uncut
from policies import presets
from policies.schema import Policy

PICTURES = (".svg",)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "replay",
        help="replay a trace in virtual time",
        description="Replay recorded traffic against a policy and simulated engines, in virtual time.",
    )
    parser.add_argument(
        "trace", type=Path, help="CSV: arrival_s,prompt_tokens,output_tokens[,tenant,class,prefix]; a recorder's folder"
    )
    parser.add_argument("--policy", type=Path, metavar="FILE", help="policy document (preset balanced)")
    parser.add_argument(
        "--engine",
        action="append",
        metavar="[NAME=]PROFILE",
        help=f"an engine; repeatable (h100_llama31_8b_tp1); one of {', '.join(profile_names())}, or a .json file",
    )
    parser.add_argument(
        "--prefix-caching",
        action="store_true",
        help="engines find beginnings of prompts again, where the trace names them",
    )
    parser.add_argument("--rate", type=float, default=1.0, metavar="X", help="times the trace's density (1)")
    parser.add_argument("--from", dest="from_s", type=float, default=0.0, metavar="SECONDS", help="where to begin (0)")
    parser.add_argument("--for", dest="for_s", type=float, metavar="SECONDS", help="how long (all of it)")
    parser.add_argument("--class", dest="class_name", default="", metavar="NAME", help="of requests that name none")
    parser.add_argument("--backlog", type=Path, metavar="FILE", help="CSV of lengths: bulk that is always waiting")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the gateway's own draws (1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="write one CSV row a request")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it over time, as .svg")


def run(args: argparse.Namespace) -> int:
    """Replay, then tell."""
    if args.rate <= 0 or args.from_s < 0 or (args.for_s is not None and args.for_s <= 0):
        raise SettingsError("replay: --rate and --for must be > 0, --from must be >= 0")
    if args.picture is not None and args.picture.suffix not in PICTURES:
        raise SettingsError(f"replay: --picture {args.picture}: must end in .svg; name it so")
    plan = _plan(args)
    duration_s = plan.duration_s or (plan.requests[-1].arrival_s if plan.requests else 0.0) or 1.0
    logs = Logs(sys.stderr.buffer)
    begun_s = time.perf_counter()
    with _progress(duration_s) as progress:
        if progress is not None:
            task = progress.add_task("", total=duration_s)
            plan = replace(plan, on_time=partial(_show, progress, task))
        played = replay(plan, logs.log)
    real_s = time.perf_counter() - begun_s
    logs.close()
    profiles = [engine.profile for engine in plan.engines]
    found = figures(played, plan.policy, duration_s=duration_s, alone=alone(profiles))
    if args.rows is not None:
        write_rows(args.rows, played.rows)
    if args.picture is not None:
        args.picture.write_text(picture(args.trace.name, played, plan.policy), encoding="utf-8")
    if args.json:
        document = _document(plan, played, found, measured_s=duration_s, real_s=real_s)
        print(json.dumps(document, indent=1))
    else:
        _table(args, plan, played, found, measured_s=duration_s, real_s=real_s)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    options = EngineOptions(prefix_caching=args.prefix_caching)
    engines = tuple(_engine(text, options) for text in args.engine or ["h100_llama31_8b_tp1"])
    names = [engine.name for engine in engines]
    if len(set(names)) < len(names):
        raise SettingsError(f"replay: --engine {' '.join(names)}: names must differ; write NAME=PROFILE")
    policy = presets.load() if args.policy is None else read_policy(args.policy, engines=names)
    if args.class_name and args.class_name not in policy.classes:
        raise SettingsError(f"replay: --class {args.class_name}: must be one of {', '.join(policy.classes)}")
    try:
        trace = read_trace(args.trace, class_name=args.class_name)
        for_s = args.for_s if args.for_s is not None else trace[-1].arrival_s / args.rate + 1e-6 - args.from_s
        requests = segment(trace, rate_scale=args.rate, from_s=args.from_s, duration_s=for_s)
        if not requests:
            raise SettingsError(
                f"{args.trace}: no requests from {args.from_s:g} s on for {for_s:g} s; choose another part"
            )
        backlog = None if args.backlog is None else Backlog(read_lengths(args.backlog), _patient(policy))
    except TraceError as error:
        raise SettingsError(str(error)) from None
    unknown = {request.class_name for request in requests} - {"", *policy.classes}
    if unknown:
        raise SettingsError(
            f"{args.trace}: class {min(unknown)!r}: must be one of {', '.join(policy.classes)}; name it in the policy"
        )
    return Plan(
        engines=engines,
        policy=policy,
        requests=requests,
        backlog=backlog,
        duration_s=for_s if backlog is not None else args.for_s,
        seed=args.seed,
    )


def _engine(text: str, options: EngineOptions) -> EngineSpec:
    name, given, profile = text.rpartition("=")
    try:
        return EngineSpec(name if given else Path(profile).stem, load_profile(profile), options)
    except ValueError as error:
        raise SettingsError(f"replay: --engine {text}: {error}") from None


def _patient(policy: Policy) -> str:
    names = [name for name, one in policy.classes.items() if not one.has_ttft_objective]
    if not names:
        raise SettingsError("replay: --backlog: the policy has no class without ttft_sla_s to put it in")
    return names[0]


def _progress(duration_s: float) -> AbstractContextManager[Progress | None]:
    console = Console(stderr=True)
    if not console.is_terminal:
        return nullcontext()
    columns = (
        TextColumn(f"{{task.completed:.0f}} of {duration_s:.0f} s replayed"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)


def _show(progress: Progress, task: TaskID, at_s: float) -> None:
    progress.update(task, completed=at_s)


def _document(plan: Plan, played: Played, found: Figures, *, measured_s: float, real_s: float) -> dict[str, object]:
    return {
        "requests": len(plan.requests),
        "engines": {engine.name: engine.profile.name for engine in plan.engines},
        "policy": plan.policy.version,
        "seed": plan.seed,
        "replayed_s": played.end_s,
        "measured_s": measured_s,
        "seconds": real_s,
        "outcomes": _outcomes(played),
        "figures": found.plain(),
    }


def _outcomes(played: Played) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in played.rows:
        counts[row.outcome] = counts.get(row.outcome, 0) + 1
    return dict(sorted(counts.items()))


def _table(
    args: argparse.Namespace, plan: Plan, played: Played, found: Figures, *, measured_s: float, real_s: float
) -> None:
    engines = ", ".join(f"{engine.name} ({engine.profile.name})" for engine in plan.engines)
    print(f"{args.trace.name}: {len(plan.requests):,} requests on {engines}")
    print(f"{played.end_s:,.0f} s replayed in {real_s:.1f} s: {played.end_s / max(real_s, 1e-9):,.0f} x real time")
    print(_measured(args, played, measured_s))
    table = Table()
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in found.plain().items():
        table.add_row(name, "-" if value is None else f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}")
    for name, count in _outcomes(played).items():
        table.add_row(f"{name} (requests)", f"{count:,}")
    table_console().print(uncut(table))


def _measured(args: argparse.Namespace, played: Played, measured_s: float) -> str:
    """What the figures per second are over, and what lies outside that."""
    until = "the last arrival" if args.for_s is None else "--for"
    after = sum(row.outcome == COMPLETED and row.end_s > measured_s for row in played.rows)
    later = f"; completed after that: {after:,} (docs/replay.md says which figures count them)" if after else ""
    return f"measured over {measured_s:,.4g} s, until {until}{later}"
