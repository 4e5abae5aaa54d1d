"""The engine that jumps gives what the engine that plods gives, and its books balance."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.simulated.continuous import ContinuousLimits, ContinuousScheduler, SchedulingPolicy
from backends.simulated.engine import Engine
from backends.simulated.scheduler import Totals
from backends.simulated.sequence import EventKind, Sequence, SequenceState
from backends.simulated.step_model import StepModel
from tests.backends.simulated.naive_engine import NaiveEngine, NaiveSequence

MODEL = StepModel(a=6.9, b=0.016, d=2.5, e=0.0293, c=0.0049, f=1.5e-5, h0=0.4, h1=0.033)


@st.composite
def limits(draw: st.DrawFn) -> ContinuousLimits:
    max_model_len = draw(st.integers(20, 400))
    block_tokens = draw(st.sampled_from([1, 4, 16]))
    kv_tokens = block_tokens * (-(-max_model_len // block_tokens) + 1 + draw(st.integers(0, 40)))
    seats = draw(st.integers(1, 12))
    return ContinuousLimits(
        kv_tokens=kv_tokens,
        max_num_seqs=seats,
        max_num_batched_tokens=seats + draw(st.integers(0, 200)),
        max_model_len=max_model_len,
        block_tokens=block_tokens,
        scheduling_policy=draw(st.sampled_from(list(SchedulingPolicy))),
        reserve_full_prompt=draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
    )


@st.composite
def arrivals(draw: st.DrawFn, within: ContinuousLimits) -> list[NaiveSequence]:
    clock_s = 0.0
    sequences = []
    for number in range(draw(st.integers(1, 14))):
        clock_s += draw(st.sampled_from([0.0, 0.0, 0.00371, 0.0519, 0.737, 5.03]))
        prompt = draw(st.integers(1, within.max_model_len - 1))
        output = min(draw(st.integers(1, 150)), within.max_model_len - prompt)
        aborted = draw(st.sampled_from([math.inf, math.inf, math.inf, 0.0, 0.0237, 0.517]))
        names = prefix_names(draw(st.integers(0, 2)), draw(st.integers(0, 100)), number, prompt // within.block_tokens)
        sequences.append(
            NaiveSequence(number, prompt, output, draw(st.integers(0, 2)), clock_s, clock_s + aborted, names)
        )
    return sequences


def prefix_names(family: int, shared: int, number: int, blocks: int) -> tuple[int, ...]:
    """Names of a prompt's blocks: the first `shared` are its family's, the rest its own."""
    return tuple(1000 * family + n if n < shared else 1_000_000 * (number + 1) + n for n in range(blocks))


def build(within: ContinuousLimits, *, lookahead: bool) -> Engine:
    totals = Totals()
    return Engine(ContinuousScheduler(within, totals), MODEL, totals, lookahead=lookahead)


def play(engine: Engine, plan: list[NaiveSequence], *, pace_s: float) -> list[Sequence]:
    """Submit and abort as planned, looking in every pace_s and at every submission; check the books each time."""
    scheduler = engine.scheduler
    assert isinstance(scheduler, ContinuousScheduler)
    made = {
        one: Sequence(
            str(one.number),
            prompt_tokens=one.prompt,
            output_tokens=one.output,
            priority=one.priority,
            block_ids=one.names,
        )
        for one in plan
    }
    todo = [(one.arrival_s, 0, one) for one in plan] + [(one.abort_s, 1, one) for one in plan if one.abort_s < math.inf]
    todo.sort(key=lambda entry: entry[:2])
    last_s = 0.0
    clock_s = 0.0
    alive = set(made.values())
    while todo or engine.busy:
        clock_s = min(clock_s + pace_s, todo[0][0]) if todo else clock_s + pace_s
        for event in engine.advance(clock_s):
            assert event.time_s >= last_s
            last_s = event.time_s
            if event.kind is EventKind.FINISHED:
                assert event.sequence.generated_tokens == event.sequence.output_tokens
                alive.remove(event.sequence)
        while todo and todo[0][0] <= clock_s:
            _, aborting, one = todo.pop(0)
            if aborting:
                engine.abort(made[one], clock_s)
            else:
                engine.submit(made[one], clock_s)
        check_books(scheduler, list(made.values()))
    for event in engine.advance(clock_s + pace_s):
        assert event.kind is not EventKind.FINISHED or event.sequence in alive
        alive.discard(event.sequence)
    assert all(one.state is SequenceState.ABORTED for one in alive), "a sequence was lost"
    return list(made.values())


def check_books(scheduler: ContinuousScheduler, sequences: list[Sequence]) -> None:
    running = [one for one in sequences if one.state is SequenceState.RUNNING]
    assert 0 <= scheduler.free_blocks <= scheduler.limits.usable_blocks
    assert 0 <= scheduler.kv_used_fraction <= 1
    assert scheduler.running >= len(running)
    assert scheduler.running <= scheduler.limits.max_num_seqs
    seated = [one for one in sequences if one.kv_tokens or one.shared_ids]
    shared = [block_id for one in seated for block_id in one.shared_ids]
    held = sum(math.ceil(one.kv_tokens / scheduler.limits.block_tokens) for one in running)
    assert held - len(shared) + len(set(shared)) <= scheduler.limits.usable_blocks - scheduler.free_blocks
    for block_id in set(shared):
        assert scheduler.cached_holders(block_id) == shared.count(block_id)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(st.data())
def test_the_jumping_engine_equals_the_plodding_one(data: st.DataObject) -> None:
    within = data.draw(limits())
    plan = data.draw(arrivals(within))
    pace_s = data.draw(st.sampled_from([0.0131, 0.41, 7.3, 1000.0]))
    lookahead = data.draw(st.booleans())
    naive = NaiveEngine(within, MODEL, lookahead)
    engine = build(within, lookahead=lookahead)

    naive.run(plan)
    played = play(engine, plan, pace_s=pace_s)

    for one, fast in zip(plan, played, strict=True):
        if one.abort_s == math.inf:
            assert abs(fast.finished_s - one.end_s) < 1e-9
            assert abs(fast.first_token_s - one.first_s) < 1e-9
            assert fast.preemptions == one.preemptions
    assert engine.totals.preemptions == naive.preemptions
    assert engine.totals.recomputed_tokens == naive.recomputed
    assert engine.totals.steps == naive.steps
    assert engine.totals.cached_prompt_tokens == naive.hits
    scheduler = engine.scheduler
    assert isinstance(scheduler, ContinuousScheduler)
    assert scheduler.free_blocks == within.usable_blocks


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_how_often_one_looks_changes_nothing(data: st.DataObject) -> None:
    within = data.draw(limits())
    plan = data.draw(arrivals(within))
    lookahead = data.draw(st.booleans())
    rarely, often = build(within, lookahead=lookahead), build(within, lookahead=lookahead)

    seldom_played = play(rarely, plan, pace_s=50.0)
    often_played = play(often, [replace(one) for one in plan], pace_s=0.0071)

    for left, right in zip(seldom_played, often_played, strict=True):
        assert left.generated_tokens == right.generated_tokens
        assert math.isnan(left.finished_s) == math.isnan(right.finished_s)
        assert math.isnan(left.finished_s) or abs(left.finished_s - right.finished_s) < 1e-9


def test_an_event_driven_caller_sees_every_event_at_the_predicted_time() -> None:
    within = ContinuousLimits(kv_tokens=1600, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512)
    engine = build(within, lookahead=False)
    for number in range(12):
        engine.submit(Sequence(str(number), prompt_tokens=100 + number, output_tokens=50 + 7 * number), 0.0)
    looks = 0
    late = 0.0

    while engine.busy:
        at_s = engine.next_event_s()
        looks += 1
        for event in engine.advance(at_s):
            late = max(late, at_s - event.time_s)

    assert late <= 1e-8
    assert engine.totals.finished == 12
    assert looks < engine.totals.steps / 2
