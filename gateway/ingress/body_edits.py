"""The one list of edits that may be made to a client's body, as byte splices: never re-serialised.

    model             an alias becomes the name the engine knows
    stream_options    include_usage is asked for, so that tokens can be counted
    priority          the engine's own scheduling follows our class
    output limit      a work that cannot be in time is shortened, where its class says so (`on_infeasible: degrade`)
    return_token_ids  an exact resume needs them

Each is made only where the engine's adapter declares the capability, and what an edit adds to the answer is taken out
again before the client sees it. Everything outside the spliced members stays the client's bytes: number formats, key
order, white space, unknown fields.

The scanner (`backends.dialects.scan`) relies on the body being valid JSON with an object on top (`gateway.ingress.facts`
has parsed it), and then is exact. Of a key written twice (readers differ in which one counts) all are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import orjson

from backends.dialects.scan import members, skip_space
from gateway.ingress.multipart import renamed

_OBJECT = re.compile(rb"[ \t\r\n]*\{")
LIMIT_FIELDS = frozenset({"max_completion_tokens", "max_tokens", "max_output_tokens"})
"""Top-level members by which the dialects limit an answer; TGI's native routes nest theirs, and keep it."""
_MERGED = frozenset({"stream_options"})


def edited(
    body: bytes,
    *,
    model: str | None = None,
    include_usage: bool = False,
    priority: int | None = None,
    return_token_ids: bool = False,
    output_limit: int | None = None,
    limit_field: str = "max_tokens",
) -> bytes:
    """The body with the edits that are asked for; None and False ask for nothing.

    output_limit   replaces every limit that the client wrote; limit_field is written where it wrote none
    Of a multipart body only the model can be edited. Anything else that is no JSON object stays as it is.
    """
    if not _OBJECT.match(body):
        return body if model is None else renamed(body, model)
    edits: dict[str, bytes] = {}
    if model is not None:
        edits["model"] = orjson.dumps(model)
    if include_usage:
        edits["stream_options"] = b'{"include_usage":true}'
    if priority is not None:
        edits["priority"] = b"%d" % priority
    if return_token_ids:
        edits["return_token_ids"] = b"true"
    if output_limit is not None:
        written = {key for key, _, _ in members(body)} & LIMIT_FIELDS
        edits.update(dict.fromkeys(sorted(written) or [limit_field], b"%d" % output_limit))
    return splice(body, edits)


def splice(body: bytes, edits: Mapping[str, bytes]) -> bytes:
    """Replace top-level members, or insert those that are absent. Values are JSON text.

    An edit of "stream_options" whose value is an object is merged into the client's object, member by member.
    """
    if not edits:
        return body
    if not any(_may_hold(body, key) for key in edits):
        return _inserted(body, edits)
    spans: list[tuple[int, int, bytes]] = []
    absent = dict(edits)
    for key, start, end in members(body):
        if key in edits:
            absent.pop(key, None)
            spans.append((start, end, _merged(body[start:end], edits[key]) if key in _MERGED else edits[key]))
    pieces: list[bytes] = []
    at = 0
    for start, end, value in spans:
        pieces += (body[at:start], value)
        at = end
    pieces.append(body[at:])
    return _inserted(b"".join(pieces), absent)


def _may_hold(body: bytes, key: str) -> bool:
    """False when the key certainly is not there. An escape may hide one."""
    return b'"%b"' % key.encode() in body or b"\\u" in body


def _inserted(body: bytes, edits: Mapping[str, bytes]) -> bytes:
    """Put members before the closing brace of the top-level object."""
    if not edits:
        return body
    end = body.rindex(b"}")
    empty = skip_space(body, body.index(b"{") + 1) == end
    added = b",".join(b"%b:%b" % (orjson.dumps(key), value) for key, value in edits.items())
    return b"%b%b%b%b" % (body[:end], b"" if empty else b",", added, body[end:])


def _merged(old: bytes, new: bytes) -> bytes:
    """Members of the object `new` put into the object `old`; null counts as absent, nonsense stays the engine's."""
    if old == b"null":
        return new
    if not old.startswith(b"{"):
        return old
    return splice(old, {key: new[start:end] for key, start, end in members(new)})
