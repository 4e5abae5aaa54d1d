"""The log says when an engine goes and comes, once each time, and names one that was never there."""

from __future__ import annotations

import pytest

from backends.base import ModelCard, Probe
from gateway.control.engine_log import PATIENCE_S, EngineLog
from gateway.control.roster import Engine
from gateway.dispatch.ledger import EngineLedger
from gateway.settings import EngineSettings
from tests.gateway.test_self_check import FakeLog

READY = Probe(ready=True, models=(ModelCard("m", {"id": "m"}, 4096),))


@pytest.fixture
def engine() -> Engine:
    return Engine(EngineSettings("e", "http://gpu1:8000", "vllm"), EngineLedger(), poll_s=0.5)


def test_an_engine_that_goes_and_comes_is_told_once_each_time(engine: Engine) -> None:
    told = FakeLog()
    log = EngineLog([engine], told)  # type: ignore[arg-type]

    engine.heard(READY, 0.0)
    log.look(0.0)
    log.look(0.5)
    engine.refused("connect_refused", 1.0)
    log.look(1.0)
    log.look(1.5)
    engine.standing.tried("", pool_s=2.0, now_s=2.0)
    engine.heard(READY, 2.0)
    log.look(2.0)

    up = ("engine is up", {"engine": "e", "kind": "vllm", "models": ["m"]})
    down = ("engine is down", {"engine": "e", "url": "http://gpu1:8000", "detail": "connect_refused"})
    assert told.lines == [up, down, up]


def test_an_engine_that_was_never_there_is_told_once_after_a_while_with_its_address(engine: Engine) -> None:
    told = FakeLog()
    log = EngineLog([engine], told)  # type: ignore[arg-type]
    engine.detail = "does not answer yet"

    log.look(10.0)
    log.look(10.0 + PATIENCE_S / 2)
    early = list(told.lines)
    log.look(10.0 + PATIENCE_S)
    log.look(11.0 + PATIENCE_S)

    assert early == []
    assert told.lines == [
        ("engine does not answer yet", {"engine": "e", "url": "http://gpu1:8000", "detail": "does not answer yet"})
    ]


def test_of_an_engine_with_thousands_of_adapters_a_few_are_told(engine: Engine) -> None:
    told = FakeLog()
    cards = tuple(ModelCard(f"adapter-{number:05}", {}, None) for number in range(20_000))

    engine.heard(Probe(ready=True, models=cards), 0.0)
    EngineLog([engine], told).look(0.0)  # type: ignore[arg-type]

    ((_, fields),) = told.lines
    assert fields["models"] == [f"adapter-{number:05}" for number in range(8)] + ["and 19992 more"]
