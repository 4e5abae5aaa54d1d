"""Event streams reach the client byte for byte, however the network cuts them and whichever line ends they use.

The kind of fault: a relay that decodes each read by itself, knows one line end only, takes every line for data, expects
one event a read, or indexes `choices[0]`. What the gateway reads of the same bytes (tokens, usage, the first token) must
not depend on the cuts either.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence

import orjson
import pytest

from tests.end_to_end.conftest import Stage
from tests.end_to_end.counts import counts
from tests.end_to_end.dialects import CHAT, WAYS, Way
from tests.end_to_end.scripted_engine import DONE, Asked, Wire, delta, event, stream
from tests.gateway.ingress.raw_client import Answer, RawClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

EURO = "preis 10 € für 北京 🌍 e\u0301 fin"
SEPARATE_S = 0.002
"""Between two pieces, so that the gateway reads them apart."""

every_way = pytest.mark.parametrize("way", WAYS, ids=repr)
every_line_end = pytest.mark.parametrize("eol", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])


def with_line_ends(pieces: Iterable[bytes], eol: bytes) -> list[bytes]:
    return [piece.replace(b"\n", eol) for piece in pieces]


def cut(data: bytes, *offsets: int) -> list[bytes]:
    marks = [0, *sorted(offsets), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(marks) if end > start]


async def relayed(stage: Stage, way: Way, pieces: Sequence[bytes], **more: object) -> bytes:
    """What a client gets of an engine's pieces."""
    stage.engine_for(way).play = stream(*pieces, pause_s=SEPARATE_S)
    answer = await stage.ask(way.ask(**more))
    assert (answer.status, answer.whole) == (200, True)
    return answer.body


# -- cuts ------------------------------------------------------------------------------------------------------------


@every_way
async def test_text_cut_inside_its_characters_arrives_whole(stage: Stage, way: Way) -> None:
    sent = b"".join(way.stream(EURO, "!"))
    continuations = [at for at, byte in enumerate(sent) if byte & 0xC0 == 0x80]

    got = await relayed(stage, way, cut(sent, *continuations))

    assert got == sent
    assert way.text(got) == f"{EURO}!"


@every_line_end
async def test_a_cut_at_any_byte_changes_nothing(stage: Stage, eol: bytes) -> None:
    sent = b"".join(with_line_ends([event(delta("€ 🌍")), b": ping\n\n", event(delta(finish="stop")), DONE], eol))
    offsets = range(1, len(sent))
    before = await counts(stage.gateway, CHAT.model)

    async def cut_there(asked: Asked, wire: Wire) -> None:
        await stream(*cut(sent, int(asked.one("x-cut"))), pause_s=SEPARATE_S)(asked, wire)

    stage.first.play = cut_there
    answers: list[Answer] = []
    for start in range(0, len(offsets), 32):
        some = offsets[start : start + 32]
        answers += await asyncio.gather(*(stage.ask(CHAT.ask(f"X-Cut: {offset}")) for offset in some))

    assert {answer.body for answer in answers} == {sent}
    grown = await counts(stage.gateway, CHAT.model) - before
    assert (grown["output"], grown["completed"], grown["engine_failed"]) == (len(offsets), len(offsets), 0)


@every_line_end
async def test_a_stream_sent_a_byte_at_a_time_is_the_same_stream(stage: Stage, eol: bytes) -> None:
    sent = b"".join(with_line_ends(CHAT.stream(EURO), eol))

    async def drip(_asked: Asked, wire: Wire) -> None:
        await wire.head()
        for at in range(len(sent)):
            await wire.part(sent[at : at + 1])
        await wire.end()

    stage.first.play = drip
    answer = await stage.ask(CHAT.ask())

    assert (answer.body, answer.whole) == (sent, True)


@every_way
async def test_a_stream_sent_in_one_piece_is_the_same_stream(stage: Stage, way: Way) -> None:
    sent = b"".join(way.stream("one", "two", "three"))
    before = await counts(stage.gateway, way.model)

    got = await relayed(stage, way, [sent])

    assert got == sent
    assert (await counts(stage.gateway, way.model) - before)["completed"] == 1


