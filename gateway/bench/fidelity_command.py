"""`headrace bench fidelity`: logs of real engines replayed on the simulated one, and every figure's error.

Without options the shipped logs, each with its profile; `--log FILE --profile NAME` for any other. Residuals are printed
whatever they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from backends.simulated.profiles import EngineOptions, profile_names
from gateway.bench.fidelity import BAR, SHIPPED, Compared, Log, Residuals, compare, picture
from gateway.replay.trace import TraceError
from gateway.settings_file import SettingsError
from gateway.tables import table_console, uncut

"""Columns where there is no terminal to ask."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the benchmark."""
    parser = subparsers.add_parser(
        "fidelity",
        help="the simulated engine beside real ones",
        description="Replay logs of real engines on the simulated one and print every figure's error.",
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="CSV: queued_s,first_token_s,last_token_s,prompt_tokens,output_tokens"
    )
    parser.add_argument(
        "--profile", metavar="NAME", help=f"engine of that log: {', '.join(profile_names())}, or a .json file"
    )
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="seats of that engine (the profile's)")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens of a step (the profile's)")
    parser.add_argument("--kv-tokens", type=int, metavar="N", help="KV cache, in tokens (the profile's)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw real and simulated, as .svg")


def run(args: argparse.Namespace) -> int:
    """Replay, then tell."""
    if (args.log is None) != (args.profile is None):
        raise SettingsError(
            "bench fidelity: --log and --profile go together; give both, or neither for the shipped logs"
        )
    logs = SHIPPED if args.log is None else (Log(args.log.stem.removeprefix("vllm_log_"), args.log, args.profile),)
    options = EngineOptions(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_tokens=args.kv_tokens,
    )
    if args.log is None and options != EngineOptions():
        raise SettingsError("bench fidelity: --max-num-seqs and the like describe the engine of --log FILE; give one")
    try:
        compared = [compare(log, options) for log in logs]
    except TraceError as error:
        raise SettingsError(str(error)) from None
    except ValueError as error:
        raise SettingsError(f"bench fidelity: {error}") from None
    if args.picture is not None:
        args.picture.write_text(picture(compared), encoding="utf-8")
    if args.json:
        sys.stdout.write(json.dumps(_document(compared), indent=1) + "\n")
    else:
        _table(compared)
    return 0


def _document(compared: Sequence[Compared]) -> dict[str, object]:
    return {
        "logs": {one.log.name: _plain(one.residuals) for one in compared},
        "parts": {
            one.log.name: {part: _plain(residuals) for part, residuals in one.parts.items()}
            for one in compared
            if one.parts
        },
        "profiles": {one.log.name: one.log.profile for one in compared},
    }


def _plain(residuals: Residuals) -> dict[str, dict[str, float]]:
    return {name: figure.plain() for name, figure in residuals.items()}


def _table(compared: Sequence[Compared]) -> None:
    table = Table(title=f"simulated beside real; ! is beyond {BAR:.0%}")
    for column in ("log", "requests", "figure"):
        table.add_column(column)
    for column in ("real", "simulated", "error"):
        table.add_column(column, justify="right")
    for one in compared:
        for part, residuals in _parts(one):
            for number, (name, figure) in enumerate(residuals.items()):
                heads = (one.log.name if part == "all" and number == 0 else "", part if number == 0 else "")
                mark = " !" if abs(figure.error) > BAR else ""
                table.add_row(
                    *heads, name, f"{figure.real:.4g}", f"{figure.simulated:.4g}", f"{figure.error:+.1%}{mark}"
                )
        table.add_section()
    table_console().print(uncut(table))


def _parts(one: Compared) -> Iterator[tuple[str, Residuals]]:
    yield "all", one.residuals
    cut, total = one.log.fitted_requests, len(one.entries)
    names = {"fitted": f"1-{cut}, fitted", "validation": f"{cut + 1}-{total}, not fitted"}
    for part, residuals in one.parts.items():
        yield names[part], residuals
