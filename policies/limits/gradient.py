"""Sizing policy `gradient`: one limit an engine, from the gradient of its latency. Gradient2 of Netflix.

What it does: each first token compares the time it took with the long-run average. While it took no more than
`tolerance` times that, the limit grows by `headroom` (smoothed); past it, it shrinks in proportion, at most by half.
When latency has fallen to less than half of the average, the average is let down faster, so that one bad hour does not
pass for normal.

Inputs: times from send to first token, and sequences in flight as of the last control tick.

Trade-off: it needs no objective and finds the knee of a server whose latency is queueing. An LLM's first token depends
first of all on the prompt's length, so the gradient follows the mix of prompts; and slowly rising latency becomes the
new normal.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.limits.shared import SharedLimit
from policies.schema import Policy
from policies.sizing import FirstToken, LearnedStep, Sampled, SizingEvent, Window
from policies.vocabulary import EngineView, Verdict, Work

WARM_UP_SAMPLES = 10
"""Samples of which the plain mean is taken before the exponential one begins."""


class Gradient:
    """See the module header."""

    __slots__ = ("_fields", "_limit", "_long_s", "_samples", "_sequences")

    def __init__(self, policy: Policy) -> None:
        self._fields = fields = policy.sizing.gradient
        self._limit = SharedLimit(policy, start=fields.start, least=fields.least, most=fields.most)
        self._sequences: dict[str, int] = {}
        self._long_s: dict[str, float] = {}
        self._samples: dict[str, int] = {}

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:  # noqa: ARG002 - the contract's
        return self._limit.verdict(work, engine)

    def window(self, engine: EngineView, class_name: str) -> Window:
        return self._limit.window(engine, class_name)

    def on_event(self, event: SizingEvent, now_s: float) -> None:  # noqa: ARG002 - the contract's
        """Move an engine's limit at a first token."""
        if isinstance(event, Sampled):
            self._sequences[event.view.name] = event.view.sequences_total
        elif isinstance(event, FirstToken):
            self._on_sample(event.engine, event.engine_ttft_s)

    def _on_sample(self, engine: str, short_s: float) -> None:
        fields, limit = self._fields, self._limit.of(engine)
        long_s = self._averaged(engine, short_s)
        if long_s > 2 * short_s:
            self._long_s[engine] = long_s * 0.95
        if 2 * self._sequences.get(engine, 0) < limit:
            return
        gradient = max(0.5, min(1.0, fields.tolerance * long_s / short_s))
        wanted = limit * gradient + fields.headroom
        self._limit.move(engine, limit * (1 - fields.smoothing) + wanted * fields.smoothing)

    def _averaged(self, engine: str, short_s: float) -> float:
        """Fold a sample into the long run and return it."""
        count = self._samples[engine] = self._samples.get(engine, 0) + 1
        weight = 1 / count if count <= WARM_UP_SAMPLES else 2 / (self._fields.long_samples + 1)
        before = self._long_s.get(engine, short_s)
        after = self._long_s[engine] = before + (short_s - before) * weight
        return after

    def learned_step(self, engine: str) -> LearnedStep | None:  # noqa: ARG002, the contract's
        """This policy does not look."""
        return None

    def snapshot(self) -> Mapping[str, object]:
        return {**self._limit.snapshot(), "long_s": dict(self._long_s)}

    def restore(self, state: Mapping[str, object]) -> None:
        self._limit.restore(state)
        long_s = state.get("long_s")
        if isinstance(long_s, Mapping):
            self._long_s = {str(name): float(one) for name, one in long_s.items() if isinstance(one, int | float)}
            self._samples = dict.fromkeys(self._long_s, WARM_UP_SAMPLES)

    def __repr__(self) -> str:
        return f"<Gradient {self._limit!r}>"
