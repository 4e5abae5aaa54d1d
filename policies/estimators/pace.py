"""How fast engines take prompts in: seconds per prompt token, from times to first tokens and what they waited behind.

A time to first token covers the prompts that were pending when its work was sent, its own included; over few of them it
is mostly the engine's step, so only those behind LEAST_TOKENS say something. Independent of the sizing policy in force.
"""

from __future__ import annotations

WEIGHT = 0.1
LEAST_TOKENS = 512


class Pace:
    """See the module header. One per pool, its owner is the dispatcher."""

    __slots__ = ("_behind", "_seconds")

    def __init__(self) -> None:
        self._behind: dict[tuple[str, int], int] = {}
        self._seconds: dict[str, float] = {}

    def granted(self, work_id: str, attempt: int, pending_tokens: int) -> None:
        """An attempt was sent; pending_tokens are not prefilled yet on its engine, its own prompt included."""
        self._behind[work_id, attempt] = pending_tokens

    def first_token(self, engine: str, work_id: str, attempt: int, engine_ttft_s: float) -> None:
        behind = self._behind.pop((work_id, attempt), 0)
        if behind >= LEAST_TOKENS and engine_ttft_s > 0:
            seconds = engine_ttft_s / behind
            before = self._seconds.get(engine, seconds)
            self._seconds[engine] = before + WEIGHT * (seconds - before)

    def ended(self, work_id: str, attempt: int) -> None:
        self._behind.pop((work_id, attempt), None)

    def seconds_per_token(self, engine: str) -> float | None:
        """None while nothing is known of the engine."""
        return self._seconds.get(engine)

    def __repr__(self) -> str:
        return f"<Pace {' '.join(f'{name}={1000 * one:.3f} ms/token' for name, one in sorted(self._seconds.items()))}>"
