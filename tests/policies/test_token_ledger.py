"""`token_ledger`: the safe-batch test against the exact sum, sums against recomputation, and what moves the window."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.credit import room, typical
from policies.dispatching import plan_round
from policies.estimators.step_model import BUDGETS
from policies.estimators.survival import HORIZONS, Lengths
from policies.limits.fixed import taken
from policies.limits.token_ledger import TokenLedger, guards
from policies.limits.token_ledger.account import CORRELATION, NOTHING, Account, Sums, forecast, newcomer
from policies.limits.token_ledger.black_box import START_TOKENS, BlackBox
from policies.limits.token_ledger.found_seats import KEPT_S, FoundSeats
from policies.limits.token_ledger.guards import ALONE_FACTOR, KV_SHARE, Asked, Hypothesis, Scene
from policies.limits.token_ledger.window import Growth
from policies.sizing import Finished, FirstToken, Granted, Progressed, Running, Sampled
from policies.vocabulary import (
    UNKNOWN,
    EngineView,
    Guard,
    GuardReading,
    Outcome,
    Quality,
    Reading,
    Result,
    Verdict,
    Work,
)
from tests.policies.worlds import NOW_S, POLICY_TEXT, engine, fresh, policy, work

POLICY = policy()
URGENT = frozenset({"chat", "code"})
CAPACITY = 40_000
QUICK = settings(max_examples=60, deadline=None)

SCENE = Scene(
    held_tokens=0.0,
    capacity_tokens=float(CAPACITY),
    rest_tokens=0.0,
    means=NOTHING,
    variances=NOTHING,
    reserve_tokens=0.0,
    pending_urgent=0.0,
    pending_patient=0.0,
    queued_tokens=0.0,
    sequences=0,
    patient=0,
    urgent_sequences=0,
    urgent_tokens=0.0,
    hypothesis=Hypothesis(1000.0, 1.0),
    tpot_s=None,
    gap_s=None,
    window=4,
    bound_tokens=None,
    seats=None,
    patient_seats=None,
    usual_memory_fraction=None,
    ttft_factor=1.0,
    oversize_due=False,
)


def told(
    in_flight: dict[str, int] | None = None,
    *,
    kv_tokens: int = 0,
    prefill_tokens: int = 0,
    used: float | None = None,
    preemptions: float = 0.0,
    started_s: float = 1.0,
    capacity: Reading | None = None,
    age_s: float = 0.1,
) -> EngineView:
    """An engine that tells everything; `used` is a fraction of its memory, by default what the ledger says."""
    fraction = kv_tokens / CAPACITY if used is None else used
    quality = Quality.FRESH if age_s < 1.5 else Quality.STALE
    return replace(
        engine(in_flight=in_flight, prefill_tokens=prefill_tokens),
        kv_tokens=kv_tokens,
        kv_used_fraction=Reading(fraction, age_s, quality),
        kv_capacity_tokens=fresh(CAPACITY) if capacity is None else capacity,
        preemptions_total=fresh(preemptions),
        start_time_s=fresh(started_s),
    )


def reading(verdict: Verdict, guard: Guard) -> tuple[float, float, bool]:
    (found,) = [one for one in verdict.guards if one.guard is guard]
    return found.value, found.threshold, found.passed


def running(ledger: TokenLedger, count: int, *, tokens: int = 2000, name: str = "night", shown: int = 50) -> EngineView:
    """Let `count` works decode on e0; returns the view of it."""
    some = [work(f"{name}{number}", name, prompt_tokens=tokens) for number in range(count)]
    for one in some:
        ledger.on_event(Granted(one, "e0", 1), NOW_S)
    ledger.on_event(Progressed("e0", [Running(one, 1, shown, True) for one in some]), NOW_S)
    view = told({name: count}, kv_tokens=count * (tokens + shown))
    ledger.on_event(Sampled(view, {"night": 8}), NOW_S)
    return view


@pytest.mark.parametrize(("credit", "taken"), [(3, True), (2, False)])
def test_what_others_may_start_does_not_keep_an_idle_engine_from_the_one_work_that_is_too_large(
    credit: int, taken: bool
) -> None:
    ledger, view = TokenLedger(POLICY), replace(told({"chat": 3}), on_credit=credit)
    too_large = work("n", "night", prompt_tokens=2 * CAPACITY)

    assert ledger.admit(too_large, view, NOW_S).admitted is taken


# -- the safe-batch test -----------------------------------------------------------------------------------------------

lots = st.lists(
    st.tuples(
        st.sampled_from(["chat", "night", "scrap"]),
        st.sampled_from(["t", "heavy", "small"]),
        st.integers(0, 6000),
        st.integers(0, 900),
        st.none() | st.integers(1, 2000),
        st.integers(1, 3),
    ),
    max_size=25,
)


def some_works(drawn: Sequence[tuple[str, str, int, int, int | None, int]]) -> list[tuple[Work, int]]:
    return [
        (work(f"w{at}", name, tenant=tenant, prompt_tokens=prompt, max_tokens=most, sequences=sequences), shown)
        for at, (name, tenant, prompt, shown, most, sequences) in enumerate(drawn)
    ]


def exactly(works: Sequence[tuple[Work, int]], candidate: Work, z: float) -> float:
    """The memory that the works and the candidate need at the worst horizon, summed work by work."""
    lengths = Lengths()
    worst = 0.0
    for at in range(len(HORIZONS)):
        bounds = []
        for column in (at, at + len(HORIZONS)):
            mean, tenants = 0.0, dict[str, list[float]]()
            for one, shown in works:
                means, variances = forecast(one, shown, (), lengths)
                mean += means[column] + (one.prompt_tokens + shown if column == at else 0)
                tenants.setdefault(one.tenant, []).append(variances[column])
            means, variances = newcomer(candidate, (), lengths)
            tenants.setdefault(candidate.tenant, []).append(variances[at])
            variance = sum(sum(each) * (1 + CORRELATION * (len(each) - 1)) for each in tenants.values())
            bounds.append(mean + candidate.prompt_tokens + means[at] + z * math.sqrt(variance))
        worst = max(worst, min(bounds))
    return worst


@QUICK
@given(lots, st.integers(0, 6000), st.integers(1000, 120_000))
def test_an_admission_never_passes_where_the_exact_sum_does_not(
    drawn: list[tuple[str, str, int, int, int | None, int]], prompt: int, capacity: int
) -> None:
    works = some_works(drawn)
    ledger = TokenLedger(POLICY)
    for one, _ in works:
        ledger.on_event(Granted(one, "e0", 1), NOW_S)
    ledger.on_event(Progressed("e0", [Running(one, 1, shown, True) for one, shown in works]), NOW_S)
    counts: dict[str, int] = {}
    for one, _ in works:
        counts[one.class_name] = counts.get(one.class_name, 0) + 1
    held = sum(one.prompt_tokens + shown for one, shown in works)
    capacity = max(capacity, held)
    view = told(counts, kv_tokens=held, used=held / max(1, capacity), capacity=fresh(capacity))
    ledger.on_event(Sampled(view), NOW_S)
    candidate = work("x", "night", tenant="t", prompt_tokens=prompt)

    verdict = ledger.admit(candidate, view, NOW_S)

    need = exactly(works, candidate, z=1.645)
    if counts and need > KV_SHARE * capacity + 1:
        assert not verdict.admitted


@QUICK
@given(lots, st.integers(0, 6000), st.integers(1000, 120_000), st.integers(0, 50_000))
def test_more_memory_never_turns_an_admission_into_a_refusal(
    drawn: list[tuple[str, str, int, int, int | None, int]], prompt: int, capacity: int, more: int
) -> None:
    lengths = Lengths()
    sums = Account(URGENT, lengths)
    sums.progressed([Running(one, 1, shown, True) for one, shown in some_works(drawn)], NOW_S)
    means, variances = newcomer(work("x"), (), lengths)
    asked = Asked(prompt, prompt, 1, None, means, sums.sums.variances_with("t", variances, sums.sums.variances))

    verdicts = []
    for size in (capacity, capacity + more):
        scene = replace(SCENE, capacity_tokens=float(size), means=tuple(sums.sums.means), held_tokens=5000.0)
        verdict = guards.kv(scene, asked, 2.326, patient=True)
        assert verdict is not None
        verdicts.append(verdict)

    assert verdicts[1][0].passed or not verdicts[0][0].passed
    assert verdicts[1][1] >= verdicts[0][1]


events = st.lists(
    st.tuples(st.sampled_from(["grant", "first", "end", "tick"]), st.integers(0, 11), st.integers(0, 3000)), max_size=60
)


def replayed(told_of: Sequence[tuple[str, int, int]]) -> Account:
    account = Account(URGENT, Lengths())
    shown: dict[int, int] = {}
    for kind, number, tokens in told_of:
        one = work(
            f"w{number}", ("chat", "night", "scrap")[number % 3], tenant=f"t{number % 4}", prompt_tokens=900 + number
        )
        if kind == "grant":
            account.granted(one, 1, NOW_S)
            shown.setdefault(number, 0)
        elif kind == "first":
            account.first_token(FirstToken(one, "e0", 0.3), NOW_S)
        elif kind == "end":
            account.ended(one.id, 1)
            shown.pop(number, None)
        else:
            for number_of in shown:
                shown[number_of] += tokens % 97
            account.progressed(
                [
                    Running(entry.work, 1, shown[int(entry.work.id[1:])], entry.prefilled)
                    for entry in account.entries.values()
                ],
                NOW_S,
            )
    return account


@QUICK
@given(events)
def test_sums_kept_step_by_step_equal_sums_made_anew(told_of: list[tuple[str, int, int]]) -> None:
    account = replayed(told_of)

    anew = Sums.of(account.entries.values())

    assert account.sums.means == pytest.approx(anew.means, abs=1e-6)
    assert account.sums.variances == pytest.approx(anew.variances, rel=1e-6, abs=1e-3)
    assert {name: count for name, count in account.sums.works.items() if count} == anew.works
    assert (account.sums.pending_urgent, account.sums.pending_patient) == (anew.pending_urgent, anew.pending_patient)
    assert account.sums.held_tokens == anew.held_tokens


@QUICK
@given(lots, st.randoms(use_true_random=False))
def test_no_decision_depends_on_the_order_of_what_runs(
    drawn: list[tuple[str, str, int, int, int | None, int]], rng: random.Random
) -> None:
    works = some_works(drawn)
    shuffled = list(works)
    rng.shuffle(shuffled)
    counts: dict[str, int] = {"code": 2}
    for one, _ in works:
        counts[one.class_name] = counts.get(one.class_name, 0) + 1
    verdicts = []
    for some, names in ((works, sorted(counts)), (shuffled, sorted(counts, reverse=True))):
        ledger = TokenLedger(POLICY)
        ledger.on_event(Progressed("e0", [Running(one, 1, shown, True) for one, shown in some]), NOW_S)
        held = sum(one.prompt_tokens + shown for one, shown in works)
        view = told({name: counts[name] for name in names}, kv_tokens=held, used=min(1.0, held / CAPACITY))
        ledger.on_event(Sampled(view), NOW_S)
        verdicts.append(ledger.admit(work("x", "night", prompt_tokens=700), view, NOW_S))

    assert [(one.guard, one.passed) for one in verdicts[0].guards] == [
        (one.guard, one.passed) for one in verdicts[1].guards
    ]
    assert [one.value for one in verdicts[0].guards] == pytest.approx([one.value for one in verdicts[1].guards])


def test_works_of_other_processes_count_by_what_their_class_makes() -> None:
    ledger = TokenLedger(policy(POLICY_TEXT.replace("sizing:\n", "sizing:\n  token_ledger: {kv_risk: 0.01}\n")))
    view = running(ledger, 4)
    alone = reading(ledger.admit(work("x", "night"), view, NOW_S), Guard.KV)[0]

    beside = ledger.admit(work("x", "night"), replace(view, in_flight={"night": 4, "scrap": 6}), NOW_S)

    assert reading(beside, Guard.KV)[0] > alone + 6 * 200


# -- guards ------------------------------------------------------------------------------------------------------------


def test_memory_that_will_be_needed_is_refused_though_it_is_free_now() -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 17)

    verdict = ledger.admit(work("x", "night", prompt_tokens=2500), view, NOW_S)

    value, threshold, passed = reading(verdict, Guard.KV)
    assert view.kv_tokens + 2500 < threshold < value
    assert not passed


def test_the_steps_to_overflow_are_the_first_horizon_for_which_memory_does_not_suffice() -> None:
    ledger = TokenLedger(POLICY)

    told_steps, verdict_steps = [], []
    for works in (2, 19):
        view = running(ledger, works)
        told_steps.append(ledger.window(view, "night").steps_to_overflow)
        verdict_steps.append(ledger.admit(work("x", "night"), view, NOW_S).steps_to_overflow)

    assert told_steps == verdict_steps == [math.inf, HORIZONS[0]]


def test_an_engine_that_tells_nothing_of_its_memory_has_no_steps_to_overflow() -> None:
    ledger = TokenLedger(POLICY)
    view = engine("e0", {"night": 1})
    ledger.on_event(Sampled(view), NOW_S)

    assert ledger.admit(work("x", "night"), view, NOW_S).steps_to_overflow is None
    assert ledger.window(view, "night").steps_to_overflow is None


def test_an_urgent_work_gets_the_memory_that_is_kept_from_bulk() -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 16)

    assert ledger.admit(work("x", "chat", prompt_tokens=2000), view, NOW_S).admitted


def test_bulk_waits_while_urgent_prompts_wait_in_the_queue() -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 1)
    free = ledger.admit(work("x", "night", prompt_tokens=100), view, NOW_S)

    ledger.on_event(Sampled(view, {"chat": 50}), NOW_S)

    assert free.admitted
    assert not reading(ledger.admit(work("x", "night", prompt_tokens=100), view, NOW_S), Guard.TTFT)[2]


def test_urgent_prompts_beyond_the_pipe_stay_where_their_order_can_change() -> None:
    ledger = TokenLedger(POLICY)
    some = [work(f"c{number}", "chat", prompt_tokens=3000) for number in range(3)]
    pending = 0
    admitted = []
    for number, one in enumerate(some):
        view = told({"chat": number, "night": 1}, kv_tokens=pending, prefill_tokens=pending)
        admitted.append(ledger.admit(one, view, NOW_S).admitted)
        ledger.on_event(Granted(one, "e0", 1), NOW_S)
        pending += one.prompt_tokens

    assert admitted == [True, False, False]


def cached(one: Work, tokens: int) -> Work:
    return replace(one, cached_tokens=tokens)


def test_what_is_cached_of_a_prompt_fills_no_pipe_and_all_of_it_takes_memory() -> None:
    ledger = TokenLedger(POLICY)
    some = [cached(work(f"c{number}", "chat", prompt_tokens=3000), 2900) for number in range(3)]
    admitted = []
    for number, one in enumerate(some):
        held = 3000 * number
        view = told({"chat": number, "night": 1}, kv_tokens=held, prefill_tokens=held)
        verdict = ledger.admit(one, view, NOW_S)
        admitted.append((verdict.admitted, reading(verdict, Guard.KV)[0] >= held + 3000))
        ledger.on_event(Granted(one, "e0", 1), NOW_S)

    assert admitted == [(True, True)] * 3


def test_bulk_that_is_mostly_cached_stalls_nobody_and_delays_no_first_token() -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 1)
    whole = work("x", "night", prompt_tokens=9000)

    slow, quick = (ledger.admit(one, view, NOW_S) for one in (whole, cached(whole, 8950)))

    for guard in (Guard.TTFT, Guard.STALL):
        assert reading(slow, guard)[0] > 2 * reading(quick, guard)[0]
    for guard in (Guard.KV, Guard.TPOT, Guard.KNEE):
        if any(one.guard is guard for one in slow.guards):
            assert reading(slow, guard) == reading(quick, guard)


def test_the_first_token_of_a_cached_prompt_is_predicted_by_what_is_to_be_computed() -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 1)
    whole = work("x", "chat", prompt_tokens=9000)

    late, early, short = (
        ledger.admit(one, view, NOW_S).first_token_s or 0.0
        for one in (whole, cached(whole, 8000), work("x", "chat", prompt_tokens=1000))
    )

    assert early == pytest.approx(short)
    assert late > 2 * early


def test_prompts_that_were_there_already_do_not_teach_that_prefill_is_cheap() -> None:
    def learned_s(tokens: int) -> float:
        account = Account(URGENT, Lengths())
        for number in range(400):
            one = cached(work(f"w{number}", prompt_tokens=4000 + tokens), tokens)
            account.granted(one, 1, NOW_S + number)
            account.first_token(FirstToken(one, "e0", 0.02 + 4000 * 1e-4), NOW_S + number)
            account.ended(one.id, 1)
        return account.step.prefill_s_per_token

    assert learned_s(20_000) == pytest.approx(learned_s(0), rel=0.05)


def test_of_prompts_to_come_time_counts_what_is_computed_and_memory_all() -> None:
    ledger = TokenLedger(POLICY)
    for number in range(40):
        ledger.on_event(Granted(cached(work(f"c{number}", prompt_tokens=6000), 5500), "e0", 1), NOW_S)
        ledger.on_event(Finished(work(f"c{number}"), "e0", None), NOW_S)
    view = told()
    for tick in range(30):
        ledger.on_event(Sampled(view, {"chat": 2}), NOW_S + tick / 4)
    scene = ledger._scene(ledger._of("e0"), view, NOW_S + 10)

    assert scene.hypothesis.tokens == 500
    assert scene.queued_tokens == 2 * 500
    assert scene.reserve_tokens == 6000


def test_prompts_that_other_processes_were_given_count_whole() -> None:
    account = Account(URGENT, Lengths())
    account.granted(cached(work("c", prompt_tokens=5000), 4000), 1, NOW_S)
    view = told({"chat": 2}, kv_tokens=8000, prefill_tokens=8000)

    assert account.pending(view, account.beyond(view)) == (1000 + 3000, 0)


@pytest.mark.parametrize("bulk", [0, 1])
def test_bulk_that_a_round_has_placed_lets_no_more_urgent_prompts_into_the_pipe(bulk: int) -> None:
    of_round = policy(POLICY_TEXT.replace("sizing:\n", "sizing:\n  policy: token_ledger\n"))
    ledger = TokenLedger(of_round)
    ledger.on_event(Progressed("e0", [Running(work("c", "chat", prompt_tokens=500), 1, 10, True)]), NOW_S)
    view = told({"chat": 1}, kv_tokens=510)
    ledger.on_event(Sampled(view), NOW_S)
    urgent = [work(f"c{number}", "chat", prompt_tokens=500) for number in range(20)]
    patient = [work(f"n{number}", "night", prompt_tokens=10) for number in range(bulk)]

    placed = [one.work.class_name for one in plan_round([*urgent, *patient], [view], ledger, of_round, NOW_S, 0.5)]

    assert (placed.count("night"), placed.count("chat")) == (bulk, 4)


@pytest.mark.parametrize("bulk", [0, 1])
def test_bulk_of_other_processes_makes_no_more_room_for_urgent_credit(bulk: int) -> None:
    ledger = TokenLedger(POLICY)
    ledger.on_event(Progressed("e0", [Running(work("c", "chat", prompt_tokens=500), 1, 10, True)]), NOW_S)
    view = told({"chat": 1, "night": bulk}, kv_tokens=510)
    ledger.on_event(Sampled(view), NOW_S)

    assert room(typical("chat", 500, NOW_S), view, ledger, NOW_S) == 4


def test_the_pipe_is_thin_where_the_objective_leaves_room_for_many_prompts() -> None:
    ledger = TokenLedger(POLICY)
    some = [work(f"c{number}", "chat", prompt_tokens=300) for number in range(12)]
    for number, one in enumerate(some):
        view = told({"chat": number}, kv_tokens=300 * number, prefill_tokens=300 * number)
        if not ledger.admit(one, view, NOW_S).admitted:
            break
        ledger.on_event(Granted(one, "e0", 1), NOW_S)

    value, threshold, passed = reading(ledger.admit(one, view, NOW_S), Guard.STALL)
    assert number > 2
    assert (threshold, passed) == (guards.PIPE_SHARE * 0.5, False)
    assert value > threshold


def test_answers_that_show_nothing_before_their_end_do_not_fill_the_pipe_for_ever() -> None:
    ledger = TokenLedger(POLICY)
    some = [work(f"c{number}", "chat", prompt_tokens=3000) for number in range(2)]
    for one in some:
        ledger.on_event(Granted(one, "e0", 1), NOW_S)
    view = told({"chat": 2}, kv_tokens=6000, prefill_tokens=6000)
    admitted = []
    for at_s in (0.25, 5.0):
        ledger.on_event(Progressed("e0", [Running(one, 1, 0, False) for one in some]), NOW_S + at_s)
        ledger.on_event(Sampled(view), NOW_S + at_s)
        admitted.append(ledger.admit(work("x", "chat", prompt_tokens=3000), view, NOW_S + at_s).admitted)

    assert admitted == [False, True]


def test_an_answer_that_shows_nothing_before_its_end_is_not_taken_for_foreign_traffic() -> None:
    ledger = TokenLedger(POLICY)
    silent = work("n", "night", prompt_tokens=8000)
    ledger.on_event(Granted(silent, "e0", 1), NOW_S)
    needs = []
    for tick in range(1, 61):
        now_s = NOW_S + tick
        view = told({"night": 1}, kv_tokens=8000, prefill_tokens=8000, used=(8000 + 20 * tick) / CAPACITY)
        ledger.on_event(Progressed("e0", [Running(silent, 1, 0, False)]), now_s)
        ledger.on_event(Sampled(view), now_s)
        needs.append(reading(ledger.admit(work("x", "night", prompt_tokens=100), view, now_s), Guard.KV)[0])

    assert needs[-1] < 8000 + 20 * 60 + 100 + 4000


@pytest.mark.parametrize(
    ("guard", "scene", "passes"),
    [
        (Guard.TPOT, {"tpot_s": 0.05, "gap_s": 0.04}, True),
        (Guard.TPOT, {"tpot_s": 0.05, "gap_s": 0.06}, False),
        (Guard.TPOT, {"tpot_s": 0.005, "gap_s": None}, False),
        (Guard.KNEE, {"held_tokens": 10_000.0}, True),
        (Guard.KNEE, {"held_tokens": 1e6}, False),
        (Guard.STALL, {"pending_patient": 1000.0}, True),
        (Guard.STALL, {"pending_patient": 9000.0}, False),
        (Guard.TTFT, {"pending_urgent": 1000.0}, True),
        (Guard.TTFT, {"pending_urgent": 9000.0}, False),
        (Guard.SEATS, {"seats": 16, "patient_seats": 14, "patient": 13}, True),
        (Guard.SEATS, {"seats": 16, "patient_seats": 14, "patient": 14}, False),
    ],
)
def test_a_guard_stands_at_its_threshold(guard: Guard, scene: dict[str, float], passes: bool) -> None:
    account, fields = Account(URGENT, Lengths()), POLICY.sizing.token_ledger
    here = replace(SCENE, **scene)  # type: ignore[arg-type]  # fields by name, from the table
    asked = Asked(500, 500, 1, None, NOTHING[:4], NOTHING)
    ask: dict[Guard, Callable[[], object]] = {
        Guard.TPOT: lambda: guards.gaps(here, asked, account.step, patient=True),
        Guard.KNEE: lambda: guards.knee(here, asked, account.step, fields),
        Guard.STALL: lambda: guards.stall(here, asked, account.step, fields),
        Guard.TTFT: lambda: guards.first_token(here, asked, account.step, fields),
        Guard.SEATS: lambda: guards.seats(here, asked, patient=True),
    }

    found = ask[guard]()

    assert isinstance(found, GuardReading)
    assert (found.guard, found.passed) == (guard, passes)


def test_a_prompt_that_makes_others_late_passes_now_and_then_when_nothing_is_pending() -> None:
    account, fields = Account(URGENT, Lengths()), POLICY.sizing.token_ledger
    huge = Asked(38_000, 38_000, 1, None, NOTHING[:4], NOTHING)
    due = replace(SCENE, oversize_due=True)

    found = [
        guards.first_token(scene, huge, account.step, fields)
        for scene in (due, SCENE, replace(due, pending_urgent=10.0))
    ]

    assert [one.passed for one in found if one is not None] == [True, False, False]


def beside_long_prompts(ledger: TokenLedger, tokens: int = 3000) -> EngineView:
    """An engine on which one urgent work decodes, where urgent prompts are so long."""
    for number in range(30):
        ledger.on_event(Granted(work(f"c{number}", "chat", prompt_tokens=tokens), "e0", 1), NOW_S)
    ledger.on_event(Progressed("e0", [Running(work("c0", "chat", prompt_tokens=tokens), 1, 10, True)]), NOW_S)
    view = told({"chat": 1}, kv_tokens=tokens + 10)
    ledger.on_event(Sampled(view, {"night": 8}), NOW_S)
    return view


@pytest.mark.parametrize("tokens", [100, 1500, 2000, 2900, 3000, 12_000])
def test_no_prompt_is_too_short_to_be_let_in_ever_where_a_longer_one_is(tokens: int) -> None:
    ledger = TokenLedger(POLICY)
    view = beside_long_prompts(ledger)

    assert ledger.admit(work("x", "night", prompt_tokens=tokens), view, NOW_S + 20).admitted


def test_one_prompt_in_twenty_seconds_may_make_somebody_late() -> None:
    ledger = TokenLedger(POLICY)
    view = beside_long_prompts(ledger)
    first, then = (work(name, "night", prompt_tokens=2000) for name in "xy")
    ledger.on_event(Granted(first, "e0", 1), NOW_S)
    ledger.on_event(Finished(first, "e0", None), NOW_S + 1)

    found = [ledger.admit(then, view, NOW_S + at_s) for at_s in (1, 19, 20)]

    assert [reading(one, Guard.TTFT)[2] for one in found] == [False, False, True]


def test_where_steps_alone_make_urgent_works_late_no_prompt_may() -> None:
    account, fields = Account(URGENT, Lengths()), POLICY.sizing.token_ledger
    slow = replace(SCENE, oversize_due=True, held_tokens=1e7)

    for tokens in (10, 38_000):
        found = guards.first_token(slow, Asked(tokens, tokens, 1, None, NOTHING[:4], NOTHING), account.step, fields)
        assert found is not None
        assert not found.passed


@pytest.mark.parametrize(("slowdown", "factor"), [(None, ALONE_FACTOR), (1.3, 1.21), (1.5, 1.35), (3.0, ALONE_FACTOR)])
def test_a_promised_slowdown_bounds_what_bulk_may_do_to_a_first_token(slowdown: float | None, factor: float) -> None:
    assert guards.alone_factor(slowdown, POLICY.sizing.token_ledger) == pytest.approx(factor)


def test_the_objective_of_a_promised_slowdown_is_by_what_the_engine_was_seen_to_take() -> None:
    policy_ = policy("version: 1\nclasses: {chat: {ttft_slowdown: 1.3}, night: {}}\n")
    thresholds = []
    for took_s in (0.4, 1.6):
        ledger = TokenLedger(policy_)
        for number in range(40):
            one = work(f"s{number}", "chat", prompt_tokens=4000, deadline_s=NOW_S + 9)
            ledger.on_event(Granted(one, "e0", 1), NOW_S)
            ledger.on_event(FirstToken(one, "e0", took_s), NOW_S)
            ledger.on_event(Finished(one, "e0", None), NOW_S)
        ledger.on_event(Sampled(told(), {}), NOW_S)
        thresholds.append(reading(ledger.admit(work("x", "night"), told({"night": 1}), NOW_S), Guard.TTFT)[1])

    assert thresholds[1] > 2.5 * thresholds[0]
    assert thresholds[1] < 1.3 * 1.6 * (1 + guards.MOST_DOUBT)


PROMISED = policy("version: 1\nclasses: {chat: {ttft_slowdown: 1.3}, night: {}}\nsizing: {policy: token_ledger}\n")


def bursts(ledger: TokenLedger, prompts_per_s: int, *, seconds: int = 40) -> float:
    """An engine to which so many prompts of 500 tokens come each second, each with its first token 50 ms after the one before it;
    when that is over."""
    number = 0
    for at_s in range(seconds):
        for part in range(prompts_per_s):
            now_s, number = NOW_S + at_s + part / prompts_per_s, number + 1
            one = work(f"s{number}", "chat", prompt_tokens=500, accepted_s=now_s, deadline_s=now_s + 0.1)
            ledger.on_event(Granted(one, "e0", 1), now_s)
            ledger.on_event(FirstToken(one, "e0", 0.05), now_s + 0.05)
            ledger.on_event(Finished(one, "e0", None), now_s + 0.06)
        ledger.on_event(Sampled(told(), {}), NOW_S + at_s + 1)
    return NOW_S + seconds


def test_the_busier_urgent_work_keeps_an_engine_the_less_bulk_decodes_beside_a_promised_slowdown() -> None:
    allowed = []
    for prompts_per_s in (1, 8, 14):
        ledger = TokenLedger(PROMISED)
        now_s = bursts(ledger, prompts_per_s)
        verdict = ledger.admit(work("x", "night", accepted_s=now_s), told({"night": 1}), now_s)
        allowed.append(reading(verdict, Guard.LOAD)[1])

    assert allowed[0] > allowed[1] > allowed[2] >= 1


def test_classes_with_an_objective_in_seconds_have_no_such_guard() -> None:
    verdict = TokenLedger(POLICY).admit(work("x", "night"), told({"night": 1}), NOW_S)

    assert Guard.LOAD not in {one.guard for one in verdict.guards}


def test_an_urgent_work_does_not_wait_for_a_gap_that_prompts_have_made() -> None:
    account = Account(URGENT, Lengths())
    torn = replace(SCENE, tpot_s=0.2, gap_s=0.5)
    one = Asked(100, 100, 1, 1.0, NOTHING[:4], NOTHING)

    urgent, patient = (guards.gaps(torn, one, account.step, patient=patient) for patient in (False, True))

    assert urgent is not None
    assert patient is not None
    assert urgent.passed
    assert not patient.passed


@pytest.mark.parametrize("budget", BUDGETS)
def test_beside_a_promised_slowdown_the_pipe_takes_a_whole_step_of_prompts_whatever_was_learned(budget: int) -> None:
    """Its objective is about one prompt: a quarter of that would let prompts in one by one, and steps be nearly empty."""
    account = Account(URGENT, Lengths())
    account.step._at = BUDGETS.index(budget)
    one = Asked(500, 500, 1, 0.1, NOTHING[:4], NOTHING)
    pending = replace(SCENE, pending_urgent=8000.0)
    promised = Hypothesis(500.0, 0.1, slowdown=1.3)

    thin, whole = (
        guards.pipe(replace(pending, hypothesis=of), one, account.step) for of in (Hypothesis(500.0, 0.1), promised)
    )

    assert not thin.passed
    assert whole.passed


def test_first_tokens_that_come_late_let_less_bulk_in_and_early_ones_no_more() -> None:
    account, fields = Account(URGENT, Lengths()), POLICY.sizing.token_ledger
    one = Asked(100, 100, 1, None, NOTHING[:4], NOTHING)

    usual, slow, quick = (
        guards.first_token(replace(SCENE, ttft_factor=factor), one, account.step, fields) for factor in (1.0, 1.3, 0.8)
    )

    assert usual is not None
    assert slow is not None
    assert slow.value == pytest.approx(1.3 * usual.value)
    assert quick == usual


def test_first_tokens_of_late_correct_what_is_predicted_for_placement() -> None:
    ledger = TokenLedger(POLICY)
    view, one = running(ledger, 2), work("c", "chat", prompt_tokens=400)
    usual_s = ledger.admit(one, view, NOW_S).first_token_s or 0.0
    ledger.on_event(Granted(one, "e0", 1), NOW_S)
    ledger.on_event(FirstToken(one, "e0", 2 * usual_s), NOW_S)
    ledger.on_event(Sampled(view), NOW_S)

    learned = ledger.learned_step("e0")
    soon_s, later_s = (
        ledger.admit(work("x", "chat", prompt_tokens=400), view, NOW_S + at_s).first_token_s or 0.0 for at_s in (0, 600)
    )

    assert learned is not None
    assert learned.ttft_factor == pytest.approx(1.08)
    assert soon_s == pytest.approx(1.08 * later_s)


def test_on_a_slow_engine_one_long_prompt_after_the_other_is_let_in() -> None:
    account, fields = Account(URGENT, Lengths()), POLICY.sizing.token_ledger
    account.step.theta[3] = 3e-4
    long = Asked(1000, 1000, 1, None, NOTHING[:4], NOTHING)
    patient = replace(SCENE, hypothesis=Hypothesis(1000.0, 2.0))

    assert guards.stall(patient, long, account.step, fields).passed
    assert not guards.stall(replace(patient, pending_patient=500.0), long, account.step, fields).passed


@pytest.mark.parametrize(
    ("change", "guard"),
    [
        ({"gpu_memory_free_fraction": fresh(0.02)}, Guard.VRAM),
        ({"gpu_heat_margin_c": fresh(2.0)}, Guard.THERMAL),
    ],
)
def test_a_gpu_at_its_limit_gets_nothing_more(change: dict[str, Reading], guard: Guard) -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 2)
    ledger.on_event(Sampled(replace(view, gpu_memory_free_fraction=fresh(0.2))), NOW_S)

    verdict = ledger.admit(work("x", "night"), replace(view, **change), NOW_S)  # type: ignore[arg-type]

    assert verdict.binding is guard


def test_a_hot_gpu_lets_in_who_is_promised_an_answer() -> None:
    ledger = TokenLedger(POLICY)
    view = replace(running(ledger, 2), gpu_heat_margin_c=fresh(1.0), gpu_slowed=fresh(1.0))

    assert ledger.admit(work("x", "chat"), view, NOW_S).admitted


def warmed(seconds: int, *, slowed_for_good: bool = False, unknown: bool = False) -> list[int]:
    """Windows by quarter seconds of an endless backlog on a card that becomes hotter by a degree for each work, half of it
    in 15 seconds; it slows down at 90 degrees, 50 of them its own."""
    ledger = TokenLedger(POLICY)
    ledger.on_event(FirstToken(work("first", "night"), "e0", 0.1), NOW_S)
    temperature_c, held, windows = 50.0, 0, []
    for tick in range(4 * seconds):
        now_s = NOW_S + tick / 4
        temperature_c += (50 + held - temperature_c) * 0.25 / 20
        view = told({"night": held}, capacity=fresh(1e6))
        if not unknown:
            slowed = fresh(float(slowed_for_good or temperature_c >= 90))
            view = replace(view, gpu_heat_margin_c=fresh(90 - temperature_c), gpu_slowed=slowed)
        ledger.on_event(Sampled(view, {"night": 100}), now_s)
        windows.append(ledger.window(view, "night").requests or 0)
        held = max(held - 1, min(held + 8, windows[-1]))
    return windows


def test_a_window_on_a_hot_gpu_settles_below_its_limit_and_does_not_swing() -> None:
    late = warmed(1200)[-4 * 600 :]

    assert max(late) <= 37
    assert min(late) >= 28
    assert max(late) - min(late) < 0.15 * max(late)


def test_a_gpu_that_slows_down_whatever_runs_keeps_the_first_window() -> None:
    assert warmed(120, slowed_for_good=True)[-1] == POLICY.sizing.token_ledger.start


def test_a_gpu_that_cannot_be_read_bounds_nobody() -> None:
    assert warmed(60, unknown=True)[-1] > 100


def test_an_engine_that_fills_its_gpu_on_purpose_is_judged_by_the_rise() -> None:
    ledger = TokenLedger(POLICY)
    view = replace(running(ledger, 2), gpu_memory_free_fraction=fresh(0.04))
    ledger.on_event(Sampled(view), NOW_S)

    assert ledger.admit(work("x", "night"), view, NOW_S).admitted
    assert not ledger.admit(work("x", "night"), replace(view, gpu_memory_free_fraction=fresh(0.01)), NOW_S).admitted


# -- the window --------------------------------------------------------------------------------------------------------


def test_a_new_window_grows_by_half_a_second_until_the_first_hold_and_by_a_twentieth_after() -> None:
    growth = Growth(4.0, 1000.0)
    for tick in range(33):
        growth.tick(held=int(growth.limit), backlog=True, clear=True, now_s=tick / 4)
    fast = growth.limit

    growth.tick(held=int(growth.limit), backlog=True, clear=False, now_s=9.0)
    held = growth.limit
    growth.tick(held=int(growth.limit), backlog=True, clear=True, now_s=9.25)

    assert fast > 4 * 1.5**7
    assert held == fast
    assert growth.limit == pytest.approx(1.05 * fast)


@pytest.mark.parametrize(("held", "backlog"), [(3, True), (10, False)])
def test_a_window_that_is_not_needed_does_not_grow(held: int, backlog: bool) -> None:
    growth = Growth(10.0, 100.0, new=False)

    growth.tick(held=held, backlog=backlog, clear=True, now_s=1.0)

    assert growth.limit == 10.0


@pytest.mark.parametrize("sequences", [1, 3, 4, 8, 64])
def test_works_of_many_sequences_do_not_keep_a_window_from_growing(sequences: int) -> None:
    growth, held = Growth(4.0, 1024.0, new=False), 0
    for tick in range(1200):
        while held + taken(sequences, int(growth.limit)) <= int(growth.limit):
            held += sequences
        growth.tick(held=held, backlog=True, clear=True, now_s=tick / 4, sequences=sequences)

    assert growth.limit == 1024


def test_the_window_of_an_engine_grows_by_the_size_of_the_works_that_come() -> None:
    ledger = TokenLedger(POLICY)
    one = work("n", "night", sequences=4)
    ledger.on_event(Granted(one, "e0", 1), NOW_S)
    ledger.on_event(FirstToken(one, "e0", 0.1), NOW_S)
    view = replace(told({"night": 1}, kv_tokens=40), extra_sequences={"night": 3})
    for tick in range(20):
        ledger.on_event(Sampled(view, {"night": 8}), NOW_S + tick / 4)

    assert ledger.admit(replace(one, id="m"), view, NOW_S + 5).admitted


def test_a_window_is_cut_once_in_a_dead_time_to_a_part_of_what_is_in_flight() -> None:
    growth = Growth(100.0, 100.0)

    cuts = [growth.cut(0.7, held=39, now_s=at) for at in (1.0, 1.5, 3.1)]

    assert cuts == [True, False, True]
    assert growth.limit == pytest.approx(0.7 * 0.7 * 40)


def test_an_eviction_by_the_engine_cuts_the_window_and_a_second_one_halves_the_risk() -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 3)
    before = ledger.window(view, "night").requests
    needs = []
    for evictions, at_s in ((1.0, 1.0), (2.0, 9.0)):
        ledger.on_event(Sampled(replace(view, preemptions_total=fresh(evictions)), {"night": 8}), NOW_S + at_s)
        needs.append(reading(ledger.admit(work("x", "night"), view, NOW_S + at_s), Guard.KV)[0])

    assert before is not None
    after = ledger.window(view, "night").requests
    assert after is not None
    assert after < before
    assert needs[1] > needs[0]


@pytest.mark.parametrize(("streams", "output_tokens"), [(True, 50), (False, 50), (False, 0)])
def test_the_window_of_a_new_engine_grows_only_once_it_has_shown_something(streams: bool, output_tokens: int) -> None:
    """An embedding has no tokens."""
    ledger, windows = TokenLedger(POLICY), []
    view = running(ledger, 4, tokens=10)
    one = work("night0", "night")
    done = Outcome(
        one.id,
        "night",
        one.tenant,
        one.model,
        "e0",
        Result.COMPLETED,
        "",
        200,
        1,
        prompt_tokens=10,
        output_tokens=output_tokens,
        total_s=9.0,
    )

    for tick in range(80):
        if tick == 40:
            shown = FirstToken(one, "e0", 9.0) if streams else Finished(one, "e0", done)
            ledger.on_event(shown, NOW_S + tick / 4)
        ledger.on_event(Sampled(view, {"night": 8}), NOW_S + tick / 4)
        windows.append(ledger.window(view, "night").requests or 0)

    assert set(windows[:40]) == {POLICY.sizing.token_ledger.start}
    assert windows[-1] > POLICY.sizing.token_ledger.start


def test_late_first_tokens_cut_the_window() -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 3)
    before = ledger.window(view, "night").requests
    for number in range(6):
        late = work(f"late{number}", "chat", accepted_s=NOW_S - 2)
        ledger.on_event(Granted(late, "e0", 1), NOW_S)
        ledger.on_event(FirstToken(late, "e0", 1.9), NOW_S)

    ledger.on_event(Sampled(view, {"night": 8}), NOW_S)

    after = ledger.window(view, "night").requests
    assert before is not None
    assert after is not None
    assert after < before


def served(ledger: TokenLedger, count: int, *, prompt_tokens: int, took_s: float, allowed_s: float) -> None:
    """So many urgent works show their first token on e0, one after the other."""
    for number in range(count):
        one = work(f"s{number}", "code", prompt_tokens=prompt_tokens, deadline_s=NOW_S + allowed_s)
        ledger.on_event(Granted(one, "e0", 1), NOW_S)
        ledger.on_event(FirstToken(one, "e0", took_s), NOW_S)
        ledger.on_event(Finished(one, "e0", None), NOW_S)


def test_first_tokens_that_are_late_without_any_bulk_cut_no_window() -> None:
    ledger = TokenLedger(POLICY)
    before = ledger.window(told(), "night").requests

    served(ledger, 20, prompt_tokens=100, took_s=1.9, allowed_s=2.0)
    ledger.on_event(Sampled(told(), {"night": 8}), NOW_S)

    assert ledger.window(told(), "night").requests == before


@pytest.mark.parametrize(("allowed_s", "cut"), [(1.0, False), (1.5, True)])
def test_first_tokens_that_the_engine_alone_makes_late_cut_no_window(allowed_s: float, cut: bool) -> None:
    ledger = TokenLedger(POLICY)
    served(ledger, 40, prompt_tokens=20_000, took_s=1.2, allowed_s=100.0)  # it was seen to need 1.2 s for such a prompt
    view = running(ledger, 3, tokens=200)
    before = ledger.window(view, "night").requests

    served(ledger, 60, prompt_tokens=20_000, took_s=1.4, allowed_s=allowed_s)
    ledger.on_event(Sampled(view, {"night": 8}), NOW_S)

    after = ledger.window(view, "night").requests
    assert (after, before) == (2, 4) if cut else after == before


def test_a_window_and_the_seats_for_bulk_count_sequences() -> None:
    ledger = TokenLedger(POLICY)
    views = [told({"night": 1}), replace(told({"night": 1}), extra_sequences={"night": 7}, seats=fresh(9))]
    for view in views:
        ledger.on_event(Sampled(view, {}), NOW_S)

    one, many = [ledger.admit(work("x", "night"), view, NOW_S) for view in views]
    three = ledger.admit(work("x", "night", sequences=3), views[0], NOW_S)

    assert reading(one, Guard.WINDOW) == (2, 4, True)
    assert reading(many, Guard.WINDOW) == (9, 4, False)
    assert reading(many, Guard.SEATS) == (9, 8, False)
    assert reading(three, Guard.WINDOW) == (3, 4, True)  # at most half of a bound is asked for


def test_what_a_step_is_learned_from_are_sequences() -> None:
    account = Account(URGENT, Lengths())
    account.granted(work("a", "night", sequences=5), 1, NOW_S)

    entry = account.granted(work("b", "night"), 1, NOW_S)

    assert entry.behind[1] == account.sums.sequences - 1 == 5


# -- what is not known -------------------------------------------------------------------------------------------------


def test_missed_polls_keep_memory_free_and_stop_growth() -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 3)
    sure = reading(ledger.admit(work("x", "night"), view, NOW_S), Guard.KV)[0]
    stale = told({"night": 3}, kv_tokens=view.kv_tokens, age_s=2.5)

    ledger.on_event(Sampled(stale, {"night": 8}), NOW_S + 2.5)

    assert reading(ledger.admit(work("x", "night"), stale, NOW_S), Guard.KV)[0] >= sure + 0.1 * CAPACITY


def test_an_engine_that_fell_silent_is_held_to_what_it_bore() -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 8)
    silent = told({"night": 8}, kv_tokens=view.kv_tokens, age_s=30.0)

    ledger.on_event(Sampled(silent, {"night": 8}), NOW_S + 30)

    value, threshold, passed = reading(ledger.admit(work("x", "night"), silent, NOW_S + 30), Guard.STALE)
    assert threshold == pytest.approx(view.kv_tokens)
    assert not passed
    assert value > threshold


def test_an_engine_that_fell_silent_in_an_idle_moment_is_given_half_of_the_memory_that_it_told_of() -> None:
    box, small = BlackBox(), BlackBox()

    box.begin(0, 400_000)
    small.begin(100, 6000)

    assert box.limit_tokens == START_TOKENS
    assert small.limit_tokens == 3000
    assert (box.peak_tokens, small.peak_tokens) == (400_000, 6000)


def test_an_engine_is_silent_after_ten_seconds_without_a_number_and_not_after_one_bad_page() -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 3)
    bad = replace(view, kv_used_fraction=Reading(None, math.inf, Quality.ABSURD))

    def binding(after_s: float) -> set[Guard]:
        ledger.on_event(Sampled(bad, {"night": 8}), NOW_S + after_s)
        return {one.guard for one in ledger.admit(work("x", "night"), bad, NOW_S + after_s).guards}

    assert Guard.STALE not in binding(0.5)
    assert Guard.STALE not in binding(9.0)
    assert Guard.STALE in binding(11.0)


def test_an_engine_without_metrics_is_bounded_by_tokens_that_grow_while_it_answers_in_time() -> None:
    box = BlackBox()
    start = box.limit_tokens
    for tick in range(20):
        box.tick(box.limit_tokens, worst=0.2, gap_s=0.02, now_s=tick / 4)
    grown = box.limit_tokens

    box.tick(box.limit_tokens, worst=0.9, gap_s=0.02, now_s=5.0)
    box.tick(box.limit_tokens, worst=0.9, gap_s=0.02, now_s=5.25)

    assert grown > 4 * start
    assert box.limit_tokens == pytest.approx(0.85 * grown)
    assert box.peak_tokens == grown


@pytest.mark.parametrize("prompt_tokens", [500, 5000, 9000, 20_000])
def test_an_engine_without_metrics_is_found_to_bear_more_than_one_long_prompt(prompt_tokens: int) -> None:
    ledger, held = TokenLedger(POLICY), 0
    for tick in range(240):
        now_s = NOW_S + tick / 4
        view = replace(told({"night": held}, kv_tokens=held * prompt_tokens), kv_capacity_tokens=UNKNOWN)
        ledger.on_event(Sampled(view, {"night": 8}), now_s)
        one = work(f"n{held}", "night", prompt_tokens=prompt_tokens)
        if ledger.admit(one, view, now_s).binding in {Guard.NONE, Guard.WINDOW}:
            ledger.on_event(Granted(one, "e0", 1), now_s)
            ledger.on_event(FirstToken(one, "e0", 0.1), now_s)
            held += 1

    assert held * prompt_tokens > 100_000


def test_a_silent_engine_whose_gaps_tear_is_given_less() -> None:
    box = BlackBox()
    for tick in range(8):
        box.tick(0, worst=None, gap_s=0.02, now_s=tick / 4)
    before = box.limit_tokens

    box.tick(before, worst=None, gap_s=0.2, now_s=3.0)

    assert box.limit_tokens < before


def test_a_restarted_engine_begins_anew_and_keeps_its_speed() -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 3)
    for tick in range(1, 60):
        ledger.on_event(Sampled(replace(view, kv_used_fraction=fresh(0.5)), {"night": 8}), NOW_S + tick)
    foreign = reading(ledger.admit(work("x", "night"), view, NOW_S + 60), Guard.KV)[0]

    ledger.on_event(Sampled(replace(told({"night": 3}, kv_tokens=view.kv_tokens, started_s=99.0)), {}), NOW_S + 60)

    assert reading(ledger.admit(work("x", "night"), view, NOW_S + 60), Guard.KV)[0] < foreign - 5000
    assert ledger.window(view, "night").requests == 4


def test_lengths_are_learned_from_what_ends() -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 2)
    before = reading(ledger.admit(work("x", "night"), view, NOW_S), Guard.KV)[0]
    for number in range(200):
        one = work(f"d{number}", "night")
        done = Outcome(one.id, "night", "t", "m", "e0", Result.COMPLETED, "", 200, 1, 10, 20, 9.0)
        ledger.on_event(Finished(one, "e0", done), NOW_S)

    ledger.on_event(Sampled(view), NOW_S + 10)
    ledger.on_event(Progressed("e0", [Running(work(f"night{n}", "night"), 1, 50, True) for n in range(2)]), NOW_S + 10)

    assert reading(ledger.admit(work("x", "night"), view, NOW_S), Guard.KV)[0] < before - 200


def test_without_any_reading_of_memory_no_number_is_made_up() -> None:
    ledger = TokenLedger(POLICY)
    silent = replace(told({"night": 1}), kv_capacity_tokens=UNKNOWN, kv_used_fraction=UNKNOWN)

    verdict = ledger.admit(work("x", "night"), silent, NOW_S)

    assert Guard.KV not in {one.guard for one in verdict.guards}
    assert reading(verdict, Guard.STALE)[2]


# -- seats -------------------------------------------------------------------------------------------------------------


def says(running: float, waiting: float, *, used: float = 0.1, age_s: float = 0.0) -> EngineView:
    """An engine that tells what it runs and has waiting, but not its seats."""
    return replace(
        told(used=used), running=Reading(running, age_s, Quality.FRESH), waiting=Reading(waiting, age_s, Quality.FRESH)
    )


def found(*polls: tuple[float, float], used: float = 0.1) -> int | None:
    seats = FoundSeats()
    for number, (runs, waits) in enumerate(polls):
        for age_s in (0.0, 0.25):  # two control ticks look at one poll
            seats.hear(says(runs, waits, used=used, age_s=age_s), NOW_S + 0.5 * number + age_s)
    return seats.value


@pytest.mark.parametrize(
    ("polls", "seats"),
    [
        ([(16, 4), (16, 2), (16, 7)], 16),
        ([(16, 4), (16, 2)], None),
        ([(16, 4), (16, 0), (16, 7)], None),
        ([(14, 4), (15, 2), (16, 7)], None),
        ([(0, 4), (0, 4), (0, 4)], None),
        ([(16, 4), (16, 2), (16, 7), (12, 0)], 16),
        ([(8, 1), (8, 1), (8, 1), (9, 0)], None),
        ([(8, 1), (8, 1), (8, 1), (16, 1), (16, 1), (16, 1)], 16),
    ],
)
def test_an_engine_with_works_waiting_and_room_in_its_memory_runs_as_many_as_it_has_seats(
    polls: list[tuple[float, float]], seats: int | None
) -> None:
    assert found(*polls) == seats


def test_works_that_wait_for_memory_say_nothing_of_seats() -> None:
    assert found((16, 4), (16, 4), (16, 4), used=0.9) is None


def test_what_was_found_of_seats_is_found_anew_after_a_while() -> None:
    seats = FoundSeats()
    for number in range(3):
        seats.hear(says(16, 4), NOW_S + number)
    kept = seats.value

    seats.hear(says(10, 0), NOW_S + KEPT_S + 3)

    assert (kept, seats.value) == (16, None)


def test_seats_that_were_found_bind_bulk_and_not_whom_they_are_kept_for_until_the_engine_is_another() -> None:
    ledger = TokenLedger(POLICY)
    for number in range(3):
        ledger.on_event(Sampled(says(8, 3), {"night": 8}), NOW_S + number)
    bulk = ledger.admit(work("x", "night"), replace(says(8, 0), in_flight={"night": 7}), NOW_S + 3)
    urgent = ledger.admit(work("x", "chat"), replace(says(8, 0), in_flight={"night": 8}), NOW_S + 3)
    told_of = replace(says(8, 0), in_flight={"night": 8}, seats=fresh(8))
    at_the_last = ledger.admit(work("x", "chat"), told_of, NOW_S + 3)

    ledger.on_event(Sampled(replace(says(0, 0), start_time_s=fresh(99.0)), {"night": 8}), NOW_S + 4)
    after = ledger.admit(work("x", "night"), replace(says(8, 0), in_flight={"night": 7}), NOW_S + 5)

    assert reading(bulk, Guard.SEATS) == (8, 7, False)
    assert Guard.SEATS not in {one.guard for one in urgent.guards}
    assert reading(at_the_last, Guard.SEATS) == (9, 8, False)
    assert not [one for one in after.guards if one.guard is Guard.SEATS]


@pytest.mark.parametrize(
    ("seats", "peak", "left"), [(16, 0, 14), (16, 5, 11), (16, 12, 8), (4, 1, 3), (4, 2, 2), (1, 3, 1)]
)
def test_bulk_leaves_the_seats_that_urgent_works_take_at_their_peak(seats: int, peak: int, left: int) -> None:
    assert guards.patient_seats(seats, peak) == left


def test_the_peak_of_urgent_works_is_kept_for_minutes_and_lowers_the_window() -> None:
    ledger = TokenLedger(POLICY)
    some = [work(f"c{number}", "chat") for number in range(5)]
    for one in some:
        ledger.on_event(Granted(one, "e0", 1), NOW_S)
    ledger.on_event(Progressed("e0", [Running(one, 1, 10, True) for one in some]), NOW_S)
    for number in range(20):
        ledger.on_event(Sampled(told({"chat": 5}), {}), NOW_S + number)
    for one in some:
        ledger.on_event(Finished(one, "e0", None, 1), NOW_S + 20)

    verdict = ledger.admit(work("x", "night"), replace(told({"night": 8}), seats=fresh(12)), NOW_S + 21)

    assert reading(verdict, Guard.SEATS) == (9, 7, False)


# -- late works --------------------------------------------------------------------------------------------------------


def test_a_work_whose_first_token_is_late_leaves_room_for_those_that_can_still_be_in_time() -> None:
    ledger = TokenLedger(POLICY)
    view = running(ledger, 4)
    in_time = work("x", "chat", accepted_s=NOW_S, deadline_s=NOW_S + 1, prompt_tokens=500)
    late = replace(in_time, accepted_s=NOW_S - 5, deadline_s=NOW_S - 4)

    free, bound = ledger.admit(in_time, view, NOW_S), ledger.admit(late, view, NOW_S)

    assert Guard.TTFT not in {one.guard for one in free.guards}
    assert Guard.TTFT in {one.guard for one in bound.guards}
    assert reading(bound, Guard.KV)[1] < reading(free, Guard.KV)[1]


def test_a_late_work_is_urgent_again_before_its_time_in_the_queue_is_over() -> None:
    max_wait_s = POLICY.class_policy("chat").max_wait_s
    late = work("x", "chat", accepted_s=NOW_S, deadline_s=NOW_S + 1)

    assert not POLICY.late(late, NOW_S + 1)
    assert POLICY.late(late, NOW_S + 2)
    assert not POLICY.late(late, NOW_S + max_wait_s / 4)
    assert not POLICY.late(work("x", "night"), NOW_S + 1e6)


def test_gaps_are_not_learned_from_while_a_prompt_is_half_taken_in() -> None:
    account = Account(URGENT, Lengths())
    old, new = work("old", "night"), work("new", "night", prompt_tokens=60_000)
    account.granted(old, 1, NOW_S)
    account.first_token(FirstToken(old, "e0", 0.1), NOW_S)

    def window(number: int, *, taken_in: bool) -> int:
        """Observations that it brings."""
        before = account.step.observations
        running = [Running(old, 1, 20 * number, True)]
        running += [Running(new, 1, 0, taken_in)] if number else []
        account.progressed(running, NOW_S + 1.1 * number)
        return account.step.observations - before

    window(0, taken_in=False)
    account.granted(new, 1, NOW_S + 0.5)

    assert [window(1, taken_in=False), window(2, taken_in=False)] == [0, 0]
    account.first_token(FirstToken(new, "e0", 3.0), NOW_S + 3)
    assert [window(3, taken_in=True), window(4, taken_in=True)] == [0, 1]


def test_the_pipe_is_as_wide_as_a_long_prompt_for_short_and_long_ones_alike() -> None:
    model = Account(URGENT, Lengths()).step
    wide = replace(SCENE, pending_urgent=2000.0, hypothesis=Hypothesis(2500.0, 1.0))
    thin = replace(wide, hypothesis=Hypothesis(100.0, 1.0))
    asked = Asked(2500, 2500, 1, 0.2, NOTHING, NOTHING)

    for tokens in (0, 100, 2500):
        assert guards.pipe(wide, replace(asked, prompt_tokens=tokens), model).passed
        assert not guards.pipe(thin, replace(asked, prompt_tokens=tokens), model).passed


def test_an_urgent_work_is_let_in_where_memory_lasts_until_something_ends() -> None:
    ledger = TokenLedger(POLICY)
    running = [work(f"b{number}", class_name="bulk", prompt_tokens=3000) for number in range(10)]
    for one in running:
        ledger.on_event(Granted(one, "e0", 1), NOW_S)
    view = told({"bulk": 10}, kv_tokens=30_000)
    ledger.on_event(Progressed("e0", [Running(one, 1, 100, prefilled=True) for one in running]), NOW_S)
    ledger.on_event(Sampled(view), NOW_S)

    def asked(prompt_tokens: int) -> GuardReading:
        verdict = ledger.admit(work("u", prompt_tokens=prompt_tokens), view, NOW_S)
        return next(one for one in verdict.guards if one.guard is Guard.KV)

    assert asked(9_400).passed
    assert asked(9_400).value > CAPACITY - 100  # all that 64 steps are expected to add would not fit
    assert not asked(9_500).passed


@QUICK
@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=12),
    st.booleans(),
    st.integers(1, 50_000),
    st.lists(st.tuples(st.integers(1, 40_000), st.sampled_from(["t", "other"]), st.integers(1, 4000)), max_size=8),
)
def test_whoever_is_longer_than_a_refusal_says_is_refused_as_well(
    running: list[int], pending: bool, asked: int, others: list[tuple[int, str, int]]
) -> None:
    ledger = TokenLedger(POLICY)
    works = [work(f"b{number}", class_name="bulk", prompt_tokens=tokens) for number, tokens in enumerate(running)]
    for one in works:
        ledger.on_event(Granted(one, "e0", 1), NOW_S)
    total = sum(running)
    view = told({"bulk": len(running)}, kv_tokens=total, prefill_tokens=total if pending else 0)
    ledger.on_event(Progressed("e0", [Running(one, 1, 1, prefilled=not pending) for one in works]), NOW_S)
    ledger.on_event(Sampled(view), NOW_S)

    def of(tokens: int, tenant: str = "t", max_tokens: int | None = None) -> Verdict:
        one = replace(work("x", class_name="bulk", prompt_tokens=tokens), tenant=tenant, max_tokens=max_tokens)
        return ledger.admit(one, view, NOW_S)

    verdict = of(asked)
    if verdict.admitted:
        assert verdict.longest_tokens == math.inf
        return
    for tokens, tenant, max_tokens in others:
        if tokens > verdict.longest_tokens + 1e-3:
            assert not of(tokens, tenant, max_tokens).admitted
    failed = {one.guard for one in verdict.guards if not one.passed}
    assert failed & {Guard.STALL, Guard.KV, Guard.TTFT} or asked <= verdict.longest_tokens + 1e-3
    assert Guard.STALL not in failed or verdict.longest_tokens < asked


# -- answers that are told whole -----------------------------------------------------------------------------------------

TRUE_STEP = (0.04, 1e-4, 2e-7, 3e-4)
"""Of an engine several times slower than the prior: base, sequence, context token, prompt token."""


def true_first_s(pending: float, sequences: float, held: float) -> float:
    base, per_sequence, per_token, prompt = TRUE_STEP
    return (0.5 + math.ceil(pending / 2048)) * (base + per_sequence * sequences + per_token * held) + prompt * pending


def whole_answers(ledger: TokenLedger, count: int, *, tokens: tuple[int, int]) -> None:
    """One after another, each alone on the engine; tokens: the least and the most that an answer has."""
    rng, now_s = random.Random(1), NOW_S
    for number in range(count):
        one = replace(work(f"w{number}", "night", prompt_tokens=rng.randrange(50, 6000)), streams=False)
        made, (base, per_sequence, per_token, _) = rng.randint(*tokens), TRUE_STEP
        ledger.on_event(Granted(one, "e0", 1), now_s)
        held = one.prompt_tokens
        total_s = true_first_s(one.prompt_tokens, 0, 0)
        total_s += max(0, made - 1) * (base + per_sequence + per_token * (held + made / 2))
        now_s += total_s
        done = Outcome(one.id, "night", "t", "m", "e0", Result.COMPLETED, "", 200, 1, held, made, total_s)
        ledger.on_event(Finished(one, "e0", done), now_s)
        now_s += 0.1


@pytest.mark.parametrize("tokens", [(1, 400), (0, 0)], ids=["answers", "embeddings"])
def test_an_engine_of_which_nobody_streams_is_known_by_how_long_whole_answers_take(tokens: tuple[int, int]) -> None:
    ledger = TokenLedger(POLICY)
    whole_answers(ledger, 80, tokens=tokens)

    step = ledger._of("e0").account.step
    for pending in (500, 3000, 9000):
        assert step.ttft_s(pending, 1, pending) == pytest.approx(true_first_s(pending, 1, pending), rel=0.2)


def test_where_first_tokens_tell_whole_answers_teach_nothing() -> None:
    ledger = TokenLedger(POLICY)
    streamed = work("s", "chat", prompt_tokens=500)
    ledger.on_event(Granted(streamed, "e0", 1), NOW_S)
    ledger.on_event(FirstToken(streamed, "e0", 0.2), NOW_S + 0.2)
    before = ledger._of("e0").account.step.observations

    whole_answers(ledger, 2, tokens=(1, 20))

    assert ledger._of("e0").account.step.observations == before
