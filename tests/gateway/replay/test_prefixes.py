"""Traces that name the beginnings of their prompts, and engines that find them again."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.replay.trace import MOONCAKE_ID_TOKENS, TraceError, read_trace

CONVERSATION = [
    {"timestamp": 3000 * turn, "input_length": 1600 + 1600 * turn, "output_length": 40, "hash_ids": list(range(4 + 3 * turn))}
    for turn in range(6)
]  # fmt: skip


def mooncake(path: Path, lines: list[dict[str, object]]) -> Path:
    text = "\n".join(json.dumps(line) for line in lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_mooncake_trace_is_read_with_its_ids(name: str, tmp_path: Path) -> None:
    requests = read_trace(mooncake(tmp_path / name, CONVERSATION))

    assert [request.arrival_s for request in requests] == [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]
    assert requests[1].prompt_tokens == 3200
    first, second = requests[0].block_ids(16), requests[1].block_ids(16)
    assert MOONCAKE_ID_TOKENS == 512
    assert len(first) == 1600 // 16
    assert len(second) == 3200 // 16
    assert second[: len(first)] == first
    assert len(set(second)) == len(second)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"timestamp": 1}\n', ":1: KeyError('input_length')"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}\n', ":1: timestamp is -1"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\nnot json\n', ":2: "),
        ("", "no requests in it"),
    ],
)
def test_a_faulty_line_is_told_with_its_number(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)

    with pytest.raises(TraceError) as told:
        read_trace(path)

    assert words in str(told.value)


CSV_TEXT = "arrival_s,prompt_tokens,output_tokens,prefix\n" + "".join(
    f"{3 * turn},{1600 + 1600 * turn},40,{800 * turn}\n" for turn in range(6)
)


def test_names_that_lie_beside_a_csv_trace_are_what_a_gateway_sees_of_it(tmp_path: Path) -> None:
    path = tmp_path / "talk.csv"
    path.write_text(CSV_TEXT)
    alone = read_trace(path)
    mooncake(tmp_path / "talk_hashids.jsonl.gz", CONVERSATION)

    requests = read_trace(path)

    assert [replace(one, prefix_ids=(), id_tokens=alone[0].id_tokens) for one in requests] == alone
    assert [one.cached_prompt_tokens for one in requests] == [0, 800, 1600, 2400, 3200, 4000]
    assert [one.prefix for one in requests] == [one.prefix for one in read_trace(tmp_path / "talk_hashids.jsonl.gz")]
    assert requests[1].prefix.startswith(requests[0].prefix)
    assert not any(one.prefix for one in alone)


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        (CONVERSATION[:5], "has 5 requests, talk.csv has 6"),
        ([*CONVERSATION[:5], {**CONVERSATION[5], "input_length": 7}], "request 6 is not that of talk.csv"),
        ([{**CONVERSATION[0], "timestamp": 100}, *CONVERSATION[1:]], "request 1 is not that of talk.csv"),
    ],
)
def test_names_of_other_requests_are_refused(beside: list[dict[str, object]], words: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.csv"
    path.write_text(CSV_TEXT)
    mooncake(tmp_path / "talk_hashids.jsonl.gz", beside)

    with pytest.raises(TraceError) as told:
        read_trace(path)

    assert words in str(told.value)


def test_with_a_prefix_cache_a_conversations_later_turns_begin_sooner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(mooncake(tmp_path / "trace.jsonl", CONVERSATION))
    ttft_s = {}

    for flags in ((), ("--prefix-caching",)):
        assert main(["replay", trace, "--json", *flags]) == 0
        ttft_s[flags] = json.loads(capsys.readouterr().out)["figures"]["ttft_p50_s"]

    assert ttft_s["--prefix-caching",] < 0.6 * ttft_s[()]
