"""Prometheus text: only what is wanted, and all of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.exposition import parse

DATA = Path(__file__).parent.parent / "data" / "engines"


def one(line: bytes) -> tuple[dict[str, str], float]:
    (sample,) = parse(line, {"m"})["m"]
    return sample


@pytest.mark.parametrize(
    ("line", "labels", "value"),
    [
        (b"m 1", {}, 1.0),
        (b"m\t1.5e3 1395066363000", {}, 1500.0),
        (b"  m  -2\r", {}, -2.0),
        (b"m{} 3", {}, 3.0),
        (b'm{a="x",b="y z",} 4', {"a": "x", "b": "y z"}, 4.0),
        (b'm { a = "x" , b="" } 5', {"a": "x", "b": ""}, 5.0),
        (b'm{a="C:\\\\dir\\n\\"q\\" } {"} 6', {"a": 'C:\\dir\n"q" } {'}, 6.0),
        (b'm{a="x"} 7 # {trace_id="KOO5S4vxi0o"} 0.67 1520879607.789', {"a": "x"}, 7.0),
        (b'm{a="x"} 8 1395066363.5 # {trace_id="a"} 1', {"a": "x"}, 8.0),
        (b"m +Inf", {}, math.inf),
        (b"m -Inf", {}, -math.inf),
        ('m{a="\u00e9\u4e2d"} 9'.encode(), {"a": "\u00e9\u4e2d"}, 9.0),
    ],
)
def test_a_sample_is_read_whole(line: bytes, labels: dict[str, str], value: float) -> None:
    assert one(line) == (labels, value)


def test_nan_is_a_value() -> None:
    assert math.isnan(one(b"m NaN")[1])


@pytest.mark.parametrize(
    "line",
    [
        b"m",
        b"m ",
        b"m{ 1",
        b'm{a="x" 1',
        b'm{a="x} 1',
        b"m{a=x} 1",
        b"m one",
        b"m 1_000",
        b"m 1 2 3",
        b"# m 1",
        b"mm 1",
        b"x_m 1",
    ],
)
def test_a_malformed_or_foreign_line_is_skipped(line: bytes) -> None:
    assert parse(line + b"\nm 7\n", {"m"}) == {"m": [({}, 7.0)]}


def test_repeated_series_are_kept_in_order() -> None:
    assert parse(b'm{e="0"} 1\nm{e="1"} 2\nm{e="0"} 3', {"m"})["m"] == [
        ({"e": "0"}, 1.0),
        ({"e": "1"}, 2.0),
        ({"e": "0"}, 3.0),
    ]


def test_a_name_without_samples_is_absent() -> None:
    assert parse(b"# TYPE m gauge\n", {"m"}) == {}


def test_a_recorded_page_gives_what_stands_on_it() -> None:
    found = parse((DATA / "vllm_metrics.txt").read_bytes(), {"vllm:num_requests_waiting", "vllm:cache_config_info"})

    assert found["vllm:num_requests_waiting"] == [({"engine": "0", "model_name": "tiny"}, 8.0)]
    assert found["vllm:cache_config_info"][0][0]["kv_cache_size_tokens"] == "2097152"


@settings(deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), st.text(max_size=8), max_size=4), st.floats())
def test_whatever_a_label_holds_comes_back(labels: dict[str, str], value: float) -> None:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    line = "m{" + ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items()) + f"}} {value}"

    found, number = one(line.encode("utf-8", "surrogatepass"))

    assert found == {
        name: text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for name, text in labels.items()
    }
    assert number == value or (math.isnan(number) and math.isnan(value))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_make_it_raise(junk: bytes) -> None:
    assert set(parse(b"m" + junk + b"\nm{" + junk, {"m"})) <= {"m"}
