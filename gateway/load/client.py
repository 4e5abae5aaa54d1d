"""One request of a load: written from prepared bytes, read in callbacks, timed from when it was due.

It stands on the gateway's own engine client and stream readers, so that a chunk costs three byte comparisons and a
request no task. Times count from `due_s`: a generator that is late, as one without a free connection or a free core is,
does not hide the wait of those who should have been sent (coordinated omission). How late it was is told apart.

What ends a request other than well has a stable word for a kind: `http_429`, a broken connection's kind, `error_event`
for an error inside a 200, `unfinished` for a stream that ended without saying so, `timeout`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import orjson

from backends.base import Call, CallFailure, EngineAddress, EngineRequest, Headers
from backends.connection import EnginePool
from backends.dialects import open_reader, read_error, read_reply
from backends.sse import EventSplitter
from gateway.load.text import prompt_of_beginnings, prompt_text
from gateway.replay.trace import Request

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
PATHS: Final = (CHAT, COMPLETIONS)
LOOK_EVERY_S: Final = 0.5
KEPT_BODY_BYTES: Final = 64 * 1024
KEY_REMEDY: Final = "give its API key with --key-env NAME"
"""To whoever named the server on the command line, where it wants another key."""
RETRY_MAX_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what they look like.

    path         CHAT or COMPLETIONS
    stream       whole answers have no first token and no gaps
    ignore_eos   ask for answers of exactly the length wanted; servers other than inference engines may refuse the field
    headers      added to every request
    keys         tenant -> API key; "" for tenants without one of their own
    timeout_s    of one request, from when it was due
    """

    url: str
    model: str
    path: str = CHAT
    stream: bool = True
    ignore_eos: bool = True
    headers: Headers = ()
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 600.0


class Watch(Protocol):
    """Told of the requests of one class as they go. Called on the loop's thread; must not raise."""

    def start(self) -> None:
        """A request left."""
        ...

    def first_token(self, ttft_s: float) -> None:
        """Its first token came, so long after it was due."""
        ...

    def tokens(self, count: int, gap_s: float | None) -> None:
        """Tokens came in one read; gap_s since those before, None for the first."""
        ...

    def ended(self, exchange: Exchange) -> None:
        """It is over, however."""
        ...


