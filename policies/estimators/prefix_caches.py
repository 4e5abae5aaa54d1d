"""What each engine's prefix cache probably holds: the beginnings of the requests that it was sent of late.

A work's `prefix` names how its request begins, each of LEVEL_ENDS_BYTES by a digest of all up to there. What two works
share is the longest level that both have, so a conversation finds the engine of its earlier turns, and requests with one
long instruction find each other. The digests sent to an engine are forgotten in the order in which they were last used,
DIGESTS_KEPT of them, all at once when it starts anew, and those of a work that came to nothing with it. How much of what they
promise is there, `prefix_trust` learns.

Two numbers come of it. What an engine *probably* has is good enough to choose it. What predictions may *count on* is 0 unless
the engine tells what it finds; a work carries that as `cached_tokens` from its grant on, and in every question about an engine.
A work that waits is taken to go where most of it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from policies.estimators.prefix_trust import PrefixTrust
from policies.vocabulary import EngineView, Outcome, Work

BYTES_PER_TOKEN = 4
FIRST_LEVEL_BYTES = 1024
LEVEL_ENDS_BYTES = tuple(
    FIRST_LEVEL_BYTES * kib for kib in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
)
"""What two requests share is longer than the level found by less than a half of it."""
DIGESTS_KEPT = 16_384
"""Of one engine."""
RESTARTED_S = 1.0
"""A start time that moves by more is another process's."""
LOOKED_FOR_S = 1.0
"""A waiting work's tokens are looked for again after so long."""
MUCH = 0.1
"""Of a prompt: with less of it cached its first token takes as long as any of its length."""
LOOKS = 16
"""Waiting works that are looked for at once: a round has a millisecond, and there may be hundreds of them."""
WAITING_KEPT = 8192

AttemptKey = tuple[str, int]
Beginning = tuple[str, str]
"""A model and a digest."""


def level_tokens(level: int) -> int:
    """Prompt tokens in the beginning that a level names."""
    return LEVEL_ENDS_BYTES[level] // BYTES_PER_TOKEN


@dataclass(slots=True)
class _Engine:
    """sent: the longest unused first; started_s: its start time as last told."""

    sent: OrderedDict[Beginning, None] = field(default_factory=OrderedDict)
    trust: PrefixTrust = field(default_factory=PrefixTrust)
    started_s: float | None = None

    def levels(self, work: Work) -> int:
        """How many of its beginnings were sent here."""
        count, sent = 0, self.sent
        for one in _beginnings(work.model, work.prefix):
            if one not in sent:
                break
            count += 1
        return count

    def send(self, work: Work) -> None:
        for one in _beginnings(work.model, work.prefix):
            self.sent[one] = None
            self.sent.move_to_end(one)
        while len(self.sent) > DIGESTS_KEPT:
            self.sent.popitem(last=False)

    def unsend(self, work: Work, levels: int) -> None:
        """It came to nothing: of its beginnings no more are here than so many."""
        for one in _beginnings(work.model, work.prefix)[levels:]:
            self.sent.pop(one, None)

    def probable(self, expected_tokens: int) -> int:
        """Of these, what is here by what was found of others."""
        return int(self.trust.part * expected_tokens)

    def counted_on(self, expected_tokens: int) -> int:
        """The same where predictions may count on it, else 0."""
        return self.probable(expected_tokens) if self.trust.told else 0


@dataclass(slots=True)
class _Attempt:
    """One whose beginnings are known. levels, expected_tokens: that were there, by the digests alone; due: its first token was
    not seen yet."""

    engine: str
    work: Work
    levels: int
    expected_tokens: int
    due: bool = True


