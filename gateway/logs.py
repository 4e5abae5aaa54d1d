"""What the process writes about itself: one line an event, JSON for machines or plain text at a terminal.

structlog carries the fields, without its global configuration: `Logs` is made once at the edge, `Logs.log` is handed
down through constructors, and a request's fields are bound explicitly where the request is known.

* **Never a prompt, never a key.** Fields with such names are replaced, and text that looks like a credential (a bearer
  token, `user:pass@` or a query in a URL) is cut out of every string, of tracebacks too.
* **A slow reader of the log never stalls a stream.** Lines of one loop turn go to a writer thread in one piece; past
  `BACKLOG_MAX` pieces they are dropped, and how many is said in the next line that fits.
* **A storm is one line.** An event with `repeat_key=...` is written at most once in `REPEAT_S`; the next one written
  carries `repeated`, the number left out.

The standard library's logging (aiohttp, asyncio, redis) is led into the same stream by `Logs.adopt_stdlib`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any, BinaryIO

import orjson
import structlog
from aiohttp.http_exceptions import HttpProcessingError
from structlog.typing import FilteringBoundLogger

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
FORMATS = ("auto", "json", "human")
REPEAT_S = 5.0
REPEAT_KEYS_MAX = 1_024
BACKLOG_MAX = 10_000
CLOSE_S = 2.0

NOT_LOGGED = "[not logged]"
SECRET_FIELDS = frozenset(
    {
        "api_key",
        "authorization",
        "body",
        "cookie",
        "headers",
        "key",
        "messages",
        "password",
        "prompt",
        "secret",
        "token",
    }
)

_CREDENTIALS = re.compile(
    r"(?<=://)[^/\s@'\"]+@"  # user:pass@ of a URL
    r"|(?<=[\w/])\?[^\s'\"#]*=[^\s'\"#]*"  # the query of a URL
    r"|(?<=[Bb]earer )[^\s'\",;]+"
    r"|\bsk-[\w-]{6,}"
)

Event = MutableMapping[str, Any]

Log = FilteringBoundLogger
"""What is handed down: `log.info("engine up", engine=name)`, `log.bind(request_id=...)`."""


class Logs:
    """The process's log stream. Owns one writer thread; `close` ends it after what was written is out."""

    def __init__(
        self,
        stream: BinaryIO,
        *,
        level: str = "info",
        human: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._writer = _Writer(stream)
        self._human = human
        self._wall = wall
        self._repeats = _Repeats(monotonic)
        self._stdlib: _StdlibHandler | None = None
        self.log: Log = structlog.wrap_logger(
            self._writer,
            processors=[self._finish],
            wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        )

    def _finish(self, _logger: object, level: str, event: Event) -> tuple[tuple[bytes], dict[str, Any]]:
        """One processor for all: repeats, redaction, time, rendering. A chain of five costs twice as much."""
        if "repeat_key" in event:
            self._repeats.pass_or_drop(event)
        trace = _traceback_of(event)
        for name, value in event.items():
            if name in SECRET_FIELDS:
                event[name] = NOT_LOGGED
            elif type(value) is str and ("?" in value or "@" in value or "sk-" in value or "earer" in value):
                event[name] = scrub(value)
        if trace:
            event["traceback"] = scrub(trace)
        render = _human_line if self._human else _json_line
        return (render(self._wall(), level, event),), {}

    def adopt_stdlib(self) -> None:
        """Lead the standard library's warnings and errors here, in place of whatever handlers the root logger has."""
        self._stdlib = _StdlibHandler(self.log)
        logging.basicConfig(handlers=[self._stdlib], level=logging.WARNING, force=True)

    def close(self) -> None:
        """Write what is pending, then stop. A stream that takes nothing is given up after `CLOSE_S`."""
        if self._stdlib is not None:
            logging.getLogger().removeHandler(self._stdlib)
        self._writer.close()

    def __repr__(self) -> str:
        return f"<Logs {'human' if self._human else 'json'} dropped={self._writer.dropped}>"


def open_logs(*, log_format: str, log_level: str) -> Logs:
    """Logs on standard error; "auto" is for people when that is a terminal, else JSON."""
    human = log_format == "human" or (log_format == "auto" and sys.stderr.isatty())
    return Logs(sys.stderr.buffer, level=log_level, human=human)


def scrub(text: str) -> str:
    """The text without what looks like a credential."""
    return _CREDENTIALS.sub("…", text)


class _Repeats:
    """Counts events of one key and lets one through in `REPEAT_S`. Holds a bounded number of keys."""

    __slots__ = ("_monotonic", "_seen")

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def pass_or_drop(self, event: Event) -> None:
        """Raise DropEvent for a repeat; else take repeat_key out and tell how many were left out before."""
        key = f"{event['event']}\0{event.pop('repeat_key')}"
        now_s = self._monotonic()
        last_s, left_out = self._seen.get(key, (-REPEAT_S, 0))
        if now_s - last_s < REPEAT_S:
            self._seen[key] = (last_s, left_out + 1)
            raise structlog.DropEvent
        self._seen[key] = (now_s, 0)
        self._seen.move_to_end(key)
        if len(self._seen) > REPEAT_KEYS_MAX:
            self._seen.popitem(last=False)
        if left_out:
            event["repeated"] = left_out


class _Writer:
    """Takes lines, writes them in a thread. structlog calls the method that bears the level's name."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lines: list[bytes] = []
        self._pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, name="headrace-log", daemon=True)
        self._thread.start()

    def msg(self, line: bytes) -> None:
        """Take one line. Within a running loop it leaves at the end of the turn, with its neighbours."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # before the loop, after it, or another thread's: nothing to gather with
            self._put([line])
            return
        if not self._lines:
            loop.call_soon(self._flush)
        self._lines.append(line)

    debug = info = warning = warn = error = critical = exception = fatal = msg

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self._put(lines)

    def _put(self, lines: list[bytes]) -> None:
        if self._pieces.qsize() >= BACKLOG_MAX:
            self.dropped += len(lines)
            return
        if self.dropped:
            lines.append(_json_line(time.time(), "warning", {"event": "log lines dropped", "count": self.dropped}))
            self.dropped = 0
        self._pieces.put(b"".join(lines))

    def _write(self) -> None:
        while (piece := self._pieces.get()) is not None:
            try:
                self._stream.write(piece)
                self._stream.flush()
            except (OSError, ValueError):  # the reader is gone: there is nobody left to tell
                continue

    def close(self) -> None:
        self._flush()
        self._pieces.put(None)
        self._thread.join(CLOSE_S)


class _StdlibHandler(logging.Handler):
    """Carries a record of `logging` over, its arguments formatted, its exception scrubbed like ours."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            # Its words quote the client's bytes, which may be a key of any form, and anybody who reaches a listener can cause it.
            kind = type(error).__name__
            self._log.info("request could not be parsed", error=kind, logger=record.name, repeat_key=kind)
            return
        level = max(10, min(40, record.levelno // 10 * 10))
        # A library that says the same of each of its tries says it once for a while; a traceback is told every time.
        repeat = {} if record.exc_info else {"repeat_key": record.name}
        self._log.log(level, record.getMessage(), logger=record.name, exc_info=record.exc_info or False, **repeat)


def _traceback_of(event: Event) -> str:
    """Take exc_info out of the event and give its traceback as text, without the values of locals."""
    info = event.pop("exc_info", None)
    if not info:
        return ""
    if isinstance(info, BaseException):
        error: BaseException | None = info
    else:
        error = info[1] if isinstance(info, tuple) else sys.exception()
    return "" if error is None else "".join(traceback.format_exception(error)).rstrip()


def _json_line(wall_s: float, level: str, event: Event) -> bytes:
    fields = {"time": _time_text(wall_s), "level": level, **event}
    return orjson.dumps(fields, default=str, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)


def _human_line(wall_s: float, level: str, event: Event) -> bytes:
    trace = event.pop("traceback", "")
    fields = " ".join(f"{name}={value}" for name, value in event.items() if name != "event")
    head = f"{_time_text(wall_s)[11:23]} {level:<7} {event.get('event', '')}"
    text = "  ".join(part for part in (head, fields.replace("\n", "\\n")) if part)
    return (text + (f"\n{trace}" if trace else "") + "\n").encode(errors="replace")


def _time_text(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
