"""One client's request in our hands: what ingress learned of it, and the way back to the client.

Ingress makes an `Exchange` and hands it to `gateway.dispatch.service`; nothing else of HTTP's server side goes
further in. The body stays the client's bytes. `Facts` are the few fields that ingress reads out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from backends.base import Headers
from gateway.errors import Dialect


class Downstream(Protocol):
    """The way back to one client. Two forms stand behind it (StreamResponse and bare transport), one suite for both.

    All methods are synchronous and never raise: writing to a client that is gone is a no-op, and `on_gone` has
    told so. Bytes are on the wire in the order they were written; there is no buffering beyond the transport's.
    """

    @property
    def started(self) -> bool:
        """True once a status line was written: from then on an error can only be an event."""
        ...

    @property
    def gone(self) -> bool:
        """True once the client's connection is lost."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """Bytes written that the client has not taken, as far as can be told: while its buffer is full, it moves as it reads."""
        ...

    def start(self, status: int, headers: Sequence[tuple[str, str]], *, content_length: int | None = None) -> None:
        """Write the head. Without a content_length the body is chunked (or ends with the connection on HTTP/1.0).

        Date, Server, Connection and framing headers are the form's own; `headers` must not hold them.
        """
        ...

    def write(self, data: bytes) -> None:
        """Write body bytes; never empty."""
        ...

    def finish(self) -> None:
        """End the body properly; the connection may serve another request."""
        ...

    def abort(self) -> None:
        """End without the framing's end, so that the client sees a truncated transfer."""
        ...

    def watch(
        self, *, on_pause: Callable[[], None], on_resume: Callable[[], None], on_gone: Callable[[], None]
    ) -> None:
        """Set the three callbacks: the client's buffer is full, has drained, the client is gone. Each may repeat.

        Calls on_gone at once when the client is gone already, and on_pause when its buffer is full already.
        """
        ...


@dataclass(frozen=True, slots=True)
class Facts:
    """The few fields that the gateway reads of a body. Everything else passes through unread.

    stream           the client asked for server-sent events
    wants_usage      the client itself asked for stream_options.include_usage
    prompt_tokens    estimate over all prompts, >= 0
    max_tokens       output limit per sequence (max_completion_tokens or max_tokens or max_new_tokens), None if absent
    inputs           prompts, texts or documents in the request's array of them; 1 without one
    copies           n or best_of, >= 1
    sequences        inputs x copies, >= 1
    service_tier     the OpenAI field; "" if absent
    """

    model: str
    stream: bool = False
    wants_usage: bool = False
    prompt_tokens: int = 0
    max_tokens: int | None = None
    inputs: int = 1
    copies: int = 1
    sequences: int = 1
    service_tier: str = ""
    previous_response_id: str | None = None


@dataclass(slots=True)
class Exchange:
    """See the module header.

    path             normalised engine path (no gateway mount, no trailing or doubled slash), e.g. "/v1/rerank"
    target           what goes on the request line to the engine: path and query
    headers          fields to pass on: allow-listed, lower-case, no credentials, nothing hop-by-hop
    rule_headers     all request headers a classify rule may look at, lower-case, credentials removed
    key_id           short public id of the API key used; "" without keys
    max_class        highest class the key may use ("" = any), for classify
    accepted_s       monotonic time at which the request was whole and accepted
    failed           an error went out instead of an answer, or at its end
    read_timeout_s   how long the client says it waits (x-stainless-read-timeout, x-headrace-timeout-s); None: unknown
    """

    request_id: str
    method: bytes
    path: str
    target: bytes
    dialect: Dialect
    headers: Headers
    body: bytes
    facts: Facts
    tenant: str
    downstream: Downstream
    accepted_s: float
    key_id: str = ""
    max_class: str = ""
    rule_headers: dict[str, str] = field(default_factory=dict)
    read_timeout_s: float | None = None
    response_headers: list[tuple[str, str]] = field(default_factory=list)
    failed: bool = False
