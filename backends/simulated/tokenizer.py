"""A small, exact tokenizer: common words are one token, everything else is cut into pieces of up to three bytes.

Real enough for what a gateway can see of one: counts, ids, and text that may end in the middle of a character. It is
reversible for any bytes, so that a prompt of token ids made of an earlier prompt and its answer means the same text.

Ids: 0 is the end of text, then the words with their leading space, then the words without, then every byte string of
length 1, 2 and 3. So the vocabulary is larger than any real one; nobody computes on it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

END_OF_TEXT = 0
_WORDS_FILE = Path(__file__).parent / "words.txt"
_PIECES = re.compile(r" ?\w+(?:['’]\w+)?|\n| ?[^\w\s]+|\s+")
_LONGEST_PIECE = 3


class Tokenizer:
    """See the module header. Immutable; share one."""

    def __init__(self, words: list[str]) -> None:
        pieces = [f" {word}".encode() for word in words] + [word.encode() for word in words]
        self.word_count = len(words)
        self._piece_of = [b"", *pieces]
        self._id_of = {piece.decode(): number for number, piece in enumerate(pieces, 1)}
        first = len(self._piece_of)
        self._first_by_length = [first, first + 256, first + 256 + 256**2]
        self.vocabulary_size = first + 256 + 256**2 + 256**3

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; decoding them gives it back."""
        ids: list[int] = []
        known = self._id_of
        for match in _PIECES.finditer(text):
            piece = match.group()
            number = known.get(piece)
            if number is None:
                ids.extend(self._encode_bytes(piece.encode("utf-8", "surrogatepass")))
            else:
                ids.append(number)
        return ids

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token, which may be part of a character. Raises ValueError for an id out of vocabulary."""
        if 0 <= token_id < len(self._piece_of):
            return self._piece_of[token_id]
        for length in range(_LONGEST_PIECE, 0, -1):
            first = self._first_by_length[length - 1]
            if first <= token_id < first + 256**length:
                return (token_id - first).to_bytes(length, "big")
        raise ValueError(f"token id {token_id}: must be in 0..{self.vocabulary_size - 1}; use ids of this tokenizer")

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; bytes that are no character become U+FFFD."""
        return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

    def split_character(self, character: str) -> tuple[int, int]:
        """Two ids that make one character of two to six bytes, neither of them text alone."""
        raw = character.encode()
        half = len(raw) // 2
        return self._encode_bytes(raw[:half])[0], self._encode_bytes(raw[half:])[0]

    def _encode_bytes(self, raw: bytes) -> list[int]:
        return [
            self._first_by_length[len(part) - 1] + int.from_bytes(part, "big")
            for part in (raw[at : at + _LONGEST_PIECE] for at in range(0, len(raw), _LONGEST_PIECE))
        ]


@lru_cache(maxsize=1)
def shipped_tokenizer() -> Tokenizer:
    """The tokenizer over the shipped word list."""
    words = _WORDS_FILE.read_text(encoding="utf-8").split()
    return Tokenizer(list(dict.fromkeys("\n" if word == "\\n" else word for word in words)))