class Exchange:
    """One request under way and, once `on_end` is called, what became of it. Times are the client's clock.

    tokens        output tokens: from usage where the server told it, else as counted
    prompt_tokens likewise; as asked for where the server did not tell
    failure       "" for a whole answer; detail is for people
    retry_after_s what a refusal asked for
    marks         when so many tokens were there, where that was asked for
    """

    __slots__ = (
        "_call",
        "_client",
        "_kept",
        "_on_end",
        "_reader",
        "_splitter",
        "_watch",
        "detail",
        "due_s",
        "end_s",
        "ended",
        "failure",
        "first_s",
        "last_s",
        "marks",
        "number",
        "prompt_tokens",
        "request",
        "retry_after_s",
        "sent_s",
        "status",
        "tokens",
    )

    def __init__(
        self,
        client: Client,
        request: Request,
        due_s: float,
        *,
        number: int,
        watch: Watch,
        on_end: Callable[[Exchange], None] | None,
        marked: bool,
    ) -> None:
        self.request = request
        self.due_s = due_s
        self.number = number
        self.sent_s = client.clock()
        self.first_s: float | None = None
        self.last_s = self.end_s = self.sent_s
        self.tokens = 0
        self.prompt_tokens = request.prompt_tokens
        self.status = 0
        self.failure = self.detail = ""
        self.retry_after_s: float | None = None
        self.ended = False
        self.marks: list[tuple[float, int]] | None = [] if marked else None
        self._client = client
        self._watch = watch
        self._on_end = on_end
        self._reader = open_reader("openai", client.target.path, sequences=1, strip_usage=False)
        self._splitter = EventSplitter()
        self._kept = bytearray()
        self._call: Call | None = None

    @property
    def ttft_s(self) -> float | None:
        """From when it was due to its first token."""
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def total_s(self) -> float:
        """From when it was due to its end."""
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap of a whole answer of several tokens."""
        if self.failure or self.first_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    def begin(self, call: Call) -> None:
        """Keep the call, to be able to give it up."""
        self._call = call
        self._watch.start()

    def give_up(self, failure: str, detail: str = "") -> None:
        """End it now; nothing more is heard of it."""
        if self._call is not None:
            self._call.abort()
        self._end(failure, detail)

    # -- the reply -------------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: Headers) -> None:
        self.status = status
        if status != 200:
            after = next((value for name, value in headers if name == b"retry-after"), b"")
            self.retry_after_s = min(float(after), RETRY_MAX_S) if after.isdigit() else None

    def on_body(self, data: bytes) -> None:
        if self.status != 200 or not self._client.target.stream:
            if len(self._kept) < KEPT_BODY_BYTES:
                self._kept += data
            return
        block = self._splitter.feed(data)
        if not block:
            return
        reader = self._reader
        remark = reader.inspect(block)
        if reader.tokens > self.tokens:
            self._count(reader.tokens - self.tokens)
        if remark is not None and remark.error is not None:
            self.give_up("error_event", remark.error.message)

    def on_end(self) -> None:
        if self.status != 200:
            self._end(f"http_{self.status}", read_error(bytes(self._kept), self.status).message)
        elif not self._client.target.stream:
            self._read_whole()
        elif self._reader.finished or self._reader.terminated:
            self._take_usage(self._reader.prompt_tokens, self._reader.output_tokens)
            self._end("", "")
        else:
            self._end("unfinished", "the stream ended without a finish reason and without [DONE]")

    def on_failure(self, failure: CallFailure) -> None:
        self._end(str(failure.kind), failure.detail)

    def _count(self, tokens: int) -> None:
        now_s = self._client.clock()
        if self.first_s is None:
            self.first_s = now_s
            self._watch.first_token(now_s - self.due_s)
            self._watch.tokens(tokens, None)
        else:
            self._watch.tokens(tokens, now_s - self.last_s)
        self.last_s = now_s
        self.tokens += tokens
        if self.marks is not None:
            self.marks.append((now_s, self.tokens))

    def _read_whole(self) -> None:
        facts = read_reply(bytes(self._kept), self._client.target.path)
        if facts.error is not None:
            self._end("error_event", facts.error.message)
            return
        self._take_usage(facts.prompt_tokens, facts.output_tokens)
        self._watch.tokens(self.tokens, None)
        self._end("", "")

    def _take_usage(self, prompt_tokens: int | None, output_tokens: int | None) -> None:
        if prompt_tokens is not None:
            self.prompt_tokens = prompt_tokens
        if output_tokens is not None:
            self.tokens = output_tokens

    def _end(self, failure: str, detail: str) -> None:
        self.end_s = self._client.clock()
        self.failure, self.detail = failure, detail
        self.ended = True
        self._call = None
        self._client.over(self)
        self._watch.ended(self)
        if self._on_end is not None:
            self._on_end(self)

    def __repr__(self) -> str:
        return f"<Exchange {self.number} {self.status} tokens={self.tokens} {self.failure or 'well'}>"


class Client:
    """Sends to one target, on the running loop; `close` gives up what is under way.

    watches   by class of the request; "" for requests without one
    clock     what times are read from; the loop's own counts whole milliseconds in uvloop
    idle      set while nothing is under way
    """

    def __init__(
        self, target: Target, watches: Mapping[str, Watch], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock = clock
        self.target = target
        self._watches = watches
        self._pools: dict[str, EnginePool] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self._sent = 0
        self._under_way: dict[Exchange, None] = {}
        self._look: asyncio.TimerHandle | None = None
        limit = (
            b'"max_tokens":%d,"stream":true,"stream_options":{"include_usage":true}'
            if target.stream
            else b'"max_tokens":%d'
        )
        end = limit + (b',"ignore_eos":true}' if target.ignore_eos else b"}")
        model = orjson.dumps(target.model)
        if target.path == CHAT:
            self._body = (
                b'{"model":' + model.replace(b"%", b"%%") + b',"messages":[{"role":"user","content":"%b"}],' + end
            )
        else:
            self._body = b'{"model":' + model.replace(b"%", b"%%") + b',"prompt":"%b",' + end
        self._path = target.path.encode()
        self._headers: dict[str, Headers] = {}

    @property
    def under_way(self) -> int:
        """Requests sent and not ended."""
        return len(self._under_way)

    @property
    def sent(self) -> int:
        """Requests sent so far."""
        return self._sent

    def send(
        self,
        request: Request,
        due_s: float,
        on_end: Callable[[Exchange], None] | None = None,
        *,
        marked: bool = False,
    ) -> Exchange:
        """Send a request that was due at due_s (the client's clock).

        on_end   called once, never before this returns
        marked   keep when each of its tokens came
        """
        self._sent += 1
        number = self._sent
        if request.prefix_ids:
            text = prompt_of_beginnings(request.prompt_tokens, number, request.prefix_ids, request.id_tokens)
        else:
            text = prompt_text(request.prompt_tokens, number)
        body = self._body % (text.encode(), request.output_tokens)
        class_name = request.class_name
        watch = self._watches[class_name]
        exchange = Exchange(self, request, due_s, number=number, watch=watch, on_end=on_end, marked=marked)
        self._under_way[exchange] = None
        self.idle.clear()
        wanted = EngineRequest(b"POST", self._path, self._headers_of(class_name), body)
        exchange.begin(self._pool(request.tenant).call(wanted, exchange))
        if self._look is None:
            self._look = self.loop.call_later(LOOK_EVERY_S, self._look_for_late)
        return exchange

    def over(self, exchange: Exchange) -> None:
        """For exchanges: it ended."""
        self._under_way.pop(exchange, None)
        if not self._under_way:
            self.idle.set()

    def give_up_all(self, failure: str) -> None:
        """End everything under way."""
        for exchange in list(self._under_way):
            exchange.give_up(failure)

    async def close(self) -> None:
        """Give up what is under way and close all connections."""
        self.give_up_all("cut")
        if self._look is not None:
            self._look.cancel()
            self._look = None
        for pool in self._pools.values():
            await pool.close()

    def _pool(self, tenant: str) -> EnginePool:
        key = self.target.keys.get(tenant) or self.target.keys.get("") or ""
        pool = self._pools.get(key)
        if pool is None:
            address = EngineAddress("target", self.target.url, key or None, connect_s=min(10.0, self.target.timeout_s))
            pool = self._pools[key] = EnginePool(address, max_idle=4096)
        return pool

    def _headers_of(self, class_name: str) -> Headers:
        headers = self._headers.get(class_name)
        if headers is None:
            own = ((b"x-headrace-class", class_name.encode()),) if class_name else ()
            headers = self._headers[class_name] = ((b"content-type", b"application/json"), *own, *self.target.headers)
        return headers

    def _look_for_late(self) -> None:
        """They were sent in the order in which they were due, or nearly: the oldest stand first."""
        self._look = None
        before_s = self.clock() - self.target.timeout_s
        while self._under_way and (oldest := next(iter(self._under_way))).due_s < before_s:
            oldest.give_up("timeout", f"no whole answer within {self.target.timeout_s:g} s")
        if self._under_way:
            self._look = self.loop.call_later(LOOK_EVERY_S, self._look_for_late)

    def __repr__(self) -> str:
        return f"<Client {self._sent} sent, {len(self._under_way)} under way>"
