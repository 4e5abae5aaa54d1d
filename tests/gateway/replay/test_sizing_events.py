"""What a sizing policy hears while a gateway runs: each grant once, the progress of what runs, counters of the engine."""

from __future__ import annotations

from collections import Counter

import pytest

from backends.simulated.profiles import load_profile
from gateway.replay.host import EngineSpec
from gateway.replay.rows import COMPLETED
from gateway.replay.trace import Request
from gateway.replay.world import Backlog, Plan, Played, replay
from policies.document import parse
from policies.limits.fixed import FixedLimits
from policies.schema import Policy
from policies.sizing import Finished, FirstToken, Granted, Progressed, Sampled, SizingEvent
from tests.gateway.replay.quiet import QUIET

POLICY = parse(
    "version: 1\nclasses: {interactive: {ttft_sla_s: 1}, bulk: {max_age_s: null, min_share: 0}}\n"
    "sizing: {fixed: {total: 8, windows: {bulk: 2}}}\n",
    "test.yaml",
)


class Heard(FixedLimits):
    """Fixed windows that keep what they are told."""

    events: list[SizingEvent]

    def on_event(self, event: SizingEvent, now_s: float) -> None:
        if isinstance(event, Progressed):
            event = Progressed(event.engine, list(event.running))
        self.events.append(event)


@pytest.fixture(scope="module")
def events() -> list[SizingEvent]:
    found: list[SizingEvent] = []

    class Recorder(Heard):
        events = found

    replay(
        Plan(
            engines=(EngineSpec("e", load_profile("h100_llama31_8b_tp1")),),
            policy=POLICY,
            requests=[Request(0.5 * number, 400, 30) for number in range(20)],
            backlog=Backlog([(2000, 300)]),
            duration_s=15.0,
            sizing=Recorder,
        ),
        QUIET,
    )
    return found


def test_each_attempt_is_granted_once_before_anything_else_is_heard_of_it(events: list[SizingEvent]) -> None:
    granted: set[tuple[str, int]] = set()

    for event in events:
        if isinstance(event, Granted):
            assert (event.work.id, event.attempt) not in granted
            granted.add((event.work.id, event.attempt))
        elif isinstance(event, FirstToken | Finished):
            assert (event.work.id, event.attempt) in granted

    assert len(granted) > 20


def test_progress_names_what_was_granted_and_has_not_ended_and_only_grows(events: list[SizingEvent]) -> None:
    in_flight: dict[tuple[str, int], int] = {}
    most = 0

    for event in events:
        if isinstance(event, Granted):
            in_flight[event.work.id, event.attempt] = 0
        elif isinstance(event, Finished):
            del in_flight[event.work.id, event.attempt]
        elif isinstance(event, Progressed):
            assert {(one.work.id, one.attempt) for one in event.running} == in_flight.keys()
            for one in event.running:
                assert one.shown_tokens >= in_flight[one.work.id, one.attempt]
                assert one.prefilled or not one.shown_tokens
                in_flight[one.work.id, one.attempt] = one.shown_tokens
                most = max(most, one.shown_tokens)

    assert most > 200


def test_the_view_carries_the_engines_counters(events: list[SizingEvent]) -> None:
    views = [event.view for event in events if isinstance(event, Sampled)]

    last = views[-1]
    assert last.kv_block_tokens.value == 16
    assert last.preemptions_total.value == 0
    assert last.start_time_s.known
    for name in ("prompt_tokens_total", "generation_tokens_total"):
        counted = [getattr(view, name).value for view in views if getattr(view, name).known]
        assert counted == sorted(counted)
        assert counted[-1] > 1000


@pytest.fixture(scope="module")
def of_three() -> tuple[Played, list[SizingEvent]]:
    """What the leader of three gateways hears, and what became of all their requests."""
    recorders: list[Heard] = []

    def recorder(policy: Policy) -> Heard:
        one = Heard(policy)
        one.events = []
        recorders.append(one)
        return one

    played = replay(
        Plan(
            engines=(EngineSpec("e", load_profile("h100_llama31_8b_tp1")),),
            policy=POLICY,
            requests=[Request(0.1 * number, 400, 30 + number) for number in range(60)],
            backlog=Backlog([(2000, 300)]),
            duration_s=15.0,
            sizing=recorder,
            replicas=3,
        ),
        QUIET,
    )
    return played, max((one.events for one in recorders), key=len)


def test_a_leader_hears_of_each_attempt_of_the_other_gateways_as_of_its_own(
    of_three: tuple[Played, list[SizingEvent]],
) -> None:
    played, events = of_three
    granted = Counter((event.work.id, event.attempt) for event in events if isinstance(event, Granted))
    first = Counter(event.work.id for event in events if isinstance(event, FirstToken))
    tokens = [
        event.outcome.output_tokens for event in events if isinstance(event, Finished) and event.outcome is not None
    ]

    completed = [row for row in played.rows if row.outcome == COMPLETED]
    assert sorted(tokens) == sorted(row.output_tokens for row in completed)
    assert set(granted.values()) == set(first.values()) == {1}
    assert len(first) >= len(completed) > 60


def test_a_leader_hears_how_far_the_attempts_of_other_gateways_are(of_three: tuple[Played, list[SizingEvent]]) -> None:
    _, events = of_three
    lengths = {
        event.work.id: event.outcome.output_tokens
        for event in events
        if isinstance(event, Finished) and event.outcome is not None
    }
    seen: dict[str, int] = {}
    for event in events:
        if isinstance(event, Progressed):
            seen |= {one.work.id: one.shown_tokens for one in event.running}

    long = [work_id for work_id, length in lengths.items() if length == 300]
    assert len(long) > 5
    assert all(seen[work_id] > 150 for work_id in long)
