"""What is missing, frozen or wrong in what engines tell, each told once; and the command that asks them."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from backends.base import Measured, ModelCard, Priority, Probe, Sample, Signal
from gateway.cli import main
from gateway.commands.check import check_all, show
from gateway.control.frozen import FROZEN_S, FrozenWatch
from gateway.control.needs import NEEDS, Finding, findings, meaning_of, rows
from gateway.control.roster import Engine
from gateway.control.self_check import SETTLE_S, SelfCheck
from gateway.dispatch.ledger import EngineLedger
from gateway.settings import EngineSettings, Settings
from policies.vocabulary import Quality
from tests.backends.recorded_engines import ENGINES, adapter
from tests.end_to_end.scripted_engine import ScriptedEngine

READY = Probe(ready=True, models=(ModelCard("m", {"id": "m"}, 4096),))
KINDS = sorted(ENGINES)


@dataclass
class FakeLog:
    lines: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def info(self, event: str, **more: Any) -> None:
        self.lines.append((event, more))

    warning = info


def values(**numbers: float | None) -> dict[Signal, Measured]:
    return {Signal(name): Measured(value, f"vllm:{name}") for name, value in numbers.items()}


def engine_with(kind: str = "vllm", *, priority: bool | None = None, **numbers: float | None) -> Engine:
    backend, _ = adapter(kind, {}, priority=priority)
    engine = Engine(EngineSettings("e", "http://e"), EngineLedger(), poll_s=0.5, backend=backend)
    engine.heard(READY, 100.0)
    engine.sampled(Sample(100.0, values(**numbers)), 100.0)
    return engine


def found(engine: Engine, now_s: float = 100.0) -> dict[Finding, str]:
    return findings(engine, engine.view(now_s), engine.frozen)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_says_which_metric_serves_which_need_and_what_stands_in(kind: str) -> None:
    backend, _ = adapter(kind, ENGINES[kind])
    engine = Engine(EngineSettings("e", "http://e"), EngineLedger(), poll_s=0.5, backend=backend)
    engine.heard(await backend.probe(), 42.0)
    engine.sampled(await backend.sample(), 42.0)

    table = rows(engine, engine.view(42.0))

    assert [row.need for row in table] == [need.name for need in NEEDS]
    for row in table:
        assert (row.quality is Quality.FRESH) == bool(row.source) == (not row.instead)


def test_a_missing_seat_count_foreign_traffic_and_unused_priority_are_said() -> None:
    engine = engine_with(running=9.0, waiting=1.0, kv_used_fraction=0.5, kv_capacity_tokens=1000.0)

    assert set(found(engine)) == {Finding.SEATS_UNKNOWN, Finding.FOREIGN_TRAFFIC, Finding.PRIORITY_UNUSED}


def test_an_engine_that_tells_all_of_it_has_no_finding() -> None:
    engine = engine_with(priority=True, running=0.0, waiting=0.0, seats=8.0)

    assert found(engine) == {}


def test_absurd_values_no_page_and_an_impossible_capacity_are_problems() -> None:
    absurd = engine_with(priority=True, running=None, seats=8.0)
    silent = engine_with(priority=True)
    small = engine_with(priority=True, running=0.0, seats=8.0, kv_capacity_tokens=100.0)
    small.ledger.kv_tokens = 500
    small.ledger.version += 1

    assert set(found(absurd)) == {Finding.ABSURD}
    assert set(found(silent)) == {Finding.NO_METRICS}
    assert set(found(small)) == {Finding.CAPACITY_DISAGREES}


def test_a_plain_server_is_not_blamed_for_having_no_metrics() -> None:
    assert found(engine_with("openai")) == {}


def test_a_finding_is_logged_once_when_it_has_stood_and_once_when_it_is_over() -> None:
    engine, log = engine_with(priority=True, running=0.0), FakeLog()
    check = SelfCheck([engine], alive_s=lambda _: -1e9, log=log)  # type: ignore[arg-type]
    now_s = 100.0

    for step in range(40):
        now_s = 100.0 + step * 0.25
        engine.sampled(Sample(now_s, values(running=0.0)), now_s)
        check.look(pool_s=now_s, now_s=now_s)
    during = dict(engine.findings)
    now_s += 0.25
    engine.sampled(Sample(now_s, values(running=0.0, seats=4.0)), now_s)
    check.look(pool_s=now_s, now_s=now_s)

    assert list(during) == ["seats_unknown"]
    assert [(event, more["finding"]) for event, more in log.lines] == [
        ("engine finding", "seats_unknown"),
        ("engine finding is over", "seats_unknown"),
    ]
    assert SETTLE_S > 1


# -- frozen ------------------------------------------------------------------------------------------------------------


def watched(numbers: list[float], *, moves: bool, for_s: float = 12.0) -> dict[Signal, float]:
    """What is frozen after the counter showed these numbers in turn, one a poll, and the last one for the rest."""
    watch, now_s = FrozenWatch(), 100.0
    result: dict[Signal, float] = {}
    for step in range(int(for_s / 0.25)):
        now_s = 100.0 + step * 0.25
        tokens = numbers[min(step, len(numbers) - 1)]
        sample = Sample(now_s, values(running=1.0, kv_used_fraction=0.3, generation_tokens_total=tokens, seats=4.0))
        result = dict(watch.look(sample, moved_s=now_s if moves else 99.0, held_tokens=10, now_s=now_s))
    return result


def test_counters_that_stand_still_while_our_tokens_come_are_frozen_with_all_that_moves() -> None:
    frozen = watched([5.0], moves=True)

    assert set(frozen) == {Signal.RUNNING, Signal.KV_USED_FRACTION, Signal.GENERATION_TOKENS_TOTAL}
    assert min(frozen.values()) > FROZEN_S


def test_nothing_is_frozen_while_counters_move_or_nothing_is_asked() -> None:
    assert watched([float(number) for number in range(100)], moves=True) == {}
    assert watched([5.0], moves=False) == {}


def test_a_fraction_that_stays_at_nothing_while_our_works_fill_it_is_frozen() -> None:
    watch = FrozenWatch()
    result: dict[Signal, float] = {}

    for step in range(40):
        now_s = 100.0 + step * 0.25
        sample = Sample(now_s, values(kv_used_fraction=0.0, kv_capacity_tokens=1000.0))
        result = dict(watch.look(sample, moved_s=0.0, held_tokens=600, now_s=now_s))

    assert set(result) == {Signal.KV_USED_FRACTION}


def test_a_frozen_signal_is_no_number_to_decide_by() -> None:
    engine = engine_with(running=3.0)
    engine.frozen = {Signal.RUNNING: 9.0}
    engine.ledger.version += 1

    reading = engine.view(100.0).running

    assert (reading.value, reading.quality, reading.known, reading.age_s) == (3.0, Quality.FROZEN, False, 9.0)


# -- the command -------------------------------------------------------------------------------------------------------


async def test_the_command_asks_every_engine_and_says_what_is_wrong() -> None:
    async with ScriptedEngine() as good, ScriptedEngine(health=503) as bad:
        engines = (
            EngineSettings("good", good.url),
            EngineSettings("bad", bad.url, kind="vllm"),
            EngineSettings("away", "http://127.0.0.1:9"),
        )
        checked = await check_all(Settings(engines=engines), trial=True)

    assert [(one.name, one.kind, one.sound) for one in checked] == [
        ("good", "vllm", True),
        ("bad", "vllm", False),
        ("away", "unknown", False),
    ]
    assert (len(good.trials), good.requests) == (1, [])
    assert "503" in checked[1].problem
    assert [row.source for row in checked[0].table if row.need == "kv_used"] == ["vllm:kv_cache_usage_perc"]


def test_both_orders_of_priority_have_words() -> None:
    assert [meaning_of(one) for one in (None, *Priority)] == ["not used", "lower first", "higher first"]


def test_an_engine_that_does_not_answer_is_told_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    code = main(["check", "engines", "--engine", f"e=http://127.0.0.1:{port}"])

    told = capsys.readouterr().out
    assert code == 1
    assert "cannot serve: does not answer as an engine: engine e: GET /health: connect_refused" in told


async def test_where_there_is_no_terminal_names_of_metrics_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    async with ScriptedEngine() as engine:
        checked = await check_all(Settings(engines=(EngineSettings("e", engine.url),)), trial=False)

    show(checked)

    lines = capsys.readouterr().out.splitlines()
    for row in checked[0].table:
        (line,) = [line for line in lines if line.split()[:1] == [row.need]]
        assert row.source in line
        assert row.instead in line


def test_a_check_needs_nothing_that_only_serving_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text("listen: 0.0.0.0:8080\nkeys_file: nowhere.yaml\nengines: [{url: 'http://127.0.0.1:9', name: e}]\n")

    code = main(["check", "engines", "--config", str(file)])

    assert code == 1
    assert capsys.readouterr().out.startswith("e  unknown")
    with pytest.raises(SystemExit):
        main(["check", "engines", "--listen", "127.0.0.1:1"])
