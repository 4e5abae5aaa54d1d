"""What the metrics page says, and what it refuses to say."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from gateway import instruments as table
from gateway.instruments import INSTRUMENTS
from gateway.series import OTHER, SERIES_MAX, Instrument, Kind
from gateway.telemetry import Telemetry
from policies.sizing import Window
from policies.vocabulary import (
    UNKNOWN,
    Action,
    Decision,
    EngineState,
    EngineView,
    Guard,
    GuardReading,
    Outcome,
    Quality,
    Reading,
    Result,
    Verdict,
)

OUTCOME = Outcome(
    work_id="w1",
    class_name="interactive",
    tenant="acme",
    model="m",
    engine="e1",
    result=Result.COMPLETED,
    reason="",
    status=200,
    attempts=1,
    prompt_tokens=100,
    output_tokens=11,
    total_s=1.2,
    queued_s=0.05,
    ttft_s=0.2,
    engine_ttft_s=0.15,
)


@pytest.fixture
def telemetry() -> Telemetry:
    telemetry = Telemetry(version="9.9.9")
    telemetry.models_known(frozenset({"m"}))
    return telemetry


def samples(telemetry: Telemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = telemetry.render()[0].decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("headrace_")
    }


def value(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    labels = {name.removesuffix("_"): text for name, text in labels.items()}
    return samples(telemetry).get((name, tuple(sorted(labels.items()))))


def test_an_outcome_is_counted_in_every_family_it_belongs_to(telemetry: Telemetry) -> None:
    telemetry.observe_outcome(OUTCOME, sla_met=True)
    telemetry.observe_outcome(OUTCOME, sla_met=False)

    of = {"class_": "interactive", "model": "m"}
    assert value(telemetry, "headrace_requests_total", **of, tenant="acme", result="completed", status="200") == 2
    assert value(telemetry, "headrace_prompt_tokens_total", **of, tenant="acme") == 200
    assert value(telemetry, "headrace_output_tokens_total", **of, tenant="acme") == 22
    assert value(telemetry, "headrace_ttft_sla_total", **of, outcome="met") == 1
    assert value(telemetry, "headrace_ttft_sla_total", **of, outcome="missed") == 1
    assert value(telemetry, "headrace_ttft_seconds_sum", **of) == pytest.approx(0.4)
    assert value(telemetry, "headrace_tpot_seconds_sum", **of) == pytest.approx(0.2)
    assert value(telemetry, "headrace_queue_wait_seconds_count", class_="interactive") == 2
    assert value(telemetry, "headrace_engine_ttft_seconds_count", engine="e1", class_="interactive") == 2
    assert value(telemetry, "headrace_request_duration_seconds_sum", **of) == pytest.approx(2.4)


def test_a_work_that_showed_no_token_adds_to_no_latency_but_its_duration(telemetry: Telemetry) -> None:
    shed = replace(
        OUTCOME, result=Result.SHED, reason="queue_full", status=429, queued_s=None, ttft_s=None, engine_ttft_s=None
    )

    telemetry.observe_outcome(shed, sla_met=None)

    of = {"class_": "interactive", "model": "m"}
    assert value(telemetry, "headrace_ttft_seconds_count", **of) == 0
    assert value(telemetry, "headrace_request_duration_seconds_count", **of) == 1
    assert value(telemetry, "headrace_sheds_total", class_="interactive", reason="queue_full") == 1
    assert value(telemetry, "headrace_ttft_sla_total", **of, outcome="missed") is None


def test_a_thousand_invented_models_make_one_series(telemetry: Telemetry) -> None:
    for number in range(1000):
        telemetry.observe_outcome(replace(OUTCOME, model=f"typo-{number}" + "x" * 5000), sla_met=None)

    page = telemetry.render()[0]
    assert b"typo" not in page
    assert len(page) < 20_000
    of = {"class_": "interactive", "model": OTHER, "tenant": "acme"}
    assert value(telemetry, "headrace_requests_total", **of, result="completed", status="200") == 1000


def test_a_model_counts_under_its_name_once_an_engine_serves_it(telemetry: Telemetry) -> None:
    lora = replace(OUTCOME, model="lora-1")
    telemetry.observe_outcome(lora, sla_met=None)

    telemetry.models_known(frozenset({"m", "lora-1"}))
    telemetry.observe_outcome(lora, sla_met=None)

    of = {"class_": "interactive", "tenant": "acme"}
    assert value(telemetry, "headrace_prompt_tokens_total", **of, model=OTHER) == 100
    assert value(telemetry, "headrace_prompt_tokens_total", **of, model="lora-1") == 100


@pytest.mark.parametrize("row", [table.RETRIES, table.QUEUED, table.REDIS_LATENCY])
def test_no_family_grows_past_its_bound(telemetry: Telemetry, row: Instrument) -> None:
    for number in range(SERIES_MAX + 500):
        labels = [f"v{number}"] * len(row.labels)
        {
            Kind.COUNTER: lambda labels: telemetry.add(row, 1, *labels),
            Kind.GAUGE: lambda labels: telemetry.set(row, 1, *labels),
            Kind.HISTOGRAM: lambda labels: telemetry.observe(row, 1, *labels),
        }[row.kind](labels)

    series = {labels for name, labels in samples(telemetry) if name.removesuffix("_count") == row.name}
    assert len(series) == SERIES_MAX + 1
    assert tuple(sorted((name, OTHER) for name in row.labels)) in series


def test_latencies_from_milliseconds_to_minutes_are_told_apart() -> None:
    telemetry = Telemetry(version="0", longest_s=1800.0)
    for seconds in (0.05, 5.0, 45.0, 200.0, 500.0):
        telemetry.observe(table.DURATION, seconds, "bulk", OTHER)

    counts = [
        count
        for (name, labels), count in samples(telemetry).items()
        if name == "headrace_request_duration_seconds_bucket" and ("le", "+Inf") not in labels
    ]
    assert sorted(set(counts)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("row", [table.DURATION, table.TENANT_TTFT], ids=lambda row: row.name)
@pytest.mark.parametrize("longest_s", [30.0, 1800.0, 7200.0, 100_000.0])
def test_the_topmost_bucket_reaches_the_longest_time_out(longest_s: float, row: Instrument) -> None:
    telemetry = Telemetry(version="0", longest_s=longest_s)
    telemetry.observe(row, 1.0, "bulk", OTHER)

    bounds = [float(bound) for bound in re.findall(rb'_seconds_bucket{.*le="([\d.]+)"', telemetry.render()[0])]
    assert max(bounds) >= longest_s


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_never_reaches_the_page(telemetry: Telemetry, nonsense: float) -> None:
    telemetry.set(table.QUEUED, 3, "bulk")
    telemetry.set(table.QUEUED, nonsense, "bulk")
    telemetry.observe(table.REDIS_LATENCY, nonsense, "enqueue")

    assert value(telemetry, "headrace_queued", class_="bulk") is None
    assert value(telemetry, "headrace_redis_round_trip_seconds_count", operation="enqueue") == 0
    assert b"nan" not in telemetry.render()[0].lower()


def view(**changes: object) -> EngineView:
    fresh = Reading(0.25, 0.1, Quality.FRESH)
    known = EngineView("e1", EngineState.UP, frozenset({"m"}), {"bulk": 3}, kv_used_fraction=fresh, running=fresh)
    return replace(known, **changes)  # type: ignore[arg-type]


def test_an_unknown_reading_has_no_series(telemetry: Telemetry) -> None:
    telemetry.engine(view(), {}, sample_age_s=0.1)
    frozen = Reading(0.25, 9.0, Quality.FROZEN)

    telemetry.engine(view(kv_used_fraction=frozen), {}, sample_age_s=None)

    assert value(telemetry, "headrace_engine_kv_used_ratio", engine="e1") is None
    assert value(telemetry, "headrace_engine_waiting", engine="e1") is None
    assert value(telemetry, "headrace_engine_sample_age_seconds", engine="e1") is None
    assert value(telemetry, "headrace_engine_running", engine="e1") == 0.25


def test_an_engines_gauges_follow_its_view(telemetry: Telemetry) -> None:
    telemetry.engine(view(), {"bulk": Window(requests=8), "interactive": Window(tokens=4096)}, sample_age_s=0.1)

    assert value(telemetry, "headrace_in_flight", engine="e1", class_="bulk") == 3
    assert value(telemetry, "headrace_in_flight", engine="e1", class_="interactive") == 0
    assert value(telemetry, "headrace_window", engine="e1", class_="bulk") == 8
    assert value(telemetry, "headrace_window", engine="e1", class_="interactive") is None
    assert value(telemetry, "headrace_window_tokens", engine="e1", class_="interactive") == 4096
    assert value(telemetry, "headrace_engine_state", engine="e1", state="up") == 1
    assert value(telemetry, "headrace_engine_state", engine="e1", state="down") == 0

    telemetry.engine(view(in_flight={}), {"interactive": Window(requests=8)}, sample_age_s=0.1)

    assert value(telemetry, "headrace_in_flight", engine="e1", class_="bulk") is None
    assert value(telemetry, "headrace_window", engine="e1", class_="bulk") is None
    assert value(telemetry, "headrace_window_tokens", engine="e1", class_="interactive") is None


def test_queue_depths_of_a_class_that_is_gone_go_too(telemetry: Telemetry) -> None:
    telemetry.queue({"bulk": 5, "old": 1}, {"bulk": 12.5})

    telemetry.queue({"bulk": 0})

    assert value(telemetry, "headrace_queued", class_="bulk") == 0
    assert value(telemetry, "headrace_queued", class_="old") is None
    assert value(telemetry, "headrace_queue_oldest_seconds", class_="bulk") is None


def test_the_policy_in_force_is_one_series(telemetry: Telemetry) -> None:
    telemetry.policy("aaa", generation=1, reload_failed=False)
    telemetry.policy("bbb", generation=2, reload_failed=True, objectives={"interactive": 0.5})

    assert value(telemetry, "headrace_policy_info", version="aaa") is None
    assert value(telemetry, "headrace_policy_info", version="bbb") == 1
    assert value(telemetry, "headrace_policy_generation") == 2
    assert value(telemetry, "headrace_ttft_objective_seconds", class_="interactive") == 0.5
    assert value(telemetry, "headrace_policy_reload_failed") == 1


def test_decisions_are_counted_by_the_guard_that_bound_them(telemetry: Telemetry) -> None:
    telemetry.decision(Decision(Action.SHED, 1.0, "v", class_name="bulk", engine="e1", binding=Guard.KV))

    of = {"action": "shed", "class_": "bulk", "engine": "e1", "guard": "kv"}
    assert value(telemetry, "headrace_decisions_total", **of) == 1


def test_refreshers_set_gauges_before_a_page(telemetry: Telemetry) -> None:
    telemetry.on_refresh(lambda telemetry: telemetry.set(table.CONNECTIONS, 7))

    telemetry.refresh()

    assert value(telemetry, "headrace_client_connections") == 7


def test_both_text_formats_can_be_read_by_the_reference_parsers(telemetry: Telemetry) -> None:
    telemetry.observe_outcome(OUTCOME, sla_met=True)
    telemetry.engine(view(), {"bulk": Window(requests=8)}, sample_age_s=0.1)

    plain, plain_type = telemetry.render("text/plain")
    open_metrics, open_type = telemetry.render("application/openmetrics-text; version=1.0.0")

    assert plain_type.startswith("text/plain; version=0.0.4")
    assert open_type.startswith("application/openmetrics-text")
    kinds = {family.name: family.type for family in parse_openmetrics(open_metrics.decode())}  # type: ignore[no-untyped-call]
    assert kinds["headrace_requests"] == "counter"
    assert {family.name for family in text_string_to_metric_families(plain.decode())} >= {"headrace_ttft_seconds"}


@pytest.mark.parametrize("row", INSTRUMENTS, ids=lambda row: row.name)
def test_every_row_of_the_table_keeps_the_naming_rules(row: Instrument) -> None:
    stem = row.name.removesuffix("_total")

    assert re.fullmatch(r"headrace_[a-z0-9_]+", row.name)
    assert row.name.endswith("_total") == (row.kind is Kind.COUNTER)
    assert not row.unit or stem.endswith("_" + row.unit)
    assert row.unit in {"", "seconds", "tokens", "bytes", "ratio", "celsius", "watts", "joules"}
    assert row.help.endswith(".")
    assert bool(row.buckets) == (row.kind is Kind.HISTOGRAM)
    assert list(row.buckets) == sorted(set(row.buckets))


def test_the_table_holds_every_instrument_of_the_module_once() -> None:
    declared = [value for value in vars(table).values() if isinstance(value, Instrument)]

    assert declared == list(INSTRUMENTS)
    assert len({row.name for row in INSTRUMENTS}) == len(INSTRUMENTS)


def test_every_signal_tells_its_age_and_how_far_it_can_be_trusted(telemetry: Telemetry) -> None:
    telemetry.engine(view(), {}, sample_age_s=0.1)
    telemetry.engine(view(kv_used_fraction=Reading(0.25, 9.0, Quality.FROZEN)), {}, sample_age_s=0.1)

    of = {"engine": "e1", "signal": "kv_used_fraction"}
    assert value(telemetry, "headrace_engine_signal_age_seconds", **of) == 9.0
    assert value(telemetry, "headrace_engine_signal_quality", **of, quality="frozen") == 1
    assert value(telemetry, "headrace_engine_signal_quality", **of, quality="fresh") is None
    assert value(telemetry, "headrace_engine_signal_age_seconds", engine="e1", signal="seats") is None
    assert value(telemetry, "headrace_engine_signal_quality", engine="e1", signal="seats", quality="missing") == 1


def test_the_headroom_of_the_tightest_gpu_is_told_only_while_it_is_known(telemetry: Telemetry) -> None:
    telemetry.engine(view(gpu_memory_free_fraction=Reading(0.08, 0.1, Quality.FRESH)), {}, sample_age_s=0.1)
    assert value(telemetry, "headrace_engine_vram_headroom_ratio", engine="e1") == 0.08

    telemetry.engine(view(), {}, sample_age_s=0.1)
    assert value(telemetry, "headrace_engine_vram_headroom_ratio", engine="e1") is None


def test_goodput_counts_what_was_completed_inside_its_objective(telemetry: Telemetry) -> None:
    telemetry.observe_outcome(OUTCOME, sla_met=True)
    telemetry.observe_outcome(OUTCOME, sla_met=None)
    telemetry.observe_outcome(OUTCOME, sla_met=False)
    telemetry.observe_outcome(replace(OUTCOME, result=Result.ENGINE_FAILED, status=502), sla_met=None)

    assert value(telemetry, "headrace_goodput_total", class_="interactive", model="m", tenant="acme") == 2


def test_an_outcome_counts_for_its_engine_and_its_tenant(telemetry: Telemetry) -> None:
    telemetry.observe_outcome(OUTCOME, sla_met=True, sequences=3)

    of = {"engine": "e1", "class_": "interactive"}
    assert value(telemetry, "headrace_engine_results_total", **of, result="completed") == 1
    assert value(telemetry, "headrace_engine_relayed_tokens_total", **of) == 11
    assert value(telemetry, "headrace_request_batch_size_sum", class_="interactive") == 3
    assert value(telemetry, "headrace_tenant_ttft_seconds_count", class_="interactive", tenant="acme") == 1


def test_counters_follow_the_engines_own_over_its_restarts(telemetry: Telemetry) -> None:
    for total in (100.0, 130.0, None, 130.0, 7.0):
        reading = Reading(total, 0.1, Quality.FRESH) if total is not None else UNKNOWN
        telemetry.engine_counts(view(preemptions_total=reading))

    assert value(telemetry, "headrace_engine_preemptions_total", engine="e1") == 37
    assert value(telemetry, "headrace_engine_prompt_tokens_total", engine="e1") is None


def test_the_guards_of_a_class_are_told_until_they_are_asked_no_more(telemetry: Telemetry) -> None:
    refused = Verdict(False, (GuardReading(Guard.SEATS, 3, 8, True), GuardReading(Guard.KV, 120, 100, False)))
    telemetry.guards({("e1", "bulk"): refused})

    of = {"engine": "e1", "class_": "bulk"}
    assert value(telemetry, "headrace_guard_value", **of, guard="kv") == 120
    assert value(telemetry, "headrace_guard_threshold", **of, guard="seats") == 8
    assert value(telemetry, "headrace_guard_binding", **of, guard="kv") == 1

    telemetry.guards({})
    assert not [name for name, _ in samples(telemetry) if name.startswith("headrace_guard")]


def test_series_that_are_set_as_a_whole_take_all_others_away(telemetry: Telemetry) -> None:
    long = "e" * 500
    telemetry.set_only(table.ENGINE_OUT, {("e1", "silent"): 1, (long, "silent"): 1, ("e2", "failing"): math.inf})
    before = telemetry.render()[0].count(b"headrace_engine_out_of_rotation{")
    telemetry.set_only(table.ENGINE_OUT, {(long, "silent"): 1})

    assert before == 2
    assert value(telemetry, table.ENGINE_OUT.name, engine="e1", reason="silent") is None
    assert value(telemetry, table.ENGINE_OUT.name, engine=long[:128], reason="silent") == 1


@pytest.mark.parametrize(("forecast", "told"), [(256.0, 256), (math.inf, table.STEPS_BEYOND), (None, None)])
def test_steps_to_overflow_are_told_as_far_as_they_are_forecast(
    telemetry: Telemetry, forecast: float | None, told: int | None
) -> None:
    telemetry.engine(view(), {"bulk": Window(steps_to_overflow=forecast)}, sample_age_s=0.1)

    assert value(telemetry, "headrace_steps_to_overflow", engine="e1") == told


def test_a_call_that_the_store_did_not_answer_is_an_error_too(telemetry: Telemetry) -> None:
    telemetry.redis_call("claim", 0.002, True)
    telemetry.redis_call("claim", 2.0, False)

    assert value(telemetry, "headrace_redis_round_trip_seconds_count", operation="claim") == 2
    assert value(telemetry, "headrace_redis_errors_total", operation="claim") == 1


def test_what_a_tenant_has_waiting_is_told_while_it_waits(telemetry: Telemetry) -> None:
    telemetry.queue({"bulk": 5}, by_tenant={("bulk", "acme"): 5})
    assert value(telemetry, "headrace_tenant_queued", class_="bulk", tenant="acme") == 5

    telemetry.queue({"bulk": 0}, by_tenant={})
    assert value(telemetry, "headrace_tenant_queued", class_="bulk", tenant="acme") is None


def test_a_latency_that_a_trace_tells_of_leads_to_it_in_openmetrics_only(telemetry: Telemetry) -> None:
    telemetry.observe_outcome(OUTCOME, sla_met=True, trace_id="ab" * 16, at_s=1000.5)
    telemetry.observe_outcome(OUTCOME, sla_met=True)

    page = telemetry.render("application/openmetrics-text; version=1.0.0")[0].decode()
    marks = {
        sample.name: sample.exemplar
        for family in parse_openmetrics(page)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert set(marks) == {
        f"headrace_{name}_seconds_bucket" for name in ("request_duration", "queue_wait", "ttft", "engine_ttft")
    }
    mark = marks["headrace_ttft_seconds_bucket"]
    assert (mark.labels, mark.value, float(mark.timestamp)) == ({"trace_id": "ab" * 16}, 0.2, 1000.5)
    assert b"trace_id" not in telemetry.render()[0]


def test_a_refresh_of_fifty_engines_costs_the_loop_little(telemetry: Telemetry) -> None:
    known = Reading(0.5, 0.1, Quality.FRESH)
    views = [view(name=f"e{number}", seats=known, preemptions_total=known) for number in range(50)]
    windows = {name: Window(8, 100, 64.0) for name in ("interactive", "bulk")}

    def cost_s(count: int) -> float:
        began_s = time.thread_time()
        for one in views[:count]:
            telemetry.engine(one, windows, sample_age_s=0.1)
        return time.thread_time() - began_s

    cost_s(50)  # the first makes the series

    few_s = min(cost_s(5) for _ in range(5))
    assert min(cost_s(50) for _ in range(5)) < 20 * few_s, "each engine's cost must not grow with the number of engines"
