"""A port that nothing holds, at or after the one wished for."""

from __future__ import annotations

import socket
from collections.abc import Collection

from gateway.settings_file import SettingsError

TRIED = 50


def free_port(wished: int, *, host: str = "127.0.0.1", taken: Collection[int] = ()) -> int:
    """The first free port from `wished` on, other than those `taken`. Raises SettingsError."""
    for port in range(wished, min(wished + TRIED, 65_536)):
        if port in taken:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise SettingsError(f"ports {wished} to {wished + TRIED - 1} on {host} are all taken; choose another with --port")
