"""What an engine was sent it probably still has: by level, by model, forgotten in the order of use, believed by what is found."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from policies.estimators.prefix_caches import DIGESTS_KEPT, LOOKED_FOR_S, LOOKS, PrefixCaches, level_tokens
from policies.estimators.prefix_trust import START
from policies.vocabulary import EngineView, Outcome, Result, Work
from tests.policies.worlds import NOW_S, engine, fresh, work

UP = frozenset({"e0"})
ANSWER = Outcome("w", "chat", "t", "m", "e0", Result.COMPLETED, "", 200, 1, 10_000, 50, 2.0)


def begun(prefix: str, *, id: str = "w", prompt_tokens: int = 100_000, model: str = "m") -> Work:
    return replace(work(id, prompt_tokens=prompt_tokens, model=model), prefix=prefix)


def tells(hits: float = 0.0, *, name: str = "e0", started_s: float = 5.0) -> EngineView:
    return replace(engine(name), prefix_hits_total=fresh(hits), start_time_s=fresh(started_s))


def warm(*prefixes: str, told: bool = True) -> PrefixCaches:
    """e0 was sent these."""
    caches = PrefixCaches()
    if told:
        caches.heard(tells())
    for number, prefix in enumerate(prefixes):
        caches.granted("e0", begun(prefix, id=f"sent{number}"), 1)
    return caches


def believed(tokens: int) -> int:
    return int(START * tokens)


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
        (begun(".".join(f"n{n}" for n in range(99))), 0),
    ],
)
def test_the_longest_beginning_that_was_sent_is_expected(asked: Work, tokens: int) -> None:
    caches = warm("a.b.c", "")

    assert caches.probable("e0", asked) == (believed(tokens), replace(asked, cached_tokens=believed(tokens)))
    assert caches.probable("e1", asked) == (0, asked)


def test_of_an_engine_that_tells_nothing_something_is_probable_and_nothing_counted_on() -> None:
    caches, again = warm("a.b", told=False), begun("a.b")

    assert caches.probable("e0", again) == (believed(level_tokens(1)), again)
    assert caches.granted("e0", again, 1) == again
    assert caches.waiting([again], UP, NOW_S) == [again]


def test_a_work_carries_what_was_counted_on_when_it_was_granted() -> None:
    caches = warm("a.b")

    there = caches.granted("e0", begun("a.b.c"), 1)

    assert there.cached_tokens == believed(level_tokens(1))
    assert there.computed_tokens == 100_000 - there.cached_tokens
    assert caches.granted("e1", there, 2).cached_tokens == 0


def test_beginnings_are_forgotten_in_the_order_of_their_use() -> None:
    caches = warm("first", "second")
    for number in range(DIGESTS_KEPT - 1):
        caches.granted("e0", begun("first"), 1)
        caches.granted("e0", begun(f"n{number}"), 1)

    assert caches.probable("e0", begun("first"))[0]
    assert not caches.probable("e0", begun("second"))[0]


def test_an_engine_that_starts_anew_has_nothing() -> None:
    caches = warm("a.b")
    caches.heard(tells(started_s=5.2))
    assert caches.probable("e0", begun("a.b"))[0]

    caches.heard(tells(started_s=65.0))

    assert caches.probable("e0", begun("a.b")) == (0, begun("a.b"))


@pytest.mark.parametrize("streams", [True, False])
def test_an_engine_whose_hits_stand_still_is_counted_on_no_more(streams: bool) -> None:
    caches = warm("a.b.c.d.e")
    for number in range(500):
        one = replace(begun("a.b.c.d.e", id=f"w{number}"), streams=streams)
        caches.granted("e0", one, 1)
        if streams:
            caches.first_token(one.id, 1)
        caches.ended("e0", one, 1, ANSWER)
        caches.heard(tells())

    found, there = caches.probable("e0", begun("a.b.c.d.e"))
    assert found == there.cached_tokens < 0.01 * level_tokens(4)
    assert list(caches._attempts) == [("sent0", 1)]


def test_answers_that_tell_what_was_found_are_believed_attempt_by_attempt() -> None:
    caches, found = warm("a.b.c.d", told=False), level_tokens(3) // 2
    for number in range(500):
        one = begun("a.b.c.d", id=f"w{number}")
        caches.granted("e0", one, 1)
        caches.ended("e0", one, 1, replace(ANSWER, cached_tokens=found))

    assert caches.probable("e0", begun("a.b.c.d"))[1].cached_tokens == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("outcome", [None, replace(ANSWER, result=Result.ENGINE_FAILED, output_tokens=0)])
def test_an_attempt_that_made_nothing_says_nothing(outcome: Outcome | None) -> None:
    caches = warm("a.b.c.d")
    before = repr(caches)
    for number in range(100):
        one = begun("a.b.c.d", id=f"w{number}")
        caches.granted("e0", one, 1)
        assert caches.ended("e0", one, 1, outcome).cached_tokens == believed(level_tokens(3))
        caches.heard(tells())

    assert repr(caches) == before


def test_who_waits_is_taken_to_go_where_most_of_it_is() -> None:
    caches = warm("a")
    caches.heard(tells(name="e1"))
    caches.granted("e1", begun("a.b.c"), 1)

    (there,) = caches.waiting([begun("a.b.c")], {"e0", "e1"}, NOW_S)

    assert there.cached_tokens == believed(level_tokens(2))


def test_a_work_that_came_to_nothing_has_left_nothing_new() -> None:
    caches = warm("a.b")
    one = begun("a.b.c.d")
    caches.granted("e0", one, 1)
    caches.ended("e0", one, 1, None)

    assert caches.probable("e0", one)[0] == believed(level_tokens(1))


def test_a_work_that_was_given_up_after_its_first_token_has_left_its_prompt() -> None:
    caches, one = warm(), begun("a.b.c.d")
    caches.granted("e0", one, 1)
    assert not caches.first_token(one.id, 1)
    caches.ended("e0", one, 1, None)

    assert caches.probable("e0", one)[0] == believed(level_tokens(3))


@contextmanager
def counted_looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    looked: list[str] = []
    most = PrefixCaches._most

    def look(self: PrefixCaches, one: Work, up: Collection[str]) -> int:
        looked.append(one.id)
        return most(self, one, up)

    with monkeypatch.context() as patched:
        patched.setattr(PrefixCaches, "_most", look)
        yield looked


def test_a_round_looks_for_few_of_many_and_for_each_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    caches, many = warm("a.b"), [begun("a.b", id=f"w{number}") for number in range(3 * LOOKS)]

    with counted_looks(monkeypatch) as looked:
        for _ in range(10):
            caches.waiting(many, UP, NOW_S)
        assert looked == [one.id for one in many]
        caches.waiting(many, UP, NOW_S + LOOKED_FOR_S)
        assert looked[3 * LOOKS :] == [one.id for one in many[:LOOKS]]


def test_a_work_that_waits_again_is_the_work_as_it_is_now() -> None:
    caches, one = warm("a.b"), begun("a.b")
    caches.waiting([one], UP, NOW_S)
    again = replace(one, attempt=1, avoid=frozenset({"e0"}))

    (there,) = caches.waiting([again], UP, NOW_S)

    assert replace(there, cached_tokens=0) == again


def test_works_without_a_beginning_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    caches, plain = warm("a.b"), [begun("", id=f"w{number}") for number in range(10)]

    with counted_looks(monkeypatch) as looked:
        assert caches.waiting(plain, UP, NOW_S) == plain

    assert not looked
    assert not caches._waiting


@pytest.mark.parametrize(("up", "avoid"), [(frozenset({"e1"}), frozenset()), (UP, frozenset({"e0"}))])
def test_what_an_engine_has_counts_for_nobody_who_cannot_go_there(up: frozenset[str], avoid: frozenset[str]) -> None:
    caches = warm("a.b.c")
    waits = replace(begun("a.b.c"), avoid=avoid)

    (there,) = caches.waiting([waits], up, NOW_S)

    assert there.cached_tokens == 0
    assert caches.waiting([begun("a.b.c", id="other")], UP, NOW_S)[0].cached_tokens > 0


def test_a_work_whose_beginnings_nobody_has_looked_for_yet_is_known_as_such() -> None:
    caches, one = warm("a.b.c"), begun("a.b.c")
    assert not caches.looked_for(one)

    caches.waiting([one], UP, NOW_S)

    assert caches.looked_for(one)
    assert caches.looked_for(work("plain"))


def test_a_first_token_tells_the_time_of_a_whole_prompt_where_little_of_it_was_there() -> None:
    caches = warm("a")
    caches.granted("e0", begun("a.b.c.d", id="long", prompt_tokens=20_000), 1)
    caches.granted("e0", begun("a.b", id="short", prompt_tokens=300), 1)

    assert not caches.first_token("long", 1)
    assert caches.first_token("short", 1)
