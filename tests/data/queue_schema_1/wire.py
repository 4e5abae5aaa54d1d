"""How works, reports and credits look inside Redis, and back again.

A work travels as one JSON object of the fields that differ from their defaults. What scripts change stands in the
record's state line instead: rank, attempt and the engines to avoid. Members, fields and columns that are not known are
ignored and missing members take their default, so that N and N+1 read each other; no script rewrites the JSON, so
that what N+1 wrote is still there when N hands the work on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import orjson

from gateway.queue.base import Claimed, Credit, InFlight, Outstanding, Place, SessionReport
from policies.vocabulary import BodyAt, Grant, Work
from tests.data.queue_schema_1.keys import encoded, rank_of, session_from

BODY_LETTERS = {BodyAt.OWNER: "o", BodyAt.BLOB: "b"}


def queue_part(work: Work) -> str:
    """The class and tenant of a work as scripts know them."""
    return f"{encoded(work.class_name)}/{encoded(work.tenant)}"


def pack_work(work: Work) -> bytes:
    """The JSON half of a work's record."""
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
    if work.pinned_engine is not None:
        fields["pinned_engine"] = work.pinned_engine
    return orjson.dumps(fields)


def pack_avoid(work: Work) -> str:
    """The engines to avoid as the state line holds them."""
    return ",".join(encoded(engine) for engine in sorted(work.avoid))


def unpack_work(work_id: str, record: bytes) -> Work:
    """A work from its whole record: state line, newline, JSON."""
    line, _, text = record.partition(b"\n")
    _, _, attempt, body, _, rank, _, _, _, _, avoid, *_ = line.split(b"\t")
    fields: dict[str, Any] = orjson.loads(text)
    get = fields.get
    return Work(
        id=work_id,
        class_name=fields["class"],
        tenant=fields["tenant"],
        model=fields["model"],
        path=fields["path"],
        accepted_s=fields["accepted_s"],
        rank=rank_of(rank),
        prompt_tokens=get("prompt_tokens", 0),
        max_tokens=get("max_tokens"),
        sequences=get("sequences", 1),
        deadline_s=get("deadline_s"),
        attempt=int(attempt),
        body=BodyAt.BLOB if body == b"b" else BodyAt.OWNER,
        pinned_engine=get("pinned_engine"),
        avoid=frozenset(map(unquote, avoid.decode().split(","))) if avoid else frozenset(),
    )


def unpack_outstanding(work_id: str, record: bytes) -> Outstanding:
    """A granted work with its grant, from its whole record."""
    line, _, _ = record.partition(b"\n")
    _, owner, attempt, _, _, _, epoch, engine, expires_ms, seq, *_ = line.decode().split("\t")
    grant = Grant(work_id, unquote(engine), int(epoch), int(attempt), int(expires_ms) / 1000)
    return Outstanding(unpack_work(work_id, record), grant, Claimed(session_from(owner), int(seq)))


def pack_report(report: SessionReport) -> bytes:
    """A session's report as JSON."""
    return orjson.dumps(
        {
            "in_flight": _rows(report.in_flight),
            "started": _rows(report.started),
            "grants_seq": report.grants_seq,
        }
    )


def unpack_report(text: bytes) -> SessionReport:
    """The report of `pack_report`."""
    fields: dict[str, Any] = orjson.loads(text)
    return SessionReport(
        _sums(fields.get("in_flight", ())), _sums(fields.get("started", ())), fields.get("grants_seq", 0)
    )


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
