"""Traces are read strictly, rows survive writing, and figures follow from rows by hand-checkable arithmetic."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.replay.chart import Bars, Line, Panel, svg
from gateway.replay.figures import figures, jain, quantile, tpot
from gateway.replay.rows import Row, read_rows, write_rows
from gateway.replay.trace import Request, TraceError, read_lengths, read_trace, segment
from gateway.replay.world import Played, Seen
from policies.document import parse

POLICY = parse("version: 1\nclasses: {chat: {ttft_sla_s: 1, ttft_sla_per_1k_tokens_s: 1}, bulk: {}}\n", "test.yaml")
CHAT = Row(10.0, "chat", "t", 1000, 11, "e", 10.1, 11.0, 12.0, "completed")


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


# -- traces


def test_columns_may_come_in_any_order_and_lines_of_licence_are_skipped(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "# a source, CC-BY 4.0\noutput_tokens,class,arrival_s,prompt_tokens,tenant,prefix\n7,bulk,2.5,100,acme,64\n0,,1,5,,\n",
    )

    requests = read_trace(path, class_name="chat")

    assert requests == [Request(1.0, 5, 1, "default", "chat"), Request(2.5, 100, 7, "acme", "bulk", 64)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("arrival_s,prompt_tokens\n1,2\n", "has no column output_tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n", "no requests in it"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,3\n-1,2,3\n", ":3: arrival_s is '-1'; must be seconds >= 0"),
        ("# x\narrival_s,prompt_tokens,output_tokens\nnan,2,3\n", ":3: arrival_s is 'nan'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2.5,3\n", ":2: prompt_tokens is '2.5'; must be a whole number"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2\n", ":2: output_tokens is missing; must be a whole number"),
    ],
)
def test_a_file_that_is_no_trace_is_told_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(TraceError) as error:
        read_trace(written(tmp_path, text))

    assert told in str(error.value)


def test_a_segment_counts_in_replayed_time() -> None:
    requests = [Request(float(at_s), 1, 1) for at_s in (0, 174, 175, 200, 324, 325)]

    taken = segment(requests, rate_scale=0.25, from_s=700.0, duration_s=600.0)

    assert [one.arrival_s for one in taken] == [0.0, 100.0, 596.0]


def test_lengths_need_no_arrivals(tmp_path: Path) -> None:
    assert read_lengths(written(tmp_path, "prompt_tokens,output_tokens\n3772,54\n")) == [(3772, 54)]


# -- rows and figures


def test_rows_come_back_as_they_were_written_and_are_a_trace(tmp_path: Path) -> None:
    rows = [CHAT, Row(1.0, "bulk", "b", 5, 0, "", None, None, 9.0, "shed", 3)]
    path = tmp_path / "rows.csv"

    write_rows(path, rows)

    assert read_rows(path) == rows[::-1]
    assert read_trace(path)[1] == Request(10.0, 1000, 11, "t", "chat")


def test_figures_are_those_of_the_rows() -> None:
    late = replace(CHAT, first_token_s=12.1, end_s=22.1)
    shed = Row(11.0, "chat", "t", 10, 0, "", None, None, 11.0, "shed")
    bulk = [
        Row(0.0, "bulk", name, 100, tokens, "e", 0.0, 1.0, 5.0, "unfinished")
        for name, tokens in (("a", 100), ("b", 500))
    ]
    unseen = Row(0.0, "bulk", "a", 9999, 0, "e", 0.0, None, 5.0, "unfinished")

    found = figures(Played([CHAT, late, shed, *bulk, unseen], energy_j=2822.0, end_s=10.0), POLICY, duration_s=10.0)

    assert found.attainment == pytest.approx(1 / 3)
    assert found.goodput_rps == 0.1
    assert found.ttft_p50_s == pytest.approx(2.1)
    assert found.ttft_p99_s == math.inf, "one never had a first token"
    assert found.tpot_p99_s == pytest.approx(1.0)
    assert found.bulk_tokens_per_s == 80.0
    assert found.joules_per_token == pytest.approx(2822.0 / 800), "chat had its first tokens after the duration"
    assert (found.shed, found.failed, found.bulk_completed) == (1, 0, 0)
    assert found.jain == pytest.approx(800**2 / (2 * (200**2 + 600**2)))


def test_tokens_count_as_far_as_they_were_served_by_then() -> None:
    row = Row(0.0, "bulk", "a", 100, 40, "e", 0.0, 2.0, 12.0, "completed")

    assert [row.served_by(at_s) for at_s in (1.9, 2.0, 7.0, 12.0, 99.0)] == pytest.approx([0, 100, 120, 140, 140])


def test_what_is_served_or_completed_after_the_duration_is_not_of_it() -> None:
    rows = [
        Row(0.0, "bulk", "a", 100, 40, "e", 0.0, 2.0, 12.0, "completed"),
        Row(0.0, "bulk", "b", 100, 40, "e", 0.0, 2.0, 7.0, "completed"),
        Row(0.0, "bulk", "c", 100, 40, "", None, None, 7.0, "unfinished"),
        Row(0.0, "bulk", "b", 100, 40, "e", 0.0, 2.0, 7.0, "engine_failed"),
    ]

    found = figures(Played(rows, energy_j=400.0, end_s=7.0), POLICY, duration_s=7.0)

    assert found.bulk_tokens_per_s == pytest.approx((120 + 140) / 7), "an answer that broke off served nobody"
    assert (found.bulk_completed, found.failed) == (1, 1)
    assert found.joules_per_token == pytest.approx(400 / 260)
    assert found.jain == pytest.approx(260**2 / (3 * (120**2 + 140**2))), "c was never served"


def test_gaps_beyond_what_the_class_allows_are_a_miss() -> None:
    gaps = parse("version: 1\nclasses: {chat: {ttft_sla_s: 1, tpot_sla_s: 0.09}, bulk: {}}\n", "test.yaml")
    of_one = replace(CHAT, output_tokens=1)

    found = [figures(Played([row], end_s=99.0), gaps, duration_s=99.0).attainment for row in (CHAT, of_one)]

    assert tpot(CHAT) == pytest.approx(0.1)
    assert found == [0.0, 1.0]


def test_the_objective_grows_with_the_prompt() -> None:
    on_time = replace(CHAT, prompt_tokens=1000, first_token_s=11.99)
    too_late = replace(CHAT, prompt_tokens=500, first_token_s=11.99)

    found = figures(Played([on_time, too_late], end_s=10.0), POLICY, duration_s=10.0)

    assert found.attainment == 0.5


def windows(of: Callable[[int], int], *, engine: str = "e", until_s: int = 600) -> list[Seen]:
    """One engine's, second by second."""
    return [Seen(float(at_s), engine, 0, 0, 0.0, {}, {"chat": 99, "bulk": of(at_s)}, {}) for at_s in range(until_s)]


