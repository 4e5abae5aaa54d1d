"""Which engine takes a work: eligibility, least loaded for the urgent, busiest for the patient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from policies.dispatching import plan_round
from policies.estimators.prefix_caches import PrefixCaches
from policies.limits import build
from policies.limits.fixed import FixedLimits
from policies.placement import Candidate, able, choose, eligible
from policies.sizing import SizingPolicy, Window
from policies.vocabulary import EngineState, EngineView, Guard, GuardReading, Verdict, Work
from tests.policies.worlds import NOW_S, engine, fresh, policy, work

POLICY = policy(
    "version: 1\nclasses: {chat: {ttft_sla_s: 0.5}, night: {}}\nsizing: {fixed: {total: 40, windows: {night: 30}}}\n"
)
SIZING = build(POLICY)


def chosen(
    one: Work,
    views: list[EngineView],
    *,
    spread: bool,
    draw: float = 0.0,
    sizing: SizingPolicy = SIZING,
    caches: PrefixCaches | None = None,
) -> str | None:
    candidates = [Candidate(view) for view in able(one, views)]
    found = choose(one, candidates, sizing, NOW_S, spread=spread, draw=draw, caches=caches)
    return None if found is None else found.candidate.view.name


def names(views: list[EngineView]) -> set[str]:
    return {view.name for view in views}


@pytest.mark.parametrize(
    ("one", "view"),
    [
        (work("w"), engine(state=EngineState.DRAINING)),
        (work("w"), engine(state=EngineState.DOWN)),
        (work("w"), engine(state=EngineState.STARTING)),
        (work("w", model="other"), engine()),
        (work("w", avoid=frozenset({"e0"})), engine()),
        (work("w", pinned_engine="e9"), engine()),
        (work("w", path="/generate"), engine(speaks_only="/v1/completions")),
    ],
)
def test_an_engine_that_cannot_take_a_work_is_not_eligible(one: Work, view: EngineView) -> None:
    assert not eligible(one, view)


def test_an_engine_that_can_take_a_work_is_eligible() -> None:
    assert eligible(work("w", pinned_engine="e0"), engine(speaks_only="/v1/completions"))


def test_urgent_work_goes_to_the_least_loaded() -> None:
    views = [engine("e0", {"night": 9}), engine("e1", {"chat": 2}), engine("e2", {"chat": 5})]

    assert chosen(work("w"), views, spread=True) == "e1"


def test_patient_work_goes_to_the_busiest_that_has_room() -> None:
    views = [engine("e0", {"chat": 10}), engine("e1", {"night": 30}), engine("e2", {"chat": 12})]

    assert chosen(work("w", "night"), views, spread=False) == "e2"


def test_patient_work_goes_to_spot_capacity_first() -> None:
    views = [engine("e0", {"chat": 12}), engine("e1", {"chat": 2}, spot=True), engine("e2", {"chat": 5}, spot=True)]

    assert chosen(work("w", "night"), views, spread=False) == "e2"
    assert chosen(work("w"), views, spread=True) == "e1"


def test_a_canary_is_offered_the_works_drawn_for_it_and_a_retry_draws_the_same() -> None:
    views = [engine("e0"), engine("e1", canary=0.1)]
    works = [work(f"w{number}") for number in range(2000)]

    drawn = [one for one in works if "e1" in names(able(one, views))]

    assert 0.08 < len(drawn) / len(works) < 0.12
    assert all("e0" in names(able(one, views)) for one in works)
    assert drawn == [one for one in works if "e1" in names(able(replace(one, attempt=1), views))]


def test_where_only_a_canary_could_run_a_work_it_goes_there() -> None:
    views = [engine("e0", state=EngineState.DOWN), engine("e1", canary=0.01)]

    assert {chosen(work(f"w{number}"), views, spread=True) for number in range(50)} == {"e1"}


def test_a_full_engine_does_not_send_more_to_a_canary() -> None:
    views = [engine("e0", {"chat": 40}), engine("e1", canary=0.1)]

    placed = plan_round([work(f"w{number}") for number in range(24)], views, SIZING, POLICY, NOW_S, 0.5)

    assert {one.engine for one in placed} <= {"e1"}
    assert {one.work.id for one in placed} == {
        f"w{number}" for number in range(24) if "e1" in names(able(work(f"w{number}"), views))
    }


@pytest.mark.parametrize(
    ("one", "taken_by"),
    [
        (work("short", prompt_tokens=1000), "e0"),
        (work("long", prompt_tokens=4000), "e1"),
        (work("long answer", prompt_tokens=1000, max_tokens=4000), "e1"),
        (work("many inputs", prompt_tokens=16_000, sequences=16), "e0"),
        (work("too long for both", prompt_tokens=100_000), "e1"),
    ],
    ids=lambda one: one.id if isinstance(one, Work) else one,
)
def test_a_work_goes_where_it_fits_into_the_context(one: Work, taken_by: str) -> None:
    views = [engine("e0", max_model_len=fresh(4096)), engine("e1", {"chat": 20}, max_model_len=fresh(32_768))]

    assert chosen(one, views, spread=True) == taken_by


def test_an_engine_that_does_not_tell_its_context_is_long_enough() -> None:
    views = [engine("e0", max_model_len=fresh(4096)), engine("e1", {"chat": 20})]

    assert chosen(work("w", prompt_tokens=100_000), views, spread=True) == "e1"


def test_a_long_work_waits_for_the_engine_that_it_fits_into() -> None:
    views = [engine("e0", max_model_len=fresh(4096)), engine("e1", {"chat": 40}, max_model_len=fresh(32_768))]

    assert chosen(work("w", prompt_tokens=8000), views, spread=True) is None


def test_urgent_work_is_spread_over_engines_that_are_nearly_equal() -> None:
    views = [engine("e0", {"chat": 20}), engine("e1", {"chat": 21}), engine("e2", {"chat": 30})]

    picks = {chosen(work("w"), views, spread=True, draw=draw / 10) for draw in range(10)}

    assert picks == {"e0", "e1"}


def test_for_work_that_can_wait_no_engine_is_asked_after_the_first_that_has_room() -> None:
    asked = []

    class Counted(FixedLimits):
        def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
            asked.append(engine.name)
            return super().admit(work, engine, now_s)

    candidates = [Candidate(engine(f"e{n}", {"chat": 20 + n})) for n in range(8)]

    found = choose(work("w"), candidates, Counted(POLICY), NOW_S, spread=False, draw=0.0)

    assert found is not None
    assert asked == ["e7"]


def test_where_the_least_loaded_are_full_the_next_takes_the_work() -> None:
    views = [engine("e0", {"chat": 2}, seats=fresh(2)), engine("e1", {"chat": 9}), engine("e2", {"chat": 12})]

    assert chosen(work("w"), views, spread=True) == "e1"


def test_a_draw_next_to_one_still_picks_an_engine() -> None:
    views = [engine("e0"), engine("e1")]

    assert chosen(work("w"), views, spread=True, draw=0.9999999999999999) == "e1"


def test_prompts_not_yet_prefilled_count_as_load() -> None:
    views = [engine("e0", {"chat": 2}, prefill_tokens=40_000), engine("e1", {"chat": 6})]

    assert chosen(work("w"), views, spread=True) == "e1"


def test_traffic_of_others_counts_as_load() -> None:
    views = [engine("e0", {"chat": 2}, running=fresh(30)), engine("e1", {"chat": 6})]

    assert chosen(work("w"), views, spread=True) == "e1"


def test_a_small_engine_is_full_earlier_than_a_large_one() -> None:
    policy_ = policy(
        "version: 1\nclasses: {chat: {ttft_sla_s: 0.5}, night: {}}\n"
        "sizing: {fixed: {total: 64, engines: {small: {total: 8}}}}\n"
    )
    candidates = [Candidate(engine("large", {"chat": 12})), Candidate(engine("small", {"chat": 6}))]

    found = choose(work("w"), candidates, build(policy_), NOW_S, spread=True, draw=0.0)

    assert found is not None
    assert found.candidate.view.name == "large"


class Holding(FixedLimits):
    """Tells the windows given, by engine."""

    def __init__(self, windows: Mapping[str, Window]) -> None:
        super().__init__(POLICY)
        self._told = windows

    def window(self, engine: EngineView, class_name: str) -> Window:
        return self._told[engine.name]


@pytest.mark.parametrize(
    ("large", "small"),
    [
        (Window(tokens=400_000), Window(requests=128, tokens=41_000)),
        (Window(tokens=400_000), Window(tokens=41_000)),
        (Window(requests=64), Window(requests=8)),
    ],
    ids=["seats told by the small one alone", "no seats told", "seats told"],
)
def test_engines_are_compared_by_what_they_hold_whatever_they_tell_of_it(large: Window, small: Window) -> None:
    """With seats told by one of two engines alone, that one got nearly all: vLLM tells none, TGI does."""
    sizing = Holding({"large": large, "small": small})

    def taken_by(on_large: int, on_small: int) -> str | None:
        views = [engine("large", {"chat": on_large}), engine("small", {"chat": on_small})]
        return chosen(work("w"), views, spread=True, sizing=sizing)

    assert taken_by(8, 4) == "large"
    assert taken_by(30, 1) == "small"


def test_an_engine_that_does_not_tell_what_it_holds_is_taken_for_as_small_as_the_smallest() -> None:
    sizing = Holding({"e0": Window(), "e1": Window(requests=8), "e2": Window(requests=80)})
    views = [engine("e0", {"chat": 2}), engine("e1", {"chat": 4}), engine("e2", {"chat": 30})]

    assert chosen(work("w"), views, spread=True, sizing=sizing) == "e0"
    assert (
        chosen(
            work("w"),
            [engine("e0", {"chat": 2}), engine("e3", {"chat": 9})],
            spread=True,
            sizing=Holding({"e0": Window(), "e3": Window()}),
        )
        == "e0"
    )


def test_a_work_finds_no_engine_where_all_are_full() -> None:
    assert chosen(work("w"), [engine("e0", {"chat": 40}), engine("e1", {"chat": 40})], spread=True) is None


def test_a_placement_counts_at_once_in_the_candidates_view() -> None:
    candidate = Candidate(engine("e0", {"chat": 1}))

    candidate.take(work("w", prompt_tokens=100))

    view = candidate.view
    assert (view.in_flight, view.kv_tokens, view.prefill_tokens) == ({"chat": 2}, 100, 100)


class Foretelling(FixedLimits):
    """Predicts first tokens by engine."""

    def __init__(self, first_token_s: Mapping[str, float | None], kv: Mapping[str, float] | None = None) -> None:
        super().__init__(POLICY)
        self.first_token_s, self.kv = first_token_s, kv or {}

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
        reading = GuardReading(Guard.KV, self.kv.get(engine.name, 0.0), 1.0, passed=True)
        return Verdict.of([reading], first_token_s=self.first_token_s[engine.name])


def test_urgent_work_goes_where_its_first_token_is_predicted_first() -> None:
    views = [engine("e0", {"chat": 2}), engine("e1", {"chat": 30})]

    assert chosen(work("w"), views, spread=True, sizing=Foretelling({"e0": 0.3, "e1": 0.1})) == "e1"


def test_where_one_engine_is_not_predicted_load_decides() -> None:
    views = [engine("e0", {"chat": 2}), engine("e1", {"chat": 30})]

    assert chosen(work("w"), views, spread=True, sizing=Foretelling({"e0": None, "e1": 0.1})) == "e0"


def test_of_engines_that_are_as_fast_the_one_with_more_memory_left_is_taken() -> None:
    views = [engine("e0"), engine("e1")]
    sizing = Foretelling({"e0": 0.2, "e1": 0.2}, kv={"e0": 0.9, "e1": 0.2})

    assert {chosen(work("w"), views, spread=True, sizing=sizing, draw=draw / 4) for draw in range(4)} == {"e1"}


@pytest.mark.parametrize(
    ("predicted_s", "picks"),
    [
        ({"e0": 0.30, "e1": 0.31, "e2": 0.4}, {"e0", "e1"}),
        ({"e0": 0.05, "e1": 0.15, "e2": 0.4}, {"e0", "e1"}),
    ],
    ids=["nearly as early", "early enough"],
)
def test_urgent_work_is_spread_over_engines_that_show_their_first_token(
    predicted_s: Mapping[str, float], picks: set[str]
) -> None:
    views = [engine(name) for name in predicted_s]

    found = {chosen(work("w"), views, spread=True, sizing=Foretelling(predicted_s), draw=draw / 9) for draw in range(9)}

    assert found == picks


def test_of_engines_that_are_early_enough_the_least_loaded_is_taken() -> None:
    views = [engine("e0", {"chat": 9}), engine("e1", {"chat": 2})]

    assert chosen(work("w"), views, spread=True, sizing=Foretelling({"e0": 0.02, "e1": 0.15})) == "e1"


@pytest.mark.parametrize(
    ("elsewhere_s", "taken_by"),
    [(0.20, "warm"), (0.05, "cold")],
    ids=["stays where its past is", "leaves it for an idler engine"],
)
def test_a_conversation_stays_where_it_is_until_others_are_idler_by_more(elsewhere_s: float, taken_by: str) -> None:
    caches, views = PrefixCaches(), [engine("cold"), engine("warm")]
    earlier, next_turn = (replace(work("w", prompt_tokens=2000), prefix=prefix) for prefix in ("a.b.c", "a.b.c.d"))
    caches.granted("warm", earlier, 1)

    # 537 tokens are probably in the cache, which take 36 ms usually.
    sizing = Foretelling({"warm": 0.22, "cold": elsewhere_s})

    assert chosen(next_turn, views, spread=True, sizing=sizing, caches=caches) == taken_by


def test_without_predictions_a_warm_cache_counts_as_load_that_is_not_there() -> None:
    caches, views = PrefixCaches(), [engine("e0", {"chat": 20}), engine("e1", {"chat": 21})]
    one = replace(work("w", prompt_tokens=9000), prefix="a.b.c.d.e.f.g.h.i.j")
    caches.granted("e1", one, 1)

    assert {chosen(one, views, spread=True, caches=caches, draw=draw / 4) for draw in range(4)} == {"e1"}


def test_bulk_that_begins_alike_goes_to_the_same_engine() -> None:
    caches, views = PrefixCaches(), [engine("e0", {"night": 2}), engine("e1", {"night": 9}), engine("e2", spot=True)]
    one = replace(work("w", "night", prompt_tokens=300), prefix="a")
    caches.granted("e0", one, 1)

    assert chosen(one, views[:2], spread=False, caches=caches) == "e0"
    assert chosen(one, views, spread=False, caches=caches) == "e2"
