"""What the log says, what it keeps to itself, and what it costs the loop."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from gateway import logs as logs_module
from gateway.logs import NOT_LOGGED, Logs, scrub


class Stepped:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def captured(**options: Any) -> Iterator[tuple[Logs, Callable[[], list[dict[str, Any]]]]]:
    """Logs on a buffer, and a reader that closes them and gives the lines as objects."""
    stream = io.BytesIO()
    logs = Logs(stream, wall=lambda: 1_700_000_000.5, **options)

    def lines() -> list[dict[str, Any]]:
        logs.close()
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    yield logs, lines
    logs.close()


def test_a_line_holds_time_level_event_and_bound_fields() -> None:
    with captured() as (logs, lines):
        logs.log.bind(request_id="r1").info("settled", status=200)

        assert lines() == [
            {"time": "2023-11-14T22:13:20.500Z", "level": "info", "event": "settled", "request_id": "r1", "status": 200}
        ]


def test_levels_below_the_chosen_one_are_silent() -> None:
    with captured(level="warning") as (logs, lines):
        logs.log.info("chatter")
        logs.log.warning("trouble")

        assert [line["event"] for line in lines()] == ["trouble"]


@pytest.mark.parametrize("field", ["authorization", "api_key", "prompt", "messages", "body", "cookie"])
def test_a_field_that_could_hold_a_secret_is_never_written(field: str) -> None:
    with captured(level="debug") as (logs, lines):
        logs.log.debug("seen", **{field: "hunter2"})

        assert lines()[0][field] == NOT_LOGGED


@pytest.mark.parametrize(
    "text",
    [
        "connecting to http://user:hunter2@engine:8000/v1",
        "GET https://engine/v1/models?key=hunter2 failed",
        "GET /v1/models?api_key=hunter2&x=1",
        "redis://:hunter2@cache:6379/0 refused",
        "header was 'Bearer hunter2'",
        "header was authorization: bearer hunter2",
        "no key sk-hunter2-abcdef here",
    ],
)
def test_credentials_inside_text_are_cut_out(text: str) -> None:
    with captured() as (logs, lines):
        logs.log.info(text, detail=text)

        assert "hunter2" not in json.dumps(lines())
    assert "hunter2" not in scrub(text)


def test_ordinary_text_stays_as_it_is() -> None:
    text = "engine http://10.0.0.1:8000 answered 503: what now? wait; see task-manager and mask-token-list"

    assert scrub(text) == text


def test_a_traceback_is_written_without_its_secrets() -> None:
    with captured() as (logs, lines):
        try:
            raise ConnectionError("cannot reach http://u:hunter2@host/")
        except ConnectionError:
            logs.log.exception("broke")

        line = lines()[0]
    assert "ConnectionError: cannot reach http://" in line["traceback"]
    assert "hunter2" not in line["traceback"]


def test_repeats_of_one_key_are_one_line_in_five_seconds_with_their_count() -> None:
    clock = Stepped()
    with captured(monotonic=clock) as (logs, lines):
        for _ in range(50):
            logs.log.warning("redis away", repeat_key="redis")
            logs.log.warning("redis away", repeat_key="other")
            clock.now_s += 0.1

        clock.now_s += 1.0
        logs.log.warning("redis away", repeat_key="redis")

        of = [line.get("repeated") for line in lines()]
    assert of == [None, None, 49]


def test_the_memory_of_repeats_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "REPEAT_KEYS_MAX", 10)
    repeats = logs_module._Repeats(Stepped())

    for number in range(100):
        repeats.pass_or_drop({"event": "e", "repeat_key": str(number)})

    assert len(repeats._seen) == 10


def test_the_standard_librarys_records_join_the_stream() -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    with captured() as (logs, lines):
        try:
            logs.adopt_stdlib()
            logging.getLogger("aiohttp.server").error("cannot read %s", "http://a:hunter2@b/")
            logging.getLogger("aiohttp.access").info("never seen")

            line = lines()[0]
        finally:
            root.handlers[:], root.level = before, level
    assert (line["level"], line["logger"]) == ("error", "aiohttp.server")
    assert "hunter2" not in line["event"]


def test_a_library_that_repeats_itself_is_one_line_and_its_tracebacks_are_all_told() -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    with captured() as (logs, lines):
        try:
            logs.adopt_stdlib()
            library = logging.getLogger("some.exporter")
            for _ in range(50):
                library.warning("cannot reach %s, trying again", "collector")
            for _ in range(2):
                library.error("broke", exc_info=ValueError("why"))

            told = [line["event"] for line in lines()]
        finally:
            root.handlers[:], root.level = before, level
    assert told == ["cannot reach collector, trying again", "broke", "broke"]


def test_what_a_client_sent_that_could_not_be_parsed_is_one_line_without_its_bytes() -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    with captured() as (logs, lines):
        try:
            logs.adopt_stdlib()
            for _ in range(50):
                error = BadHttpMessage("Invalid header token: b'x-api-key : plainsecret'")
                logging.getLogger("aiohttp.server").error("Error handling request from %s", "::1", exc_info=error)

            (line,) = lines()
        finally:
            root.handlers[:], root.level = before, level
    assert (line["level"], line["error"]) == ("info", "BadHttpMessage")
    assert "plainsecret" not in str(line)


def test_a_line_for_people_is_plain_text() -> None:
    stream = io.BytesIO()
    logs = Logs(stream, human=True, wall=lambda: 1_700_000_000.5)

    logs.log.info("engine up", engine="e1", models=2)
    logs.close()

    assert stream.getvalue() == b"22:13:20.500 info    engine up  engine=e1 models=2\n"


async def test_a_reader_that_takes_nothing_neither_stalls_the_loop_nor_fills_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs_module, "BACKLOG_MAX", 5)
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, True)
    logs = Logs(os.fdopen(write_fd, "wb", buffering=0))

    async with asyncio.timeout(5):
        for _ in range(100):
            logs.log.info("x" * 10_000)
            await asyncio.sleep(0)

    assert logs._writer.dropped > 0
    drain = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(read_fd, 65536), b"")])
    drain.start()
    logs.log.info("after the jam")
    logs.close()
    logs._writer._stream.close()
    drain.join()
    os.close(read_fd)


async def test_what_was_dropped_is_said_in_the_next_line_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with captured() as (logs, lines):
        monkeypatch.setattr(logs_module, "BACKLOG_MAX", 0)
        logs.log.info("lost")
        await asyncio.sleep(0)
        monkeypatch.setattr(logs_module, "BACKLOG_MAX", 100)

        logs.log.info("kept")
        await asyncio.sleep(0)

        assert [(line["event"], line.get("count")) for line in lines()] == [("kept", None), ("log lines dropped", 1)]


def test_closing_twice_is_harmless() -> None:
    with captured() as (logs, lines):
        logs.log.info("last")
        logs.close()

        assert len(lines()) == 1
