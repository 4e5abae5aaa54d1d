"""An in-memory network: hosts with addresses, names, links with latency and bandwidth, and what can go wrong there.

Who is calling? All processes of a simulation share one loop, so the host a piece of code runs on travels in its
context: `with network.on("gateway-1"): ...` starts a process there, and every task, timer and accepted connection that
it makes inherits the host, as asyncio hands contexts down.

Faults, all of them reversible except the first:

    crash(host)            kill -9: the kernel closes its sockets (FIN, or RST where bytes were unread), ports refuse
    freeze / thaw(host)    SIGSTOP: the kernel still accepts and buffers, nothing is read and nothing more is sent; the
                           loop holds every callback of that host back until SIGCONT
    partition / heal(a, b) bytes, FIN, RST and SYN stall and go on later; after 15 min a sender gives up as TCP does
    isolate / rejoin(host) partition from every other host: a machine taken away, a cable pulled
    reset_between(a, b)    a middle box forgot the connections: both ends see ECONNRESET

Nothing here awaits and nothing reads a real clock: the loop moves `now_ns` and calls `deliver`.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Any

from gateway.replay.agenda import NS, Agenda, after_ns
from tests.simulation.sockets import Flow, Mark, State, VirtualSocket
from tests.simulation.trace import Trace

FIRST_FD = 1_000_000
"""Virtual descriptors start here, far above anything a kernel hands out, so that a real one is noticed."""

FIRST_EPHEMERAL_PORT = 32_768
SYN_RETRIES = 6
"""As Linux: after 1, 2, 4 ... s, giving up with ETIMEDOUT after 127 s."""

LOCAL = "local"
"""Where code runs that is on no host: the world itself, and the store."""
_HERE: ContextVar[str] = ContextVar("host", default=LOCAL)


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two hosts.

    jitter_s         added to the latency of each segment, drawn evenly from 0 to this; order is kept
    bytes_per_s      shared by all connections of that direction
    window_bytes     what one connection's sender may have accepted and unread (see `sockets`)
    segment_bytes    a write is cut into pieces of at most this
    short_read_p     chance that a read returns only a part, of drawn size, of what has come
    """

    latency_s: float = 0.000_2
    jitter_s: float = 0.0
    bytes_per_s: float = math.inf
    window_bytes: int = 65_536
    segment_bytes: int = 16_384
    short_read_p: float = 0.0


LOOPBACK = Link(latency_s=0.000_02)


class Path:
    """The state of one direction between two hosts: its link, whether it is down, and when it is free again."""

    __slots__ = ("_free_ns", "_rng", "down", "link", "name")

    def __init__(self, name: str, link: Link, rng: random.Random) -> None:
        self.name = name
        self.link = link
        self.down = False
        self._free_ns = 0
        self._rng = rng

    def latency_ns(self) -> int:
        """The delay of one segment without its own length, jitter drawn."""
        jitter_s = self._rng.random() * self.link.jitter_s if self.link.jitter_s else 0.0
        return after_ns(self.link.latency_s + jitter_s)

    def arrival_ns(self, now_ns: int, size_bytes: int) -> int:
        """When a segment sent now is there; occupies the link for its length."""
        if self.link.bytes_per_s != math.inf:
            self._free_ns = max(self._free_ns, now_ns) + after_ns(size_bytes / self.link.bytes_per_s)
            now_ns = self._free_ns
        return now_ns + self.latency_ns()

    def __repr__(self) -> str:
        return f"<Path {self.name}{' down' if self.down else ''}>"


@dataclass(slots=True)
class Host:
    """One machine. `listeners` is keyed by bound address and port; "0.0.0.0" and "::" take any of its own."""

    name: str
    addresses: tuple[str, ...]
    frozen: bool = False
    sockets: dict[int, VirtualSocket] = field(default_factory=dict)
    listeners: dict[tuple[str, int], VirtualSocket] = field(default_factory=dict)
    next_port: int = FIRST_EPHEMERAL_PORT

    def bind(self, address: str, port: int) -> tuple[str, int]:
        """Take an address to listen on; port 0 means a free one. Raises OSError like the kernel."""
        if address not in ("0.0.0.0", "::", "127.0.0.1", "::1", *self.addresses):
            raise OSError(errno.EADDRNOTAVAIL, f"cannot bind {address}: not an address of host {self.name}")
        if port == 0:
            port = self.ephemeral_port()
        if (address, port) in self.listeners:
            raise OSError(errno.EADDRINUSE, f"cannot bind {address}:{port}: in use on host {self.name}")
        return address, port

    def ephemeral_port(self) -> int:
        taken = {port for _, port in self.listeners}
        while True:
            port, self.next_port = self.next_port, self.next_port + 1
            if self.next_port > 65_535:
                self.next_port = FIRST_EPHEMERAL_PORT
            if port not in taken:
                return port

    def listener(self, address: str, port: int) -> VirtualSocket | None:
        """Who listens there, for a caller that dialled `address`."""
        wildcard = "::" if ":" in address else "0.0.0.0"
        return self.listeners.get((address, port)) or self.listeners.get((wildcard, port))


