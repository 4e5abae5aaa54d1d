"""The demo as a user runs it: one command, both classes, a clean end."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.cli import UNREAD, main
from gateway.demo import llamacpp

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "gateway.cli", "demo", "--port", "18080"]
SHOWS_BOTH = re.compile(
    r"interactive: \d+ open, \d+ queued, TTFT p50 0\.\d\d s p99 \d+\.\d\d s of SLA 0\.50 s, [\d.]+% inside"
    r"  bulk: [1-9]\d* open, \d+ queued, \d+ done  [1-9]\d* tokens/s \([1-9]\d* bulk\)"
)

CLOSING = re.compile(
    r"^After \d+ s:\n  interactive: \d+ requests \(.* 0 failed(?:, \d+ cut by the end)?\), [\d.]+% inside the SLA of 0\.50 s, TTFT p50 .* tokens/s"
    r"\n  bulk: \d+ requests \(.* 0 failed(?:, \d+ cut by the end)?\), TTFT p50 .* tokens/s\n",
    re.MULTILINE,
)


@contextmanager
def demo(*args: str) -> Iterator[subprocess.Popen[str]]:
    """A demo that is over when the context ends, whatever the test found."""
    bounded = args if "--for" in args else ("--for", "40", *args)
    process = subprocess.Popen([*COMMAND, *bounded], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=30)


def children(pid: int) -> set[int]:
    """Processes that `pid` started, and theirs."""
    below = {
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    }
    return below.union(*(children(child) for child in below))


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def line_matching(process: subprocess.Popen[str], pattern: re.Pattern[str]) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if pattern.search(line):
            return line
    raise AssertionError("the demo ended first:\n" + "".join(lines) + (process.stderr.read() if process.stderr else ""))


def test_the_demo_shows_both_classes_and_ends_by_itself() -> None:
    with demo("--for", "6") as process:
        out, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (0, "")
    assert SHOWS_BOTH.search(out), out
    assert "curl http://127.0.0.1:18" in out
    assert CLOSING.search(out), out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_ends_everything_it_started_with_exit_code_0(number: signal.Signals) -> None:
    with demo() as process:
        line_matching(process, SHOWS_BOTH)
        started = children(process.pid)

        process.send_signal(number)
        out, err = process.communicate(timeout=30)

    assert (process.returncode, err) == (0, "")
    assert CLOSING.search(out), out
    assert len(started) >= 3, "two engines and a Valkey were expected"
    assert [pid for pid in started if alive(pid)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
def test_a_demo_that_is_killed_takes_everything_it_started_along() -> None:
    with demo() as process:
        line_matching(process, SHOWS_BOTH)
        started = children(process.pid)

        process.kill()
        process.wait(30)
        until_s = time.monotonic() + 20
        while any(map(alive, started)) and time.monotonic() < until_s:
            time.sleep(0.05)

    assert len(started) >= 3, "two engines and a Valkey were expected"
    assert [pid for pid in started if alive(pid)] == []


def test_a_reader_that_leaves_ends_everything_it_started() -> None:
    with demo() as process:
        line_matching(process, SHOWS_BOTH)
        started = children(process.pid)

        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(30) == UNREAD

    assert [pid for pid in started if alive(pid)] == []


@pytest.mark.many
def test_two_demos_run_beside_each_other_on_ports_of_their_own() -> None:
    with demo("--bulk", "1") as one:
        first = line_matching(one, re.compile(r"^gateway"))
        with demo("--bulk", "1") as other:
            second = line_matching(other, re.compile(r"^gateway"))

    assert first != second


def test_on_a_terminal_the_demo_is_a_live_view() -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--for", "3"], stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    )
    os.close(slave)
    seen = b""
    try:
        while piece := os.read(master, 65536):
            seen += piece
    except OSError:  # the last holder of the terminal closed it
        pass
    finally:
        os.close(master)

    assert process.wait(30) == 0
    assert b"in flight / window" in seen
    assert b"Ctrl-C ends everything." in seen


@pytest.mark.skipif(bool(llamacpp.missing()), reason=llamacpp.missing())
def test_with_a_real_engine_answers_are_text() -> None:
    with demo("--real", "--bulk", "2") as process:
        answer = line_matching(process, re.compile(r"smollm2: .* → \w+"))

    assert len(answer.split()) > 6


@pytest.mark.parametrize("args", [("--rate", "0"), ("--for", "nan"), ("--bulk", "-1"), ("--port", "65535")])
def test_what_cannot_be_played_is_refused_in_one_line(
    args: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["demo", *args])

    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("headrace: demo: --")
    assert args[0] in err
    assert err.count("\n") == 1
