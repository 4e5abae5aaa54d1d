"""From the series of one metric to one signal of the engine: whose they are, how they add up, what is absurd.

An engine is one thing to the gateway even where its page shows many series. The rules:

1. **Whose.** Once the engine's own model list is known, a series labelled with a model outside it is not counted, so
   that a page shared with another server never mixes in. A series without such a label counts. While the list is
   unknown all series count.
2. **Copies.** A series told twice is one; told twice with different values it is absurd. Ranks that hold the same requests
   (tensor and pipeline parallel) repeat a value; the highest one stands.
3. **Sums.** Requests, tokens and KV capacity of data-parallel engines and of several models add up.
4. **Maximum.** A used fraction is the highest one: the fullest part is the one that evicts.

One absurd value (NaN, infinite, negative, a fraction above 1) makes the signal unknown, since a sum without it would
be a number that nobody measured.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from backends.base import Measured
from backends.exposition import Series

MODEL_LABEL = "model_name"


def own(series: Series, models: Collection[str]) -> Series:
    """Rule 1. `models` is the engine's own list, empty while it is unknown."""
    if not models:
        return series
    return [item for item in series if not (model := item[0].get(MODEL_LABEL, "")) or model in models]


def once(series: Series) -> Series:
    """Rule 2, for the same labels twice: a page's makers were glued together, or read each other."""
    if len(series) < 2:
        return series
    told: dict[frozenset[tuple[str, str]], tuple[dict[str, str], float]] = {}
    for item in series:
        labels, value = item
        key = frozenset(labels.items())
        if told.setdefault(key, item)[1] != value:
            told[key] = labels, math.nan
    return list(told.values())


def without_copies(series: Series, rank_labels: Collection[str]) -> Series:
    """Rule 2: one series for each set of labels other than the rank labels. NaN stands above every number."""
    highest: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in series:
        key = tuple(sorted(item for item in labels.items() if item[0] not in rank_labels))
        before = highest.get(key, -math.inf)
        highest[key] = value if math.isnan(value) or value > before else before
    return [(dict(key), value) for key, value in highest.items()]


def total(series: Series, source: str) -> Measured:
    """Rule 3."""
    values = [value for _, value in series]
    return Measured(sum(values) if _all_plausible(values) else None, source)


def fullest(series: Series, source: str) -> Measured:
    """Rule 4, for fractions of 0 to 1."""
    values = [value for _, value in series]
    return Measured(max(values) if _all_plausible(values) and max(values) <= 1 else None, source)


def measured(value: float, source: str) -> Measured:
    """One value >= 0, unknown if it is absurd."""
    return total([({}, value)], source)


def label_number(labels: Mapping[str, str], name: str) -> float | None:
    """A number kept in a label, None where there is none ("None" is what Python engines write)."""
    try:
        number = float(labels.get(name, ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _all_plausible(values: list[float]) -> bool:
    return bool(values) and all(math.isfinite(value) and value >= 0 for value in values)
