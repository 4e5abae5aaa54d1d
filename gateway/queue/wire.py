"""How works and reports look inside Redis, and back again.

A work travels as one JSON object of the fields that differ from their defaults. Its rank and attempt stand in the
record's state line instead, because scripts change them. Unknown members are ignored and missing ones take their
default, so that N and N+1 read each other's works.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from gateway.queue.base import InFlight, SessionReport
from gateway.queue.keys import encoded, rank_of
from policies.vocabulary import BodyAt, Work

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
    if work.avoid:
        fields["avoid"] = sorted(work.avoid)
    return orjson.dumps(fields)


def unpack_work(work_id: str, record: bytes) -> Work:
    """A work from its whole record: state line, newline, JSON."""
    line, _, text = record.partition(b"\n")
    _, _, attempt, body, _, rank, _ = line.split(b"\t", 6)
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
        avoid=frozenset(get("avoid", ())),
    )


def pack_report(report: SessionReport) -> bytes:
    """A session's sums as JSON rows."""
    return orjson.dumps(
        [
            [engine, class_name, sums.works, sums.kv_tokens, sums.prefill_tokens]
            for (engine, class_name), sums in report.items()
        ]
    )


def unpack_report(text: bytes) -> SessionReport:
    """The sums of `pack_report`; further columns of a newer release are ignored."""
    rows: Iterable[list[Any]] = orjson.loads(text)
    return {(row[0], row[1]): InFlight(row[2], row[3], row[4]) for row in rows}