@pytest.mark.parametrize("framing", ["length", "close"])
@every_way
async def test_the_engines_framing_does_not_show_in_the_bytes(stage: Stage, way: Way, framing: str) -> None:
    sent = b"".join(way.stream("one", "two"))

    async def framed(_asked: Asked, wire: Wire) -> None:
        if framing == "length":
            await wire.head(length=len(sent))
        else:
            await wire.head(version="HTTP/1.0")
        for piece in cut(sent, 7, len(sent) // 2):
            await wire.raw(piece)
            await asyncio.sleep(SEPARATE_S)

    stage.engine_for(way).play = framed
    answer = await stage.ask(way.ask())

    assert (answer.body, answer.whole) == (sent, True)


# -- line ends -------------------------------------------------------------------------------------------------------


@every_line_end
@every_way
async def test_each_event_is_passed_on_when_it_arrives(stage: Stage, way: Way, eol: bytes) -> None:
    events = with_line_ends(way.stream("crlf ", "works"), eol)
    opening = len(way.opening)
    go_on = asyncio.Event()

    async def one_by_one(_asked: Asked, wire: Wire) -> None:
        await wire.head()
        for piece in events[: opening + 1]:
            await wire.part(piece)
        await go_on.wait()
        for piece in events[opening + 1 :]:
            await wire.part(piece)
        await wire.end()

    stage.engine_for(way).play = one_by_one
    async with RawClient(stage.port) as client:
        await client.send(way.ask())
        head = await client.read_head()
        first = b""
        while b"crlf " not in first:
            first += await client.read_some()
        go_on.set()
        rest = first
        while not rest.endswith(b"0\r\n\r\n"):
            rest += await client.read_some()

    assert head.status == 200
    assert b"works" not in first
    assert b"works" in rest


@every_line_end
async def test_usage_finish_and_first_token_are_read_alike_with_every_line_end(stage: Stage, eol: bytes) -> None:
    usage = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}})
    pieces = with_line_ends([*CHAT.opening, event(delta("hi")), event(delta(finish="stop")), usage, DONE], eol)
    before = await counts(stage.gateway, CHAT.model)

    got = await relayed(stage, CHAT, pieces, stream_options={"include_usage": True})

    assert got == b"".join(pieces)
    grown = await counts(stage.gateway, CHAT.model) - before
    assert grown == {"prompt": 7, "output": 2, "completed": 1, "first_tokens": 1}


async def test_line_ends_may_be_mixed_within_a_stream(stage: Stage) -> None:
    pieces = [
        event(delta("a"), eol=b"\r\n"),
        event(delta("b")),
        event(delta("c"), eol=b"\r"),
        event(delta(finish="stop"), eol=b"\r\n"),
        b"data: [DONE]\r\n\n",
    ]

    assert await relayed(stage, CHAT, pieces) == b"".join(pieces)


async def test_a_last_event_without_its_empty_line_still_ends_the_stream(stage: Stage) -> None:
    pieces = [event(delta("a")), event(delta(finish="stop")), b"data: [DONE]\n"]

    assert await relayed(stage, CHAT, pieces) == b"".join(pieces)


# -- comments --------------------------------------------------------------------------------------------------------

COMMENTS = (b": PROCESSING\n\n", b":\n\n", b": ping - 1\n\n", b':{"choices": [\n\n', b": data: {broken\n\n")


@every_line_end
@every_way
async def test_comments_are_relayed_and_are_no_tokens(stage: Stage, way: Way, eol: bytes) -> None:
    tokens = [way.token("a"), b": glued\n" + way.token("b")]
    pieces = with_line_ends([*COMMENTS, *way.opening, *tokens, *COMMENTS, *way.ending, b": bye\n\n"], eol)
    before = await counts(stage.gateway, way.model)

    got = await relayed(stage, way, pieces)

    assert got == b"".join(pieces)
    assert way.text(got) == "ab"
    grown = await counts(stage.gateway, way.model) - before
    assert (grown["completed"], grown["engine_failed"]) == (1, 0)


async def test_comments_before_the_first_token_do_not_count_as_the_first_token(stage: Stage) -> None:
    async def slow_start(_asked: Asked, wire: Wire) -> None:
        await wire.head()
        for _ in range(3):
            await wire.part(b": PROCESSING\n\n")
            await asyncio.sleep(0.1)
        for piece in CHAT.stream("a"):
            await wire.part(piece)
        await wire.end()

    before = await stage.gateway.metrics()
    stage.first.play = slow_start
    await stage.ask(CHAT.ask())

    after = await stage.gateway.metrics()
    series = 'headrace_engine_ttft_seconds_sum{class="interactive",engine="e0"}'
    assert after[series] - before.get(series, 0.0) > 0.25


async def test_an_engine_that_only_sends_comments_is_timed_out(stage: Stage) -> None:
    """Comments keep connections alive; they are no progress. The stage's first_byte_s is 3 s."""

    async def comments_only(_asked: Asked, wire: Wire) -> None:
        await wire.head()
        while not wire.gone.is_set():
            await wire.part(b": ping\n")
            await asyncio.sleep(0.1)
            await wire.part(b"\n")

    stage.first.play = comments_only
    asked_s = time.monotonic()
    answer = await stage.ask(CHAT.ask())

    assert b"first_byte_s" in answer.body
    assert time.monotonic() - asked_s < 4.5


