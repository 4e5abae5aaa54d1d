"""The one documented entry: `headrace COMMAND`. Each command is a module of `gateway.commands` with two functions.

`add_parser(subparsers)` describes the command and returns nothing; `run(args) -> int` does it and gives the exit code.
Only the module of the command named is imported, and that by `main` itself: `headrace key` does not pay for aiohttp, and
Ctrl-C is understood from the beginning.

What an operator got wrong is told as plain lines on standard error with exit code 2, never as a traceback; a bug keeps
its traceback. A reader of our output that leaves, as `head` does, ends a command quietly.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

COMMANDS = (
    "serve",
    "check",
    "demo",
    "policy",
    "simulate",
    "replay",
    "load",
    "profile",
    "bench",
    "dashboards",
    "gpu-exporter",
    "key",
)
USAGE = 2
INTERRUPTED = 130
UNREAD = 128 + signal.SIGPIPE
"""What a shell says of a command that this signal ended, which Python ignores."""
STDOUT = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    return exit_code(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    args = parser(argv).parse_args(argv)
    return int(args.run(args))


def exit_code(run: Callable[[], int]) -> int:
    """What `run` returns, or the code for the way in which it failed, told on standard error."""
    try:
        code = run()
        if sys.stdout is not None:  # as in a process that was started without one
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        causes = list(_leaves(error))
        if all(isinstance(cause, BrokenPipeError) for cause in causes) and _reader_left():
            return UNREAD
        if not all(map(_is_operators, causes)):
            raise
        return _told("\n".join(_words(cause) for cause in causes))
    return code


def parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """What reads a command line; with `argv` that names a command it knows only that one."""
    made = _Parser(
        prog="headrace", description="LLM serving gateway: interactive and bulk queues in front of your engines."
    )
    made.add_argument("--version", action="version", version=f"headrace {version('headrace')}")
    subparsers = made.add_subparsers(metavar="COMMAND", required=True)
    for name in [argv[0]] if argv and argv[0] in COMMANDS else COMMANDS:
        module = importlib.import_module(f"gateway.commands.{name.replace('-', '_')}")
        module.add_parser(subparsers)
        subparsers.choices[name].set_defaults(run=module.run)
    return made


class _Parser(argparse.ArgumentParser):
    """One whose subcommands tell of what they do not know themselves: with their usage, not with that of the whole program."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _leaves(error: Exception) -> Iterator[Exception]:
    """The error itself, or the single ones of a group: what starts within a TaskGroup fails within one."""
    if isinstance(error, ExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error


def _reader_left() -> bool:
    """Whoever read standard output is gone; what is still to be written there then goes nowhere."""
    watch = select.poll()
    watch.register(STDOUT, 0)
    if not any(event & select.POLLERR for _, event in watch.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    return True


def _is_operators(error: Exception) -> bool:
    """True for what an operator can put right: settings, documents, and what the gateway needs but cannot have."""
    if isinstance(error, OSError):
        return error.errno in {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES}
    # Only now: they take longer to load than all of the rest.
    from gateway.addresses import AddressError
    from gateway.errors import StartError
    from gateway.settings_file import SettingsError
    from policies.yaml_source import DocumentError

    return isinstance(error, SettingsError | AddressError | DocumentError | StartError)


def _words(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _told(text: str) -> int:
    for line in text.splitlines():
        sys.stderr.write(f"headrace: {line}\n")
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
