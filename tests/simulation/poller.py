"""Readiness of virtual sockets in the form in which asyncio's selector loop asks for it.

Level-triggered like epoll: a socket is reported in every turn in which it is ready for something that is wanted of it.
Only sockets that changed, or that were ready in the last turn, are looked at, so that ten thousand idle streams cost
nothing. Events of one turn come in an order drawn by the seed: no kernel promises one between sockets.
"""

from __future__ import annotations

import selectors
from collections.abc import Mapping
from typing import Any

from tests.simulation.net import FIRST_FD, Network

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Poller(selectors.BaseSelector):
    """A selector over one `Network`. It never waits: the loop alone moves time."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if fd < FIRST_FD:
            raise RuntimeError(
                f"descriptor {fd}: expected a socket of the simulated network; real input and output would make the"
                " run irreproducible"
            )
        if fd in self._keys:
            raise KeyError(f"descriptor {fd}: registered already")
        return self._put(fd, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._put(fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now; `timeout` is not used."""
        touched = self._network.touched
        ready = []
        for fd in list(touched):
            key, endpoint = self._keys.get(fd), self._network.open.get(fd)
            mask = 0
            if key is not None and endpoint is not None:
                mask = key.events & ((READ if endpoint.readable else 0) | (WRITE if endpoint.writable else 0))
            if key is not None and mask:
                ready.append((key, mask))
            else:
                del touched[fd]
        if len(ready) > 1:
            self._network.rng.shuffle(ready)
        return ready

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[fileobj if isinstance(fileobj, int) else fileobj.fileno()]

    def close(self) -> None:
        self._keys.clear()

    def _put(self, fd: int, events: int, data: Any) -> selectors.SelectorKey:
        key = self._keys[fd] = selectors.SelectorKey(fd, fd, events, data)
        self._network.touched[fd] = None
        return key
