"""Small sets of servers for tests: a cluster and a Sentinel set, on free ports of loopback, ended by pid.

A set costs its seconds (a cluster's node waits two before it serves, a Sentinel needs a round to find the others), so a
test session shares the cluster, and a test that kills a node has a set of its own. Replicas start at once and are
waited for: with the default delay a replica that joins late is not there yet when the primary dies.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from tests.ports import BUS, free_port
from tests.redis_servers import binary

SLOTS = 16384
SERVICE = "headrace"


@dataclass(frozen=True, slots=True)
class Node:
    """One server of a set."""

    port: int
    process: subprocess.Popen[bytes]

    def client(self) -> Redis:
        """A client that waits for its answers, for arranging."""
        return Redis(host="127.0.0.1", port=self.port, socket_timeout=5)

    def kill(self) -> None:
        """End it as a lost machine ends."""
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True, slots=True)
class Topology:
    """A running set: its URL for the queue, and its servers, primaries first (without Sentinels)."""

    url: str
    nodes: Sequence[Node]

    def primary_of(self, key: str) -> Node:
        """The server that takes writes of a key (with a hash tag) now."""
        return next(node for node in self.nodes if _takes(node, key))

    def has_primary_of(self, key: str) -> bool:
        """Some server takes writes of a key."""
        return any(_takes(node, key) for node in self.nodes)

    def others(self, node: Node) -> list[Node]:
        """All but one."""
        return [one for one in self.nodes if one is not node]


@contextmanager
def cluster(*, replicas: int = 0) -> Iterator[Topology]:
    """Three primaries, and so many replicas of each."""
    with ExitStack() as stack:
        nodes = [_start(stack, *_CLUSTER, bus=True) for _ in range(3 * (1 + replicas))]
        primaries = nodes[:3]
        starts = [0, SLOTS // 3, 2 * SLOTS // 3, SLOTS]
        for number, node in enumerate(primaries):
            _ask(node, "CLUSTER", "ADDSLOTSRANGE", starts[number], starts[number + 1] - 1)
            _ask(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            _ask(node, "CLUSTER", "MEET", "127.0.0.1", nodes[0].port, nodes[0].port + BUS)
        _wait(lambda: all(_cluster_knows(node, len(nodes)) for node in nodes), "the cluster to form")
        for number, node in enumerate(nodes[3:]):
            primary = str(_ask(primaries[number % 3], "CLUSTER", "MYID"), "ascii")
            _wait(partial(_done, node, "CLUSTER", "REPLICATE", primary), "a replica to be one")
        _wait(lambda: all(_linked(node) for node in nodes[3:]), "the replicas to follow")
        _wait(lambda: all(_cluster_ok(node) for node in nodes), "the cluster to serve")
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in primaries)
        yield Topology(f"redis+cluster://{hosts}", nodes)


@contextmanager
def sentinels() -> Iterator[Topology]:
    """A primary, two replicas, and three Sentinels that fail it over after a silence of a second."""
    with ExitStack() as stack:
        primary = _start(stack, *_REPLICATED)
        replicas = [_start(stack, *_REPLICATED, "--replicaof", f"127.0.0.1 {primary.port}") for _ in range(2)]
        _wait(lambda: all(_linked(node) for node in replicas), "the replicas to follow")
        watching = [_start_sentinel(stack, primary.port) for _ in range(3)]
        _wait(lambda: all(_sentinel_sees_all(node) for node in watching), "the Sentinels to find each other")
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in watching)
        yield Topology(f"redis+sentinel://{hosts}/{SERVICE}", [primary, *replicas])


_BUS = 10_000
_CLUSTER = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--repl-diskless-sync-delay", "0")
_REPLICATED = (
    "--repl-diskless-sync-delay",
    "0",
)
_SENTINEL = """\
port {port}
bind 127.0.0.1
sentinel monitor {service} 127.0.0.1 {primary} 2
sentinel down-after-milliseconds {service} 1000
sentinel failover-timeout {service} 4000
sentinel parallel-syncs {service} 2
"""


def _start(stack: ExitStack, *arguments: str, bus: bool = False) -> Node:
    port = free_port(bus=bus)
    named = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", *arguments)
    return _started(stack, port, lambda home: (*named, "--dir", str(home)))


def _start_sentinel(stack: ExitStack, primary: int) -> Node:
    port = free_port()

    def arguments(home: Path) -> tuple[str, ...]:
        file = home / "sentinel.conf"
        file.write_text(_SENTINEL.format(port=port, primary=primary, service=SERVICE))
        return str(file), "--sentinel"

    return _started(stack, port, arguments)


def _started(stack: ExitStack, port: int, arguments: Callable[[Path], tuple[str, ...]]) -> Node:
    program = binary("valkey-9")
    assert program is not None, "valkey-9 is not installed"
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hrt", dir="/tmp")))
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, *arguments(home)], stdout=log, stderr=log, cwd=home, env={**os.environ, "LC_ALL": "C"}
        )
    stack.callback(_end, process)
    node = Node(port, process)
    _wait(lambda: _done(node, "PING"), f"a server to answer: {home / 'log'}")
    return node


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _ask(node: Node, *words: Any) -> Any:
    with node.client() as client:
        return client.execute_command(*words)


def _done(node: Node, *words: Any) -> bool:
    try:
        _ask(node, *words)
    except RedisError:
        return False
    return True


def _info(node: Node, *words: str) -> dict[str, str]:
    info: dict[str, str] = _ask(node, " ".join(words))
    return info


def _cluster_knows(node: Node, nodes: int) -> bool:
    return int(_info(node, "CLUSTER", "INFO")["cluster_known_nodes"]) == nodes


def _cluster_ok(node: Node) -> bool:
    return _info(node, "CLUSTER", "INFO")["cluster_state"] == "ok"


def _linked(node: Node) -> bool:
    with node.client() as client:
        return bool(client.info("replication").get("master_link_status") == "up")


def _sentinel_sees_all(node: Node) -> bool:
    with node.client() as client:
        state = client.sentinel_master(SERVICE)
        return bool((state["num-other-sentinels"], state["num-slaves"]) == (2, 2))


def _takes(node: Node, key: str) -> bool:
    if node.process.poll() is not None:
        return False
    with node.client() as client:
        try:
            client.delete(f"{key} that is not there")  # a write that changes nothing
        except RedisError:
            return False
    return True


def slot_of(key: str) -> int:
    """The slot of a key."""
    return int(key_slot(key.encode()))


def _wait(until: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + 20
    while not until():
        assert time.monotonic() < until_s, f"waited 20 s for {what}"
        time.sleep(0.02)
