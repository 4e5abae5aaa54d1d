"""What a sweep measured, in the terms of the step model: durations of steps whose contents are known.

A prompt that is alone takes the steps of its chunks and what a request costs besides (HTTP, tokenising, the way there
and back). Sequences that decode together take one step a token. How a prompt is cut follows from the engine's budget of
tokens a step, which is found out in between; until then a prompt counts as one chunk, which changes nothing of what
grows with the prompt: the attention of all chunks adds up to p²/2 however they are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step. context_tokens: KV of the decoding sequences; chunk, before: of the one prompt in it."""

    decoding: int
    context_tokens: float
    chunk: int = 0
    before: int = 0


@dataclass(frozen=True, slots=True)
class Alone:
    """A prompt on an idle engine: from its sending to its first token."""

    prompt_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Together:
    """Sequences that all decode: the mean step over a stretch, with the context in its middle. power_w: None unknown."""

    batch: int
    context_tokens: float
    seconds: float
    power_w: float | None = None


@dataclass(frozen=True, slots=True)
class Stall:
    """A long prompt beside one decoding stream: the longest gap of the stream, and its usual one."""

    prompt_tokens: int
    context_tokens: float
    longest_s: float
    usual_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a sweep measured."""

    alone: tuple[Alone, ...] = ()
    together: tuple[Together, ...] = ()
    stalls: tuple[Stall, ...] = ()


def chunks(prompt_tokens: int, budget_tokens: int | None) -> Iterator[Step]:
    """The steps of a prompt that is alone. budget_tokens: of a step; None: no bound."""
    before = 0
    while before < prompt_tokens:
        chunk = prompt_tokens - before if budget_tokens is None else min(budget_tokens, prompt_tokens - before)
        yield Step(0, 0.0, chunk, before)
        before += chunk
