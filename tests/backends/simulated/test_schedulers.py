"""Who runs, who waits and who gives way, in each of the three kinds of engine."""

from __future__ import annotations

import pytest

from backends.simulated.continuous import ContinuousLimits, ContinuousScheduler, SchedulingPolicy
from backends.simulated.engine import Engine
from backends.simulated.profiles import (
    EngineOptions,
    build_engine,
    build_reserving_engine,
    build_static_engine,
    load_profile,
)
from backends.simulated.scheduler import Totals
from backends.simulated.sequence import Event, EventKind, Sequence, SequenceState

PROFILE = load_profile("h100_llama31_8b_tp1")


def vllm(
    *, kv_tokens: int = 16_000, seats: int = 8, budget: int = 512, policy: SchedulingPolicy = SchedulingPolicy.FCFS
) -> Engine:
    limits = ContinuousLimits(
        kv_tokens=kv_tokens,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        max_model_len=min(8192, kv_tokens - 32),
        scheduling_policy=policy,
    )
    totals = Totals()
    return Engine(ContinuousScheduler(limits, totals), PROFILE.step_model, totals, power_model=PROFILE.power_model)


def sequence(name: str, prompt: int = 100, output: int = 50, *, priority: int = 0, cached: int = 0) -> Sequence:
    return Sequence(name, prompt_tokens=prompt, output_tokens=output, priority=priority, cached_prompt_tokens=cached)


def run_out(engine: Engine) -> list[Event]:
    return engine.advance(1e9)


def names(events: list[Event], kind: EventKind) -> list[str]:
    return [event.sequence.id for event in events if event.kind is kind]


def test_a_long_prompt_is_cut_into_chunks_while_others_decode() -> None:
    engine = vllm(budget=128)
    short, long = sequence("short", prompt=16, output=40), sequence("long", prompt=1000, output=1)
    engine.submit(short, 0.0)
    engine.advance(engine.next_step_s())

    engine.submit(long, 0.01)
    run_out(engine)

    between = engine.totals.steps
    assert long.first_token_s > short.first_token_s
    assert long.first_token_s < short.finished_s
    assert between >= 8


def test_waiting_sequences_are_admitted_in_order_of_arrival_and_only_to_free_seats() -> None:
    engine = vllm(seats=2)
    for number in range(4):
        engine.submit(sequence(f"s{number}", output=10 + number), 0.0)

    engine.next_step_s()

    assert (engine.scheduler.running, engine.scheduler.waiting) == (2, 2)
    assert names(run_out(engine), EventKind.FIRST_TOKEN) == ["s0", "s1", "s2", "s3"]


def test_under_the_priority_policy_a_late_urgent_sequence_takes_the_next_seat() -> None:
    engine = vllm(seats=1, policy=SchedulingPolicy.PRIORITY)
    engine.submit(sequence("running", priority=10), 0.0)
    engine.advance(0.001)
    for number in range(3):
        engine.submit(sequence(f"bulk{number}", priority=10), 0.01)
    engine.submit(sequence("urgent", priority=0), 0.02)

    firsts = names(run_out(engine), EventKind.FIRST_TOKEN)

    assert firsts == ["running", "urgent", "bulk0", "bulk1", "bulk2"]


def test_under_fcfs_priority_has_no_effect() -> None:
    engine = vllm(seats=1)
    engine.submit(sequence("first", priority=10), 0.0)
    engine.submit(sequence("second", priority=0), 0.0)

    firsts = names(run_out(engine), EventKind.FIRST_TOKEN)

    assert firsts == ["first", "second"]


@pytest.mark.parametrize(
    ("policy", "victim"), [(SchedulingPolicy.FCFS, "urgent-newest"), (SchedulingPolicy.PRIORITY, "bulk")]
)
def test_when_blocks_run_out_the_policys_victim_gives_way(policy: SchedulingPolicy, victim: str) -> None:
    engine = vllm(kv_tokens=16 * 33, policy=policy)
    engine.submit(sequence("bulk", prompt=200, output=250, priority=5), 0.0)
    engine.submit(sequence("urgent-newest", prompt=200, output=250, priority=0), 0.0)

    events = run_out(engine)

    assert names(events, EventKind.PREEMPTED)[0] == victim
    assert sorted(names(events, EventKind.FINISHED)) == ["bulk", "urgent-newest"]


def test_one_that_is_its_own_victim_ends_the_round_and_those_behind_it_sit_out_one_step() -> None:
    engine = vllm(kv_tokens=16 * 33, policy=SchedulingPolicy.PRIORITY)
    first, worst, behind = sequence("first", 167), sequence("worst", 159, priority=9), sequence("behind", 165)
    engine.submit(first, 0.0)
    engine.submit(worst, 0.0)
    engine.advance(engine.next_step_s())
    engine.submit(behind, engine.clock_s)
    engine.advance(engine.next_step_s())

    engine.advance(engine.next_step_s())
    after_round = (worst.preemptions, first.generated_tokens, behind.generated_tokens)
    engine.advance(engine.next_step_s())

    assert after_round == (1, 3, 1)
    assert (first.generated_tokens, behind.generated_tokens) == (4, 2)


