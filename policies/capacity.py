"""What fits now: how many inputs of a class would start at once, and how many one request may bring.

Asked of the sizing policy itself, with the ledger as it stands, so that the answer is what the next decision will be. More
in flight never gives more room, so the number is found by halving: about ten questions an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policies.placement import suited
from policies.schema import ClassPolicy
from policies.sizing import SizingPolicy
from policies.vocabulary import EngineView, Guard, Work

MOST = 1024
"""Inputs on one engine beyond which nobody asks."""


@dataclass(frozen=True, slots=True)
class Fit:
    """inputs would start now on the engines that may take the work; `binding` holds the next one back on the last of
    them, NONE where there is no such engine. too_long: the work fits into the context of none of them."""

    inputs: int
    binding: Guard = Guard.NONE
    too_long: bool = False


def fit(work: Work, engines: Iterable[EngineView], sizing: SizingPolicy, now_s: float) -> Fit:
    """How many works like this one, of one sequence, could start now, as if nothing waited."""
    total, binding = 0, Guard.NONE
    views = suited(work, sorted(engines, key=lambda one: one.name))
    if views and not any(_takes(view, work.prompt_tokens) for view in views):
        return Fit(0, too_long=True)
    for view in views:
        here, binding = _fit(work, view, sizing, now_s)
        total += here
    return Fit(total, binding)


def _takes(view: EngineView, prompt_tokens: int) -> bool:
    """Whether its context has room for such a prompt and one token of an answer, as far as it tells."""
    told = view.max_model_len
    return not told.known or told.value is None or prompt_tokens < told.value


def _fit(work: Work, view: EngineView, sizing: SizingPolicy, now_s: float) -> tuple[int, Guard]:
    fewest, most, binding = 0, MOST, Guard.NONE
    while fewest < most:
        tried = (fewest + most) // 2
        verdict = sizing.admit(work, view.with_more(work, tried), now_s)
        if verdict.admitted:
            fewest = tried + 1
        else:
            most, binding = tried, verdict.binding
    return fewest, binding


def largest_batch(one: ClassPolicy, *, waiting: int, parts_at_once: int, inputs_max: int) -> int:
    """Inputs of the largest request batch that would be let in now, to start or to wait; by the rule of `admit`.

    waiting         works of the class that wait
    parts_at_once   works that one request lets wait at a time, at most
    inputs_max      inputs that any request may have
    """
    places = one.max_queue - waiting
    if not waiting or places >= parts_at_once:
        return inputs_max
    return max(0, places) * one.inputs_max
