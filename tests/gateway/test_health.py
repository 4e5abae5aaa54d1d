"""Which engines leave the rotation, for what they did and not for what they say, and how they return."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import Measured, ModelCard, Probe, Sample, Signal, Unready
from gateway.control.health import SILENT_GRACE_S, HealthWatch
from gateway.control.pulse import Blame, Pulse
from gateway.control.roster import Engine, Roster
from gateway.control.standing import HOLD_S, Why
from gateway.dispatch.ledger import EngineLedger
from gateway.dispatch.retries import BALANCE_MAX, RetryBudget
from gateway.queue.base import Vitals
from gateway.settings import EngineSettings
from policies.vocabulary import EngineState

STEP_S = 0.25
AHEAD_S = 5_000.0  # of the pool's clock before this process's
SILENCE_S = 5.0
SILENT = Probe(ready=False, detail="no answer within 5 s", unready=Unready.SILENT)


def serving(*models: str) -> Probe:
    return Probe(ready=True, models=tuple(ModelCard(model, {"id": model}) for model in models))


@dataclass
class Pool:
    """Engines under watch, with what two processes say of each."""

    names: tuple[str, ...] = ("a", "b", "c")
    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    now_s: float = 100.0
    changes: list[tuple[str, str | None, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        engines = [Engine(EngineSettings(name, f"http://{name}"), EngineLedger(), poll_s=0.5) for name in self.names]
        self.roster = Roster(engines)
        self.vitals: dict[str, dict[object, Vitals]] = {name: {"w0": Vitals(), "w1": Vitals()} for name in self.names}
        self.watch = HealthWatch(
            self.roster,
            failures=5,
            silence_s=SILENCE_S,
            vitals=lambda engine: dict(self.vitals[engine.name]),
            on_change=lambda engine, why, _detail, kept: self.changes.append((engine.name, why, kept)),
        )
        for engine in engines:
            engine.heard(serving(*self.models.get(engine.name, ("m",))), self.now_s)
        self.counts(*self.names)
        self.judge()

    def add(self, name: str, process: str = "w0", **more: int) -> None:
        before = self.vitals[name][process]
        self.vitals[name][process] = replace(
            before, **{key: getattr(before, key) + value for key, value in more.items()}
        )

    def waits(self, name: str, since_s: float | None) -> None:
        waiting_ms = 0 if since_s is None else int((since_s + AHEAD_S) * 1000)
        self.vitals[name]["w1"] = replace(self.vitals[name]["w1"], waiting_ms=waiting_ms)

    def moves(self, name: str) -> None:
        self.vitals[name]["w1"] = replace(self.vitals[name]["w1"], moved_ms=int((self.now_s + AHEAD_S) * 1000))

    def counts(self, *names: str) -> None:
        """Their pages' token counters move."""
        for name in names:
            tokens = {Signal.GENERATION_TOKENS_TOTAL: Measured(self.now_s, "vllm:generation_tokens_total")}
            self.roster[name].sampled(Sample(self.now_s, tokens), self.now_s)

    def judge(self, for_s: float = 0.0) -> None:
        until_s = self.now_s + for_s
        while True:
            self.watch.judge(pool_s=self.now_s + AHEAD_S, now_s=self.now_s)
            if self.now_s >= until_s:
                return
            self.now_s += STEP_S

    def tried(self, name: str, problem: str = "") -> None:
        standing = self.roster[name].standing
        standing.tried(problem, pool_s=self.now_s + AHEAD_S, now_s=self.now_s)
        self.judge()

    @property
    def out(self) -> dict[str, Why]:
        return {one.name: one.standing.why for one in self.roster if one.standing.why is not None}


# -- broken answers (FAI-04, FAI-15) -----------------------------------------------------------------------------------


def test_an_engine_whose_answers_break_in_a_row_leaves_and_a_token_brings_it_back() -> None:
    pool = Pool()

    pool.add("a", failed=3)
    pool.add("a", "w1", failed=2)
    pool.judge()
    after_five = (pool.out, pool.roster["a"].state, pool.roster["a"].offered)
    pool.tried("a")

    assert after_five == ({"a": Why.FAILING}, EngineState.DOWN, frozenset())
    assert (pool.out, pool.roster["a"].state) == ({}, EngineState.UP)
    assert pool.changes == [("a", Why.FAILING, False), ("a", None, False)]


