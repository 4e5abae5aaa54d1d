"""The credit this process holds: works it may start at once though another process leads.

Credit is told as running totals (`queue.base.Credit`): what was ever started may reach what is ever allowed, so a lost
or repeated renewal changes nothing. Its validity is counted on this process's monotonic clock from before the renewal
that brought it was sent, minus what this clock and the leader's may be wrong by, so that it ends here before the leader
takes it back.

Cut off from the store, a process keeps a share of each place that halves every HALVING_S: it may start while what it
has in flight there is below it. Its share is what the leader counts for it anyway: what it last reported to run with the
credit that it held, or the floor that it was told if that is more. A report whose answer did not come may have arrived or not,
so the least of what was told since the last answer counts. The leader keeps the same share reserved, counted from later,
so that both sides of a partition together stay inside the window. A leader counts itself by what runs, and gives the rest
away: when its time is over it has no more than ran here when it last gave anything.

A share is of the windows that it was given under. Where a policy brings others, what was told until everybody went by them
is no share, nor is what was begun until then.

Only classes with a TTFT objective ever have credit or a share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.clock import CLOCK_ERROR_MAX_S
from gateway.queue.base import Credit, InFlight, Place, Renewed
from policies.vocabulary import Work

HALVING_S = 10.0
RESERVED_S = 60.0
"""The leader forgets a lost session's share after this; it is less than a sixtieth by then."""
RESIZED_S = 4.0
"""Once a process goes by other windows the leader may still go by the old ones for two polls of its file, and the credit
that it gave then runs for as long again."""
NOTHING = InFlight()


def share_left(share: int, since_s: float) -> int:
    """Works of a share that are left `since_s` after contact was lost, rounded: the last one stays for HALVING_S."""
    return int(share * 0.5 ** (since_s / HALVING_S) + 0.5) if since_s < RESERVED_S else 0


@dataclass(slots=True)
class _Held:
    credit: Credit
    until_s: float


class CreditBook:
    """See the module header. Owned by the process's dispatcher; `started` goes into each report."""

    __slots__ = ("_floors", "_held", "_kept", "_renewed_s", "_reported", "_settled_s", "epoch", "started")

    def __init__(self) -> None:
        self._held: dict[Place, _Held] = {}
        self._floors: dict[Place, int] = {}
        self._kept: dict[Place, int] = {}
        self._reported: dict[Place, int] = {}
        self._renewed_s = 0.0
        self._settled_s = -math.inf
        self.epoch = 0
        self.started: dict[Place, InFlight] = {}

    def reporting(self, running: Mapping[Place, InFlight], now_s: float) -> None:
        """A report is about to be sent: this runs here, and with the credit that is left it is what we may keep. Without what
        was begun under other windows."""
        self._reported = self._at_most(running, now_s)
        self._kept = _least(self._kept, self._reported)

    def giving(self, running: Mapping[Place, InFlight], now_s: float) -> None:
        """As the leader we are about to give away what is free. A place whose work of ours has ended is free, whatever we
        reported: we may keep what runs here now."""
        most = self._at_most(running, now_s)
        self._reported, self._kept = _least(self._reported, most), _least(self._kept, most)

    def renewed(self, renewed: Renewed, *, sent_s: float, now_ms: int, error_s: float = 0.0) -> None:
        """Take a renewal's answer.

        sent_s            our monotonic clock before it was sent; now_ms: the pool clock then
        error_s           what that pool clock may be wrong by
        """
        apart_s = CLOCK_ERROR_MAX_S + error_s
        self._renewed_s = sent_s
        self._kept = self._reported
        # A store that has lost its record takes a late word of a leader that another one has replaced.
        given = renewed.credits if renewed.epoch >= self.epoch else {}
        self.epoch = max(self.epoch, renewed.epoch)
        self._held = {
            place: _Held(credit, sent_s + (credit.expires_ms - now_ms) / 1000 - apart_s)
            for place, credit in given.items()
            if credit.expires_ms > now_ms
        }
        self._floors = {place: credit.share for place, credit in given.items() if credit.share}

    @property
    def floors(self) -> Mapping[Place, int]:
        """As we were last told."""
        return self._floors

    def resized(self, now_s: float) -> None:
        """Other windows are in force here."""
        self._settled_s = now_s + RESIZED_S

    def lost(self) -> None:
        """The session is another one: its totals begin anew."""
        self._held.clear()
        self._floors.clear()
        self._kept = {}
        self.started.clear()

    def spend(self, work: Work, engines: Iterable[str], now_s: float) -> str | None:
        """Start a work on one of these engines if credit allows, and count it; the one with the most left."""
        best, most = None, 0
        for engine in engines:
            left = self._left(work, (engine, work.class_name), now_s)
            if left > most:
                best, most = engine, left
        if best is not None:
            self._count(work, (best, work.class_name))
        return best

    def spend_share(
        self, work: Work, engines: Iterable[str], running: Mapping[Place, InFlight], now_s: float
    ) -> str | None:
        """The same while cut off from the store; running: what this process has in flight."""
        best, most = None, 0
        for engine in engines:
            place = (engine, work.class_name)
            left = self.share(place, now_s) - running.get(place, NOTHING).works
            if left > most:
                best, most = engine, left
        if best is not None:
            self._count(work, (best, work.class_name))
        return best

    def share(self, place: Place, now_s: float) -> int:
        """Works that may be in flight on a place while we are cut off."""
        if self._renewed_s < self._settled_s:
            return 0
        whole = max(self._floors.get(place, 0), self._kept.get(place, 0))
        return share_left(whole, now_s - self._renewed_s)

    def unspent(self, place: Place, now_s: float) -> int:
        """Works that credit still allows to start on a place."""
        held = self._held.get(place)
        if held is None or now_s >= held.until_s:
            return 0
        return max(0, held.credit.allowed.works - self.started.get(place, NOTHING).works)

    def _at_most(self, running: Mapping[Place, InFlight], now_s: float) -> dict[Place, int]:
        """What runs here, with what credit still allows."""
        return {
            place: running.get(place, NOTHING).works + self.unspent(place, now_s)
            for place in running.keys() | self._held.keys()
        }

    def _left(self, work: Work, place: Place, now_s: float) -> int:
        """Works that may still be started on a place, 0 when this one does not fit."""
        unspent = self.unspent(place, now_s)
        if not unspent:
            return 0
        allowed, started = self._held[place].credit.allowed, self.started.get(place, NOTHING)
        if started.kv_tokens + work.prompt_tokens > allowed.kv_tokens:
            return 0
        if started.prefill_tokens + work.prompt_tokens > allowed.prefill_tokens:
            return 0
        return unspent

    def _count(self, work: Work, place: Place) -> None:
        was = self.started.get(place, NOTHING)
        self.started[place] = InFlight(
            was.works + 1, was.kv_tokens + work.prompt_tokens, was.prefill_tokens + work.prompt_tokens
        )

    def __repr__(self) -> str:
        left = {
            "/".join(place): held.credit.allowed.works - self.started.get(place, NOTHING).works
            for place, held in self._held.items()
        }
        return f"<CreditBook epoch={self.epoch} left={left}>"


def _least(works: Mapping[Place, int], most: Mapping[Place, int]) -> dict[Place, int]:
    return {place: min(count, most.get(place, 0)) for place, count in works.items()}
