"""The ledger's sums equal a recomputation after any sequence of events."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.ledger import EngineLedger, Ledger
from gateway.queue.base import Claimed, InFlight, Session
from policies.vocabulary import Work


@dataclass
class Counter:
    output_tokens: int = 0
    recallable = True
    recalls = 0

    def recall(self) -> None:
        self.recalls += 1


def work(number: int, *, class_name: str = "interactive", prompt_tokens: int = 10, sequences: int = 1) -> Work:
    return Work(
        id=f"w{number}",
        class_name=class_name,
        tenant="t",
        model="m",
        path="/v1/completions",
        accepted_s=0.0,
        rank=0.0,
        prompt_tokens=prompt_tokens,
        sequences=sequences,
    )


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "first", "grow", "refresh", "remove"]),
        st.integers(0, 7),
        st.integers(0, 5000),
        st.integers(1, 4),
    ),
    max_size=60,
)


@given(EVENTS)
def test_sums_equal_a_recomputation_after_any_sequence_of_events(events: list[tuple[str, int, int, int]]) -> None:
    ledger = EngineLedger()
    counters: dict[int, Counter] = {}

    for event, number, tokens, sequences in events:
        key = (f"w{number}", 1)
        if event == "add" and key not in ledger.entries:
            name = "interactive" if number % 2 else "bulk"
            ledger.add(work(number, class_name=name, prompt_tokens=tokens, sequences=sequences), 1, 1.0)
            counters[number] = Counter()
            ledger.attach(*key, counters[number])
        elif event == "first":
            ledger.first_token(*key)
        elif event == "grow" and number in counters:
            counters[number].output_tokens += tokens
        elif event == "refresh":
            ledger.refresh()
        elif event == "remove":
            ledger.remove(*key)

    by_class: dict[str, int] = {}
    for entry in ledger.entries.values():
        by_class[entry.work.class_name] = by_class.get(entry.work.class_name, 0) + 1
    assert ledger.in_flight == by_class
    sequences = sum(entry.work.sequences for entry in ledger.entries.values())
    assert sum(ledger.in_flight.values()) + sum(ledger.extra_sequences.values()) == sequences
    assert ledger.kv_tokens == sum(entry.kv_tokens for entry in ledger.entries.values())
    assert ledger.prefill_tokens == sum(entry.prefill_tokens for entry in ledger.entries.values())


def test_an_attempt_is_counted_once() -> None:
    ledger = EngineLedger()
    ledger.add(work(1), 1, 0.0)

    with pytest.raises(ValueError, match="in the ledger already"):
        ledger.add(work(1), 1, 0.0)


def test_removing_twice_frees_one_place() -> None:
    ledger = EngineLedger()
    ledger.add(work(1), 1, 0.0)
    ledger.add(work(2), 1, 0.0)

    removed = [ledger.remove("w1", 1), ledger.remove("w1", 1)]

    assert removed == [True, False]
    assert ledger.in_flight == {"interactive": 1}


def test_kv_is_counted_in_whole_blocks_of_each_sequence() -> None:
    ledger = EngineLedger(block_tokens=16)
    ledger.add(work(1, prompt_tokens=34, sequences=2), 1, 0.0)

    assert ledger.kv_tokens == 2 * 32


def test_a_report_sums_by_engine_and_class() -> None:
    ledger = Ledger()
    ledger["a"].add(work(1, prompt_tokens=16), 1, 0.0)
    ledger["a"].add(work(2, prompt_tokens=16), 1, 0.0)
    ledger["b"].add(work(3, class_name="bulk", prompt_tokens=16), 1, 0.0)
    ledger["a"].first_token("w1", 1)
    for _, one in ledger:
        for entry in one.entries.values():
            entry.taken_s = 1.0

    report = ledger.running_here()

    assert report["a", "interactive"].works == 2
    assert report["a", "interactive"].prefill_tokens == 16
    assert report["b", "bulk"].kv_tokens == 16


def test_a_claim_whose_answer_is_not_there_is_not_told_to_run_here() -> None:
    ledger = Ledger()
    ledger["a"].add(work(1), 1, 0.0)
    ledger["a"].add(work(2), 1, 0.0)
    ledger["a"].entries["w1", 1].taken_s = 1.0

    assert ledger.running_here()["a", "interactive"].works == 1
    assert ledger["a"].entries_of("interactive") == 1
    assert ledger["a"].in_flight == {"interactive": 2}


OTHER = Session("other", 1)


def test_another_sessions_grant_is_an_entry_until_its_report_includes_it() -> None:
    ledger = Ledger()
    ledger["a"].add(work(1), 1, 0.0)
    ledger["a"].entries["w1", 1].claimed = Claimed(OTHER, 7)

    early = ledger.taken_over(OTHER, 6)
    late = ledger.taken_over(OTHER, 7)
    ledger["a"].elsewhere(OTHER, {"interactive": InFlight(1, 16, 0)}, {})

    assert early == []
    assert [(engine, entry.work.id) for engine, entry in late] == [("a", "w1")]
    assert ledger["a"].in_flight == {"interactive": 1}
    assert ledger["a"].kv_tokens == 16


def test_a_process_that_leads_no_more_keeps_its_own_attempts_only() -> None:
    ledger = Ledger()
    ledger["a"].add(work(1), 1, 0.0)
    ledger["a"].add(work(2), 1, 0.0)
    ledger["a"].entries["w2", 1].claimed = Claimed(OTHER, 1)
    ledger["a"].elsewhere(OTHER, {"bulk": InFlight(3, 48, 48)}, {"bulk": InFlight(1)})

    dropped = ledger.only_here()

    assert [entry.work.id for entry in dropped] == ["w2"]
    assert ledger["a"].in_flight == {"interactive": 1}
    assert ledger["a"].prefill_tokens == 10


def test_sums_of_another_session_replace_each_other() -> None:
    ledger = EngineLedger()

    ledger.elsewhere(
        OTHER, {"bulk": InFlight(3, 48, 48), "interactive": InFlight(1, 16, 16)}, {"bulk": InFlight(3, 48, 48)}
    )
    ledger.elsewhere(OTHER, {"bulk": InFlight(2, 16, 0)}, {"bulk": InFlight(1, 8, 0)})

    assert ledger.in_flight == {"bulk": 2}
    assert ledger.running("bulk") == 1
    assert (ledger.kv_tokens, ledger.prefill_tokens) == (16, 0)
    assert (ledger.allowed_kv_tokens, ledger.allowed_prefill_tokens) == (8, 0)


def test_what_a_process_that_is_heard_of_may_start_is_on_credit_and_what_a_lost_one_had_is_not() -> None:
    ledger, had = EngineLedger(), {"interactive": InFlight(2, 32, 32)}

    ledger.elsewhere(OTHER, had, had)
    heard_of = ledger.on_credit
    ledger.elsewhere(OTHER, had, had, lost=True)
    lost = ledger.on_credit
    ledger.elsewhere(OTHER, {}, {})

    assert (heard_of, lost, ledger.on_credit) == (2, 0, 0)


def test_an_attempt_counts_as_sent_from_when_its_owner_took_the_grant_up() -> None:
    ledger = EngineLedger()
    ledger.add(work(1), 1, 10.0)
    waits_for_its_claim = ledger.sent_by(20.0)
    ledger.entries["w1", 1].taken_s = 10.5
    ledger.attach("w1", 1, Counter())

    assert waits_for_its_claim == 0
    assert [ledger.sent_by(by_s) for by_s in (10.0, 10.4, 10.5)] == [0, 0, 1]


def test_an_engine_gives_up_nothing_more_while_something_is_being_given_up() -> None:
    ledger, counters = EngineLedger(), [Counter(), Counter(), Counter()]
    counters[2].recallable = False
    for number, counter in enumerate(counters):
        ledger.add(work(number, class_name="bulk", prompt_tokens=100), 1, float(number))
        ledger.attach(f"w{number}", 1, counter)
    before = [(one.work.id, one.attempt, one.granted_s, one.kv_tokens) for one in ledger.recallable()]

    ledger.recall("w1", 1)
    meanwhile = ledger.recallable()
    ledger.remove("w1", 1)

    assert before == [("w0", 1, 0.0, 112), ("w1", 1, 1.0, 112)]
    assert [counter.recalls for counter in counters] == [0, 1, 0]
    assert meanwhile == []
    assert [one.work.id for one in ledger.recallable()] == ["w0"]
