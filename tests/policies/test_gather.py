"""Works that gain from each other stand together, and nobody loses more than its mates' places."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from policies.dispatching import plan_round
from policies.limits import build
from policies.ordering.gather import gathered
from policies.vocabulary import Work
from tests.policies.worlds import NOW_S, engine, policy, work

kinds = st.tuples(
    st.sampled_from(["/v1/completions", "/v1/embeddings"]), st.sampled_from(["", "a", "b"]), st.integers(0, 5000)
)


def made(drawn: list[tuple[str, str, int]]) -> list[Work]:
    return [
        replace(work(f"w{number:02}", "night", path=path, prompt_tokens=tokens, rank=float(number)), prefix=prefix)
        for number, (path, prefix, tokens) in enumerate(drawn)
    ]


@given(st.lists(kinds, max_size=30))
def test_every_work_is_there_once_and_mates_keep_their_order(drawn: list[tuple[str, str, int]]) -> None:
    works = made(drawn)

    order = gathered(works)

    assert sorted(one.id for one in order) == [one.id for one in works]
    assert order[:1] == works[:1]
    for path, prefix in {(one.path, one.prefix) for one in works}:
        mates = [one.id for one in order if (one.path, one.prefix) == (path, prefix)]
        if path == "/v1/completions":
            assert mates == sorted(mates)


@given(st.lists(kinds, max_size=30))
def test_only_younger_mates_of_older_works_overtake(drawn: list[tuple[str, str, int]]) -> None:
    works = made(drawn)
    order = gathered(works)

    for at, one in enumerate(order):
        for before in order[:at]:
            if before.rank > one.rank:
                assert any(
                    older.rank < one.rank
                    and older.path == before.path
                    and (older.prefix == before.prefix or older.path == "/v1/embeddings")
                    for older in order[:at]
                )


def test_inputs_of_one_length_and_requests_that_begin_alike_go_out_together() -> None:
    rules = policy()
    embed = [
        work(f"e{number}", "night", path="/v1/embeddings", prompt_tokens=tokens, rank=float(number))
        for number, tokens in enumerate([100, 3000, 120, 3500, 90])
    ]
    alike = [
        replace(work(f"c{number}", "night", rank=10.0 + number), prefix=prefix)
        for number, prefix in enumerate(["x", "y", "x", "", "y"])
    ]

    first = plan_round(embed, [engine()], build(rules), rules, NOW_S, 0.5)
    second = plan_round(alike, [engine()], build(rules), rules, NOW_S, 0.5)

    assert [one.work.id for one in first] == ["e0", "e2", "e4"]
    assert [one.work.id for one in second] == ["c0", "c2", "c1"]
