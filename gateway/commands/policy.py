"""`headrace policy init | check | show`: write a policy to start from, check one, see what one comes to."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import orjson

from gateway.control.policy_store import read_policy
from policies import presets
from policies.document import effective, render
from policies.schema import Policy
from policies.yaml_source import DocumentError

DEFAULT_FILE = Path("policy.yaml")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser("policy", help="write, check and show policy files")
    actions = parser.add_subparsers(dest="action", required=True, metavar="init|check|show")
    init = actions.add_parser("init", help="write a commented policy to start from")
    init.add_argument("file", nargs="?", type=Path, default=DEFAULT_FILE, help=f"file to write ({DEFAULT_FILE})")
    init.add_argument("--preset", choices=presets.PRESETS, default=presets.DEFAULT, help="which one (balanced)")
    init.add_argument("--force", action="store_true", help="overwrite a file that is there")
    check = actions.add_parser("check", help="name every mistake in a policy file; exit 1 if there is one")
    check.add_argument("file", type=Path, help="policy file")
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    show = actions.add_parser("show", help="print a policy with all defaults filled in")
    show.add_argument("file", nargs="?", type=Path, help="policy file; left out, the preset balanced")
    show.add_argument("--json", action="store_true", help="print JSON instead of YAML")


def run(args: argparse.Namespace) -> int:
    """Run one of the three; 0 when all is well, 1 when a document or a file is not."""
    actions = {"init": _init, "check": _check, "show": _show}
    return actions[args.action](args)


def _init(args: argparse.Namespace) -> int:
    file: Path = args.file
    try:
        with file.open("w" if args.force else "x", encoding="utf-8") as stream:
            stream.write(presets.text(args.preset))
    except FileExistsError:
        return _fail(f"{file} is there already: not overwritten; use --force or another name")
    except OSError as error:
        return _fail(f"{file} cannot be written: {error.strerror}; choose another place")
    print(f"wrote {file} (preset {args.preset}); use it with `policy_file: {file}` in headrace.yaml")
    return 0


def _check(args: argparse.Namespace) -> int:
    try:
        policy = read_policy(args.file)
    except DocumentError as error:
        if args.json:
            problems = [dataclasses.asdict(problem) for problem in error.problems]
            print(orjson.dumps({"ok": False, "problems": problems}).decode())
            return 1
        return _fail(str(error))
    if args.json:
        print(orjson.dumps({"ok": True, "problems": [], "version": policy.version}).decode())
    else:
        print(f"{args.file}: good; version {policy.version}, classes {', '.join(policy.precedence)}")
    return 0


def _show(args: argparse.Namespace) -> int:
    try:
        policy: Policy = presets.load() if args.file is None else read_policy(args.file)
    except DocumentError as error:
        return _fail(str(error))
    if args.json:
        print(orjson.dumps({"policy": effective(policy), "version": policy.version}).decode())
    else:
        print(f"# version {policy.version}\n{render(policy)}", end="")
    return 0


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1
