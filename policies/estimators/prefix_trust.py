"""How far to believe that an engine has what it was sent before: of the tokens expected in its prefix cache, the part found.

An engine may have no such cache, or forget sooner than we do. Two things tell. Where answers say how much of their prompt was
cached, that is compared prompt by prompt. Else the engine's own counter of hits is: it counts what nobody expected too, and
some moments before we see a first token, so tokens are expected until there are STRETCH_TOKENS of them, and no more than
MOST_FOUND of these are believed found. Old tokens fade by new ones, never by time: what is not used is not known to change.

An engine that says neither has START, which is a guess: good enough to choose among engines, not to predict by (`told`).
"""

from __future__ import annotations

START = 0.7
"""Of the tokens expected, where nothing was heard yet."""
START_TOKENS = 4096.0
"""So many tokens' worth that is believed."""
HALF_TOKENS = 100_000.0
"""Expected tokens after which what was known before counts half."""
STRETCH_TOKENS = 4096
MOST_FOUND = 2.0


class PrefixTrust:
    """See the module header. One per engine. told: the engine says what it finds."""

    __slots__ = ("_by_answers", "_counted_from", "_due_tokens", "_expected", "_found", "told")

    def __init__(self) -> None:
        self._expected = START_TOKENS
        self._found = START * START_TOKENS
        self._due_tokens = 0
        self._counted_from: float | None = None
        self._by_answers = False
        self.told = False

    @property
    def part(self) -> float:
        """In [0, 1], of the tokens expected."""
        return self._found / self._expected

    def taken_in(self, expected_tokens: int) -> None:
        """A prompt has been computed of which so many tokens were expected to be there."""
        self._due_tokens += expected_tokens

    def answered(self, expected_tokens: int, found_tokens: int) -> None:
        """An answer says how many of its prompt's tokens were there."""
        self._by_answers = self.told = True
        if expected_tokens:
            self._saw(expected_tokens, min(expected_tokens, found_tokens))

    def counted(self, hits_total: float) -> None:
        """What the engine's counter of tokens found shows now."""
        self.told = True
        if self._counted_from is None or hits_total < self._counted_from or self._by_answers:
            self._counted_from, self._due_tokens = hits_total, 0
        elif self._due_tokens >= STRETCH_TOKENS:
            self._saw(self._due_tokens, min(MOST_FOUND * self._due_tokens, hits_total - self._counted_from))
            self._counted_from, self._due_tokens = hits_total, 0

    def _saw(self, expected: float, found: float) -> None:
        kept = 0.5 ** (expected / HALF_TOKENS)
        self._expected = kept * self._expected + expected
        self._found = min(self._expected, kept * self._found + found)

    def __repr__(self) -> str:
        return f"<PrefixTrust {self.part:.2f}{'' if self.told else ' untold'}>"
