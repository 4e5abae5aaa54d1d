"""How works, reports and credits look inside Redis, and back again.

A work travels as one JSON object of the fields that differ from their defaults. What scripts change stands in the
record's state line instead: rank, attempt and the engines to avoid. Members, fields and columns that are not known are
ignored and missing members take their default, so that N and N+1 read each other; no script rewrites the JSON, so
that what N+1 wrote is still there when N hands the work on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any
from urllib.parse import unquote

import orjson

from gateway.queue.base import (
    Answered,
    Began,
    Claimed,
    Credit,
    Ended,
    Grew,
    InFlight,
    Outstanding,
    Place,
    SessionReport,
    Told,
    Vitals,
)
from gateway.queue.keys import encoded, rank_of, session_from
from policies.vocabulary import BodyAt, Grant, Outcome, Result, Work

_VITALS = attrgetter("served", "failed", "draining", "moved_ms", "waiting_ms")
BODY_LETTERS = {BodyAt.OWNER: "o", BodyAt.BLOB: "b"}


def queue_part(work: Work) -> str:
    """The class and tenant of a work as scripts know them."""
    return f"{encoded(work.class_name)}/{encoded(work.tenant)}"


def pack_work(work: Work) -> bytes:
    """The JSON half of a work's record."""
    return orjson.dumps(_fields(work))


def _fields(work: Work) -> dict[str, object]:
    fields: dict[str, object] = {
        "class": work.class_name,
        "tenant": work.tenant,
        "model": work.model,
        "path": work.path,
        "accepted_s": work.accepted_s,
        "prompt_tokens": work.prompt_tokens,
    }
    if work.max_tokens is not None:
        fields["max_tokens"] = work.max_tokens
    if work.sequences != 1:
        fields["sequences"] = work.sequences
    if work.deadline_s is not None:
        fields["deadline_s"] = work.deadline_s
    if work.finish_by_s is not None:
        fields["finish_by_s"] = work.finish_by_s
    if work.pinned_engine is not None:
        fields["pinned_engine"] = work.pinned_engine
    if work.prefix:
        fields["prefix"] = work.prefix
    if not work.streams:
        fields["whole"] = True
    return fields


def pack_avoid(work: Work) -> str:
    """The engines to avoid as the state line holds them."""
    return ",".join(encoded(engine) for engine in sorted(work.avoid))


def owner_in(record: bytes) -> str:
    """The session part of a work's owner, from its whole record; "" for nobody."""
    return record.split(b"\t", 2)[1].decode()


def unpack_work(work_id: str, record: bytes) -> Work:
    """A work from its whole record: state line, newline, JSON."""
    line, _, text = record.partition(b"\n")
    _, _, attempt, body, _, rank, _, _, _, _, avoid, *_ = line.split(b"\t")
    return _work(
        work_id,
        orjson.loads(text),
        rank=rank_of(rank),
        attempt=int(attempt),
        body=BodyAt.BLOB if body == b"b" else BodyAt.OWNER,
        avoid=frozenset(map(unquote, avoid.decode().split(","))) if avoid else frozenset(),
    )


def _work(work_id: str, fields: Mapping[str, Any], *, rank: float, **changed: Any) -> Work:
    """A work from what its JSON says, and from what the state line says."""
    get = fields.get
    return Work(
        id=work_id,
        class_name=fields["class"],
        tenant=fields["tenant"],
        model=fields["model"],
        path=fields["path"],
        accepted_s=fields["accepted_s"],
        rank=rank,
        prompt_tokens=get("prompt_tokens", 0),
        max_tokens=get("max_tokens"),
        sequences=get("sequences", 1),
        deadline_s=get("deadline_s"),
        finish_by_s=get("finish_by_s"),
        pinned_engine=get("pinned_engine"),
        prefix=get("prefix", ""),
        streams=not get("whole", False),
        **changed,
    )


def unpack_outstanding(work_id: str, record: bytes) -> Outstanding:
    """A granted work with its grant, from its whole record."""
    line, _, _ = record.partition(b"\n")
    _, owner, attempt, _, _, _, epoch, engine, expires_ms, seq, *_ = line.decode().split("\t")
    grant = Grant(work_id, unquote(engine), int(epoch), int(attempt), int(expires_ms) / 1000)
    return Outstanding(unpack_work(work_id, record), grant, Claimed(session_from(owner), int(seq)))