def test_one_good_answer_ends_a_row_of_broken_ones() -> None:
    pool = Pool()

    for _ in range(4):
        pool.add("a", failed=1)
        pool.judge(STEP_S)
    pool.add("a", "w1", served=20)
    pool.judge()
    pool.add("a", failed=4)
    pool.judge()

    assert pool.out == {}


def test_an_engine_that_breaks_most_answers_leaves_though_never_five_in_a_row() -> None:
    pool = Pool()

    for _ in range(6):
        pool.add("a", failed=2)
        pool.judge(STEP_S)
        pool.add("a", served=1)
        pool.judge(STEP_S)

    assert pool.out == {"a": Why.FAILING}


def test_one_that_breaks_again_after_its_return_leaves_at_once_and_for_longer() -> None:
    pool = Pool()
    pool.add("a", failed=5)
    pool.judge()
    first_due_s = pool.roster["a"].standing.trial_due_s - pool.now_s
    pool.tried("a")

    pool.add("a", failed=1)
    pool.judge()

    assert pool.out == {"a": Why.FAILING}
    assert (first_due_s, pool.roster["a"].standing.trial_due_s - pool.now_s) == (HOLD_S, 2 * HOLD_S)


def test_calls_that_broke_while_an_engine_was_down_do_not_count_against_its_successor() -> None:
    pool = Pool()
    engine = pool.roster["a"]
    engine.refused("connection refused", pool.now_s)
    pool.add("a", failed=13)
    pool.judge()

    pool.tried("a")
    engine.heard(serving("m"), pool.now_s)
    pool.judge(1.0)

    assert (pool.out, engine.state) == ({}, EngineState.UP)


def test_a_new_leader_holds_nothing_against_an_engine_that_was_counted_before() -> None:
    pool = Pool()
    pool.now_s += 60.0
    pool.add("a", failed=50, draining=3)
    pool.judge(1.0)
    before = dict(pool.out)

    pool.add("a", failed=5)
    pool.judge()

    assert (before, pool.out) == ({}, {"a": Why.FAILING})


def test_what_this_process_saw_before_it_first_judged_counts() -> None:
    pool = Pool()
    fresh = HealthWatch(
        pool.roster,
        failures=5,
        silence_s=SILENCE_S,
        vitals=lambda engine: {None: Vitals(draining=1 if engine.name == "a" else 0)},
        on_change=lambda *_: None,
    )

    fresh.judge(pool_s=pool.now_s + AHEAD_S, now_s=pool.now_s)

    assert pool.out == {"a": Why.DRAINING}


# -- streams that stand still (FAI-07) ---------------------------------------------------------------------------------


def test_an_engine_on_which_nothing_moves_leaves_within_seconds_whatever_its_pages_say() -> None:
    pool = Pool()
    pool.waits("a", pool.now_s)

    pool.judge(SILENCE_S)
    before = dict(pool.out)
    pool.judge(1.0)

    assert (before, pool.out) == ({}, {"a": Why.STALLED})


def test_requests_that_keep_coming_do_not_hide_that_none_is_answered() -> None:
    pool = Pool()
    pool.waits("a", pool.now_s)

    for _ in range(24):
        pool.add("a", "w0", served=0)
        pool.vitals["a"]["w0"] = replace(pool.vitals["a"]["w0"], waiting_ms=int((pool.now_s + AHEAD_S) * 1000))
        pool.judge(STEP_S)

    assert pool.out == {"a": Why.STALLED}


@pytest.mark.parametrize("sign", ["a stream moves", "its counters move", "an answer ends well", "nothing waits"])
def test_a_slow_engine_that_still_works_stays(sign: str) -> None:
    pool = Pool()
    pool.waits("a", pool.now_s)

    for _ in range(80):
        if sign == "a stream moves":
            pool.moves("a")
        elif sign == "its counters move":
            pool.counts("a")
        elif sign == "an answer ends well":
            pool.add("a", served=1)
        else:
            pool.waits("a", None)
        pool.judge(STEP_S)

    assert pool.out == {}


def test_a_long_prompt_is_given_the_time_that_its_prefill_takes() -> None:
    pool = Pool()
    ledger = pool.roster["a"].ledger
    ledger.in_flight["chat"], ledger.prefill_tokens = 1, 30_000
    pool.waits("a", pool.now_s)

    pool.judge(34.0)
    before = dict(pool.out)
    pool.judge(2.0)

    assert (before, pool.out) == ({}, {"a": Why.STALLED})


