"""What the engines offer together, as clients see it: the union of their model lists, with aliases.

Rebuilt from what the poller last heard whenever asked; an engine that is away keeps its place in the list, since its
models exist and will answer again. Engines' own fields (max_model_len, root, parent) are kept as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.control.roster import Roster
from policies.vocabulary import EngineState


class Catalogue:
    """See `gateway.ingress.server.Catalogue`."""

    __slots__ = ("_aliases", "_roster")

    def __init__(self, roster: Roster, aliases: Mapping[str, str]) -> None:
        self._roster = roster
        self._aliases = aliases

    def models(self) -> Sequence[Mapping[str, object]]:
        """One object per name: the first engine's that lists it, then the aliases that lead somewhere."""
        found: dict[str, Mapping[str, object]] = {}
        for engine in self._roster:
            for card in engine.cards:
                found.setdefault(card.id, card.raw)
        for alias, model in self._aliases.items():
            if model in found and alias not in found:
                found[alias] = {**found[model], "id": alias, "root": model}
        return list(found.values())

    def knows(self, model: str) -> bool:
        """False only when every engine has been heard, at least one is up, and none lists the model."""
        if self._roster.knows(model):
            return True
        heard = all(engine.state is not EngineState.STARTING for engine in self._roster)
        return not (heard and self._roster.any_up())

    def info(self, model: str) -> Mapping[str, object]:
        """TGI's /info for a model: what its engine's model object says, in TGI's words where there are any."""
        for engine in self._roster:
            for card in engine.cards:
                if card.id == model or not model:
                    return {
                        "model_id": card.id,
                        "max_total_tokens": card.max_model_len,
                        "version": engine.version,
                        **card.raw,
                    }
        return {"model_id": model}
