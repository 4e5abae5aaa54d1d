"""What a prompt takes to its first token on an idle engine, by model: the measure of `ttft_slowdown`.

No engine is idle for long, so it is taken from the quick ones of late: of the last KEPT first tokens of each size (powers of
two) the QUICK part, as times what is usual. A size that was not seen takes the nearest one's. A model whose engines have
been full for all of that time is believed slower than it is, and its promise is laxer for as long.
"""

from __future__ import annotations

import math
from collections import deque

from policies.schema import usual_alone_s

KEPT = 64
QUICK = 0.1
SIZES_KEPT = 1024
"""Of all models together."""


class Alone:
    """See the module header. One per pool and process, its owner is the dispatcher."""

    __slots__ = ("_sizes", "_times")

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, int], deque[float]] = {}
        self._times: dict[str, dict[int, float]] = {}

    def first_token(self, model: str, prompt_tokens: int, engine_ttft_s: float) -> None:
        """An attempt showed its first token so long after it was sent."""
        if engine_ttft_s <= 0:
            return
        key = model, _size(prompt_tokens)
        found = self._sizes.get(key)
        if found is None:
            if len(self._sizes) >= SIZES_KEPT:
                self._forget(next(iter(self._sizes)))
            found = self._sizes[key] = deque(maxlen=KEPT)
        found.append(engine_ttft_s / usual_alone_s(prompt_tokens))
        self._times.setdefault(model, {})[key[1]] = sorted(found)[int(QUICK * (len(found) - 1))]

    def seconds(self, model: str, prompt_tokens: int) -> float | None:
        """Predicted for a prompt of this size; None for a model of which no first token was seen."""
        times = self._times.get(model)
        if not times:
            return None
        size = _size(prompt_tokens)
        known = times.get(size)
        if known is None:
            known = times[min(times, key=lambda one: (abs(one - size), one))]
        return known * usual_alone_s(prompt_tokens)

    def _forget(self, key: tuple[str, int]) -> None:
        model, size = key
        del self._sizes[key]
        self._times[model].pop(size, None)

    def __repr__(self) -> str:
        return f"<Alone models={len(self._times)}>"


def _size(prompt_tokens: int) -> int:
    return int(math.log2(max(1, prompt_tokens)))
