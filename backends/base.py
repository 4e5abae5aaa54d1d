"""The engine contract: call it, sample it, probe it. One file per kind of engine stands behind it.

The seam of the relay is here: engine framing never crosses it. A `Backend` takes an `EngineRequest` and answers
through a `Receiver` with a status, headers and *body bytes* (chunk framing and content coding already undone), in
callbacks, on the loop's thread, without a task per call. Backpressure goes the other way through the `Call`.

A missing, repeated or absurd signal is reported as such in the `Sample`: unknown is never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

Headers = Sequence[tuple[bytes, bytes]]
"""Header fields in order, names lower-case, repeated names kept."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What is sent to an engine. The adapter adds Host, framing and the engine's own credentials.

    target   path and query below the engine's base URL, e.g. b"/v1/chat/completions?x=1"
    headers  fields to pass on, names lower-case; hop-by-hop fields and the client's credentials already removed
    body     the exact bytes to send; b"" for none
    """

    method: bytes
    target: bytes
    headers: Headers
    body: bytes


class FailureKind(StrEnum):
    """Why a call broke before its framed end. One metric label each."""

    CONNECT_REFUSED = "connect_refused"
    CONNECT_TIMEOUT = "connect_timeout"
    NAME_UNRESOLVED = "name_unresolved"
    TLS = "tls"
    RESET = "reset"
    TRUNCATED = "truncated"
    BAD_RESPONSE = "bad_response"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A call that broke: `kind` says how, `detail` is for people and never holds a body, a key or a full URL.

    sent             some byte of the request may have reached the engine
    response_started at least one byte of a response arrived
    """

    kind: FailureKind
    detail: str
    sent: bool
    response_started: bool


class Receiver(Protocol):
    """Takes one reply, in callbacks: on_head, on_body*, then exactly one of on_end and on_failure.

    None may raise. After `Call.abort()` no further callback comes.
    """

    def on_head(self, status: int, headers: Headers) -> None:
        """The final status (1xx never shows) and end-to-end headers; hop-by-hop ones are removed."""
        ...

    def on_body(self, data: bytes) -> None:
        """Body bytes as they came off the wire, decoded; never empty."""
        ...

    def on_end(self) -> None:
        """The reply's framing ended properly."""
        ...

    def on_failure(self, failure: CallFailure) -> None:
        """The call broke; also for a body cut short of its framing."""
        ...


class Call(Protocol):
    """One call under way."""

    def pause(self) -> None:
        """Stop reading from the engine (its socket fills, it slows down). Idempotent."""
        ...

    def resume(self) -> None:
        """Read on. Idempotent."""
        ...

    def abort(self) -> None:
        """Close the connection at once, which makes the engine stop generating. Idempotent, safe after the end."""
        ...


