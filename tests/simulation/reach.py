"""Which works count against a window, and which the protocol lets run beside it.

A process that reaches the store has its works counted by whoever leads, so that all of them together stay inside the
window. One that is cut off for longer than its session is valid goes on with what it runs, and may start while it is
below a share that halves (docs/decisions, "What a cut-off process may run beside the window"). Such works are *excused*
until they end, also after the process has come back: what the leader must keep free for them is the share, if it led
already when contact was lost. A successor that never heard of the process keeps nothing. A session
that a flush took was lost under the leader of that moment, though it shows only once the process has not come back.

A process that is stopped does not notice that an engine has ended a work of it. That work runs nowhere, and the leader is told
so by the engine, so it counts no more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gateway.dispatch.credit import share_left
from gateway.dispatch.relay import Relay
from gateway.queue.base import Place, SessionReport
from tests.simulation.hosts import WALL_OFFSET_S, EngineHost, GatewayHost
from tests.simulation.invariants import Invariant, InvariantBroken
from tests.simulation.store import WatchedStore

CLOCKS_APART_S = 0.3
"""A session so near its end may have ended for a leader whose clock is ahead."""
AFTER_FLUSH_S = 2.0
"""For so long the leader still counts what it knew, or a fresh one decides nothing."""
Attempt = tuple[str, int]


@dataclass(slots=True)
class _Process:
    """One process as it was last seen. ended: at the engine, while it was stopped; away_s: out of contact since; reign: of the
    leader that lost it."""

    running: dict[Attempt, Place] = field(default_factory=dict)
    excused: set[Attempt] = field(default_factory=set)
    ended: set[Attempt] = field(default_factory=set)
    away_s: float | None = None
    reign: int = 0
    heard_s: float = 0.0
    report: SessionReport = field(default_factory=SessionReport)


class Reach:
    """See the module header. One per run; `count` looks at every process that is up."""

    def __init__(self, store: WatchedStore, engines: Mapping[str, EngineHost]) -> None:
        self._store = store
        self._engines = engines
        self._processes: dict[str, _Process] = {}
        self._reign = 0
        self._flushed_s = -math.inf
        self._flushed_reign = 0

    def count(self, hosts: Iterable[GatewayHost], windows: dict[str, int], now_s: float) -> dict[Place, int]:
        """Works by place that must be inside its window. Raises InvariantBroken when a cut-off process exceeds its share."""
        counted: Counter[Place] = Counter()
        once: set[str] = set()
        if self._flushed_s != self._store.flushed_s:
            self._flushed_s, self._flushed_reign = self._store.flushed_s, self._reign
        for host in hosts:
            if host.presence.leads:
                self._reign = max(self._reign, host.presence.epoch)
        for host in hosts:
            one = self._processes.setdefault(host.session_id, _Process())
            running = dict(_running(host))
            for work_id, _ in running:
                if work_id in once:
                    raise InvariantBroken(Invariant.RUNS_ONCE, f"at {now_s:.6f} s work {work_id} runs twice")
                once.add(work_id)
            self._in_its_time(host, one, running, now_s)
            self._follow(host, one, now_s)
            if one.away_s is not None:
                self._within_share(host, one, running, windows, now_s)
                one.excused |= running.keys()
            if host.host.frozen:
                one.ended |= self._ended_unnoticed(host)
            one.ended &= running.keys()
            one.excused &= running.keys() - one.ended
            one.running = running
            counted.update(place for attempt, place in running.items() if attempt not in one.excused | one.ended)
            counted.update(self._kept_free(one, now_s))
        return dict(counted)

    def _ended_unnoticed(self, host: GatewayHost) -> set[Attempt]:
        return {
            attempt
            for engine, ledger in host.gateway.ledger
            for attempt, entry in ledger.entries.items()
            if isinstance(entry.progress, Relay)
            and self._engines[engine].has_ended(entry.progress._exchange.request_id)
        }

    def _follow(self, host: GatewayHost, one: _Process, now_s: float) -> None:
        until_s = self._store.present(host.presence.session) - WALL_OFFSET_S
        if until_s - now_s > CLOCKS_APART_S:
            one.away_s = None
        elif one.away_s is None and now_s - self._store.flushed_s > AFTER_FLUSH_S:
            one.heard_s, one.report = self._store.heard.get(host.session_id, (now_s, SessionReport()))
            one.away_s, one.reign = now_s, self._reign if one.heard_s > self._flushed_s else self._flushed_reign

    def _in_its_time(self, host: GatewayHost, one: _Process, running: dict[Attempt, Place], now_s: float) -> None:
        """No grant is used after it has expired, but by a process that was stopped between its check and its first byte."""
        for attempt in running.keys() - one.running.keys():
            until_s = self._store.granted_until_s.get(attempt, math.inf) - WALL_OFFSET_S
            if now_s > until_s and attempt[0] not in host.on_credit and now_s != host.thawed_s:
                raise InvariantBroken(
                    Invariant.GRANT_VALID,
                    f"at {now_s:.6f} s {host.name} started {attempt}: its grant had expired at {until_s:.6f} s",
                )

    def _within_share(
        self,
        host: GatewayHost,
        one: _Process,
        running: dict[Attempt, Place],
        windows: dict[str, int],
        now_s: float,
    ) -> None:
        since_s = now_s - one.heard_s
        by_place = Counter(running.values())
        for attempt, place in running.items():
            asked = attempt in one.running or attempt[0] not in host.on_credit
            if not asked and by_place[place] > share_left(windows.get(place[1], 0), since_s):
                raise InvariantBroken(
                    Invariant.INSIDE_SHARE,
                    f"at {now_s:.6f} s {host.name}, cut off for {since_s:.1f} s, started {place[1]} work number"
                    f" {by_place[place]} on {place[0]}: its share is {share_left(windows.get(place[1], 0), since_s)}",
                )

    def _kept_free(self, one: _Process, now_s: float) -> Counter[Place]:
        """What the leader holds back for the excused works of a process that it lost itself."""
        kept: Counter[Place] = Counter()
        if one.away_s is None or one.reign != self._reign:
            return kept
        running = Counter(one.running[attempt] for attempt in one.excused)
        for place, works in running.items():
            reported = one.report.in_flight.get(place)
            if reported is not None:
                kept[place] = min(works, share_left(reported.works, now_s - one.heard_s))
        return kept


def _running(host: GatewayHost) -> Iterator[tuple[Attempt, Place]]:
    """Attempts of this process that have been sent to an engine and have not ended."""
    for engine, ledger in host.gateway.ledger:
        for attempt, entry in ledger.entries.items():
            if entry.progress is not None:
                yield attempt, (engine, entry.work.class_name)
