"""What of a request the queue orders by: its deadline, its rank, and whether it begins like others."""

from __future__ import annotations

import pytest

from gateway.dispatch.affinity import Affinity
from gateway.dispatch.intake import CLIENTS_SHARE, RANK_STEP_S, Intake
from gateway.errors import Dialect, Refusal
from gateway.exchange import Exchange, Facts
from gateway.telemetry import Telemetry
from policies.classify import Classified
from policies.estimators.prefix_caches import FIRST_LEVEL_BYTES, LEVEL_ENDS_BYTES
from tests.gateway.test_relay import FakeClock, FakeDownstream
from tests.policies.worlds import policy

POLICY = policy("version: 1\nclasses: {chat: {ttft_sla_s: 30}, night: {}, batch: {deadline_s: 3600}}\n")
BEGINNING = b'{"prompt": "' + b"Summarise the following minutes. " * 80


@pytest.fixture
def affinity() -> Affinity:
    return Affinity()


@pytest.fixture
def intake(affinity: Affinity) -> Intake:
    return Intake(
        aliases={"small": "smollm2"},
        alone_s=lambda _model, _tokens: None,
        affinity=affinity,
        sink=lambda _decision: None,
        telemetry=Telemetry(version="0", longest_s=60.0),
        clock=FakeClock(),
        work_ids="p",
    )


def exchange(body: bytes = b"{}", *, path: str = "/v1/completions", **facts: str) -> Exchange:
    return Exchange(
        request_id="r",
        method=b"POST",
        path=path,
        target=path.encode(),
        dialect=Dialect.OPENAI,
        headers=(),
        body=body,
        facts=Facts(**{"model": "small", **facts}),  # type: ignore[arg-type]
        tenant="t",
        downstream=FakeDownstream(),
        accepted_s=90.0,
    )


def found(deadline_s: float | None = None) -> Classified:
    return Classified("chat" if deadline_s else "night", "rule 1: path", deadline_s, rank=95.0)


def test_bulk_works_that_begin_alike_say_so_and_others_do_not(intake: Intake) -> None:
    bodies = [BEGINNING + end for end in (b"Monday", b"Tuesday")] + [BEGINNING.replace(b"minutes", b"letters")]

    one, mate, other = (intake.work(exchange(body), found(), POLICY).prefix for body in bodies)

    assert len(BEGINNING) > 2 * FIRST_LEVEL_BYTES
    assert one == mate != other
    assert len(one) == 17
    assert "Summarise" not in one


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (BEGINNING, "/v1/embeddings"),
        (BEGINNING[:FIRST_LEVEL_BYTES], "/v1/completions"),
    ],
    ids=["is gathered by its length", "is short"],
)
def test_a_work_whose_beginning_nobody_reads_has_none(intake: Intake, body: bytes, path: str) -> None:
    assert intake.work(exchange(body, path=path), found(), POLICY).prefix == ""


def test_the_next_turn_of_a_conversation_shares_all_whole_levels_with_the_one_before(intake: Intake) -> None:
    turn = b'{"messages": [' + b"".join(b'{"role": "user", "content": "%d"},' % n for n in range(200))
    bodies = turn + b'{"role": "user", "content": "so?"}]}', turn + b'{"role": "user", "content": "so?"},' * 100 + b"]}"

    first, following = (intake.work(exchange(body), found(100.0), POLICY).prefix.split(".") for body in bodies)

    assert len(first) == sum(end <= len(bodies[0]) for end in LEVEL_ENDS_BYTES) == 5
    assert following[: len(first)] == first
    assert len(following) == 6


def test_who_waits_for_less_than_the_class_promises_has_an_earlier_deadline(intake: Intake) -> None:
    hasty = exchange()
    hasty.read_timeout_s = 5.0

    work = intake.work(hasty, found(deadline_s=120.0), POLICY)

    assert work.deadline_s == 90.0 + CLIENTS_SHARE * 5.0
    assert work.rank == work.deadline_s


def test_parts_of_a_request_keep_their_order_and_its_class(intake: Intake) -> None:
    whole = found()
    rules = policy("version: 1\nclasses: {night: {}}\n")

    parts = [intake.part_of(whole, exchange(), number, rules) for number in range(3)]

    assert [one.class_name for one in parts] == ["night"] * 3
    assert [one.rank - parts[0].rank for one in parts] == pytest.approx([0, RANK_STEP_S, 2 * RANK_STEP_S])


def test_a_stored_response_binds_its_follower_to_the_engine_that_keeps_it(intake: Intake, affinity: Affinity) -> None:
    follower = exchange(path="/v1/responses", previous_response_id="resp_1")

    with pytest.raises(Refusal, match="'resp_1' is not known here"):
        intake.work(follower, found(), POLICY)
    affinity.keep("resp_1", "e1")

    work = intake.work(follower, found(), POLICY)
    assert (work.pinned_engine, work.model) == ("e1", "smollm2")


@pytest.mark.parametrize(
    ("class_name", "waits_s", "finish_in_s"),
    [
        ("batch", None, 3600.0),
        ("batch", 600.0, 540.0),
        ("batch", 9000.0, 3600.0),
        ("night", 600.0, None),
        ("night", None, None),
    ],
)
def test_a_whole_answer_is_due_when_its_class_says_or_sooner_when_its_client_does(
    intake: Intake, class_name: str, waits_s: float | None, finish_in_s: float | None
) -> None:
    one = exchange()
    one.read_timeout_s = waits_s

    work = intake.work(one, Classified(class_name, "rule 1: path", None, rank=90.0), POLICY)

    assert work.deadline_s is None
    assert work.finish_by_s == (None if finish_in_s is None else work.accepted_s + finish_in_s)


def test_a_work_with_an_objective_has_no_other_deadline(intake: Intake) -> None:
    one = exchange()
    one.read_timeout_s = 600.0

    assert intake.work(one, found(deadline_s=120.0), POLICY).finish_by_s is None
