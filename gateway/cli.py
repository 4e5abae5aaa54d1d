"""The one documented entry: `headrace COMMAND`. Each command is a module of `gateway.commands` with two functions.

`add_parser(subparsers)` describes the command and returns nothing; `run(args) -> int` does it and gives the exit code.
Only the module of the command named is imported, so that `headrace key` does not pay for aiohttp.

What an operator got wrong is told as plain lines on standard error with exit code 2, never as a traceback; a bug keeps
its traceback.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from gateway.addresses import AddressError
from gateway.settings_file import SettingsError
from policies.yaml_source import DocumentError

COMMANDS = ("serve", "demo", "policy", "simulate", "key")
USAGE = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv).parse_args(argv)
    try:
        return int(args.run(args))
    except (SettingsError, AddressError, DocumentError) as error:
        return _told(str(error))
    except OSError as error:
        if error.errno not in {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES}:
            raise
        return _told(error.strerror or str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace", description="LLM serving gateway: interactive and bulk queues in front of your engines."
    )
    parser.add_argument("--version", action="version", version=f"headrace {version('headrace')}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in [argv[0]] if argv and argv[0] in COMMANDS else COMMANDS:
        module = importlib.import_module(f"gateway.commands.{name}")
        module.add_parser(subparsers)
        subparsers.choices[name].set_defaults(run=module.run)
    return parser


def _told(text: str) -> int:
    for line in text.splitlines():
        sys.stderr.write(f"headrace: {line}\n")
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
