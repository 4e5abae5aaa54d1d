"""In front of the service: a request with an Idempotency-Key runs once; its repetition gets the first one's answer.

    same key, still running            409, with Retry-After: ask again
    same key, answered                 the first answer as it was, with `idempotent-replayed: true`
    same key, another request          422: a key names one request
    same key, answered but not kept    409: the answer was too long, or too many were kept

Only answers of 2xx are kept. A request that failed, or whose client left before the end (which ends its run), leaves the
key free: then nothing was done that a repetition would do twice. Keys count by tenant. After Stripe's rules and the IETF's
draft; OpenAI's clients repeat after a 409.

When the store does not answer the request runs as if it had no key, and `x-headrace-idempotency: unavailable` says so: a
client that asks for more care must not get less service.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence

import orjson

from gateway.clock import Clock
from gateway.errors import Refusal
from gateway.exchange import Downstream, Exchange
from gateway.idempotency.answers import LEASE_S, Answers, AnswersUnavailable
from gateway.ingress.server import Service
from gateway.instruments import IDEMPOTENT
from gateway.logs import Log
from gateway.telemetry import Telemetry

HEADER = "idempotency-key"
KEY_MAX_CHARS = 255
ANSWER_MAX_BYTES = 256 * 1024
KEPT_MAX_BYTES = 64 * 1024 * 1024
"""Answers that one process keeps in the store over one lifetime; more are not kept."""
RETRY_AFTER_S = 1.0

_OWN_HEADERS = frozenset({"x-request-id", "date", "server", "connection", "content-length", "transfer-encoding"})
_NOT_KEPT = b"null"

Pair = tuple[str, str]


class Idempotent:
    """See the module header. Serves exchanges as `Service` does; those without a key pass straight on."""

    def __init__(
        self,
        service: Service,
        answers: Answers,
        *,
        keep_s: float,
        name: str,
        clock: Clock,
        telemetry: Telemetry,
        log: Log,
    ) -> None:
        """keep_s: how long an answer is kept; 0 leaves the header unread. name: unique among processes."""
        self._service = service
        self._answers = answers
        self._keep_s = keep_s
        self._clock = clock
        self._telemetry = telemetry
        self._log = log
        self._tokens = (f"{name}-{number:x}" for number in itertools.count(1))
        self._running: dict[str, bytes] = {}
        self._to_end: deque[tuple[str, bytes, bytes]] = deque()
        self._ended = asyncio.Event()
        self._kept: deque[tuple[float, int]] = deque()
        self._kept_bytes = 0

    async def serve(self, exchange: Exchange) -> None:
        """Answer an exchange, by running it or from memory."""
        key = exchange.rule_headers.get(HEADER)
        if key is None or not self._keep_s or exchange.method != b"POST":
            await self._service.serve(exchange)
            return
        if not 0 < len(key) <= KEY_MAX_CHARS or not key.isprintable():
            raise Refusal(
                400, f"Idempotency-Key must have 1 to {KEY_MAX_CHARS} printable characters", reason="invalid_key"
            )
        digest, fingerprint = _digest(exchange.tenant, key), _fingerprint(exchange)
        record = b"r\t%b\t%b" % (next(self._tokens).encode(), fingerprint)
        try:
            found = await self._answers.begin(digest, record)
        except AnswersUnavailable as error:
            self._log.warning("idempotency unavailable", reason=str(error), repeat_key="idempotency unavailable")
            self._telemetry.add(IDEMPOTENT, 1, "unavailable")
            exchange.response_headers.append(("x-headrace-idempotency", "unavailable"))
            await self._service.serve(exchange)
            return
        if found is None:
            await self._first(exchange, digest, record, fingerprint)
        else:
            self._again(exchange, found, fingerprint)

    async def run(self) -> None:
        """Renew the leases of what runs and write what ended without its handler, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LEASE_S / 3):
                    await self._ended.wait()
            except TimeoutError:
                pass
            self._ended.clear()
            try:
                await self._write_ended()
                for digest, record in list(self._running.items()):
                    await self._answers.replace(digest, record, record, LEASE_S)
            except AnswersUnavailable:
                continue

    def __repr__(self) -> str:
        return f"<Idempotent running={len(self._running)} to end={len(self._to_end)} kept={self._kept_bytes} bytes>"

    async def _write_ended(self) -> None:
        """Write what became of the requests that ended. Raises AnswersUnavailable; what is left is tried again."""
        while self._to_end:
            digest, record, answer = ended = self._to_end.popleft()
            try:
                await self._answers.replace(digest, record, answer, self._keep_s)
            except AnswersUnavailable:
                self._to_end.append(ended)
                raise
            except BaseException:
                self._to_end.append(ended)
                self._ended.set()  # `run` may have looked meanwhile, and found nothing to write
                raise

    async def _first(self, exchange: Exchange, digest: str, record: bytes, fingerprint: bytes) -> None:
        self._telemetry.add(IDEMPOTENT, 1, "first")
        heard = exchange.downstream = _Heard(exchange.downstream)
        self._running[digest] = record
        try:
            await self._service.serve(exchange)
        finally:
            # The handler may be cancelled here, since the client is gone: then `run` writes what it can no longer.
            del self._running[digest]
            answer = b"" if exchange.failed else self._kept_answer(heard, fingerprint)
            self._to_end.append((digest, record, answer))
            self._ended.set()
        with contextlib.suppress(AnswersUnavailable):
            await self._write_ended()  # before this connection's next request, which may be a repetition

    def _again(self, exchange: Exchange, found: bytes, fingerprint: bytes) -> None:
        state, _, rest = found.partition(b"\t")
        if state == b"r":
            if rest.rpartition(b"\t")[2] != fingerprint:
                raise self._reused()
            self._telemetry.add(IDEMPOTENT, 1, "running")
            raise Refusal(
                409,
                "a request with this Idempotency-Key is running: ask again for its answer",
                reason="idempotency_key_in_use",
                retry_after_s=RETRY_AFTER_S,
            )
        of, _, answer = rest.partition(b"\t")
        if of != fingerprint:
            raise self._reused()
        head, _, body = answer.partition(b"\n")
        if head == _NOT_KEPT:
            self._telemetry.add(IDEMPOTENT, 1, "not_kept")
            raise Refusal(
                409,
                "the request with this Idempotency-Key was answered, and its answer was too large to be kept; use a new key",
                reason="idempotency_answer_not_kept",
                headers=(("x-should-retry", "false"),),
            )
        self._telemetry.add(IDEMPOTENT, 1, "replayed")
        status, headers = orjson.loads(head)
        own = {name for name, _ in exchange.response_headers}
        shown = [(name, value) for name, value in headers if name not in own]
        exchange.downstream.start(
            status, [*shown, ("idempotent-replayed", "true"), *exchange.response_headers], content_length=len(body)
        )
        if body:
            exchange.downstream.write(body)
        exchange.downstream.finish()

    def _reused(self) -> Refusal:
        self._telemetry.add(IDEMPOTENT, 1, "reused")
        return Refusal(
            422,
            "this Idempotency-Key was used for another request: use a new key for each request",
            reason="idempotency_key_reused",
        )

    def _kept_answer(self, heard: _Heard, fingerprint: bytes) -> bytes:
        """The record of an answer; b"" for one that leaves the key free."""
        if not heard.ended or not 200 <= heard.status < 300:
            return b""
        head = orjson.dumps([heard.status, [pair for pair in heard.headers if pair[0] not in _OWN_HEADERS]])
        body = b"".join(heard.pieces)
        if heard.too_long or not self._may_keep(len(head) + len(body)):
            head, body = _NOT_KEPT, b""
        return b"d\t%b\t%b\n%b" % (fingerprint, head, body)

    def _may_keep(self, size: int) -> bool:
        now_s = self._clock.now_s()
        while self._kept and self._kept[0][0] <= now_s - self._keep_s:
            self._kept_bytes -= self._kept.popleft()[1]
        if self._kept_bytes + size > KEPT_MAX_BYTES:
            return False
        self._kept.append((now_s, size))
        self._kept_bytes += size
        return True


