"""The attempts that run in other processes, one by one, as their journals tell them: the leader's side of `journal`.

The sums of a session's report say how full an engine is and are never wrong; what is known here says what its works are,
and is for learning. Where an event was lost the two differ, and the sums count.

Every sequence on an engine makes one token a step, so between two reports an attempt is taken to grow as the engine's
attempts last did: the sizing policy reads steps from how far works come within a second.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from statistics import median

from gateway.queue.base import Answered, Began, Ended, Grew, Session, Told
from policies.sizing import Finished, FirstToken, Granted, Running
from policies.vocabulary import Work

GROWS_MOST_S = 1.5
"""A growth is assumed to go on for so long: three beats."""

Key = tuple[str, int]
News = tuple[float, Granted | FirstToken | Finished]
"""(pool time, event), as if it had happened in this process."""


@dataclass(slots=True)
class _Attempt:
    """shown_tokens as told at shown_s. began: the number under which its session told its beginning."""

    began: int
    work: Work
    engine: str
    attempt: int
    session: Session
    began_s: float
    shown_tokens: int
    shown_s: float
    prefilled: bool


@dataclass(slots=True)
class _Journal:
    """What one session has told. heard: the number of the last event that was taken in."""

    heard: int = 0
    began: dict[int, Key] = field(default_factory=dict)


class Elsewhere:
    """See the module header. Its owner is the steward.

    missed   events whose numbers are missing: dropped before this leader could read them
    """

    __slots__ = ("_attempts", "_journals", "_on_ended", "_tokens_per_s", "missed")

    def __init__(self, on_ended: Callable[[str, float, float], None]) -> None:
        """on_ended: told of each end that a session told of: the engine, when the attempt began there and when it ended."""
        self._on_ended = on_ended
        self._attempts: dict[Key, _Attempt] = {}
        self._journals: dict[Session, _Journal] = {}
        self._tokens_per_s: dict[str, float] = {}
        self.missed = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._attempts

    def hear(self, session: Session, events: Iterable[Told], granted_here: Callable[[str, Key], bool]) -> list[News]:
        """Take in what a session told; each event once.

        granted_here   (engine, attempt): whether this leader has granted that attempt itself, so that its beginning is no
                       news; asked once
        """
        journal = self._journals.get(session)
        if journal is None:
            journal = self._journals[session] = _Journal()
        news: list[News] = []
        for told in events:
            if told.number <= journal.heard:
                continue
            if journal.heard:
                self.missed += told.number - journal.heard - 1
            journal.heard = told.number
            at_s = told.at_ms / 1000
            match told.event:
                case Began() as event:
                    known = self._began(session, journal, told.number, event, at_s)
                    if not granted_here(event.engine, (event.work.id, event.attempt)) and not known:
                        news.append((at_s, Granted(event.work, event.engine, event.attempt)))
                case Answered() as event:
                    news += self._answered(journal, event, at_s)
                case Ended() as event:
                    news += self._ended(journal, event, at_s)
                case Grew() as event:
                    news += self._grew(journal, event, at_s)
        return news

    def running(self, engine: str, now_s: float) -> list[Running]:
        """Attempts on an engine, as far as they must have come by now."""
        per_s = self._tokens_per_s.get(engine, 0.0)
        return [
            Running(one.work, one.attempt, _grown(one, per_s, now_s), one.prefilled)
            for one in self._attempts.values()
            if one.engine == engine
        ]

    def count(self, engine: str, began_by_s: float, sessions: Container[Session]) -> int:
        """Attempts of these sessions on an engine that began by then and run, as far as was told."""
        return sum(
            one.engine == engine and one.began_s <= began_by_s and one.session in sessions
            for one in self._attempts.values()
        )

    def forget(self, session: Session) -> list[News]:
        """A session is over or lost: its attempts are known by its sums, if at all."""
        self._journals.pop(session, None)
        gone = [key for key, one in self._attempts.items() if one.session == session]
        return [self._over(key) for key in gone]

    def forget_but(self, sessions: Container[Session]) -> list[News]:
        """Forget all sessions but these. A leader that reads from the beginning hears of some that were over before."""
        return [news for session in list(self._journals) if session not in sessions for news in self.forget(session)]

    def forget_all(self) -> list[News]:
        """This process leads no more, or anew."""
        self._journals.clear()
        return [self._over(key) for key in list(self._attempts)]

    def _began(self, session: Session, journal: _Journal, number: int, event: Began, at_s: float) -> bool:
        """True when the attempt was known already: a session tells all that runs whenever another leads."""
        key = (event.work.id, event.attempt)
        before = self._attempts.get(key)
        if before is not None and before.session == session:
            journal.began.pop(before.began, None)
        journal.began[number] = key
        self._attempts[key] = _Attempt(
            number, event.work, event.engine, event.attempt, session, at_s, event.shown_tokens, at_s, event.prefilled
        )
        return before is not None

    def _answered(self, journal: _Journal, event: Answered, at_s: float) -> list[News]:
        one = self._attempts.get(journal.began.get(event.began, _NOWHERE))
        if one is None:
            return []
        one.prefilled, one.shown_s = True, at_s
        return [(at_s, FirstToken(one.work, one.engine, event.engine_ttft_s, one.attempt))]

    def _ended(self, journal: _Journal, event: Ended, at_s: float) -> list[News]:
        one = self._attempts.pop(journal.began.pop(event.began, _NOWHERE), None)
        if one is None:
            return []
        self._on_ended(one.engine, one.began_s, at_s)
        work, outcome = one.work, event.outcome
        if outcome is not None:
            outcome = replace(
                outcome,
                work_id=work.id,
                class_name=work.class_name,
                tenant=work.tenant,
                model=work.model,
                engine=one.engine,
            )
        return [(at_s, Finished(work, one.engine, outcome, one.attempt))]

    def _grew(self, journal: _Journal, event: Grew, at_s: float) -> list[News]:
        shown = dict(event.shown)
        rates: dict[str, list[float]] = {}
        for began, tokens in event.shown:
            one = self._attempts.get(journal.began.get(began, _NOWHERE))
            if one is None:
                continue
            passed_s = at_s - one.shown_s
            if one.shown_tokens and passed_s > 0 and one.work.sequences == 1:
                rates.setdefault(one.engine, []).append((tokens - one.shown_tokens) / passed_s)
            one.shown_tokens, one.shown_s = tokens, at_s
            one.prefilled = one.prefilled or tokens > 0
        for engine, found in rates.items():
            self._tokens_per_s[engine] = max(0.0, median(found))
        over = [number for number in journal.began if number < event.up_to and number not in shown]
        return [self._over(key) for number in over if (key := journal.began.pop(number)) in self._attempts]

    def _over(self, key: Key) -> News:
        one = self._attempts.pop(key)
        return (one.shown_s, Finished(one.work, one.engine, None, one.attempt))

    def __repr__(self) -> str:
        return f"<Elsewhere attempts={len(self._attempts)} sessions={len(self._journals)} missed={self.missed}>"


_NOWHERE: Key = ("", 0)


def _grown(one: _Attempt, per_s: float, now_s: float) -> int:
    if not one.shown_tokens:
        return 0
    for_s = min(GROWS_MOST_S, max(0.0, now_s - one.shown_s))
    most = one.work.max_tokens * one.work.sequences if one.work.max_tokens is not None else None
    grown = one.shown_tokens + int(per_s * for_s * one.work.sequences)
    return grown if most is None else max(one.shown_tokens, min(grown, most))
