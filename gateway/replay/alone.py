"""What a prompt takes to its first token when a profiled engine has nothing else to do. Known to a replay, not to a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from backends.simulated.profiles import Profile


def alone(profiles: Iterable[Profile]) -> Callable[[int], float]:
    """Prompt tokens -> seconds, on the fastest of the engines."""
    engines = tuple(profiles)

    @lru_cache(maxsize=4096)
    def seconds(prompt_tokens: int) -> float:
        return min(_seconds(profile, prompt_tokens) for profile in engines)

    return seconds


def _seconds(profile: Profile, prompt_tokens: int) -> float:
    """A step for each piece of the prompt."""
    budget = profile.max_num_batched_tokens
    pieces = [(min(budget, prompt_tokens - before), before) for before in range(0, prompt_tokens, budget)]
    return sum(profile.step_model.step_s(0, 0, (piece,)) for piece in pieces)