class Priority(StrEnum):
    """How an engine reads a body's `priority` field, where it honours it at all."""

    LOWER_FIRST = "lower_first"
    HIGHER_FIRST = "higher_first"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What may be asked of an engine; the gateway edits a body only where one of these allows it.

    include_usage      understands stream_options.include_usage
    priority           the meaning of a body's `priority`; None: not honoured, never sent
    return_token_ids   understands return_token_ids (exact resume)
    """

    include_usage: bool = False
    priority: Priority | None = None
    return_token_ids: bool = False


class Signal(StrEnum):
    """What a sample can tell. The unit is in the name; counters end in _total.

    asleep        1 while the engine says that it has unloaded its weights, else 0
    server_load   requests that its web server holds, also those that the engine behind it has not seen
    gpu_slowed    1 while some GPU slows itself down to protect itself, else 0; at its power cap alone it is throttled only
    """

    RUNNING = "running"
    WAITING = "waiting"
    KV_USED_FRACTION = "kv_used_fraction"
    KV_CAPACITY_TOKENS = "kv_capacity_tokens"
    KV_BLOCK_TOKENS = "kv_block_tokens"
    SEATS = "seats"
    PREEMPTIONS_TOTAL = "preemptions_total"
    PROMPT_TOKENS_TOTAL = "prompt_tokens_total"
    GENERATION_TOKENS_TOTAL = "generation_tokens_total"
    PREFIX_QUERIES_TOTAL = "prefix_queries_total"
    PREFIX_HITS_TOTAL = "prefix_hits_total"
    START_TIME_S = "start_time_s"
    ASLEEP = "asleep"
    SERVER_LOAD = "server_load"
    REJECTED_TOTAL = "rejected_total"
    GPU_BUSY_FRACTION = "gpu_busy_fraction"
    GPU_POWER_FRACTION = "gpu_power_fraction"
    GPU_HEAT_MARGIN_C = "gpu_heat_margin_c"
    GPU_POWER_W = "gpu_power_w"
    GPU_TEMPERATURE_C = "gpu_temperature_c"
    GPU_MEMORY_FREE_BYTES = "gpu_memory_free_bytes"
    GPU_MEMORY_FREE_FRACTION = "gpu_memory_free_fraction"
    GPU_THROTTLED = "gpu_throttled"
    GPU_SLOWED = "gpu_slowed"
    GPU_ENERGY_J_TOTAL = "gpu_energy_j_total"


@dataclass(frozen=True, slots=True)
class Measured:
    """One value with its provenance: the metric name or route that it was read from.

    value is None when the source held something absurd (NaN, negative, a fraction above 1); source still names it.
    """

    value: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Sample:
    """What one poll of one engine said. A signal that is absent from `values` was not to be had.

    taken_s   monotonic time at which the reply arrived
    """

    taken_s: float
    values: Mapping[Signal, Measured] = field(default_factory=dict)

    def value(self, signal: Signal) -> float | None:
        """The signal's number, or None when it is unknown."""
        measured = self.values.get(signal)
        return None if measured is None else measured.value


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of an engine's model list: `raw` is the engine's own JSON object, kept for /v1/models.

    max_model_len is the context length in tokens; None when the engine does not say.
    """

    id: str
    raw: Mapping[str, object]
    max_model_len: int | None = None


class Unready(StrEnum):
    """How an engine showed that it cannot serve; it decides how soon that is believed."""

    SAYS_SO = "says_so"
    """It answered, and not as one that serves; or it broke its answer off."""
    REFUSED = "refused"
    """Nothing listens at its address."""
    SILENT = "silent"
    """No whole answer in time: it may be frozen or cut off, or only busy."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Who answers at this address and whether it can serve now.

    ready     the engine says that it can take work (health 200 and at least one model)
    detail    what was wrong, for people; "" when ready
    unready   how it is not ready; means nothing when it is
    """

    ready: bool
    models: tuple[ModelCard, ...] = ()
    version: str = ""
    detail: str = ""
    unready: Unready = Unready.SAYS_SO


class BackendError(Exception):
    """A sample or probe failed; the message names the engine, the route and what came instead of what was expected."""

    def __init__(self, message: str, unready: Unready = Unready.SAYS_SO) -> None:
        super().__init__(message)
        self.unready = unready


class Backend(Protocol):
    """One engine behind its adapter."""

    name: str
    kind: str
    capabilities: Capabilities

    def speaks(self, path: str) -> bool:
        """True when the engine serves this path natively (its dialect, not a translation)."""
        ...

    def call(self, request: EngineRequest, receiver: Receiver) -> Call:
        """Start a call; returns at once. All of the reply comes through `receiver`, never before this returns."""
        ...

    async def sample(self) -> Sample:
        """Read the engine's metrics once. Raises BackendError; bounded by the adapter's sample time-out."""
        ...

    async def probe(self) -> Probe:
        """Ask health, version and models once. An engine that does not answer is `ready=False`, not an error."""
        ...

    async def try_generation(self, within_s: float) -> str:
        """Have the engine make one token, as a client would; "" when it did, else what came instead. Raises nothing."""
        ...

    async def close(self) -> None:
        """Close pooled connections; calls under way are aborted."""
        ...


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine is and how to speak to it.

    base_url       scheme://host[:port][/prefix], without trailing slash and without /v1 (either form is accepted
                   from the operator and normalised by `gateway.settings`)
    api_key        sent as a bearer token to the engine; never logged
    connect_s      bound on name resolution + TCP + TLS
    idle_s         a pooled connection is not reused after this; below the 5 s of vLLM's server
    sample_s       bound on one sample or probe
    key_remedy     what to do where the engine wants another key, in the words of whoever is told
    """

    name: str
    base_url: str
    api_key: str | None = field(default=None, repr=False)
    connect_s: float = 5.0
    idle_s: float = 4.0
    sample_s: float = 5.0
    key_remedy: str = "check the engine's api_key"


UNSEEN = Sample(taken_s=-math.inf)
