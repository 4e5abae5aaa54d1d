"""How long a prompt may keep an engine, for the sake of those who are about to come.

An engine takes in one prompt after another. While it takes in one of a hundred thousand tokens, which may be for ten seconds,
nobody who comes has a first token; and since it began when nothing else waited, no order helps them. Who comes is not known, but how
many came of late is, and how much time they have: a prompt is too long when more than one of those to come would be late for it.
That is Moore and Hodgson's exchange, one for one, with works that are only expected.

A prompt of less than LONG times the usual length is never too long: where people are late behind each other, all are.
"""

from __future__ import annotations

import math

from policies.estimators.pace import prefill_tokens
from policies.ordering.feasibility import SPARE, STRETCH
from policies.vocabulary import Work

LONG = 2.0
FADES_IN_S = 60.0
LEAST_SEEN = 8.0
"""Works of the last minute below which nothing is expected."""
MODELS_KEPT = 256


class Crowd:
    """See the module header. Its writer is the pool's dispatcher.

    Of each model: works with a deadline of late, the sums of the times that they had and of their `prefill_tokens`, and when
    the last one came; they fade by e in FADES_IN_S.
    """

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, float, float, float]] = {}

    def came(self, work: Work, now_s: float) -> None:
        """A work has its place, or was refused one."""
        if work.deadline_s is None:
            return
        count, time_s, tokens, at_s = self._of.pop(work.model, (0.0, 0.0, 0.0, now_s))
        fade = math.exp(min(0.0, at_s - now_s) / FADES_IN_S)
        self._of[work.model] = (
            count * fade + 1,
            time_s * fade + work.deadline_s - work.accepted_s,
            tokens * fade + prefill_tokens(work.prompt_tokens, work.cached_tokens),
            max(at_s, now_s),
        )
        if len(self._of) > MODELS_KEPT:  # the one not heard of for the longest
            self._of.pop(next(iter(self._of)))

    def long(self, work: Work) -> bool:
        """It is so much longer than usual that `most_s` is worth asking for."""
        count, _, tokens, _ = self._of.get(work.model, _NOBODY)
        return prefill_tokens(work.prompt_tokens, work.cached_tokens) * count > LONG * tokens

    def most_s(self, model: str, each_s: float, now_s: float) -> float:
        """The longest time for which a prompt may keep the engines of a model; inf while few come. each_s: for each of
        `prefill_tokens`."""
        spare_s, rate_per_s = self._expected(model, each_s, now_s)
        return spare_s + 1 / rate_per_s if rate_per_s else math.inf

    def allowed_in_s(self, model: str, takes_s: float, each_s: float, now_s: float) -> float:
        """When a prompt that takes so long is not too long any more, should nobody come; >= 0."""
        spare_s, rate_per_s = self._expected(model, each_s, now_s)
        late = rate_per_s * max(0.0, takes_s - spare_s)
        return FADES_IN_S * math.log(late) if late > 1 else 0.0

    def _expected(self, model: str, each_s: float, now_s: float) -> tuple[float, float]:
        """(how long who comes can wait and be in time, in seconds; how many come in one)."""
        count, time_s, tokens, at_s = self._of.get(model, _NOBODY)
        lately = count * math.exp(min(0.0, at_s - now_s) / FADES_IN_S)
        if lately < LEAST_SEEN:
            return 0.0, 0.0
        return max(0.0, (1 - SPARE) * time_s / count - STRETCH * each_s * tokens / count), lately / FADES_IN_S

    def __repr__(self) -> str:
        return f"<Crowd {' '.join(f'{model}={count:.0f}' for model, (count, *_) in self._of.items())}>"


_NOBODY = (0.0, 0.0, 0.0, -math.inf)
