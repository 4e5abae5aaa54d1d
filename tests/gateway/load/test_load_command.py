"""`headrace load` against a simulated engine: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from subprocess import PIPE, Popen
from sys import executable
from threading import Thread

import pytest

from gateway.cli import main
from gateway.commands.load import bar_text
from gateway.load.figures import Objectives, Record
from gateway.replay.rows import read_rows
from gateway.replay.trace import read_trace


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    command = [executable, "-m", "gateway.cli", "simulate", "--listen", "127.0.0.1:0", "--speed", "50"]
    process = Popen(command, stdout=PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("listening on ").strip()
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.mark.slow
def test_an_open_load_of_two_classes_is_told_by_class_and_kept(
    engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--rate",
        "60",
        "--requests",
        "40",
        "--class",
        "interactive=3",
        "--class",
        "bulk",
        "--ttft-sla",
        "interactive=5",
    ]

    code = main(["load", engine_url, "--json", "--report", str(tmp_path), *flags])

    told = json.loads(capsys.readouterr().out)
    classes = told["classes"]
    assert code == 0
    assert told["model"] == "sim-8b"
    assert (told["rate_rps"], told["seed"], told["class"]) == (60, 1, "interactive=3 bulk")
    assert told["lasted_s"] > 0
    assert classes["all"]["completed"] == 40
    assert classes["interactive"]["completed"] + classes["bulk"]["completed"] == 40
    assert classes["interactive"]["attainment"] == 1.0
    assert classes["bulk"]["attainment"] is None
    rows = read_rows(tmp_path / "rows.csv")
    assert sum(row.output_tokens for row in rows) == pytest.approx(
        classes["all"]["output_tokens_per_s"] * classes["all"]["duration_s"]
    )
    assert len(read_trace(tmp_path / "rows.csv")) == 40
    report = (tmp_path / "report.md").read_text()
    assert "| completed |" in report
    assert "- rate: 60 per second\n" in report
    assert (tmp_path / "report.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_a_trace_beside_clients_in_a_loop(engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,class\n0,30,5,interactive\n0.2,40,6,interactive\n")
    rows = tmp_path / "rows.csv"

    code = main(
        ["load", engine_url, "--trace", str(trace), "--clients", "3", "--clients-class", "bulk", "--rows", str(rows)]
    )

    found = read_rows(rows)
    assert code == 0
    assert [(row.output_tokens, row.outcome) for row in found if row.class_name == "interactive"] == [
        (5, "completed"),
        (6, "completed"),
    ]
    assert sum(row.class_name == "bulk" for row in found) >= 3
    assert "interactive" in capsys.readouterr().out


@pytest.mark.slow
def test_a_staircase_is_told_step_by_step(engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "10,40", "--step", "0.5", "--cv", "0", "--output-tokens", "5", "--ttft-sla", "5"]

    code = main(["load", engine_url, "--report", str(tmp_path), *flags])

    told = json.loads((tmp_path / "figures.json").read_text())
    assert code == 0
    assert [(one["rate_rps"], one["attainment"]) for one in told["steps"]] == [(10, 1.0), (40, 1.0)]
    assert [one["sent"] for one in told["steps"]] == [5, 20]
    assert (told["rate_rps"], told["step_s"]) == ([10, 40], 0.5)
    assert "requests per second" in capsys.readouterr().out
    assert "| 40 | 20 | 20 | 100.00% |" in (tmp_path / "report.md").read_text()


def test_the_bar_tells_what_is_under_way_done_and_failed() -> None:
    now_s = 10.0
    record = Record(lambda: now_s, Objectives())
    now_s = 12.0
    for _ in range(3):
        record.start()
    record.first_token(0.25)
    record.tokens(30, None)
    record.score.completed, record.score.failed = 1, 1

    assert bar_text(1, {"chat": record}) == "1 under way, 1 done, 1 not, TTFT p99 250.0 ms, 15 tokens/s"


def test_nobody_there_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "http://127.0.0.1:9", "--rate", "1"]) == 2
    assert capsys.readouterr().err.startswith("headrace: load http://127.0.0.1:9: ")


def test_errors_are_told_with_what_the_first_said(engine_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["load", engine_url, "--model", "nope", "--clients", "1", "--requests", "1", "--for", "5"])

    assert code == 1
    assert "http_404: 1 requests, the first: The model `nope` does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "nothing to send; give --rate, --clients or --trace"),
        (["--rate", "0"], "--rate 0: expected a number > 0"),
        (["--rate", "5,x"], "--rate x: expected a number > 0"),
        (["--rate", "5", "--for", "-1"], "--for -1: must be > 0"),
        (["--rate", "5", "--burst", "50:2"], "--burst 50:2: expected RATE:SECONDS:SECONDS"),
        (["--burst", "50:2:10", "--clients", "1"], "--burst says what comes between"),
        (["--rate", "5", "--header", "secret"], "expected 'NAME: VALUE'"),
        (["--rate", "5", "--key-env", "NO_SUCH_VARIABLE"], "the environment has no such variable"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv: cannot be read (No such file or directory)"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", "http://127.0.0.1:9", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_lists_no_model_is_told_with_what_may_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "http://127.0.0.1:9", "--rate", "1"]) == 2
    assert capsys.readouterr().err.endswith("; start it, or name a model with --model\n")


@pytest.mark.slow
def test_a_server_that_wants_a_key_is_told_with_the_flag_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    class Locked(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Locked) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        url = f"http://127.0.0.1:{server.server_port}"
        codes = [main(["load", url, "--rate", "1"]), main(["profile", url])]
        server.shutdown()

    told = capsys.readouterr().err.splitlines()
    assert codes == [2, 2]
    assert told[0].endswith("answered 401; give its API key with --key-env NAME")
    assert told[1].endswith("answered 401; give its API key with --key-env NAME")


def test_a_keys_file_that_is_none_does_not_show_what_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# tenants\nred: k-1\nsk-verysecret\n")

    assert main(["load", "http://127.0.0.1:9", "--rate", "1", "--keys", str(keys)]) == 2

    told = capsys.readouterr().err
    assert "keys:3: expected `TENANT: KEY`" in told
    assert "verysecret" not in told