def pack_report(report: SessionReport) -> bytes:
    """A session's report as JSON."""
    fields: dict[str, object] = {
        "in_flight": _rows(report.in_flight),
        "started": _rows(report.started),
        "grants_seq": report.grants_seq,
        "vitals": [[engine, *_VITALS(one)] for engine, one in report.vitals.items()],
    }
    if not report.serves:
        fields["serves"] = False
    if report.floors:
        fields["floors"] = [[*place, works] for place, works in report.floors.items()]
    return orjson.dumps(fields)


def unpack_report(text: bytes) -> SessionReport:
    """The report of `pack_report`."""
    fields: dict[str, Any] = orjson.loads(text)
    return SessionReport(
        _sums(fields.get("in_flight", ())),
        _sums(fields.get("started", ())),
        fields.get("grants_seq", 0),
        {engine: Vitals(*counts[:5]) for engine, *counts in fields.get("vitals", ())},
        serves=fields.get("serves", True),
        floors={(engine, class_name): works for engine, class_name, works in fields.get("floors", ())},
    )


def pack_events(events: Sequence[Told]) -> bytes:
    """A renewal's events as JSON: the first one's number, and a row an event."""
    return orjson.dumps([events[0].number, [_row(told) for told in events]])


def unpack_events(text: bytes) -> tuple[Told, ...]:
    """Those of `pack_events`; a kind that is not known has its number and is left out."""
    first, rows = orjson.loads(text)[:2]
    found = ((number, row[1], _event(row)) for number, row in enumerate(rows, first))
    return tuple(Told(number, at_ms, event) for number, at_ms, event in found if event is not None)


def _row(told: Told) -> list[object]:
    event = told.event
    match event:
        case Began():
            fields = _fields(event.work)
            return [
                "b",
                told.at_ms,
                event.engine,
                event.attempt,
                event.shown_tokens,
                event.prefilled,
                event.work.id,
                fields,
            ]
        case Answered():
            return ["a", told.at_ms, event.began, event.engine_ttft_s]
        case Grew():
            return ["g", told.at_ms, event.up_to, [number for pair in event.shown for number in pair]]
        case Ended():
            return ["e", told.at_ms, event.began, None if event.outcome is None else _outcome_row(event.outcome)]


def _event(row: list[Any]) -> Began | Answered | Grew | Ended | None:
    match row:
        case ["b", _, engine, attempt, shown, prefilled, work_id, fields, *_]:
            return Began(_work(work_id, fields, rank=0.0, attempt=attempt - 1), engine, attempt, shown, bool(prefilled))
        case ["a", _, began, ttft_s, *_]:
            return Answered(began, ttft_s)
        case ["g", _, up_to, shown, *_]:
            return Grew(up_to, tuple(zip(shown[::2], shown[1::2], strict=True)))
        case ["e", _, began, outcome, *_]:
            return Ended(began, None if outcome is None else _outcome(*outcome[:11]))
    return None


def _outcome_row(one: Outcome) -> list[object]:
    row: list[object] = [one.result, one.reason, one.status, one.attempts, one.prompt_tokens, one.output_tokens]
    return [*row, one.total_s, one.queued_s, one.ttft_s, one.engine_ttft_s, one.cached_tokens]


def _outcome(result: str, *columns: Any) -> Outcome:
    return Outcome("", "", "", "", "", Result(result), *columns)


def pack_credits(credits: Mapping[Place, Credit]) -> bytes:
    """A session's credits as JSON rows."""
    return orjson.dumps(
        [
            [*place, one.allowed.works, one.allowed.kv_tokens, one.allowed.prefill_tokens, one.share, one.expires_ms]
            for place, one in credits.items()
        ]
    )


def unpack_credits(given: bytes, now_ms: int) -> dict[Place, Credit]:
    """Those of `pack_credits` that have not expired, from a whole value: line of when they were given, newline, JSON."""
    text = given.partition(b"\n")[2]
    return {
        (engine, class_name): Credit(InFlight(works, kv_tokens, prefill_tokens), share, expires_ms)
        for engine, class_name, works, kv_tokens, prefill_tokens, share, expires_ms, *_ in orjson.loads(text or b"[]")
        if expires_ms > now_ms
    }


def _rows(sums: Mapping[Place, InFlight]) -> list[tuple[str, str, int, int, int]]:
    return [(*place, one.works, one.kv_tokens, one.prefill_tokens) for place, one in sums.items()]


def _sums(rows: Iterable[list[Any]]) -> dict[Place, InFlight]:
    return {(row[0], row[1]): InFlight(row[2], row[3], row[4]) for row in rows}
