"""What a process may start on credit, and on its share once it is cut off."""

from __future__ import annotations

from gateway.dispatch.credit import HALVING_S, RESIZED_S, CreditBook, share_left
from gateway.queue.base import Credit, InFlight, Renewed
from policies.vocabulary import Work

PLACE = ("a", "chat")


def work(prompt_tokens: int = 10) -> Work:
    return Work(
        id="w",
        class_name="chat",
        tenant="t",
        model="m",
        path="/v1/completions",
        accepted_s=0.0,
        rank=0.0,
        prompt_tokens=prompt_tokens,
    )


def book(works: int, *, tokens: int = 1000, expires_ms: int = 2_000, share: int = 0) -> CreditBook:
    held = CreditBook()
    credit = Credit(InFlight(works, tokens, tokens), share, expires_ms)
    held.renewed(Renewed({PLACE: credit}, epoch=5, snapshot_version=1), sent_s=100.0, now_ms=0)
    return held


def test_credit_allows_as_many_works_as_it_says() -> None:
    held = book(2)

    started = [held.spend(work(), ["a"], 100.0) for _ in range(3)]

    assert started == ["a", "a", None]
    assert held.started[PLACE] == InFlight(2, 20, 20)


def test_a_repeated_renewal_gives_nothing_twice() -> None:
    held = book(2)
    held.spend(work(), ["a"], 100.0)
    again = Credit(InFlight(2, 1000, 1000), 0, 2_000)

    held.renewed(Renewed({PLACE: again}, epoch=5), sent_s=100.5, now_ms=500)

    assert [held.spend(work(), ["a"], 100.6) for _ in range(2)] == ["a", None]


def test_credit_ends_early_by_what_two_clocks_may_differ() -> None:
    held = CreditBook()
    credit = Credit(InFlight(2, 1000, 1000), 0, 2_000)
    held.renewed(Renewed({PLACE: credit}), sent_s=100.0, now_ms=0, error_s=0.05)

    assert held.spend(work(), ["a"], 100.0 + 1.84) == "a"
    assert held.spend(work(), ["a"], 100.0 + 1.86) is None


def test_a_prompt_past_the_tokens_allowed_has_to_ask() -> None:
    held = book(5, tokens=25)

    assert held.spend(work(20), ["a"], 100.0) == "a"
    assert held.spend(work(20), ["a"], 100.0) is None


def test_another_session_begins_its_totals_anew() -> None:
    held = book(1)
    held.spend(work(), ["a"], 100.0)

    held.lost()

    assert held.started == {}
    assert held.spend(work(), ["a"], 100.0) is None


def test_a_share_halves_and_counts_what_still_runs() -> None:
    held = book(0, share=4)
    running = {PLACE: InFlight(1, 0, 0)}

    at_once = held.spend_share(work(), ["a"], running, 100.0)
    later = held.spend_share(work(), ["a"], {PLACE: InFlight(2, 0, 0)}, 100.0 + HALVING_S)

    assert at_once == "a"
    assert later is None
    assert [share_left(4, seconds) for seconds in (0, 10, 20, 30, 60)] == [4, 2, 1, 1, 0]


def told(works: int) -> CreditBook:
    """It has told of so many works that run, and is answered."""
    held = CreditBook()
    held.reporting({PLACE: InFlight(works, 0, 0)}, 100.0)
    held.renewed(Renewed({}), sent_s=100.0, now_ms=0)
    return held


def test_a_leader_has_no_share_of_a_place_that_it_gave_away_as_its_work_had_ended() -> None:
    held = told(3)

    held.giving({PLACE: InFlight(2, 0, 0)}, 100.1)

    assert held.share(PLACE, 100.2) == 2


def test_the_answer_to_a_report_of_before_gives_a_leader_nothing_back() -> None:
    held = told(3)
    held.reporting({PLACE: InFlight(3, 0, 0)}, 100.5)

    held.giving({PLACE: InFlight(2, 0, 0)}, 100.6)
    held.renewed(Renewed({}), sent_s=100.5, now_ms=500)

    assert held.share(PLACE, 100.7) == 2


def test_a_share_that_was_told_before_everybody_went_by_other_windows_is_none() -> None:
    held = book(0, share=1)

    held.resized(100.2)
    at_once = held.share(PLACE, 100.3)
    late = Credit(InFlight(), 1, 10_000)
    held.renewed(Renewed({PLACE: late}, epoch=5), sent_s=100.1 + RESIZED_S, now_ms=4_100)
    told_too_early = held.share(PLACE, 100.3 + RESIZED_S)
    held.renewed(Renewed({PLACE: late}, epoch=5), sent_s=100.2 + RESIZED_S, now_ms=4_200)

    assert (at_once, told_too_early, held.share(PLACE, 100.3 + RESIZED_S)) == (0, 0, 1)


def test_a_late_word_of_a_leader_that_was_replaced_gives_nothing_though_the_store_has_forgotten_it() -> None:
    held = book(2, share=1)
    late = Credit(InFlight(9, 1000, 1000), 1, 3_000)

    held.renewed(Renewed({PLACE: late}, epoch=4), sent_s=101.0, now_ms=1_000)

    assert held.unspent(PLACE, 101.0) == 0
    assert held.share(PLACE, 101.0) == 0
    assert held.epoch == 5
