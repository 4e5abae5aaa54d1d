"""What an engine was sent it probably still has: by level, by model, and forgotten in the order of use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.estimators.prefix_caches import DIGESTS_KEPT, PrefixCaches, level_tokens
from policies.vocabulary import Work
from tests.policies.worlds import work


def begun(prefix: str, *, prompt_tokens: int = 100_000, model: str = "m") -> Work:
    return replace(work("w", prompt_tokens=prompt_tokens, model=model), prefix=prefix)


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        (begun("a.b.c"), level_tokens(2)),
        (begun("a.b.x"), level_tokens(1)),
        (begun("a.b.c.d"), level_tokens(2)),
        (begun("a"), level_tokens(0)),
        (begun("x.b.c"), 0),
        (begun(""), 0),
        (begun("a.b.c", prompt_tokens=300), 300),
        (begun("a.b.c", model="other"), 0),
    ],
)
def test_the_longest_beginning_that_was_sent_is_expected(asked: Work, tokens: int) -> None:
    caches = PrefixCaches()
    caches.granted("e0", begun("a.b.c"))
    caches.granted("e0", begun(""))

    assert caches.tokens("e0", asked) == tokens
    assert caches.tokens("e1", asked) == 0


def test_beginnings_are_forgotten_in_the_order_of_their_use() -> None:
    caches = PrefixCaches()
    caches.granted("e0", begun("first"))
    caches.granted("e0", begun("second"))
    for number in range(DIGESTS_KEPT - 1):
        caches.granted("e0", begun("first"))
        caches.granted("e0", begun(f"n{number}"))

    assert caches.tokens("e0", begun("first")) == level_tokens(0)
    assert caches.tokens("e0", begun("second")) == 0
