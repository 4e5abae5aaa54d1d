"""`headrace replay` as it is typed: table, JSON, rows, picture, and what it says of mistakes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.replay.figures import Figures
from gateway.replay.rows import read_rows

TRACE = str(Path(__file__).parents[3] / "tests/data/azure_conv_10min.csv")


def test_it_writes_json_rows_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, picture = tmp_path / "rows.csv", tmp_path / "picture.svg"

    code = main(["replay", TRACE, "--for", "60", "--json", "--rows", str(rows), "--picture", str(picture)])

    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert told["requests"] == told["outcomes"]["completed"] == len(read_rows(rows))
    assert told["figures"]["attainment"] == 1.0
    assert told["engines"] == {"h100_llama31_8b_tp1": "h100_llama31_8b_tp1"}
    assert picture.read_text().startswith("<svg")


def test_two_runs_write_the_same_rows(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.csv", "two.csv")]

    for file in files:
        main(
            ["replay", TRACE, "--for", "30", "--rate", "3", "--engine", "a=rtx4090_llama31_8b_tp1", "--rows", str(file)]
        )

    assert files[0].read_bytes() == files[1].read_bytes()


def test_it_prints_a_table_with_the_speed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n500,50\n")

    main(["replay", TRACE, "--for", "30", "--from", "100", "--backlog", str(lengths)])

    told = capsys.readouterr().out
    assert "x real time" in told
    assert "bulk_tokens_per_s" in told


def test_what_is_completed_after_the_measured_time_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "short.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,20\n1,100,400\n")

    main(["replay", str(trace)])
    main(["replay", str(trace), "--for", "30"])
    main(["replay", str(trace), "--json"])

    told = capsys.readouterr().out
    assert "measured over 1 s, until the last arrival; completed after that: 1 (" in told
    assert "measured over 30 s, until --for\n" in told
    assert '"measured_s": 1.0,' in told


def test_the_page_defines_every_figure() -> None:
    page = (Path(__file__).parents[3] / "docs/replay.md").read_text()

    assert [one.name for one in fields(Figures) if f"`{one.name}`" not in page] == []


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["nowhere.csv"], "nowhere.csv: cannot be read (No such file or directory); give a CSV file"),
        (["nowhere.jsonl"], "nowhere.jsonl: cannot be read (No such file or directory); give a JSON Lines file"),
        ([TRACE, "--rate", "0"], "--rate and --for must be > 0"),
        ([TRACE, "--engine", "h100"], "did you mean"),
        ([TRACE, "--engine", "rtx4090_llama31_8b_tp1", "--engine", "rtx4090_llama31_8b_tp1"], "names must differ"),
        ([TRACE, "--class", "chat"], "must be one of interactive, bulk"),
        ([TRACE, "--picture", "p.jpg"], "must end in .svg"),
        ([TRACE, "--from", "9000"], "no requests"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["replay", *flags])

    error = capsys.readouterr().err
    assert code == 2
    assert told in error
    assert error.count("\n") == 1
