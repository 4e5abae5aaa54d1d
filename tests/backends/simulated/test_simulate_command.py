"""`headrace simulate` as a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

RUN = (
    "import argparse, sys; from gateway.commands import simulate; parser = argparse.ArgumentParser();"
    "simulate.add_parser(parser.add_subparsers()); args = parser.parse_args(); sys.exit(simulate.run(args))"
)


@contextmanager
def simulating(*options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", RUN, "simulate", "--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on http://127.0.0.1:")
    return line.removeprefix("listening on ").strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_tells_its_url_serves_and_ends_cleanly_on_a_signal(number: signal.Signals) -> None:
    with simulating("--model", "mine", "--speed", "50") as process:
        url = url_of(process)
        body = json.dumps({"model": "mine", "prompt": "hello", "max_tokens": 5, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body)  # noqa: S310 - loopback
        with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310 - loopback
            answer = json.load(reply)

        process.send_signal(number)
        code = process.wait(timeout=10)
        _, errors = process.communicate()

    assert answer["usage"]["completion_tokens"] == 5
    assert (code, errors) == (0, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--profile", "h100"],
            "profile 'h100': not found; did you mean 'h100_llama31_8b_tp1' or 'h100x4_llama31_70b_tp4'?",
        ),
        (["--profile", "zzz"], "profile 'zzz': not found; expected one of a100_llama3_8b_tp1, "),
        (["--kv-tokens", "100", "--max-model-len", "4000"], "lower it or raise kv_tokens"),
        (["--speed", "0"], "speed 0.0: must be > 0"),
    ],
)
def test_options_that_cannot_work_end_it_with_one_line_and_code_2(options: list[str], message: str) -> None:
    with simulating(*options) as process:
        _, errors = process.communicate(timeout=20)

    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert message in errors


@pytest.mark.parametrize("option", ["--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "--kv-tokens"])
def test_nothing_is_a_bound_of_zero_which_would_read_as_none_given(option: str) -> None:
    with simulating(option, "0") as process:
        _, errors = process.communicate(timeout=20)

    assert process.returncode == 2
    assert f"argument {option}: '0': expected a whole number >= 1" in errors
