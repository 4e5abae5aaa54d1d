"""`headrace policy`: a file to start from, every mistake at once, and what a policy comes to."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.commands import policy as command
from policies import presets
from policies.document import effective, parse

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser()
        command.add_parser(parser.add_subparsers())
        code = command.run(parser.parse_args(["policy", *map(str, arguments)]))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_init_writes_the_balanced_preset_with_its_comments(run: Run, tmp_path: Path) -> None:
    code, _, _ = run("init", tmp_path / "p.yaml")

    assert code == 0
    assert (tmp_path / "p.yaml").read_text() == presets.text("balanced")


def test_init_writes_to_policy_yaml_here_by_default(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    run("init", "--preset", "throughput")

    assert (tmp_path / "policy.yaml").read_text() == presets.text("throughput")


def test_init_does_not_overwrite_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("mine")

    code, _, err = run("init", tmp_path / "p.yaml")

    assert (code, (tmp_path / "p.yaml").read_text()) == (1, "mine")
    assert "use --force" in err


def test_init_overwrites_when_told_to(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("mine")

    code, _, _ = run("init", "--force", tmp_path / "p.yaml")

    assert (code, (tmp_path / "p.yaml").read_text()) == (0, presets.text("balanced"))


def test_init_says_when_the_place_cannot_be_written(run: Run, tmp_path: Path) -> None:
    code, _, err = run("init", tmp_path / "absent" / "p.yaml")

    assert code == 1
    assert "No such file or directory" in err


def test_check_names_every_problem_and_fails(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("version: 1\nclasses:\n  chat: {ttft_sla_s: -3}\nsize: 1\n")

    code, out, err = run("check", tmp_path / "p.yaml")

    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 2


def test_check_can_name_the_problems_as_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("version: 1\nclasses:\n  chat: {ttft_sla_s: -3}\n")

    code, out, _ = run("check", "--json", tmp_path / "p.yaml")

    (problem,) = json.loads(out)["problems"]
    assert code == 1
    assert (problem["line"], problem["key"], problem["value"]) == (3, "classes.chat.ttft_sla_s", "-3")


def test_check_says_that_a_good_file_is_good(run: Run, tmp_path: Path) -> None:
    run("init", tmp_path / "p.yaml")

    code, out, _ = run("check", tmp_path / "p.yaml")
    as_json = json.loads(run("check", "--json", tmp_path / "p.yaml")[1])

    assert code == 0
    assert "classes interactive, bulk" in out
    assert as_json["ok"] is True


def test_check_of_a_file_that_is_not_there_fails(run: Run, tmp_path: Path) -> None:
    code, _, err = run("check", tmp_path / "absent.yaml")

    assert code == 1
    assert "cannot be read" in err


def test_show_prints_the_whole_policy_so_that_it_reads_the_same(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("version: 1\nclasses: {chat: {ttft_sla_s: 1}}\n")

    code, out, _ = run("show", tmp_path / "p.yaml")

    assert code == 0
    assert effective(parse(out, "shown")) == effective(parse((tmp_path / "p.yaml").read_text(), "p.yaml"))


def test_show_without_a_file_prints_the_preset_in_force_without_one(run: Run) -> None:
    code, out, _ = run("show", "--json")

    assert code == 0
    assert json.loads(out) == {"policy": effective(presets.load()), "version": presets.load().version}


def test_show_of_a_wrong_file_fails(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("version: 1\n")

    code, _, err = run("show", tmp_path / "p.yaml")

    assert (code, err.strip().rpartition(": ")[2]) == (1, "classes is missing; required; add it")