class _Heard:
    """A client's way back that also remembers what went over it.

    ended   the answer was finished properly
    """

    __slots__ = ("_inner", "_left_bytes", "ended", "headers", "pieces", "status", "too_long")

    def __init__(self, inner: Downstream) -> None:
        self._inner = inner
        self._left_bytes = ANSWER_MAX_BYTES
        self.ended = False
        self.status = 0
        self.headers: list[Pair] = []
        self.pieces: list[bytes] = []
        self.too_long = False

    @property
    def started(self) -> bool:
        return self._inner.started

    @property
    def gone(self) -> bool:
        return self._inner.gone

    @property
    def unsent_bytes(self) -> int:
        return self._inner.unsent_bytes

    def start(self, status: int, headers: Sequence[Pair], *, content_length: int | None = None) -> None:
        self.status, self.headers = status, list(headers)
        self._inner.start(status, headers, content_length=content_length)

    def write(self, data: bytes) -> None:
        self._inner.write(data)
        self._left_bytes -= len(data)
        if self._left_bytes >= 0:
            self.pieces.append(data)
        else:
            self.too_long = True
            self.pieces.clear()

    def finish(self) -> None:
        self.ended = True
        self._inner.finish()

    def abort(self) -> None:
        self._inner.abort()

    def watch(
        self, *, on_pause: Callable[[], None], on_resume: Callable[[], None], on_gone: Callable[[], None]
    ) -> None:
        self._inner.watch(on_pause=on_pause, on_resume=on_resume, on_gone=on_gone)


def _digest(tenant: str, key: str) -> str:
    """One digest for a tenant's key; lengths go in, so that no two pairs are alike."""
    name = tenant.encode()
    return hashlib.sha256(b"%d:%b%b" % (len(name), name, key.encode("utf-8", "surrogatepass"))).hexdigest()


def _fingerprint(exchange: Exchange) -> bytes:
    """What a key names: route and body, to the byte."""
    return hashlib.sha256(b"%b\n%b" % (exchange.target, exchange.body)).hexdigest().encode()
