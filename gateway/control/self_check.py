"""Looks at what engines tell, beside the judgement of their health: frozen signals and findings, each told once it changes.

A finding counts once it has stood for SETTLE_S, so that a restart, a poll that came late or a burst is no news.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from gateway.control.frozen import FrozenWatch
from gateway.control.needs import PROBLEMS, Finding, findings
from gateway.control.roster import Engine
from gateway.logs import Log

SETTLE_S = 3.0


class SelfCheck:
    """See the module header. Leader only; `look` is called a few times a second. alive_s: see `HealthWatch.alive_s`."""

    def __init__(self, engines: Iterable[Engine], *, alive_s: Callable[[Engine], float], log: Log) -> None:
        self._engines = tuple(engines)
        self._alive_s = alive_s
        self._log = log
        self._frozen = {engine.name: FrozenWatch() for engine in self._engines}
        self._since_s: dict[str, dict[Finding, float]] = {engine.name: {} for engine in self._engines}

    def look(self, *, pool_s: float, now_s: float) -> None:
        """O(engines)."""
        for engine in self._engines:
            moved_s = self._alive_s(engine) - (pool_s - now_s)
            held = engine.ledger.kv_tokens - engine.ledger.prefill_tokens
            engine.frozen = self._frozen[engine.name].look(
                engine.sample, moved_s=moved_s, held_tokens=held, now_s=now_s
            )
            seen = findings(engine, engine.view(now_s), engine.frozen)
            since_s = self._since_s[engine.name]
            for gone in since_s.keys() - seen.keys():
                del since_s[gone]
            stood = {
                finding: text
                for finding, text in seen.items()
                if now_s - since_s.setdefault(finding, now_s) >= SETTLE_S
            }
            self._tell(engine, stood)

    def _tell(self, engine: Engine, now: Mapping[Finding, str]) -> None:
        before = engine.findings
        engine.findings = {finding.value: text for finding, text in now.items()}
        for finding in now.keys() - before.keys():
            say = self._log.warning if finding in PROBLEMS else self._log.info
            say("engine finding", engine=engine.name, finding=finding.value, detail=now[finding])
        for over in before.keys() - now.keys():
            self._log.info("engine finding is over", engine=engine.name, finding=str(over))

    def __repr__(self) -> str:
        return f"<SelfCheck {sum(len(engine.findings) for engine in self._engines)} findings>"
