"""The answers under way for one HTTP request: its sequences in the engine, and what of their tokens was taken.

A `Choice` makes its tokens only when they are taken, so an answer that nobody reads costs nothing but the engine's
own time. When a client reads slowly its tokens pile up here as a number, and come out several at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from backends.simulated.answer import Answer, StopPoint, TextDecoder
from backends.simulated.driver import Driver
from backends.simulated.sequence import Sequence
from backends.simulated.stats import ExchangeStats
from backends.simulated.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Taken:
    """New tokens of a choice: their ids, the text that became whole with them, and whether they are the last."""

    ids: list[int]
    text: str
    last: bool


class Choice:
    """One answer. Told of the engine's steps as a `driver.Listener`, through its `Generation`.

    finish_reason  why it ends when it does: "stop" or "length"; "abort" once it was cut
    stop           where a stop string ends it, None without
    taken_tokens   tokens handed out by `take`
    """

    def __init__(
        self,
        index: int,
        sequence: Sequence,
        tokenizer: Tokenizer,
        prompt_ids: tuple[int, ...],
        *,
        variant: int,
        finish_reason: str,
        stop: StopPoint | None = None,
    ) -> None:
        self.index = index
        self.sequence = sequence
        self.prompt_ids = prompt_ids
        self.finish_reason = finish_reason
        self.stop = stop
        self.taken_tokens = 0
        self._text_length = 0
        self._answer = Answer(tokenizer, prompt_ids, choice=variant)
        self._decoder = TextDecoder(tokenizer)

    @property
    def untaken_tokens(self) -> int:
        """Tokens that the engine has produced and nobody has taken."""
        return self.sequence.generated_tokens - self.taken_tokens

    def take(self, *, at_most: int | None = None) -> Taken:
        """Make and return the tokens not taken yet, all of them or at_most so many."""
        count = self.untaken_tokens if at_most is None else min(at_most, self.untaken_tokens)
        ids = [self._answer.next_id() for _ in range(count)]
        self.taken_tokens += len(ids)
        cut = self.finish_reason == "abort" and not self.untaken_tokens
        last = cut or self.taken_tokens >= self.sequence.output_tokens
        text = self._decoder.push(ids, last=last)
        if self.stop is not None:
            text = text[: max(0, len(self.stop.text) - self._text_length)]
        self._text_length += len(text)
        return Taken(ids, text, last)


class Generation:
    """All choices of one request, from submission to the end of the last.

    on_tokens, on_end   called per step with a choice that has new tokens, and once with each choice that ended
    """

    def __init__(
        self,
        driver: Driver,
        stats: ExchangeStats,
        choices: Iterable[Choice],
        *,
        on_tokens: Callable[[Choice], None] | None = None,
        on_end: Callable[[Choice], None] | None = None,
    ) -> None:
        self.choices = tuple(choices)
        self._driver = driver
        self._stats = stats
        self._on_tokens = on_tokens
        self._on_end = on_end
        self._open: dict[Choice, None] = {}
        self._done = asyncio.Event()

    @property
    def taken_tokens(self) -> int:
        """Tokens handed out, over all choices."""
        return sum(choice.taken_tokens for choice in self.choices)

    def start(self) -> None:
        """Submit every choice's sequence. Raises ValueError when one could never run."""
        for choice in self.choices:
            self._driver.submit(_Follower(choice, self._driver, self._stats, self._on_tokens, self._end))
            self._open[choice] = None

    async def finished(self) -> None:
        """Wait until every choice has ended."""
        await self._done.wait()

    def cut(self) -> None:
        """End all that is open with what it has, as an engine that shuts down does."""
        for choice in list(self._open):
            self._driver.abort(choice.sequence)
            choice.finish_reason = "abort"
            self._stats.finished["abort"] += 1
            self._end(choice)

    def close(self) -> None:
        """Abort what is still open; nothing is told any more. Idempotent, to be called in every case."""
        for choice in self._open:
            self._driver.abort(choice.sequence)
        self._open.clear()

    def _end(self, choice: Choice) -> None:
        del self._open[choice]
        if self._on_end is not None:
            self._on_end(choice)
        if not self._open:
            self._done.set()


class _Follower:
    """Counts a choice's tokens for the statistics, whether or not anybody takes them, and passes the news on."""

    __slots__ = ("_choice", "_driver", "_on_end", "_on_tokens", "_seen_s", "_seen_tokens", "_stats", "sequence")

    def __init__(
        self,
        choice: Choice,
        driver: Driver,
        stats: ExchangeStats,
        on_tokens: Callable[[Choice], None] | None,
        on_end: Callable[[Choice], None],
    ) -> None:
        self.sequence = choice.sequence
        self._choice = choice
        self._driver = driver
        self._stats = stats
        self._on_tokens = on_tokens
        self._on_end = on_end
        self._seen_tokens = 0
        self._seen_s = 0.0

    def on_step(self) -> None:
        if self._count(self._driver.engine.clock_s) and self._on_tokens is not None:
            self._on_tokens(self._choice)

    def on_finished(self) -> None:
        self._count(self.sequence.finished_s)
        self._stats.on_finished(self.sequence, self._choice.finish_reason)
        self._on_end(self._choice)

    def _count(self, now_s: float) -> bool:
        new_tokens = self.sequence.generated_tokens - self._seen_tokens
        if new_tokens <= 0:
            return False
        if self._seen_tokens == 0:
            self._stats.on_first_token(self.sequence)
            self._seen_s = self.sequence.first_token_s
            new_tokens -= 1
            self._seen_tokens = 1
        if new_tokens:
            self._stats.on_tokens(now_s - self._seen_s, new_tokens)
            self._seen_s = now_s
            self._seen_tokens += new_tokens
        return True
