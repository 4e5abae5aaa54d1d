"""A TCP socket and the two flows of bytes behind a connection, as Linux behaves and asyncio sees it.

The simulation ends here: asyncio's own transports (water marks, half-close, `eof_received`, `BufferedProtocol`, TLS)
run unchanged above `VirtualSocket`, so whatever they promise on a real socket they promise here, in each version of
Python. Below stands only what a kernel does: non-blocking send and receive, a bounded window, FIN, RST and errno.

What is modelled, and how Linux does it (`net/ipv4/tcp.c`, `tcp_input.c`):

* A sender may have `window_bytes` accepted and not yet read by the peer's application: its send buffer, the wire and
  the peer's receive buffer in one. A reader that stops therefore stops the writer after a bounded number of bytes.
* A socket is writable again once a third of that window is free (`sk_stream_is_writeable`), one latency later.
* Bytes that came before a FIN or RST can still be read.
* A close with unread bytes, or with SO_LINGER of zero seconds, resets; any other close ends with FIN after what was
  accepted. `Transport.abort()` drops asyncio's own buffer and closes: that is a FIN, unless one of the two holds.
* After a RST reading raises ECONNRESET; when FIN came first, reading says end of file and writing raises EPIPE.
* Bytes for a socket that was closed are answered with RST.

Not modelled: Nagle, slow start, loss and reordering (TCP hides them as delay, which jitter is), urgent data.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.net import Host, Network, Path

Address = tuple[str, int] | tuple[str, int, int, int]

GIVE_UP_S = 924.6
"""How long Linux retransmits unacknowledged bytes before the connection fails with ETIMEDOUT (tcp_retries2 = 15)."""


class Mark(Enum):
    """What travels in a flow besides bytes."""

    ESTABLISHED = "established"
    FIN = "fin"
    RST = "rst"


class State(Enum):
    FRESH = "fresh"
    LISTENING = "listening"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    CLOSED = "closed"


class Flow:
    """One direction of a connection: what `source` sent and `target` has not received, in order.

    outstanding_bytes   accepted from the source's application and not yet read by the target's
    """

    __slots__ = (
        "_arrives_ns",
        "_parked",
        "_parked_times",
        "_wire",
        "number",
        "outstanding_bytes",
        "path",
        "source",
        "target",
    )

    def __init__(self, number: int, source: VirtualSocket, target: VirtualSocket, path: Path) -> None:
        self.number = number
        self.source = source
        self.target = target
        self.path = path
        self.outstanding_bytes = 0
        self._wire: deque[bytes | Mark] = deque()
        self._arrives_ns = 0
        self._parked = 0
        self._parked_times = 0

    @property
    def room_bytes(self) -> int:
        return max(0, self.path.link.window_bytes - self.outstanding_bytes)

    @property
    def writable(self) -> bool:
        return self.room_bytes * 3 >= self.path.link.window_bytes

    def push(self, segment: bytes | Mark) -> None:
        """Put a segment on the wire. It stays with a host that is frozen and waits at a path that is down."""
        self._wire.append(segment)
        if self.source.host.frozen and segment is not Mark.ESTABLISHED:
            self._park()
        else:
            self._schedule(0 if isinstance(segment, Mark) else len(segment))

    def unpark(self) -> None:
        """Send on what waited, after a fault ended."""
        count, self._parked = self._parked, 0
        self._parked_times += 1
        for _ in range(count):
            self._schedule(0)

    def read_by_target(self, count: int) -> None:
        """The target's application took `count` bytes: the source hears of room one latency later."""
        was_writable = self.writable
        self.outstanding_bytes -= count
        if not was_writable and self.writable:
            network = self.source.network
            network.after(self.path.latency_ns(), self.source.touch)

    def _schedule(self, size_bytes: int) -> None:
        network = self.source.network
        self._arrives_ns = max(self._arrives_ns, self.path.arrival_ns(network.now_ns, size_bytes))
        network.at(self._arrives_ns, self._arrive)

    def _arrive(self) -> None:
        if self.path.down:
            self._park()
            return
        segment = self._wire.popleft()
        network = self.source.network
        network.trace.note(network.now_ns, self.number, len(segment) if isinstance(segment, bytes) else segment.value)
        self.target.arrived(segment)

    def _park(self) -> None:
        if not self._parked and self.path.down:
            times = self._parked_times
            self.source.network.after(int(GIVE_UP_S * 1e9), lambda: self._give_up(times))
        self._parked += 1
        self.source.network.parked[self] = None

    def _give_up(self, times: int) -> None:
        if self._parked and times == self._parked_times:
            self.source.fail(errno.ETIMEDOUT)

    def __repr__(self) -> str:
        return f"<Flow {self.number} {self.path} outstanding={self.outstanding_bytes} wire={len(self._wire)}>"