@pytest.mark.parametrize(
    ("seen", "swing"),
    [
        (windows(lambda at_s: at_s if at_s < 300 else 8 + 4 * (at_s % 2)), 4 / 10),
        (windows(lambda at_s: 8 + at_s // 60), 0.0),
        (windows(lambda at_s: 20 if at_s < 400 else 10), 0.0),
        (windows(lambda _: 8) + windows(lambda at_s: 90 + 20 * (at_s % 2), engine="f"), 20 / 100),
    ],
    ids=["swings", "follows", "cut once", "the worst of two engines of different size"],
)
def test_oscillation_is_how_far_the_bulk_window_swings_in_a_minute(seen: list[Seen], swing: float) -> None:
    found = figures(Played([], seen, end_s=599.0), POLICY, duration_s=599.0)

    assert found.window_oscillation == pytest.approx(swing, rel=0.05)


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1.0), (0.25, 1.0), (0.26, 2.0), (0.5, 2.0), (0.99, 4.0), (1.0, 4.0)]
)
def test_a_quantile_is_a_value_that_was_measured(share: float, value: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == value


def test_jain_is_one_when_even_and_one_over_n_when_one_has_all() -> None:
    assert jain({"a": 5, "b": 5, "c": 5}) == pytest.approx(1.0)
    assert jain({"a": 5, "b": 0, "c": 0}) == pytest.approx(1 / 3)
    assert jain({}) is None
    assert jain({"a": 5}) is None, "nobody to be fair to"


# -- pictures


def test_a_picture_is_well_formed_says_what_it_shows_and_never_changes() -> None:
    wave = [(number / 10, 1.0 + number % 7) for number in range(20_000)]
    panels: list[Panel | Bars] = [
        Panel(
            "first tokens & more",
            [Line("<chat>", wave), Line("dots", wave[:50], dots=True)],
            "s",
            log_y=True,
            levels=[("sla", 2.0)],
        ),
        Panel("nothing yet", [Line("empty", [])]),
        Bars("bulk", [("ours", 10.0), ("zero", 0.0)], "tok/s", levels=[("bound", 12.0)]),
    ]

    drawn = svg("a < b", panels)

    words = ["".join(one.itertext()) for one in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314
    assert {"a < b", "first tokens & more", "<chat>", "sla", "empty", "bound"} <= set(words)
    assert svg("a < b", panels) == drawn
    assert len(drawn) < 100_000


def test_thinning_keeps_the_peaks() -> None:
    flat = [(float(number), 1.0) for number in range(10_000)]
    flat[7_777] = (7777.0, 50.0)

    drawn = svg("t", [Panel("p", [Line("l", flat)])])

    top_px = min(float(pair.split()[1]) for pair in drawn.split('<path d="M')[1].split('"')[0].split("L"))
    assert top_px == pytest.approx(26.0)


def test_one_moment_is_one_column_in_all_panels() -> None:
    short, long = (
        Panel(name, [Line("a", [(0.0, 1.0), (end_s, 2.0)])]) for name, end_s in (("short", 50.0), ("long", 100.0))
    )

    marks = re.findall(r'<text x="([\d.]+)" y="172"[^>]*>(\d+) s</text>', svg("t", [short, long]))

    assert marks[: len(marks) // 2] == marks[len(marks) // 2 :]


def test_a_long_name_keeps_its_end_and_levels_do_not_write_over_each_other() -> None:
    name = "an-engine-with-a-very-long-name-number-17"
    picture = svg(
        "t", [Panel("p", [Line(name, [(0.0, 1.0)])]), Bars("b", [("x", 1.0)], levels=[("one", 1.0), ("two", 1.01)])]
    )

    heights = re.findall(r'y="(\d+)" text-anchor="middle" fill="#a00">', picture)

    assert name not in picture
    assert "number-17</text>" in picture
    assert len(set(heights)) == 2