async def test_an_engine_that_prefixes_its_events_with_comments_is_not_timed_out(stage: Stage) -> None:
    async def prefixed(_asked: Asked, wire: Wire) -> None:
        await wire.head()
        for number in range(8):
            await wire.part(b": beat\n" + event(delta(str(number))))
            await asyncio.sleep(0.5)
        await wire.part(event(delta(finish="stop")) + DONE)
        await wire.end()

    stage.first.play = prefixed
    answer = await stage.ask(CHAT.ask())

    assert CHAT.text(answer.body) == "01234567"


# -- fields ----------------------------------------------------------------------------------------------------------


@every_line_end
async def test_every_field_form_is_relayed_and_read(stage: Stage, eol: bytes) -> None:
    chunk = orjson.dumps(delta("y"))
    middle = chunk.index(b'"choices"')
    pieces = with_line_ends(
        [
            b"retry: 3000\n\n",
            b"id: 7\nevent: message\ndata:" + orjson.dumps(delta("x")) + b"\n\n",
            b"data: " + chunk[:middle] + b"\ndata: " + chunk[middle:] + b"\n\n",
            b"unknown: field\nbare\ndata\n\n",
            b"data:\ndata: " + orjson.dumps(delta("z")) + b"\nid\n\n",
            b"data:" + orjson.dumps(delta(finish="stop")) + b"\n\n",
            b"data:[DONE]\n\n",
        ],
        eol,
    )
    before = await counts(stage.gateway, CHAT.model)

    got = await relayed(stage, CHAT, pieces)

    assert got == b"".join(pieces)
    grown = await counts(stage.gateway, CHAT.model) - before
    assert (grown["output"], grown["completed"]) == (3, 1)


async def test_a_byte_order_mark_is_relayed_and_hides_nothing(stage: Stage) -> None:
    pieces = [b"\xef\xbb\xbf" + event(delta("a")), event(delta(finish="stop")), DONE]
    before = await counts(stage.gateway, CHAT.model)

    got = await relayed(stage, CHAT, pieces)

    assert got == b"".join(pieces)
    assert (await counts(stage.gateway, CHAT.model) - before)["output"] == 1


async def test_text_that_looks_like_framing_is_text(stage: Stage) -> None:
    text = 'data: [DONE]\n\ndata: {"error": "no"}\r\n\r\n: x "quoted" \\ \u2028\u2029\u0085'

    got = await relayed(stage, CHAT, CHAT.stream(text, text))

    assert CHAT.text(got) == text * 2


# -- odd choices -----------------------------------------------------------------------------------------------------

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
ODD = {
    "empty": {"choices": [], "usage": USAGE},
    "missing": {"usage": USAGE},
    "null": {"choices": None, "usage": USAGE},
    "null_choice": {"choices": [None], "usage": USAGE},
    "null_delta": {"choices": [{"index": 0, "delta": None}], "usage": USAGE},
    "no_delta": {"choices": [{"index": 0}], "usage": USAGE},
    "object": {"choices": {}, "usage": USAGE},
}


@pytest.mark.parametrize("odd", ODD.values(), ids=list(ODD))
@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
async def test_a_usage_event_with_odd_choices_is_relayed_and_counted(
    stage: Stage, odd: dict[str, object], first: bool
) -> None:
    good = [event(delta("hi")), event(delta(finish="stop"))]
    pieces = [event(odd), *good, DONE] if first else [*good, event(odd), DONE]
    before = await counts(stage.gateway, CHAT.model)

    got = await relayed(stage, CHAT, pieces, stream_options={"include_usage": True})

    assert got == b"".join(pieces)
    grown = await counts(stage.gateway, CHAT.model) - before
    assert (grown["prompt"], grown["output"], grown["completed"]) == (7, 2, 1)
    assert "Traceback" not in stage.gateway.log


async def test_a_usage_event_that_only_the_gateway_asked_for_is_counted_and_taken_out(stage: Stage) -> None:
    good = [event(delta("hi")), event(delta(finish="stop"))]
    before = await counts(stage.gateway, CHAT.model)

    got = await relayed(stage, CHAT, [*good, event(ODD["empty"]), DONE])

    assert got == b"".join([*good, DONE])
    assert (await counts(stage.gateway, CHAT.model) - before)["prompt"] == 7


@pytest.mark.parametrize(
    "junk", [b"data: null\n\n", b"data: 3\n\n", b"data: []\n\n", b"data: {broken\n\n", b"data: \xff\n\n"]
)
async def test_an_event_that_is_no_object_is_relayed_and_breaks_nothing(stage: Stage, junk: bytes) -> None:
    pieces = [junk, event(delta("hi")), junk, event(delta(finish="stop")), DONE]
    before = await counts(stage.gateway, CHAT.model)

    got = await relayed(stage, CHAT, pieces)

    assert got == b"".join(pieces)
    grown = await counts(stage.gateway, CHAT.model) - before
    assert (grown["output"], grown["completed"]) == (1, 1)
    assert "Traceback" not in stage.gateway.log
