"""`headrace bench curve`: what a batch of 1 to 512 gains and costs on one engine, continuous and static.

Prints tokens per second, time to first token, gaps and energy at each batch, the knee, and for each published rule of
thumb where it holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from backends.simulated.profiles import load_profile, profile_names
from gateway.bench.curve import BATCHES, MODES, Point, Rule, curve, knee, picture, rules
from gateway.load.lengths import Workload
from gateway.settings_file import SettingsError
from gateway.tables import table_console, uncut

"""Columns where there is no terminal to ask."""
_CHAT = Workload()


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the benchmark."""
    parser = subparsers.add_parser(
        "curve",
        help="throughput, latency and energy over the batch",
        description="Measure one simulated engine with batches of 1 to 512, continuous and static.",
    )
    parser.add_argument(
        "--profile",
        default="h100_llama31_8b_tp1",
        metavar="NAME",
        help=f"engine (h100_llama31_8b_tp1): {', '.join(profile_names())}, or a .json file",
    )
    parser.add_argument(
        "--prompt-tokens", type=float, default=_CHAT.prompt_tokens, metavar="N", help="mean (%(default)g)"
    )
    parser.add_argument(
        "--output-tokens", type=float, default=_CHAT.output_tokens, metavar="N", help="mean (%(default)g)"
    )
    parser.add_argument(
        "--cv", type=float, default=_CHAT.cv, metavar="X", help="standard deviation of lengths over mean (%(default)g)"
    )
    parser.add_argument("--seed", type=int, default=_CHAT.seed, metavar="N", help="of the lengths (%(default)s)")
    parser.add_argument(
        "--batch", type=int, action="append", metavar="N", help="only this batch; repeatable (1 to 512)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the curves, as .svg")


def run(args: argparse.Namespace) -> int:
    """Measure, then tell."""
    if args.prompt_tokens < 1 or args.output_tokens < 1 or args.cv < 0:
        raise SettingsError("bench curve: --prompt-tokens and --output-tokens must be >= 1, --cv >= 0")
    batches = tuple(sorted(set(args.batch or BATCHES)))
    if batches[0] < 1:
        raise SettingsError(f"bench curve: --batch {batches[0]}: must be >= 1")
    workload = Workload(args.prompt_tokens, args.output_tokens, args.cv, args.seed)
    try:
        profile = load_profile(args.profile)
        points = curve(profile, workload, batches)
        told = rules(profile)
    except ValueError as error:
        raise SettingsError(f"bench curve: {error}") from None
    if args.picture is not None:
        args.picture.write_text(picture(f"{profile.model} on {profile.gpu}", points), encoding="utf-8")
    if args.json:
        document = {
            "profile": args.profile,
            "points": [point.plain() for point in points],
            "knee": {mode: knee(points, mode) for mode in MODES},
            "rules": [one.plain() for one in told],
        }
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        _tables(points, told)
    return 0


def _tables(points: Sequence[Point], told: Sequence[Rule]) -> None:
    console = table_console()
    for mode in MODES:
        at_knee = knee(points, mode)
        table = Table(title=f"{mode} (the knee is at {at_knee})")
        for column in (
            "batch", "running", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "J/token", "padded"
        ):  # fmt: skip
            table.add_column(column, justify="right")
        for point in points:
            if point.mode == mode:
                table.add_row(*_cells(point), style="bold" if point.batch == at_knee else None)
        console.print(uncut(table))
    table = Table(title="rules of thumb")
    for column in ("rule", "workload", "mode", "holds", "measured"):
        table.add_column(column)
    said = ""
    for one in told:
        holds = {True: "yes", False: "no", None: "-"}[one.holds]
        table.add_row("" if one.rule == said else one.rule, one.workload, one.mode, holds, one.measured)
        said = one.rule
    console.print(uncut(table))


def _cells(point: Point) -> tuple[str, ...]:
    times_s = (point.ttft_p50_s, point.ttft_p99_s, point.itl_p50_s, point.itl_p99_s)
    joules = "-" if point.joules_per_token is None else f"{point.joules_per_token:.3g}"
    return (
        str(point.batch),
        f"{point.running:.1f}",
        f"{point.tokens_per_s:,.0f}",
        *(f"{1000 * time_s:,.1f} ms" if time_s < 1 else f"{time_s:,.1f} s" for time_s in times_s),
        joules,
        f"{point.padded_share:.0%}",
    )