class PrefixCaches:
    """See the module header. One per pool, its owner is the dispatcher."""

    __slots__ = ("_attempts", "_engines", "_waiting")

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._attempts: dict[AttemptKey, _Attempt] = {}
        self._waiting: dict[str, tuple[float, Work]] = {}

    # -- what happens --------------------------------------------------------------------------------------------------

    def granted(self, engine: str, work: Work, attempt: int) -> Work:
        """The work was sent there; as predictions are to take it from now on."""
        self._waiting.pop(work.id, None)
        if not work.prefix:
            return work
        one = self._of(engine)
        levels = one.levels(work)
        expected = _tokens(work, levels)
        there = _with(work, one.counted_on(expected))
        self._attempts[work.id, attempt] = _Attempt(engine, there, levels, expected)
        one.send(work)
        return there

    def first_token(self, work_id: str, attempt: int) -> bool:
        """An attempt's prompt has been computed. Whether much of it may have been there."""
        one = self._attempts.get((work_id, attempt))
        if one is not None and one.due:
            one.due = False
            self._of(one.engine).trust.taken_in(one.expected_tokens)
        return one is not None and one.expected_tokens > MUCH * one.work.prompt_tokens

    def ended(self, engine: str, work: Work, attempt: int, outcome: Outcome | None) -> Work:
        """An attempt is over; the work as it was granted."""
        if outcome is not None and outcome.output_tokens:
            self.first_token(work.id, attempt)  # that of an answer told whole was not seen
        one = self.forget(work.id, attempt)
        if one is not None and one.due:
            self._of(one.engine).unsend(work, one.levels)
        if outcome is not None and outcome.cached_tokens is not None:
            self._of(engine).trust.answered(0 if one is None else one.expected_tokens, outcome.cached_tokens)
        return work if one is None else one.work

    def forget(self, work_id: str, attempt: int) -> _Attempt | None:
        """Nobody will tell what comes of an attempt."""
        return self._attempts.pop((work_id, attempt), None)

    def heard(self, view: EngineView) -> None:
        """What an engine says of itself, each control tick."""
        started, hits = view.start_time_s, view.prefix_hits_total
        one = self._engines.get(view.name)
        if one is None:
            if not hits.known:
                return
            one = self._of(view.name)
        if started.known and started.value is not None:
            if one.started_s is not None and abs(started.value - one.started_s) > RESTARTED_S:
                one.sent.clear()
            one.started_s = started.value
        if hits.known and hits.value is not None:
            one.trust.counted(hits.value)

    # -- what is asked -------------------------------------------------------------------------------------------------

    def probable(self, engine: str, work: Work) -> tuple[int, Work]:
        """(leading prompt tokens that the engine probably has, the work as predictions are to take it there)."""
        one = self._engines.get(engine)
        if one is None or not work.prefix:
            return 0, _with(work, 0)
        expected = _tokens(work, one.levels(work))
        return one.probable(expected), _with(work, one.counted_on(expected))

    def waiting(self, works: Iterable[Work], up: Collection[str], now_s: float) -> list[Work]:
        """Works that wait, as predictions are to take them where most of each is. Looks for LOOKS of them at most; the
        others are as they were last found. up: engines that may take works."""
        kept, looks = self._waiting, LOOKS
        if len(kept) > WAITING_KEPT:
            kept.clear()
        found: list[Work] = []
        for work in works:
            if work.prefix:
                until_s, there = kept.get(work.id, _NOT_LOOKED_FOR)
                if looks and (until_s <= now_s or there.attempt != work.attempt):
                    looks -= 1
                    there = _with(work, self._most(work, up))
                    kept[work.id] = now_s + LOOKED_FOR_S, there
                found.append(there if there.attempt == work.attempt else work)
            else:
                found.append(work)
        return found

    def looked_for(self, work: Work) -> bool:
        """What can be known of the work is known: it has no beginnings, or `waiting` has looked for them."""
        return not work.prefix or work.id in self._waiting

    def _most(self, work: Work, up: Collection[str]) -> int:
        told = (one for name, one in self._engines.items() if one.trust.told and name in up and name not in work.avoid)
        return max((one.counted_on(_tokens(work, one.levels(work))) for one in told), default=0)

    def _of(self, engine: str) -> _Engine:
        found = self._engines.get(engine)
        if found is None:
            found = self._engines[engine] = _Engine()
        return found

    def __repr__(self) -> str:
        parts = (f"{name}={len(one.sent)}*{one.trust.part:.2f}" for name, one in sorted(self._engines.items()))
        return f"<PrefixCaches {' '.join(parts)}>"


@lru_cache(maxsize=1024)
def _beginnings(model: str, prefix: str) -> tuple[Beginning, ...]:
    """Kept for the engines that the same work is asked for one after the other."""
    return tuple((model, digest) for digest in prefix.split(".")[: len(LEVEL_ENDS_BYTES)])


def _tokens(work: Work, levels: int) -> int:
    """Leading prompt tokens in so many of its beginnings."""
    return min(level_tokens(levels - 1), work.prompt_tokens) if levels else 0


def _with(work: Work, cached_tokens: int) -> Work:
    return work if work.cached_tokens == cached_tokens else replace(work, cached_tokens=cached_tokens)


_NOT_LOOKED_FOR = (0.0, Work("", "", "", "", "", 0.0, 0.0, attempt=-1))
