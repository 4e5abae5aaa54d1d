"""Which engine keeps a stored response, so that a follow-up goes where its past is.

`/v1/responses` answers are stored by the engine that made them; `previous_response_id`, GET, cancel and DELETE must
reach that engine. A bounded, least-recently-used map; what it forgot is told to the client as an unknown response,
never guessed.
"""

from __future__ import annotations

from collections import OrderedDict

from gateway.errors import Refusal

KEPT = 100_000


class Affinity:
    """response id -> engine name."""

    __slots__ = ("_engines", "_kept")

    def __init__(self, kept: int = KEPT) -> None:
        self._engines: OrderedDict[str, str] = OrderedDict()
        self._kept = kept

    def keep(self, response_id: str, engine: str) -> None:
        self._engines[response_id] = engine
        self._engines.move_to_end(response_id)
        if len(self._engines) > self._kept:
            self._engines.popitem(last=False)

    def engine(self, response_id: str) -> str | None:
        """The engine that made it, or None when unknown or forgotten."""
        found = self._engines.get(response_id)
        if found is not None:
            self._engines.move_to_end(response_id)
        return found

    def keeper(self, response_id: str) -> str:
        """The engine that made it. Raises a 404 Refusal when unknown or forgotten."""
        engine = self.engine(response_id)
        if engine is None:
            raise Refusal(
                404,
                f"response {response_id[:80]!r} is not known here: it was never made through this gateway, or is forgotten",
                reason="response_not_found",
                code="response_not_found",
                param="previous_response_id",
            )
        return engine

    def __len__(self) -> int:
        return len(self._engines)
