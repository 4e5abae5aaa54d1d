"""A program that ends with the process that started it, however that ends: `python -m gateway.with_parent PID PROGRAM ARG ...`.

For what is of no use once its starter is gone: engines and the store of a demo. Linux sends such a program SIGTERM when the
thread that started it is gone, also by kill -9; on other systems it runs on. It keeps the number of the process that was started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def with_parent(command: Sequence[str]) -> list[str]:
    """The command line that runs this one for as long as we live; for the main thread."""
    return [sys.executable, "-m", "gateway.with_parent", str(os.getpid()), *command]


def end_with_parent(number: signal.Signals) -> None:
    """From now on this process gets a signal when the one that started it is gone, also after another program took its place."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def main(parent: int, program: str, *args: str) -> NoReturn:
    """Become the program, or end with 1 if the parent is gone already."""
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what is ignored stays so
    os.execvp(program, [program, *args])  # noqa: S606 - what our own caller names


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
