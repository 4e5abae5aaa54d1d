"""How many workers: what an operator writes, and what a machine has."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from gateway.commands import serve
from gateway.settings_file import add_arguments, read_file, settings_from
from policies.yaml_source import DocumentError

ENGINE = ["--engine", "http://127.0.0.1:8000"]


def flags(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([*ENGINE, *args])


@pytest.mark.parametrize(("args", "workers"), [([], 1), (["--workers", "4"], 4), (["--workers", "auto"], 0)])
def test_the_flag_gives_a_number_or_leaves_it_to_the_machine(args: list[str], workers: int) -> None:
    assert settings_from(flags(*args), {}).workers == workers


@pytest.mark.parametrize(("text", "workers"), [("3", 3), ("auto", 0), ("0", 0)])
def test_the_file_gives_a_number_or_leaves_it_to_the_machine(tmp_path: Path, text: str, workers: int) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(f"engines: [{{url: 'http://127.0.0.1:8000'}}]\nworkers: {text}\n")

    assert read_file(file, {}).workers == workers


@pytest.mark.parametrize("text", ["-1", "two", "1.5", "100000"])
def test_another_number_is_refused_with_what_was_expected(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(f"workers: {text}\n")

    with pytest.raises(DocumentError, match=r"headrace\.yaml:1: workers is "):
        read_file(file, {})
    with pytest.raises(SystemExit):
        flags("--workers", text)
    assert "expected auto or a number up to 256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("150000 100000", 2), ("400000 100000", 4), ("9900000 100000", 8), ("1000 100000", 1), ("", 8)],
)
def test_cores_are_those_that_the_container_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(serve, "CGROUP_CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))

    assert serve.cores() == cores
