"""The prefix cache: what is found again, what it saves, and what goes first when memory is short.

That all of it equals a block-by-block simulation is in test_engine_equivalence.py.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.simulated.blocks import PrefixCache, block_ids
from backends.simulated.continuous import ContinuousScheduler
from backends.simulated.engine import Engine
from backends.simulated.profiles import EngineOptions, build_engine, load_profile
from backends.simulated.sequence import Sequence
from tests.backends.simulated.test_vllm_face import metric, plain, post, serving

PROFILE = load_profile("h100_llama31_8b_tp1")
SHARED = tuple(range(64))


def engine(*, kv_tokens: int = 16_016, prefix_caching: bool = True) -> Engine:
    return build_engine(PROFILE, EngineOptions(kv_tokens=kv_tokens, prefix_caching=prefix_caching))


def prompt(name: str, ids: tuple[int, ...], *, tokens: int = 1040, output: int = 20) -> Sequence:
    return Sequence(name, prompt_tokens=tokens, output_tokens=output, block_ids=ids)


def free_blocks(one: Engine) -> int:
    assert isinstance(one.scheduler, ContinuousScheduler)
    return one.scheduler.free_blocks


def test_a_prefix_seen_before_is_not_computed_again_and_one_without_a_cache_is() -> None:
    ttft_s = {}
    for caching in (True, False):
        one = engine(prefix_caching=caching)
        for name in ("first", "second"):
            sequence = prompt(name, SHARED)
            one.submit(sequence, one.clock_s)
            one.advance(one.clock_s + 100)
            ttft_s[name, caching] = sequence.first_token_s - sequence.arrival_s

    assert ttft_s["second", True] < 0.5 * ttft_s["first", True]
    assert ttft_s["second", False] == pytest.approx(ttft_s["first", False])


def test_two_prompts_of_one_step_share_the_memory_of_their_prefix() -> None:
    one = engine()
    before = free_blocks(one)

    one.submit(prompt("a", (*SHARED, 100)), 0.0)
    one.submit(prompt("b", (*SHARED, 200)), 0.0)
    one.next_step_s()

    assert before - free_blocks(one) == 64 + 1 + 1
    assert one.totals.cached_prompt_tokens == 64 * 16


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    one = engine()

    for name in ("first", "second"):
        one.submit(prompt(name, SHARED, tokens=1024), one.clock_s)
        one.advance(one.clock_s + 100)

    assert one.totals.cached_prompt_tokens == 63 * 16


def test_what_was_unused_longest_is_forgotten_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    cache = PrefixCache(8)
    for ids in ((1, 2, 3), (4, 5, 6)):
        cache.take(3)
        cache.give(0, cache.enter(ids))

    cache.take(3)

    assert [cache.hits((1, 2, 3), at_most=9), cache.hits((4, 5, 6), at_most=9)] == [2, 3]
    cache.take(4)
    assert [cache.hits((1, 2, 3), at_most=9), cache.hits((4, 5, 6), at_most=9)] == [0, 1]


def test_a_sequence_that_leaves_keeps_what_another_holds() -> None:
    one = engine()
    leaving, staying = prompt("leaving", SHARED, output=500), prompt("staying", SHARED, output=500)
    one.submit(leaving, 0.0)
    one.submit(staying, 0.0)
    one.advance(one.next_step_s())
    held = free_blocks(one)

    one.abort(leaving, one.clock_s)
    one.advance(one.next_step_s())

    assert free_blocks(one) - held <= 2
    assert not staying.preemptions


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=40))
def test_the_cache_never_loses_or_invents_a_block(moves: list[tuple[int, int]]) -> None:
    """Sequences of family f and n blocks hold what they can and leave in order of arrival when there is no room."""
    blocks = 12
    cache = PrefixCache(blocks)
    held: list[tuple[int, list[int]]] = []
    for family, size in moves:
        ids = [10 * family + n for n in range(size)]
        found = ids[: cache.hits(ids, at_most=size)]
        while size - len(found) + cache.idle(found) > cache.free:
            own, shared = held.pop(0)
            cache.give(own, shared)
            found = ids[: cache.hits(ids, at_most=size)]
        cache.share(found)
        cache.take(size - len(found))
        named = cache.enter(ids[len(found) :])
        held.append((size - len(found) - len(named), found + named))

        distinct = {block_id for _, shared in held for block_id in shared}
        assert cache.free == blocks - sum(own for own, _ in held) - len(distinct)
        assert all(cache.holders(one) == sum(one in shared for _, shared in held) for one in distinct)
        assert cache.known <= blocks


def test_ids_stand_for_a_blocks_tokens_and_all_before_them() -> None:
    ids = block_ids((1, 2, 3, 4, 5, 6, 7), 2)

    assert len(ids) == 3
    assert block_ids((1, 2, 3, 4), 2) == ids[:2]
    assert block_ids((9, 2, 3, 4), 2)[1] != ids[1]


async def test_over_http_a_repeated_prompt_is_found_by_its_tokens() -> None:
    text = "one two three four five six seven eight " * 40

    async with serving(options=EngineOptions(prefix_caching=True)) as (_, client):
        for _ in range(2):
            status, _ = await post(client, "/v1/completions", plain(prompt=text))
            assert status == 200
        queried = await metric(client, "vllm:prefix_cache_queries_total")
        found = await metric(client, "vllm:prefix_cache_hits_total")

    assert queried / 2 - 16 <= found < queried / 2