class Network:
    """All hosts and everything on the wire. The loop owns the one there is and gives it the time.

    now_ns    virtual time; moved by the loop only
    touched   descriptors whose readiness may have changed, for the loop's poller
    parked    flows that wait for a fault to end
    frozen    names of the hosts that are stopped
    """

    def __init__(self, rng: random.Random, *, trace: Trace | None = None, link: Link | None = None) -> None:
        self.rng = rng
        self.trace = Trace() if trace is None else trace
        self.default_link = Link() if link is None else link
        self.now_ns = 0
        self.touched: dict[int, None] = {}
        self.parked: dict[Flow, None] = {}
        self.frozen: set[str] = set()
        self.hosts: dict[str, Host] = {}
        self.open: dict[int, VirtualSocket] = {}
        self._by_address: dict[str, Host] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._paths: dict[tuple[str, str], Path] = {}
        self._arrivals: Agenda[Callable[[], None]] = Agenda(rng)
        self._next_fd = FIRST_FD
        self._flows = 0
        self.add_host(LOCAL, "10.0.0.1")

    # -- what there is ------------------------------------------------------------------------------------------------

    def add_host(self, name: str, *addresses: str) -> Host:
        """A machine, reachable by its name and its addresses."""
        host = Host(name, addresses)
        self.hosts[name] = host
        self._names[name] = addresses
        for address in addresses:
            self._by_address[address] = host
        return host

    def set_name(self, name: str, *addresses: str) -> None:
        """What the name resolves to from now on; without addresses it does not resolve."""
        self._names[name] = addresses

    def set_link(self, a: str, b: str, link: Link) -> None:
        """Both directions between two hosts, from now on."""
        self.path(a, b).link = link
        self.path(b, a).link = link

    def path(self, source: str, target: str) -> Path:
        key = (source, target)
        path = self._paths.get(key)
        if path is None:
            link = LOOPBACK if source == target else self.default_link
            path = self._paths[key] = Path(f"{source}->{target}", link, self.rng)
        return path

    @contextmanager
    def on(self, host: str) -> Iterator[None]:
        """Code in this block, and all that it starts, runs on that host."""
        if host not in self.hosts:
            raise ValueError(f"host {host!r}: expected one of {sorted(self.hosts)}; call add_host first")
        token = _HERE.set(host)
        try:
            yield
        finally:
            _HERE.reset(token)

    @property
    def here(self) -> Host:
        """The host that the running code is on."""
        return self.hosts[_HERE.get()]

    def resolve(self, name: str | None, port: int, family: int = 0) -> list[tuple[Any, Any, int, str, Any]]:
        """As getaddrinfo(3) for streams. Raises socket.gaierror for a name that does not resolve."""
        infos = []
        for address in self._addresses(name):
            is_v6 = ":" in address
            its_family = socket.AF_INET6 if is_v6 else socket.AF_INET
            if family in (0, its_family):
                sockaddr = (address, port, 0, 0) if is_v6 else (address, port)
                infos.append((its_family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", sockaddr))
        if not infos:
            raise socket.gaierror(socket.EAI_NONAME, f"name {name!r}: does not resolve")
        return infos

    # -- faults -------------------------------------------------------------------------------------------------------

    def crash(self, name: str) -> None:
        self.thaw(name)
        for endpoint in list(self.hosts[name].sockets.values()):
            endpoint.crash()

    def freeze(self, name: str) -> None:
        self.hosts[name].frozen = True
        self.frozen.add(name)

    def thaw(self, name: str) -> None:
        host = self.hosts[name]
        host.frozen = False
        self.frozen.discard(name)
        for endpoint in host.sockets.values():
            endpoint.touch()
        self._unpark()

    def thaw_all(self) -> None:
        for name in list(self.frozen):
            self.thaw(name)

    def partition(self, a: str, b: str) -> None:
        self.path(a, b).down = self.path(b, a).down = True

    def heal(self, a: str, b: str) -> None:
        self.path(a, b).down = self.path(b, a).down = False
        self._unpark()

    def isolate(self, name: str) -> None:
        for other in self.hosts:
            if other != name:
                self.partition(name, other)

    def rejoin(self, name: str) -> None:
        for other in self.hosts:
            if other != name:
                self.heal(name, other)

    def reset_between(self, a: str, b: str) -> None:
        for source, target in ((a, b), (b, a)):
            for endpoint in list(self.hosts[source].sockets.values()):
                if endpoint.out is not None and endpoint.out.target.host.name == target:
                    endpoint.fail(errno.ECONNRESET)

    # -- for the loop and its poller ----------------------------------------------------------------------------------

    def stopped(self, context: Context) -> str | None:
        """The frozen host that a callback of this context runs on; None when it may run."""
        host = self.host_of(context)
        return host if host in self.frozen else None

    def host_of(self, context: Context) -> str:
        """Where a callback of this context runs; "local" where nothing was said."""
        return context.get(_HERE, LOCAL)

    @property
    def next_ns(self) -> int | None:
        """When the next segment arrives; None when nothing is on the wire."""
        return self._arrivals.next_ns

    def deliver(self) -> None:
        """Let everything arrive that is due at `now_ns`."""
        while (due_ns := self._arrivals.next_ns) is not None and due_ns <= self.now_ns:
            self._arrivals.take()()

    def at(self, due_ns: int, action: Callable[[], None]) -> None:
        """Do something below the application at an instant: no callback of the loop, no context."""
        self._arrivals.add(due_ns, action)

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        self._arrivals.add(self.now_ns + delay_ns, action)

    # -- for sockets --------------------------------------------------------------------------------------------------

    def socket(self, family: int = socket.AF_INET) -> VirtualSocket:
        """A fresh socket on the host that the running code is on."""
        return self._open(self.here, family)

    def socket_for(self, address_info: Sequence[Any]) -> Any:
        """In the form that `aiohttp.TCPConnector(socket_factory=...)` wants."""
        return self.socket(address_info[0])

    def cuts(self, link: Link) -> bool:
        """Draw whether a read on this link comes up short."""
        return link.short_read_p > 0 and self.rng.random() < link.short_read_p

    def forget(self, fd: int, host: Host) -> None:
        """The descriptor was closed."""
        self.open.pop(fd, None)
        host.sockets.pop(fd, None)

    def dial(self, caller: VirtualSocket) -> None:
        """Send the first SYN of a connection from `caller` to its remote address."""
        assert caller.remote is not None
        target = self._host_at(caller.host, caller.remote[0])
        if caller.local[1] == 0:
            caller.local = (_own_address(caller.host, caller.remote[0]), caller.host.ephemeral_port())
        if target is None:
            self._retry_syn(caller, None, 0)
        else:
            self.after(self.path(caller.host.name, target.name).latency_ns(), lambda: self._syn(caller, target, 0))

    def _syn(self, caller: VirtualSocket, target: Host, tries: int) -> None:
        """A SYN is due at the target: accept, refuse, or lose it."""
        if caller.state is not State.CONNECTING:
            return
        there, back = self.path(caller.host.name, target.name), self.path(target.name, caller.host.name)
        if there.down or back.down:
            self._retry_syn(caller, target, tries)
            return
        assert caller.remote is not None
        listener = target.listener(*caller.remote)
        if listener is None:
            self.after(back.latency_ns(), lambda: caller.fail(errno.ECONNREFUSED))
        elif len(listener.accepted) > listener.backlog:
            self._retry_syn(caller, target, tries)
        else:
            self._establish(caller, listener, there, back)

    def _retry_syn(self, caller: VirtualSocket, target: Host | None, tries: int) -> None:
        delay_ns = NS << tries
        if tries == SYN_RETRIES:
            self.after(delay_ns, lambda: caller.fail(errno.ETIMEDOUT))
        elif target is None:
            self.after(delay_ns, lambda: self._retry_syn(caller, None, tries + 1))
        else:
            self.after(delay_ns, lambda: self._syn(caller, target, tries + 1))

    def _establish(self, caller: VirtualSocket, listener: VirtualSocket, there: Path, back: Path) -> None:
        callee = self._open(listener.host, caller.family)
        callee.state = State.CONNECTED
        assert caller.remote is not None
        callee.local, callee.remote = caller.remote, caller.local
        self._flows += 2
        caller.out = callee.incoming = Flow(self._flows - 1, caller, callee, there)
        callee.out = caller.incoming = Flow(self._flows, callee, caller, back)
        listener.accepted.append(callee)
        listener.touch()
        callee.out.push(Mark.ESTABLISHED)

    def _open(self, host: Host, family: int) -> VirtualSocket:
        fd, self._next_fd = self._next_fd, self._next_fd + 1
        endpoint = VirtualSocket(self, host, family, fd)
        self.open[fd] = host.sockets[fd] = endpoint
        return endpoint

    def _unpark(self) -> None:
        for flow in [flow for flow in self.parked if not flow.path.down and not flow.source.host.frozen]:
            del self.parked[flow]
            flow.unpark()

    def _host_at(self, caller: Host, address: str) -> Host | None:
        """Whose address it is; None when nobody's, which no one answers."""
        return caller if address in ("127.0.0.1", "::1") else self._by_address.get(address)

    def _addresses(self, name: str | None) -> tuple[str, ...]:
        if name in (None, ""):
            return ("0.0.0.0",)
        if name == "localhost":
            return ("127.0.0.1",)
        try:
            return (str(ipaddress.ip_address(name)),)
        except ValueError:
            return self._names.get(name, ()) if name is not None else ()

    def __repr__(self) -> str:
        return f"<Network {self.now_ns / NS:.6f}s hosts={len(self.hosts)} open={len(self.open)} wire={len(self._arrivals)}>"


def _own_address(host: Host, remote: str) -> str:
    """The address a connection to `remote` comes from."""
    if remote in ("127.0.0.1", "::1"):
        return remote
    same_family = [address for address in host.addresses if (":" in address) == (":" in remote)]
    return same_family[0] if same_family else ("::" if ":" in remote else "0.0.0.0")
