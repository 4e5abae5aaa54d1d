"""The splitter and the event reader on bytes: nothing changed, nothing held that need not be, every line end."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backends.sse import EventSplitter, events

RECORDED = sorted((Path(__file__).parent.parent / "data" / "engines").glob("*.sse"))
PIECES = [
    b"data: {}",
    b"data:x",
    b"\n",
    b"\r\n",
    b"\r",
    b"\n\n",
    b"\r\n\r\n",
    b": ping",
    b"event: e",
    b"a",
    b"\xef\xbb\xbf",
]


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(a % (len(data) + 1) for a in at)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def relayed(splitter: EventSplitter, reads: list[bytes]) -> bytes:
    return b"".join(map(splitter.feed, reads)) + splitter.take_rest()


def reference_events(data: bytes) -> list[tuple[bytes, bytes]]:
    """Name and data of each event that carries data, by the standard's rules, on the whole stream at once."""
    lines = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    found: list[tuple[bytes, bytes]] = []
    name = b""
    parts: list[bytes] = []
    for line in lines[:-1]:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not line:
            if parts and b"\n".join(parts):
                found.append((name, b"\n".join(parts)))
            name, parts = b"", []
        elif field == b"data":
            parts.append(value)
        elif field == b"event":
            name = value
    return found


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=20), st.lists(st.integers(0, 200), max_size=12), st.integers(1, 40))
@example([b"data:x", b"\r", b"\r", b"\n", b"data:x", b"\n\n"], [7, 8, 9], 4)
def test_what_goes_out_is_what_came_in(pieces: list[bytes], at: list[int], hold_max_bytes: int) -> None:
    data = b"".join(pieces)

    out = relayed(EventSplitter(hold_max_bytes), cut(data, at))

    assert out == data


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES[:-1]), max_size=20), st.lists(st.integers(0, 200), max_size=12))
def test_events_are_the_same_for_every_cut(pieces: list[bytes], at: list[int]) -> None:
    data = b"".join(pieces)
    splitter = EventSplitter()

    blocks = [*map(splitter.feed, cut(data, at))]

    seen = [(event.name, event.data) for block in blocks for event in events(block) if event.data]
    assert seen == reference_events(data)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
def test_each_event_goes_out_with_its_last_byte(path: Path, line_end: bytes) -> None:
    whole = path.read_bytes().replace(b"\n", line_end)
    splitter = EventSplitter()

    out = [splitter.feed(whole[i : i + 1]) for i in range(len(whole))]

    ready = [piece for piece in out if piece.startswith(b"data")]
    assert len(ready) == whole.count(b"data: ")
    assert all(piece.endswith(line_end * 2) or line_end == b"\r\n" for piece in ready)


def test_a_read_of_whole_events_is_returned_without_a_copy() -> None:
    data = b'data: {"a": 1}\n\ndata: [DONE]\n\n'

    assert EventSplitter().feed(data) is data


def test_an_incomplete_event_is_held_until_its_end() -> None:
    splitter = EventSplitter()

    first = splitter.feed(b"data: a\n\ndata: b")
    second = splitter.feed(b"\n\n")

    assert (first, second, splitter.take_rest()) == (b"data: a\n\n", b"data: b\n\n", b"")


def test_a_comment_line_is_let_through_before_its_event_is_complete() -> None:
    splitter = EventSplitter()

    ready = splitter.feed(b"data: a\n\n: ping\ndata: b")

    assert ready == b"data: a\n\n: ping\n"


def test_a_comment_line_alone_is_let_through_so_that_an_event_of_ours_may_follow() -> None:
    splitter = EventSplitter()

    assert splitter.feed(b": ping\n") == b": ping\n"


def test_an_event_past_the_bound_goes_through_in_pieces() -> None:
    splitter = EventSplitter(hold_max_bytes=10)

    pieces = [splitter.feed(part) for part in (b"data: 123", b"45678", b"9", b"\n", b"\ndata: x", b"\n\n")]

    assert pieces == [b"", b"data: 12345678", b"9", b"\n", b"\n", b"data: x\n\n"]


def test_an_event_past_the_bound_is_told_to_be_open_until_it_ends() -> None:
    splitter = EventSplitter(hold_max_bytes=10)

    splitter.feed(b"data: 123456789")
    during = splitter.oversize
    splitter.feed(b"0\r\n\r\n")

    assert (during, splitter.oversize) == (True, False)


def test_eight_megabytes_on_one_line_pass_in_linear_time() -> None:
    splitter = EventSplitter()
    read = b"x" * 4096
    splitter.feed(b"data: ")
    before_s = time.process_time()

    longest = max(len(splitter.feed(read)) for _ in range(2048))

    assert longest <= 16 * 1024 + 2 * 4096
    assert time.process_time() - before_s < 1.0


def test_fields_are_read_by_the_rules_not_by_a_prefix() -> None:
    block = b"id: 7\nevent: message\nretry: 5\nvendor: x\ndata:one\n: c\ndata:  two\ndata\n\n: only\n\n"

    first, second = events(block)

    assert (first.name, first.data, first.is_comment_only) == (b"message", b"one\n two\n", False)
    assert (second.is_comment_only, block[second.start : second.end]) == (True, b": only\n\n")


def test_a_byte_order_mark_hides_no_field() -> None:
    (event,) = events(b"\xef\xbb\xbfdata: x\n\n")

    assert event.data == b"x"
