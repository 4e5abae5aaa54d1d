"""What a process that does not lead tells of how much fits: what its leader published, of the next larger size."""

from __future__ import annotations

import json

import pytest

from backends.base import ModelCard, Probe
from gateway.dispatch import capacity as capacity_module
from gateway.dispatch.capacity import PROMPT_TOKENS_MAX, SIZES, USUAL_PROMPT_TOKENS
from gateway.dispatch.member import Member
from gateway.queue.memory_queue import MemoryQueue
from policies.document import parse
from tests.gateway.members import START_S, member

POLICY = """
version: 1
classes:
  chat: {ttft_sla_s: 0.5}
  night: {}
sizing: {policy: fixed, fixed: {total: 8, windows: {chat: 8, night: 3}}}
"""


async def two(max_model_len: int | None = 65_536) -> tuple[Member, Member]:
    """Processes of a pool, of which the first leads."""
    pool_s = [START_S]
    queue, policy = MemoryQueue(lambda: int(1000 * pool_s[0])), parse(POLICY, "test.yaml")
    leader = member(queue, "a", policy, candidate=True, now_s=lambda: pool_s[0])
    follower = member(queue, "b", policy, candidate=False, now_s=lambda: pool_s[0])
    for one in (leader, follower):
        one.capacity._roster["e"].heard(Probe(ready=True, models=(ModelCard("m", {}, max_model_len),)), pool_s[0])
    for _ in range(3):
        await leader.presence.beat()
        await follower.presence.beat()
        pool_s[0] += 1.5
    await leader.presence.beat()
    assert leader.presence.leads
    assert not follower.presence.leads
    return leader, follower


def models_of(one: Member, query: str) -> object:
    """What it tells of class chat."""
    classes = one.capacity.answer(query)["classes"]
    assert isinstance(classes, dict)
    return classes["chat"]["models"]


async def tell(leader: Member, follower: Member) -> None:
    follower.capacity.heard(json.loads(json.dumps(await leader.capacity.published())))


@pytest.mark.parametrize(
    ("asked", "told"), [("", 1024), ("1", 256), ("1024", 1024), ("1025", 2048), ("30000", 32_768), ("65536", 65_536)]
)
async def test_a_follower_tells_what_the_leader_would_of_the_next_larger_size(asked: str, told: int) -> None:
    leader, follower = await two()
    await tell(leader, follower)

    answer = follower.capacity.answer(f"prompt_tokens={asked}" if asked else "")

    assert answer["prompt_tokens"] == told
    assert answer["classes"] == leader.capacity.answer(f"prompt_tokens={told}")["classes"]


async def test_a_follower_knows_what_no_engine_takes() -> None:
    leader, follower = await two()
    await tell(leader, follower)

    assert models_of(follower, "prompt_tokens=1000000") == {"m": {"starts_now": 0, "bound_by": "context"}}


async def test_before_a_leader_was_heard_nothing_is_known() -> None:
    _, follower = await two()

    assert follower.capacity.answer("")["age_s"] is None
    assert models_of(follower, "") == {"m": {"starts_now": None, "bound_by": None}}


async def test_of_a_pool_that_takes_too_long_to_ask_the_usual_size_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = await two()
    monkeypatch.setattr(capacity_module, "PUBLISH_S", -1.0)
    await tell(leader, follower)

    usual, large = models_of(follower, ""), models_of(follower, "prompt_tokens=30000")

    assert usual == {"m": {"starts_now": 8, "bound_by": "window"}}
    assert large == {"m": {"starts_now": None, "bound_by": None}}


def test_every_size_that_can_be_asked_for_has_a_published_one() -> None:
    assert USUAL_PROMPT_TOKENS in SIZES
    assert sorted(SIZES) == list(SIZES)
    assert SIZES[-1] == PROMPT_TOKENS_MAX
