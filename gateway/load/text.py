"""Prompts of about so many tokens: common words, cut from one long text, so that a prompt costs a copy and no loop.

Each word is one token for the simulated engines and nearly so for real ones. Every prompt begins with a number of its
own, so that a prefix cache finds nothing that the traffic would not offer; where a trace names the beginnings of its
prompts, equal names give equal beginnings.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

WORDS = (
    "the", "water", "that", "we", "use", "to", "turn", "and", "move", "is", "the", "same", "water", "that", "will", "come", "back", "to", "the", "land",
)  # fmt: skip
_ROUND = "".join(f"{word} " for word in WORDS)
_STARTS = (0, *accumulate(len(word) + 1 for word in WORDS))


def prompt_text(tokens: int, number: int) -> str:
    """A text of about `tokens` tokens that no prompt of another number begins with; `number` also turns the words."""
    return f"{number} {_words(number % len(WORDS), max(1, tokens - 2))}"


def prompt_of_beginnings(tokens: int, number: int, names: Iterable[int], each_tokens: int) -> str:
    """The same for a prompt whose beginnings are named, each `each_tokens` longer than the one before."""
    parts: list[str] = []
    left = tokens
    for name in names:
        if left <= each_tokens:
            break
        parts.append(prompt_text(each_tokens, name))
        left -= each_tokens
    return " ".join([*parts, prompt_text(left, number)])


def _words(first: int, count: int) -> str:
    rounds, last = divmod(first + count, len(WORDS))
    return (_ROUND * (rounds + 1))[_STARTS[first] : rounds * len(_ROUND) + _STARTS[last] - 1]
