"""The numbers of several processes on one page: as if one process had seen it all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway import instruments as table
from gateway.instruments import INSTRUMENTS
from gateway.series import Instrument, Kind, Labels, Merge
from gateway.telemetry import Telemetry
from gateway.workers.merge import Measured, Teller, Told, add_counts, gauge_values, merge_gauges

COUNTED = [row for row in INSTRUMENTS if row.kind is not Kind.GAUGE]
GAUGES = [row for row in INSTRUMENTS if row.kind is Kind.GAUGE]
WORDS = st.sampled_from(["a", "b", 'quoted "c"', "ünï"])
"""Few label values, so that processes meet in the same series."""


@st.composite
def labelled(draw: st.DrawFn, rows: Sequence[Instrument]) -> tuple[Instrument, Labels]:
    row = draw(st.sampled_from(rows))
    return row, tuple(draw(WORDS) for _ in row.labels)


@dataclass(frozen=True)
class Event:
    """Something that one of the processes sees, and whether it tells right after."""

    process: int
    row: Instrument
    labels: Labels
    amount: float
    tells: bool


@st.composite
def events(draw: st.DrawFn) -> Event:
    row, labels = draw(labelled(COUNTED))
    amount = draw(st.one_of(st.integers(0, 10_000).map(float), st.floats(0, 5000)))
    return Event(draw(st.integers(0, 3)), row, labels, amount, draw(st.booleans()))


def see(telemetry: Telemetry, event: Event) -> None:
    if event.row.kind is Kind.COUNTER:
        telemetry.add(event.row, event.amount, *event.labels)
    else:
        telemetry.observe(event.row, event.amount, *event.labels)


def sent(told: Told) -> Told:
    """As it comes out of the channel."""
    received: Told = orjson.loads(orjson.dumps(told))
    return received


def page(telemetry: Telemetry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = telemetry.render()[0].decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("headrace_")
    }


def fresh() -> Telemetry:
    return Telemetry(version="1", longest_s=1800.0)


@given(st.lists(events(), max_size=60))
def test_counts_of_many_processes_are_those_of_one_that_saw_everything(seen: list[Event]) -> None:
    alone, merged = fresh(), fresh()
    processes = [fresh() for _ in range(4)]
    tellers = [Teller(one) for one in processes]

    for event in seen:
        see(alone, event)
        see(processes[event.process], event)
        if event.tells:
            add_counts(merged, sent(tellers[event.process].counts()))
    for teller in tellers:
        add_counts(merged, sent(teller.counts()))

    assert page(merged) == pytest.approx(page(alone))


@given(st.lists(events(), max_size=60), st.integers(0, 3))
def test_what_a_dead_process_has_told_stays_and_no_sum_ever_falls(seen: list[Event], dies: int) -> None:
    merged, told = fresh(), fresh()
    processes = [fresh() for _ in range(4)]
    tellers = [Teller(one) for one in processes]
    pending: list[list[Event]] = [[] for _ in processes]
    was = page(merged)

    for event in seen:
        see(processes[event.process], event)
        pending[event.process].append(event)
        if event.tells:
            add_counts(merged, sent(tellers[event.process].counts()))
            for one in pending[event.process]:
                see(told, one)
            pending[event.process].clear()
        now = page(merged)
        assert all(now[series] >= value for series, value in was.items())
        was = now
    processes[dies], tellers[dies] = fresh(), Teller(fresh())  # its successor starts at nothing
    add_counts(merged, sent(tellers[dies].counts()))

    assert page(merged) == pytest.approx(page(told))


@given(st.lists(st.tuples(st.integers(0, 3), labelled(GAUGES), st.floats(-1e6, 1e6))))
def test_gauges_are_merged_by_the_rule_of_their_row(sets: list[tuple[int, tuple[Instrument, Labels], float]]) -> None:
    processes = [fresh() for _ in range(4)]
    for process, (row, labels), value in sets:
        processes[process].set(row, value, *labels)
    merged = fresh()

    merge_gauges(
        merged,
        [Measured(gauge_values(sent(Teller(one).gauges())), decides=i == 0) for i, one in enumerate(processes)],
    )

    found = {gauge.instrument: gauge.children for gauge in merged.gauges()}
    for row in GAUGES:
        of = [next(gauge.children for gauge in one.gauges() if gauge.instrument is row) for one in processes]
        if row.merge is Merge.DECIDER:
            assert found[row] == of[0]
            continue
        for labels in set().union(*of):
            values = [one[labels] for one in of if labels in one]
            expected = {Merge.SUM: sum(values), Merge.MIN: min(values), Merge.MAX: max(values)}[row.merge]
            assert found[row][labels] == pytest.approx(expected)


def test_a_gauge_goes_with_its_process() -> None:
    merged, one, other = fresh(), fresh(), fresh()
    one.set(table.CONNECTIONS, 3)
    other.set(table.CONNECTIONS, 4)
    both = [Measured(gauge_values(Teller(process).gauges())) for process in (one, other)]

    merge_gauges(merged, both)
    with_both = page(merged)["headrace_client_connections", frozenset()]
    merge_gauges(merged, both[:1])

    assert (with_both, page(merged)["headrace_client_connections", frozenset()]) == (7, 3)


def test_a_redis_that_one_process_cannot_reach_is_told_as_down() -> None:
    merged, one, other = fresh(), fresh(), fresh()
    one.set(table.REDIS_UP, 1)
    other.set(table.REDIS_UP, 0)

    merge_gauges(merged, [Measured(gauge_values(Teller(process).gauges())) for process in (one, other)])

    assert page(merged)["headrace_redis_up", frozenset()] == 0


@pytest.mark.parametrize(("ours_s", "theirs_s"), [(1800.0, 7200.0), (7200.0, 1800.0)])
def test_histograms_of_other_time_outs_are_added_as_far_as_their_bounds_go(ours_s: float, theirs_s: float) -> None:
    merged, process = Telemetry(version="1", longest_s=ours_s), Telemetry(version="1", longest_s=theirs_s)
    for seconds in (0.2, 1000.0, 3000.0, 90_000.0):
        process.observe(table.DURATION, seconds, "bulk", "m")
        merged.observe(table.DURATION, seconds, "bulk", "m")

    add_counts(merged, sent(Teller(process).counts()))

    def bucket(le: str) -> float:
        labels = frozenset({("class", "bulk"), ("model", "m"), ("le", le)})
        return page(merged)["headrace_request_duration_seconds_bucket", labels]

    assert [bucket(le) for le in ("0.2", "1800.0", "+Inf")] == [2, 4, 8]


def test_a_row_or_a_label_of_another_version_is_passed_over() -> None:
    merged = fresh()

    add_counts(merged, {"headrace_newer_total": [[["x"], 1]], table.SHEDS.name: [[["bulk", "x", "new label"], 1]]})
    merge_gauges(
        merged, [Measured(gauge_values({"headrace_new": [[[], 1]], table.CONNECTIONS.name: [[["new label"], 1]]}))]
    )

    assert "new" not in str(page(merged))


def test_telling_thousands_of_series_costs_little_when_few_have_changed() -> None:
    process = fresh()
    for number in range(1_000):
        process.add(table.RETRIES, 1, f"e{number}", "reset")
        process.observe(table.ENGINE_TTFT, 1.0, f"e{number}", "bulk")
    teller = Teller(process)
    first = teller.counts()
    process.add(table.RETRIES, 1, "e7", "reset")

    started_s = time.perf_counter()
    second = teller.counts()
    took_s = time.perf_counter() - started_s

    assert len(first[table.RETRIES.name]) == 1_000
    assert second == {table.RETRIES.name: [[("e7", "reset"), 1.0]]}
    assert took_s < 0.05


def test_what_leads_to_a_trace_in_one_process_leads_there_from_the_merged_page() -> None:
    one, merged = Telemetry(version="0"), Telemetry(version="0", longest_s=7200.0)
    one.observe(table.TTFT, 0.2, "interactive", "m")
    one.keep(table.TTFT, "interactive", "m").mark("ab" * 16, 0.2, 1000.5)
    teller = Teller(one)

    add_counts(merged, orjson.loads(orjson.dumps(teller.counts())))
    one.observe(table.TTFT, 0.2, "interactive", "m")
    add_counts(merged, orjson.loads(orjson.dumps(teller.counts())))

    page = merged.render("application/openmetrics-text; version=1.0.0")[0].decode()
    assert page.count(f'# {{trace_id="{"ab" * 16}"}} 0.2 1000.5') == 1
    assert merged.keep(table.TTFT, "interactive", "m").total == pytest.approx(0.4)