def test_an_engine_that_counts_nothing_is_given_longer() -> None:
    pool = Pool()
    pool.roster["a"].sampled(Sample(pool.now_s, {}), pool.now_s)
    pool.waits("a", pool.now_s)

    pool.judge(14.0)
    before = dict(pool.out)
    pool.judge(2.0)

    assert (before, pool.out) == ({}, {"a": Why.STALLED})


def test_a_stalled_engine_returns_with_the_first_token_of_a_real_stream() -> None:
    pool = Pool()
    pool.waits("a", pool.now_s)
    pool.judge(6.0)

    pool.moves("a")
    pool.judge()

    assert (pool.out, pool.roster["a"].state) == ({}, EngineState.UP)


def test_a_failing_engine_does_not_return_because_an_old_stream_still_moves() -> None:
    pool = Pool()
    pool.add("a", failed=5)
    pool.judge()

    pool.moves("a")
    pool.judge(2.0)

    assert pool.out == {"a": Why.FAILING}


def test_a_trial_that_fails_is_repeated_later_and_later() -> None:
    pool = Pool()
    pool.add("a", failed=5)
    pool.judge()
    standing = pool.roster["a"].standing
    waits = []

    for _ in range(6):
        pool.now_s = standing.trial_due_s
        pool.tried("a", "made no token within 10 s")
        waits.append(standing.trial_due_s - pool.now_s)

    assert waits == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert standing.detail == "made no token within 10 s"


# -- what engines say ---------------------------------------------------------------------------------------------------


def test_one_refusal_of_an_engine_that_shuts_down_is_enough() -> None:
    pool = Pool()

    pool.add("a", draining=1)
    pool.judge()

    assert (pool.out, pool.roster["a"].state) == ({"a": Why.DRAINING}, EngineState.DRAINING)


def test_an_engine_that_sleeps_gets_no_work() -> None:
    pool = Pool()
    pool.roster["a"].sampled(Sample(pool.now_s, {Signal.ASLEEP: Measured(1.0, "vllm:engine_sleep_state")}), pool.now_s)

    pool.judge()

    assert pool.out == {"a": Why.ASLEEP}


# -- pages that do not answer (FAI-08) ---------------------------------------------------------------------------------


def test_late_pages_alone_put_nobody_out_while_answers_come() -> None:
    pool = Pool()

    for _ in range(200):
        for engine in pool.roster:
            engine.heard(SILENT, pool.now_s)
        pool.moves("a")
        pool.moves("b")
        pool.moves("c")
        pool.judge(STEP_S)

    assert pool.out == {}
    assert {engine.state for engine in pool.roster} == {EngineState.UP}


def test_an_engine_whose_pages_and_answers_are_silent_leaves_and_at_last_is_down() -> None:
    pool = Pool()

    for _ in range(int(SILENT_GRACE_S / STEP_S)):
        pool.roster["a"].heard(SILENT, pool.now_s)
        pool.judge(STEP_S)

    assert pool.out == {"a": Why.SILENT}


def test_the_only_engine_is_down_after_a_minute_of_silence() -> None:
    pool = Pool(names=("a",))
    states = []

    for _ in range(4 * 70):
        pool.roster["a"].heard(SILENT, pool.now_s)
        pool.judge(STEP_S)
        states.append(pool.roster["a"].state)

    assert states.index(EngineState.DOWN) * STEP_S == pytest.approx(60, abs=12)


# -- never all ---------------------------------------------------------------------------------------------------------


def test_the_only_engine_stays_and_it_is_said_once_that_it_should_not() -> None:
    pool = Pool(names=("a",))

    pool.add("a", failed=50)
    pool.judge(5.0)

    assert (pool.out, pool.roster["a"].state) == ({}, EngineState.UP)
    assert pool.changes == [("a", Why.FAILING, True)]


def test_when_all_break_nobody_leaves() -> None:
    pool = Pool()

    for name in pool.names:
        pool.add(name, failed=50)
    pool.judge(5.0)

    assert pool.out == {}


def test_more_than_half_leave_only_while_another_is_seen_to_work() -> None:
    pool, proven = Pool(), Pool()

    for one in (pool, proven):
        one.add("a", failed=5)
        one.add("b", failed=5)
    proven.add("c", served=1)
    pool.judge(1.0)
    proven.judge(1.0)

    assert pool.out == {"a": Why.FAILING}
    assert proven.out == {"a": Why.FAILING, "b": Why.FAILING}