class VirtualSocket:
    """What asyncio needs of a non-blocking stream socket. Made by `Network.socket`; `host` is where it lives."""

    type = socket.SOCK_STREAM
    proto = socket.IPPROTO_TCP

    def __init__(self, network: Network, host: Host, family: int, fd: int) -> None:
        self.network = network
        self.host = host
        self.family = socket.AddressFamily(family)
        self.state = State.FRESH
        self.local: tuple[str, int] = ("::" if family == socket.AF_INET6 else "0.0.0.0", 0)
        self.remote: tuple[str, int] | None = None
        self.out: Flow | None = None
        self.incoming: Flow | None = None
        self.backlog = 0
        self.accepted: deque[VirtualSocket] = deque()
        self._fd = fd
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._fin_received = False
        self._fin_sent = False
        self._error = 0
        self._broken = False
        self._linger_zero = False

    # -- what the loop asks -------------------------------------------------------------------------------------------

    @property
    def readable(self) -> bool:
        """Something for `accept` or `recv` to return or raise, unless the process that would call them is frozen."""
        if self.host.frozen:
            return False
        if self.state is State.LISTENING:
            return bool(self.accepted)
        return bool(self._inbox) or self._fin_received or self._broken

    @property
    def writable(self) -> bool:
        if self.host.frozen or self.state is State.CONNECTING:
            return False
        return self._broken or (self.out is not None and self.out.writable)

    def touch(self) -> None:
        """Have the loop look at this socket's readiness again."""
        self.network.touched[self._fd] = None

    # -- calls of the application -------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return -1 if self.state is State.CLOSED else self._fd

    def bind(self, address: Address) -> None:
        self.local = self.host.bind(address[0], address[1])

    def listen(self, backlog: int = 100) -> None:
        self.backlog = max(1, backlog)
        self.state = State.LISTENING
        self.host.listeners[self.local] = self

    def accept(self) -> tuple[VirtualSocket, Address]:
        if not self.accepted:
            raise _would_block()
        connection = self.accepted.popleft()
        return connection, connection.getpeername()

    def connect(self, address: Address) -> None:
        """Send SYN. Always raises BlockingIOError: the outcome comes as writability and SO_ERROR."""
        self.state = State.CONNECTING
        self.remote = (address[0], address[1])
        self.network.dial(self)
        raise BlockingIOError(errno.EINPROGRESS, os.strerror(errno.EINPROGRESS))

    def send(self, data: bytes | bytearray | memoryview) -> int:
        self._raise_error()
        if self.out is None or self._broken or self._fin_sent:
            raise _os_error(errno.EPIPE if self.out is not None else errno.ENOTCONN)
        count = min(self.out.room_bytes, len(data))
        if count == 0:
            raise _would_block()
        self.out.outstanding_bytes += count
        with memoryview(data) as view:
            for begin in range(0, count, self.out.path.link.segment_bytes):
                self.out.push(bytes(view[begin : min(count, begin + self.out.path.link.segment_bytes)]))
        return count

    def sendmsg(self, buffers: list[bytes | bytearray | memoryview]) -> int:
        return self.send(b"".join(buffers))

    def recv(self, limit_bytes: int) -> bytes:
        """What has come, up to the limit; sometimes, drawn by the seed, less than has come, as POSIX allows."""
        if not self._inbox:
            if self._fin_received:
                return b""
            self._raise_error()
            if self._broken:
                return b""
            raise _would_block()
        if len(self._inbox) == 1:
            data = self._inbox.popleft()
        else:
            data = b"".join(self._inbox)
            self._inbox.clear()
        count = min(limit_bytes, len(data))
        assert self.incoming is not None
        if self.network.cuts(self.incoming.path.link):
            count = self.network.rng.randint(1, count)
        if count < len(data):
            self._inbox.appendleft(data[count:])
            data = data[:count]
        self._inbox_bytes -= count
        self.incoming.read_by_target(count)
        return data

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        data = self.recv(len(buffer))
        memoryview(buffer)[: len(data)] = data
        return len(data)

    def shutdown(self, how: int) -> None:
        if self.out is None:
            raise _os_error(errno.ENOTCONN)
        if how != socket.SHUT_RD and not self._fin_sent and not self._broken:
            self._fin_sent = True
            self.out.push(Mark.FIN)

    def close(self) -> None:
        """Let go of the descriptor; what was accepted for sending still goes out, FIN or RST behind it."""
        if self.state is State.CLOSED:
            return
        if self.state is State.LISTENING:
            self._stop_listening()
        elif self.out is not None:
            self._hang_up(reset=bool(self._inbox) or self._linger_zero)
        self.state = State.CLOSED
        self._inbox.clear()
        self.network.forget(self._fd, self.host)

    def getsockname(self) -> Address:
        return self._spell(self.local)

    def getpeername(self) -> Address:
        if self.remote is None:
            raise _os_error(errno.ENOTCONN)
        return self._spell(self.remote)

    def setblocking(self, flag: bool) -> None:
        if flag:
            raise ValueError("setblocking True: a virtual socket never blocks; await the loop instead")

    def gettimeout(self) -> float:
        return 0.0

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_LINGER) and isinstance(value, bytes):
            on, linger_s = struct.unpack("ii", value)
            self._linger_zero = bool(on) and linger_s == 0

    def getsockopt(self, level: int, option: int) -> int:
        if (level, option) != (socket.SOL_SOCKET, socket.SO_ERROR):
            return 0
        error, self._error = self._error, 0
        return error

    # -- what the wire and the faults do ------------------------------------------------------------------------------

    def arrived(self, segment: bytes | Mark) -> None:
        """The head of the incoming flow is here."""
        if self.state is State.CLOSED or self._broken:
            if segment is not Mark.RST and segment is not Mark.FIN and self.out is not None:
                self.out.push(Mark.RST)
            return
        if isinstance(segment, bytes):
            self._inbox.append(segment)
            self._inbox_bytes += len(segment)
        elif segment is Mark.FIN:
            self._fin_received = True
        elif segment is Mark.RST:
            self.fail(errno.EPIPE if self._fin_received else errno.ECONNRESET)
        else:
            self.state = State.CONNECTED
        self.touch()

    def fail(self, error: int) -> None:
        """The connection is dead with this errno; nothing is told to the peer."""
        if not self._broken:
            self._broken = True
            self._error = error
            if self.state is State.CONNECTING:
                self.state = State.CONNECTED
            self.touch()

    def crash(self) -> None:
        """The process died: the kernel closes for it. Its own side sees a reset, so that whoever plays it can end."""
        if self.state is State.LISTENING:
            self._stop_listening()
        elif self.out is not None:
            self._hang_up(reset=bool(self._inbox))
        self._inbox.clear()
        self.fail(errno.ECONNRESET)

    def _hang_up(self, *, reset: bool) -> None:
        assert self.out is not None
        if self._broken:
            return
        if reset:
            self.out.push(Mark.RST)
        elif not self._fin_sent:
            self._fin_sent = True
            self.out.push(Mark.FIN)

    def _stop_listening(self) -> None:
        if self.host.listeners.get(self.local) is self:
            del self.host.listeners[self.local]
        for connection in self.accepted:
            connection._linger_zero = True
            connection.close()
        self.accepted.clear()

    def _raise_error(self) -> None:
        if self._error:
            error, self._error = self._error, 0
            raise _os_error(error)

    def _spell(self, address: tuple[str, int]) -> Address:
        return (*address, 0, 0) if self.family == socket.AF_INET6 else address

    def __repr__(self) -> str:
        return (
            f"<VirtualSocket {self._fd} on {self.host.name} {self.state.value} {self.local} -> {self.remote}"
            f" unread={self._inbox_bytes}>"
        )


def _would_block() -> BlockingIOError:
    return BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _os_error(code: int) -> OSError:
    """OSError picks the fitting subclass by errno, e.g. ConnectionResetError."""
    return OSError(code, os.strerror(code))
