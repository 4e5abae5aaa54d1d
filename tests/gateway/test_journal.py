"""What a process tells of its attempts and what a leader makes of it: each thing once, whatever is lost on the way."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch import journal as journal_module
from gateway.dispatch.elsewhere import Elsewhere as AnyElsewhere
from gateway.dispatch.elsewhere import News
from gateway.dispatch.journal import Journal
from gateway.dispatch.ledger import Ledger
from gateway.queue.base import Began, Grew, Session, Told
from policies.sizing import Finished, FirstToken, Granted
from policies.vocabulary import Outcome, Result, Work

EPOCH = 7
SESSION = Session("worker", 1)
OUTCOME = Outcome("", "", "", "", "", Result.COMPLETED, "", 200, 1, 10, 30, 2.0)


class Elsewhere(AnyElsewhere):
    """That of a leader whom nobody asks what has ended."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(lambda _engine, _began_s, _ended_s: None)


class Tokens:
    def __init__(self, output_tokens: int = 0) -> None:
        self.output_tokens = output_tokens
        self.recallable = False

    def recall(self) -> None:
        raise AssertionError("nobody recalls in these tests")


class Process:
    """A process with a journal: its attempts begin, show a first token, grow and end."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.journal = Journal(self.ledger)
        self.now_ms = 1_000_000
        self.journal.to_tell(EPOCH, self.now_ms)

    def begin(self, name: str, engine: str = "e") -> None:
        work = Work(name, "chat", "t", "m", "/v1/completions", accepted_s=1.0, rank=0.0, prompt_tokens=10)
        self.ledger[engine].add(work, 1, self.now_ms / 1000)
        self.ledger[engine].entries[name, 1].taken_s = self.now_ms / 1000
        self.journal.began(work, engine, 1, self.now_ms)

    def show(self, name: str, tokens: int = 1, engine: str = "e") -> None:
        self.ledger[engine].attach(name, 1, Tokens(tokens))
        self.ledger[engine].first_token(name, 1)
        self.journal.first_token(name, 1, 0.25, self.now_ms)

    def end(self, name: str, engine: str = "e") -> None:
        self.ledger[engine].remove(name, 1)
        self.journal.ended(name, 1, OUTCOME, self.now_ms)

    def renew(self, *, arrives: bool = True, epoch: int = EPOCH) -> tuple[Told, ...]:
        told = self.journal.to_tell(epoch, self.now_ms)
        if arrives:
            self.journal.answered()
        return told


def hear(leader: Elsewhere, told: tuple[Told, ...], session: Session = SESSION) -> list[News]:
    return leader.hear(session, told, lambda _engine, _key: False)


def shape(news: list[News]) -> list[tuple[str, str]]:
    return [(type(event).__name__, event.work.id) for _, event in news]


def test_a_claim_whose_answer_is_not_known_is_no_attempt_of_ours_to_the_next_leader() -> None:
    process = Process()
    process.journal.to_tell(0, process.now_ms)  # it leads
    process.begin("ours")
    claimed = Work("theirs", "chat", "t", "m", "/v1/completions", accepted_s=1.0, rank=0.0, prompt_tokens=10)
    process.ledger["e"].add(claimed, 1, process.now_ms / 1000)

    told = process.renew(epoch=EPOCH + 1)

    assert [one.event.work.id for one in told if isinstance(one.event, Began)] == ["ours"]


def test_a_life_is_told_as_if_it_had_happened_in_the_leader() -> None:
    process, leader = Process(), Elsewhere()
    process.begin("w")
    process.now_ms += 250
    process.show("w")
    process.now_ms += 250
    process.end("w")

    (began_s, began), (answered_s, answered), (ended_s, ended) = hear(leader, process.renew())

    assert (began_s, answered_s, ended_s) == (1000.0, 1000.25, 1000.5)
    assert isinstance(began, Granted)
    assert isinstance(answered, FirstToken)
    assert answered.engine_ttft_s == 0.25
    assert isinstance(ended, Finished)
    assert ended.outcome is not None
    assert (ended.outcome.work_id, ended.outcome.engine, ended.outcome.output_tokens) == ("w", "e", 30)
    assert leader.running("e", 1000.5) == []


def test_a_renewal_whose_reply_was_lost_tells_again_and_is_taken_once() -> None:
    process, leader = Process(), Elsewhere()
    process.begin("w")
    first = hear(leader, process.renew(arrives=False))
    process.end("w")

    second = hear(leader, process.renew())

    assert shape(first + second) == [("Granted", "w"), ("Finished", "w")]
    assert process.renew() == ()


@given(
    st.lists(st.sampled_from(["begin", "show", "end", "renew", "lost call", "lost reply"]), max_size=60), st.integers()
)
def test_each_event_is_heard_exactly_once_whatever_calls_and_replies_are_lost(steps: list[str], seed: int) -> None:
    rng = random.Random(seed)
    process, leader = Process(), Elsewhere()
    names, alive, heard = iter(range(1000)), [], []
    happened = []
    for step in steps:
        process.now_ms += rng.randint(0, 300)
        if step == "begin":
            alive.append(f"w{next(names)}")
            process.begin(alive[-1])
            happened.append(("Granted", alive[-1]))
        elif step == "show" and alive:
            name = rng.choice(alive)
            process.show(name)
            happened.append(("FirstToken", name))
        elif step == "end" and alive:
            name = alive.pop(rng.randrange(len(alive)))
            process.end(name)
            happened.append(("Finished", name))
        elif step == "lost call":
            process.renew(arrives=False)
        elif step in {"renew", "lost reply"}:
            heard += hear(leader, process.renew(arrives=step == "renew"))
    heard += hear(leader, process.renew())

    assert shape(heard) == happened
    assert sorted(one.work.id for one in leader.running("e", 0.0)) == sorted(alive)
    assert leader.missed == 0


def test_a_work_that_the_leader_granted_itself_is_no_news() -> None:
    process, leader = Process(), Elsewhere()
    process.begin("w")

    news = leader.hear(SESSION, process.renew(), lambda engine, key: (engine, key) == ("e", ("w", 1)))

    assert news == []
    assert ("w", 1) in leader


def test_another_leader_is_told_of_all_that_runs_and_how_far_it_is() -> None:
    process = Process()
    process.begin("w")
    process.show("w", 40)
    process.ledger.refresh()
    process.renew()

    told = process.renew(epoch=EPOCH + 1)

    (event,) = [one.event for one in told if isinstance(one.event, Began)]
    assert (event.work.id, event.shown_tokens, event.prefilled) == ("w", 40, True)
    assert told[0].at_ms == 1_000_000


def test_a_leader_that_is_told_twice_of_an_attempt_knows_it_once() -> None:
    process, leader = Process(), Elsewhere()
    process.begin("w")
    news = hear(leader, process.renew())
    news += hear(leader, process.renew(epoch=EPOCH + 1))
    process.now_ms += 1_000
    news += hear(leader, process.renew(epoch=EPOCH + 1))
    process.end("w")

    news += hear(leader, process.renew(epoch=EPOCH + 1))

    assert shape(news) == [("Granted", "w"), ("Finished", "w")]


def test_what_a_session_told_that_is_over_by_now_begins_and_ends_at_once() -> None:
    """A new leader reads events from the beginning; nobody will tell it of ends in a process that has ended itself."""
    gone, alive, leader = Process(), Process(), Elsewhere()
    gone.begin("g")
    alive.begin("a")
    other = Session("other", 1)
    news = hear(leader, gone.renew()) + hear(leader, alive.renew(), other)

    news += leader.forget_but({other: None})

    assert shape(news) == [("Granted", "g"), ("Granted", "a"), ("Finished", "g")]
    assert [one.work.id for one in leader.running("e", 1000.0)] == ["a"]
    assert leader.forget_but({other: None}) == []


def test_a_process_that_leads_tells_nothing() -> None:
    process = Process()
    process.renew(epoch=0)
    process.begin("w")
    process.end("w")

    assert process.renew(epoch=0) == ()


def test_under_a_new_session_numbers_begin_anew_and_what_runs_is_told_again() -> None:
    process, leader = Process(), Elsewhere()
    process.begin("w")
    hear(leader, process.renew())
    leader.forget(SESSION)

    process.journal.registered()
    told = process.renew()

    assert told[0].number == 1
    assert shape(hear(leader, told, Session("worker", 2))) == [("Granted", "w")]


def test_a_growth_names_all_that_runs_so_that_a_lost_end_is_found() -> None:
    process, leader = Process(), Elsewhere()
    process.begin("lost")
    process.begin("w")
    hear(leader, process.renew())
    process.ledger["e"].remove("lost", 1)
    process.journal._began.pop(("lost", 1))  # as if its end had been dropped
    process.now_ms += 1_000

    news = hear(leader, process.renew())

    assert [(event.work.id, getattr(event, "outcome", "")) for _, event in news] == [("lost", None)]
    assert [one.work.id for one in leader.running("e", 0.0)] == ["w"]


def test_between_two_reports_attempts_go_on_as_their_engine_s_last_did() -> None:
    process, leader = Process(), Elsewhere()
    process.begin("w")
    for tokens in (10, 30):
        process.show("w", tokens)
        process.now_ms += 1_000
        hear(leader, process.renew())

    grown = [leader.running("e", process.now_ms / 1000 + after_s)[0].shown_tokens for after_s in (0.0, 0.5, 60.0)]

    assert grown == [30, 40, 60]


def test_events_that_nobody_takes_are_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "EVENTS_KEPT", 4)
    process, leader = Process(), Elsewhere()
    process.begin("first")
    hear(leader, process.renew())
    for name in "abcdef":
        process.begin(name)

    news = hear(leader, process.renew())

    assert [event.work.id for _, event in news] == ["c", "d", "e", "f"]
    assert (process.journal.dropped, leader.missed) == (2, 2)


def test_a_renewal_takes_so_many_events_and_the_next_one_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "EVENTS_SENT", 2)
    process = Process()
    for name in "abc":
        process.begin(name)

    assert [[one.number for one in process.renew()] for _ in range(3)] == [[1, 2], [3, 4], []]


def test_of_very_many_attempts_the_growth_of_the_first_is_told_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_module, "GROWTH_SENT", 2)
    process, leader = Process(), Elsewhere()
    for name in "abc":
        process.begin(name)
    hear(leader, process.renew())
    process.now_ms += 1_000

    told = process.renew()
    hear(leader, told)

    (grew,) = [one.event for one in told if isinstance(one.event, Grew)]
    assert len(grew.shown) == 2
    assert len(leader.running("e", 0.0)) == 3