def test_a_model_that_nobody_else_has_is_not_withheld() -> None:
    pool = Pool(models={"a": ("m", "only-a")})

    pool.add("a", failed=5)
    pool.judge()
    engine = pool.roster["a"]

    assert (engine.standing.why, engine.state, engine.offered) == (Why.FAILING, EngineState.UP, frozenset({"only-a"}))
    assert engine.view(pool.now_s).models == frozenset({"only-a"})


def test_an_engine_that_is_out_takes_work_again_when_the_others_go_down() -> None:
    pool = Pool(names=("a", "b"))
    pool.add("a", failed=5)
    pool.judge()

    pool.roster["b"].refused("connection refused", pool.now_s)
    pool.judge()

    assert (pool.roster["a"].state, pool.roster["b"].state) == (EngineState.UP, EngineState.DOWN)


ACTS = ("fail", "serve", "stall", "move", "lost", "ready", "silent", "trial", "drain")


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(ACTS)), max_size=60), st.integers(0, 2**32))
def test_while_some_engine_serves_a_model_somebody_is_offered_its_work(acts: list[tuple[str, str]], seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool(names=("a", "b", "c", "d"), models={"a": ("m", "n"), "d": ("n",)})
    for name, act in acts:
        engine = pool.roster[name]
        if act == "fail":
            pool.add(name, failed=rng.randrange(9))
        elif act == "serve":
            pool.add(name, served=1)
        elif act == "stall":
            pool.waits(name, pool.now_s)
        elif act == "move":
            pool.moves(name)
        elif act == "lost":
            engine.refused("refused", pool.now_s)
        elif act == "ready":
            engine.heard(serving(*pool.models.get(name, ("m",))), pool.now_s)
        elif act == "silent":
            engine.heard(SILENT, pool.now_s)
        elif act == "drain":
            pool.add(name, draining=1)
        else:
            engine.standing.tried("", pool_s=pool.now_s + AHEAD_S, now_s=pool.now_s)
        pool.judge(rng.choice((0.0, STEP_S, 3.0)))

        for model in ("m", "n"):
            if any(one.reachable and model in one.models for one in pool.roster):
                assert any(one.state is EngineState.UP and model in one.offered for one in pool.roster), pool.watch


# -- what this process sees --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class FakeCall:
    sent_s: float
    streams: bool = True
    moved_s: float | None = None


@dataclass
class FakeClock:
    time_s: float = 50.0

    def now_s(self) -> float:
        return self.time_s

    def pool_s(self) -> float:
        return self.time_s + AHEAD_S


def test_vitals_are_of_the_oldest_stream_and_of_the_latest_byte() -> None:
    pulse = Pulse()
    for call in (FakeCall(40.0, moved_s=45.0), FakeCall(41.0), FakeCall(30.0, streams=False)):
        pulse.began(call)

    vitals = pulse.vitals(FakeClock())

    assert vitals == Vitals(moved_ms=5_045_000, waiting_ms=5_040_000)


def test_an_end_counts_once_and_what_it_showed_is_kept() -> None:
    pulse, call = Pulse(), FakeCall(40.0, moved_s=45.0)
    pulse.began(call)

    pulse.ended(call, Blame.SERVED)
    pulse.ended(call, Blame.FAILED)

    assert pulse.vitals(FakeClock()) == Vitals(served=1, moved_ms=5_045_000)


# -- second attempts (FAI-09) ------------------------------------------------------------------------------------------


def test_a_pool_that_fails_gets_at_most_a_fifth_more_attempts() -> None:
    budget = RetryBudget(0.0)
    retried = 0

    for number in range(50 * 60):
        budget.attempted()
        retried += budget.take(number / 50)

    assert retried / (50 * 60) < 0.2


def test_a_quiet_gateway_retries_everything() -> None:
    budget = RetryBudget(0.0)
    taken = []

    for number in range(100):
        budget.attempted()
        taken.append(budget.take(number * 1.0))

    assert all(taken)


def test_a_burst_is_retried_up_to_the_balance() -> None:
    budget = RetryBudget(0.0)

    assert sum(budget.take(0.0) for _ in range(100)) == BALANCE_MAX
