"""Tells the log when an engine's pages begin and cease to say that it serves, and when one at start does not answer.

What takes an engine out of rotation while it answers is told by `gateway.control.health`, what is wrong with its
numbers by `gateway.control.self_check`.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.control.roster import Engine
from gateway.logs import Log
from policies.vocabulary import EngineState

PATIENCE_S = 3.0
"""An engine that is configured but does not answer is told of after this time: a wrong URL, or a model still loading."""
MODELS_SHOWN = 8
"""An engine may serve thousands of adapters."""


class EngineLog:
    """See the module header. Leader only; `look` is called a few times a second."""

    def __init__(self, engines: Iterable[Engine], log: Log) -> None:
        self._engines = tuple(engines)
        self._log = log
        self._told: dict[str, EngineState] = {}
        self._since_s: float | None = None

    def look(self, now_s: float) -> None:
        """O(engines). now_s is monotonic."""
        self._since_s = now_s if self._since_s is None else self._since_s
        for engine in self._engines:
            reach = engine.reach
            if reach is self._told.get(engine.name):
                continue
            if reach is EngineState.STARTING and now_s - self._since_s < PATIENCE_S:
                continue
            self._told[engine.name] = reach
            self._tell(engine)

    def _tell(self, engine: Engine) -> None:
        if engine.reachable:
            names = sorted(engine.models)
            shown = (
                names
                if len(names) <= MODELS_SHOWN
                else [*names[:MODELS_SHOWN], f"and {len(names) - MODELS_SHOWN} more"]
            )
            self._log.info("engine is up", engine=engine.name, kind=engine.kind, models=shown)
            return
        starting = engine.reach is EngineState.STARTING
        self._log.warning(
            "engine does not answer yet" if starting else "engine is down",
            engine=engine.name,
            url=engine.settings.url,
            detail=engine.detail,
        )

    def __repr__(self) -> str:
        return f"<EngineLog {len(self._told)} of {len(self._engines)} told>"
