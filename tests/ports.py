"""Ports for whoever is told his before he listens.

Not by binding to port 0 and letting go: the kernel deals such ports to outgoing connections too, and while one of those has
it nobody can listen there. These lie below the range it deals from, with room for the ports that cluster nodes add to theirs.
"""

from __future__ import annotations

import os
import random
import socket

BUS = 10_000
"""What a cluster's node adds to its port for the one it talks to other nodes on."""
_FIRST, _LAST = 12_000, 22_000
_PROCESSES = 16

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = list(range(_FIRST + _worker % _PROCESSES, _LAST, _PROCESSES))
random.SystemRandom().shuffle(_ports)


def free_port(host: str = "127.0.0.1", *, bus: bool = False) -> int:
    """A port that nothing holds and that this process has not given out before; with bus, the one of the bus is free too."""
    while True:
        port = _ports.pop()
        if _free(host, port) and not (bus and not _free(host, port + BUS)):
            return port


def _free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