def test_a_preempted_sequence_computes_prompt_and_answer_again_and_loses_no_token() -> None:
    engine = vllm(kv_tokens=16 * 33)
    keeper, victim = sequence("keeper", 200, 250), sequence("victim", 200, 250)
    engine.submit(keeper, 0.0)
    engine.submit(victim, 0.0)

    run_out(engine)

    assert victim.preemptions == 1
    assert victim.generated_tokens == 250
    assert 250 < engine.totals.recomputed_tokens < 300
    assert engine.totals.generation_tokens == 500
    assert engine.totals.prompt_tokens == 400


def test_an_aborted_sequence_frees_its_memory_when_the_step_ends_and_tells_nothing() -> None:
    engine = vllm()
    leaving, staying = sequence("leaving", output=1000), sequence("staying", output=5)
    engine.submit(leaving, 0.0)
    engine.submit(staying, 0.0)
    engine.advance(0.03)

    engine.abort(leaving, 0.03)
    events = run_out(engine)

    assert names(events, EventKind.FINISHED) == ["staying"]
    assert leaving.state is SequenceState.ABORTED
    assert engine.scheduler.kv_used_fraction == 0
    assert not engine.busy


def test_an_aborted_waiting_sequence_never_runs() -> None:
    engine = vllm(seats=1)
    engine.submit(sequence("running"), 0.0)
    waiting = sequence("waiting")
    engine.submit(waiting, 0.0)
    engine.next_step_s()

    engine.abort(waiting, 0.001)
    events = run_out(engine)

    assert names(events, EventKind.FIRST_TOKEN) == ["running"]
    assert engine.scheduler.waiting == 0


def test_an_answer_ends_at_the_models_context_length() -> None:
    engine = vllm(kv_tokens=16 * 40)
    limit = 16 * 40 - 32
    long = sequence("long", prompt=500, output=10_000)

    engine.submit(long, 0.0)
    run_out(engine)

    assert long.generated_tokens == limit - 500


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused() -> None:
    engine = vllm(kv_tokens=16 * 40)

    with pytest.raises(ValueError, match="must be < max_model_len 608"):
        engine.submit(sequence("long", prompt=608), 0.0)


def test_a_cached_prefix_is_not_computed_again() -> None:
    cold, warm = vllm(budget=2048), vllm(budget=2048)
    plain, cached = sequence("plain", 1600, 1), sequence("cached", 1600, 1, cached=1500)
    cold.submit(plain, 0.0)
    warm.submit(cached, 0.0)

    run_out(cold)
    run_out(warm)

    assert cached.first_token_s < plain.first_token_s / 2
    assert warm.totals.cached_prompt_tokens == 1488


def test_energy_is_power_at_the_batch_size_times_time() -> None:
    assert PROFILE.power_model is not None
    engine = vllm()
    engine.submit(sequence("one", prompt=1, output=100), 0.0)

    run_out(engine)

    assert engine.totals.energy_j == pytest.approx(engine.totals.busy_s * PROFILE.power_model.power_w(1))


def test_a_memory_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="needs more than the 9 usable blocks"):
        ContinuousLimits(kv_tokens=160, max_model_len=1000)


def test_a_reserving_engine_admits_by_what_sequences_may_need_and_never_preempts() -> None:
    engine = build_reserving_engine(PROFILE, EngineOptions(kv_tokens=1000, max_model_len=1000))
    for number in range(3):
        engine.submit(Sequence(f"s{number}", prompt_tokens=100, output_tokens=20, max_tokens=300), 0.0)

    engine.next_step_s()

    assert (engine.scheduler.running, engine.scheduler.waiting) == (2, 1)
    assert engine.scheduler.kv_used_fraction == pytest.approx(0.8)
    assert names(run_out(engine), EventKind.FINISHED) == ["s0", "s1", "s2"]
    assert engine.totals.preemptions == 0


def test_a_reserving_engine_interrupts_its_batch_for_one_newcomer_only_after_twenty_decode_steps() -> None:
    engine = build_reserving_engine(PROFILE, EngineOptions(kv_tokens=100_000, max_model_len=4000))
    for number in range(8):
        engine.submit(Sequence(f"s{number}", prompt_tokens=10, output_tokens=500), 0.0)
    engine.advance(engine.next_step_s())
    steps = engine.totals.steps
    late = Sequence("late", prompt_tokens=10, output_tokens=5)

    engine.submit(late, engine.clock_s)
    while late.state is SequenceState.WAITING:
        engine.advance(engine.next_step_s())

    assert engine.totals.steps - steps == 20 + 1


def test_a_static_batch_pads_and_lets_nobody_join() -> None:
    engine = build_static_engine(PROFILE, rows=2)
    short, long, late = sequence("short", 10, 10), sequence("long", 100, 110), sequence("late", 10, 10)
    for one in (short, long, late):
        engine.submit(one, 0.0)

    run_out(engine)

    assert short.finished_s < long.finished_s < late.first_token_s
    assert engine.totals.padded_tokens == (100 - 10) + (110 - 10)


def test_a_continuous_engine_outruns_a_static_one_on_uneven_answers() -> None:
    static, continuous = build_static_engine(PROFILE, rows=8), build_engine(PROFILE, EngineOptions(max_num_seqs=8))
    ends = []
    for engine in (static, continuous):
        for number in range(32):
            engine.submit(sequence(f"s{number}", 100, 20 + 400 * (number % 8 == 0)), 0.0)
        ends.append(max(event.time_s for event in run_out(engine)))

    assert ends[1] < 0.7 * ends[0]
