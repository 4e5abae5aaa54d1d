"""What the virtual engine says: words that follow from the tokens before them, as in greedy decoding.

The next token is a function of the whole token sequence so far, prompt and answer alike. So the same prompt gets the
same answer from every engine, and a prompt made of a prompt and the first half of its answer gets the second half:
what a resume elsewhere relies on. Text only looks like text.
"""

from __future__ import annotations

import codecs
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from backends.simulated.tokenizer import Tokenizer

_MODULUS = (1 << 61) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15 % _MODULUS
_SPLIT_CHARACTER = "🌊"
_SPLIT_EVERY = 61
"""One token in so many starts a character that only the next token completes, as byte-level tokenizers do."""


class Answer:
    """The endless answer to one prompt; whoever uses it knows where it stops.

    choice  index among several answers to the same prompt (n > 1), which differ
    """

    __slots__ = ("_halves", "_pending_half", "_state", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, choice: int = 0) -> None:
        self._tokenizer = tokenizer
        self._halves = tokenizer.split_character(_SPLIT_CHARACTER)
        state = choice + 1
        for token_id in prompt_ids:
            state = (state * _MULTIPLIER + token_id + 1) % _MODULUS
        self._state = state
        self._pending_half = bool(prompt_ids) and prompt_ids[-1] == self._halves[0]

    def next_id(self) -> int:
        """Make one more token."""
        if self._pending_half:
            token_id = self._halves[1]
        elif self._state % _SPLIT_EVERY == 0:
            token_id = self._halves[0]
        else:
            token_id = 1 + (self._state >> 17) % self._tokenizer.word_count
        self._pending_half = token_id == self._halves[0]
        self._state = (self._state * _MULTIPLIER + token_id + 1) % _MODULUS
        return token_id


class TextDecoder:
    """Turns token bytes into text as they come: half a character is held back until it is whole."""

    __slots__ = ("_decoder", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: list[int], *, last: bool) -> str:
        """Text that is whole after these tokens; with `last` a half character left over becomes U+FFFD."""
        return self._decoder.decode(b"".join(map(self._tokenizer.piece, ids)), final=last)


@dataclass(frozen=True, slots=True)
class OutputLengths:
    """How long answers are where the client lets the model decide: lognormal, by seed and prompt.

    median_tokens, sigma   the defaults give p50 129 and p90 424, those of the Azure conversation trace of 2023
                           (Azure/AzurePublicDataset, CC-BY 4.0)
    """

    seed: int = 0
    median_tokens: float = 129.0
    sigma: float = 0.93

    def draw(self, prompt_ids: Sequence[int], choice: int, *, at_least: int, at_most: int) -> int:
        """The true length of one answer, within at_least..at_most; the same for the same prompt and seed."""
        dice = random.Random(f"{self.seed}:{choice}:{len(prompt_ids)}:{hash(tuple(prompt_ids))}")
        tokens = round(dice.lognormvariate(math.log(self.median_tokens), self.sigma))
        return max(1, at_least, min(tokens, at_most))


@dataclass(frozen=True, slots=True)
class StopPoint:
    """Where a stop string ends an answer: tokens made until then, text kept, the string that was met."""

    tokens: int
    text: str
    stop: str


def find_stop(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], choice: int, stops: tuple[str, ...], at_most: int
) -> StopPoint | None:
    """Where the first of `stops` turns up in the first at_most tokens of an answer; None if nowhere."""
    answer, decoder = Answer(tokenizer, prompt_ids, choice=choice), TextDecoder(tokenizer)
    text = ""
    for made in range(1, at_most + 1):
        text += decoder.push([answer.next_id()], last=made == at_most)
        met = [(text.find(stop), stop) for stop in stops if stop in text]
        if met:
            position, stop = min(met)
            return StopPoint(made, text[:position], stop)
    return None
