"""The virtual engine beside real ones: replays of real vLLM logs, and how fast a replay runs.

Only the first log is a test of the model: its profile was made of component measurements. The other two profiles were
fitted to their logs, so that they only show that the model can take that form.
"""

from __future__ import annotations

import csv
import time
from pathlib import Path

import pytest

from backends.simulated.profiles import build_engine, load_profile
from backends.simulated.sequence import Sequence

DATA = Path(__file__).parent / "data"
BAR = 0.10


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@pytest.mark.parametrize(
    ("profile", "log", "preempts"),
    [
        ("rtx4090_llama31_8b_tp1", "vllm_log_rtx4090_llama31_8b.csv", True),
        ("rtxpro6000x2_qwen3_32b_tp2", "vllm_log_rtxpro6000_qwen3_32b.csv", False),
        ("rtxpro6000_qwen3_30b_a3b", "vllm_log_rtxpro6000_qwen3_30b_a3b.csv", False),
    ],
)
def test_the_replay_of_a_real_vllm_log_is_within_ten_percent(profile: str, log: str, preempts: bool) -> None:
    with (DATA / log).open() as lines:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]
    engine = build_engine(load_profile(profile))
    played = []
    for number, row in enumerate(rows):
        one = Sequence(str(number), prompt_tokens=int(row["prompt_tokens"]), output_tokens=int(row["output_tokens"]))
        engine.submit(one, row["queued_s"])
        played.append(one)

    engine.advance(1e6)

    ttft_s = [one.first_token_s - one.arrival_s for one in played]
    real_ttft_s = [row["first_token_s"] - row["queued_s"] for row in rows]
    tpot_s = [(one.finished_s - one.first_token_s) / (one.output_tokens - 1) for one in played]
    real_tpot_s = [(row["last_token_s"] - row["first_token_s"]) / (row["output_tokens"] - 1) for row in rows]
    figures = {
        "ttft p50": (quantile(ttft_s, 0.5), quantile(real_ttft_s, 0.5)),
        "ttft p90": (quantile(ttft_s, 0.9), quantile(real_ttft_s, 0.9)),
        "tpot p50": (quantile(tpot_s, 0.5), quantile(real_tpot_s, 0.5)),
        "makespan": (max(one.finished_s for one in played), max(row["last_token_s"] for row in rows)),
    }
    for name, (simulated, real) in figures.items():
        assert simulated == pytest.approx(real, rel=BAR), name
    assert (engine.totals.preemptions > 50) is preempts


def test_a_minute_of_a_busy_engine_is_simulated_in_a_small_part_of_a_second() -> None:
    engine = build_engine(load_profile("h100_llama31_8b_tp1"))
    started_s = time.process_time()

    for number in range(600):
        at_s = number / 10
        while (event_s := engine.next_event_s()) <= at_s:
            engine.advance(event_s)
        engine.submit(Sequence(str(number), prompt_tokens=1155, output_tokens=211), at_s)
    engine.advance(60.0)

    assert engine.totals.finished > 400
    assert time.process_time() - started_s < 60 / 300
