"""The simulated engine beside real ones, and `headrace bench fidelity` as it is typed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from backends.simulated.profiles import load_profile
from gateway.bench.fidelity import BAR, LOGS_DIR, SHIPPED, Log, compare, play, read_log
from gateway.cli import main
from tests.benchmarks.fit_link import DENSE, MIXTURE, dense, mixture

HEADER = "queued_s,scheduled_s,first_token_s,last_token_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize("log", SHIPPED, ids=lambda log: log.name)
def test_the_replay_of_a_real_log_is_within_ten_percent_in_all_its_parts(log: Log) -> None:
    compared = compare(log)

    for figures in (compared.residuals, *compared.parts.values()):
        assert set(figures) == {"ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "makespan_s"}
        for name, figure in figures.items():
            assert abs(figure.error) < BAR, (name, figure)


def test_the_profiles_of_two_gpus_are_what_their_derivation_says() -> None:
    for name, model in ((DENSE, dense(36, 14.9)), (MIXTURE, mixture(36, 14.9))):
        shipped = load_profile(name).step_model
        assert asdict(shipped) == pytest.approx(asdict(model), rel=1e-3), name


def test_only_the_starved_engine_preempts() -> None:
    preemptions = [compare(log).preemptions for log in SHIPPED]

    assert preemptions[0] > 50
    assert preemptions[1:] == [0, 0]


def test_requests_are_in_the_step_that_the_real_engine_had_them_in() -> None:
    """Of the starved engine's first seconds, where every step is full and 0.2 s long: one step off is 20 % or more."""
    log = read_log(LOGS_DIR / "vllm_log_rtx4090_llama31_8b.csv")

    played, _ = play(load_profile("rtx4090_llama31_8b_tp1"), log[:41])

    for entry, one in list(zip(log, played, strict=False))[11:]:
        assert one.first_token_s - one.taken_s == pytest.approx(entry.ttft_s, abs=0.03), one


def test_what_is_fitted_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fidelity", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert set(told["logs"]) == {log.name for log in SHIPPED}
    assert {name: set(parts) for name, parts in told["parts"].items()} == {
        "RTXPRO6000_Qwen3-32B": {"fitted", "validation"}
    }
    for log in SHIPPED:
        assert bool(load_profile(log.profile).fitted_on) is bool(log.fitted_requests)
        figure = told["logs"][log.name]["makespan_s"]
        assert figure["error"] == pytest.approx(figure["simulated"] / figure["real"] - 1)


def test_any_log_can_be_compared_with_any_profile_and_misses_are_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, picture = tmp_path / "vllm_log_mine.csv", tmp_path / "mine.svg"
    log.write_text(HEADER + "".join(f"{5 + n},{5 + n},{5.1 + n},{6 + n},100,50\n" for n in range(20)))

    code = main(["bench", "fidelity", "--log", str(log), "--profile", "h100_llama31_8b_tp1", "--picture", str(picture)])

    told = capsys.readouterr().out
    assert code == 0
    assert "mine" in told
    assert "!" in told
    assert picture.read_text().startswith("<svg")


def test_an_engine_started_otherwise_than_its_profile_is_simulated_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.csv"
    log.write_text(HEADER + "".join(f"0,0,{1 + n},{2 + n},100,50\n" for n in range(20)))
    command = ["bench", "fidelity", "--log", str(log), "--profile", "h100_llama31_8b_tp1", "--json"]

    main(command)
    wide = json.loads(capsys.readouterr().out)["logs"]["log"]["makespan_s"]["simulated"]
    main([*command, "--max-num-seqs", "2"])
    narrow = json.loads(capsys.readouterr().out)["logs"]["log"]["makespan_s"]["simulated"]

    assert narrow > 5 * wide


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("a,b\n1,2\n", ["--profile", "h100_llama31_8b_tp1"], "has no column queued_s"),
        (HEADER, ["--profile", "h100_llama31_8b_tp1"], "no requests in it"),
        (HEADER + "0,0,1,2,ten,5\n", ["--profile", "h100_llama31_8b_tp1"], ":2: "),
        (HEADER + "0,0,1,0.5,10,5\n", ["--profile", "h100_llama31_8b_tp1"], "must come in this order"),
        (HEADER + "0,0,1,2,10,5\n", [], "--log and --profile go together"),
        (HEADER + "0,0,1,2,10,5\n", ["--profile", "h100_llama31_8b"], "did you mean 'h100_llama31_8b_tp1'"),
        (HEADER + "0,0,1,2,900000,5\n", ["--profile", "h100_llama31_8b_tp1"], "must be < max_model_len"),
    ],
)
def test_a_log_that_cannot_be_compared_is_refused_in_one_line(
    text: str, flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.csv"
    log.write_text(text)

    code = main(["bench", "fidelity", "--log", str(log), *flags])

    told = capsys.readouterr()
    assert code == 2
    assert told.out == ""
    assert words in told.err
    assert told.err.count("\n") == 1
