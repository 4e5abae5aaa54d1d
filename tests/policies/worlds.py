"""Policies, works and engines for the tests of decisions, and Hypothesis strategies that draw them."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from policies.document import parse
from policies.schema import Policy
from policies.vocabulary import UNKNOWN, EngineState, EngineView, Quality, Reading, Work

NOW_S = 1000.0

POLICY_TEXT = """
version: 1
classes:
  chat: {ttft_sla_s: 0.5}
  code: {ttft_sla_s: 5}
  night: {max_age_s: 120, min_share: 0.1}
  scrap: {max_age_s: null, min_share: 0}
sizing:
  fixed:
    total: 8
    windows: {chat: 8, code: 6, night: 3, scrap: 2}
    engines:
      e1: {total: 4, windows: {night: 1, scrap: 1}}
tenants:
  heavy: {weight: 3}
  small: {max_in_flight: 2}
"""


def policy(text: str = POLICY_TEXT) -> Policy:
    return parse(text, "test.yaml")


def work(
    id: str,
    class_name: str = "chat",
    *,
    tenant: str = "t",
    model: str = "m",
    accepted_s: float = NOW_S,
    deadline_s: float | None = None,
    rank: float | None = None,
    prompt_tokens: int = 10,
    max_tokens: int | None = None,
    sequences: int = 1,
    path: str = "/v1/completions",
    pinned_engine: str | None = None,
    avoid: frozenset[str] = frozenset(),
) -> Work:
    if deadline_s is None and class_name in ("chat", "code"):
        deadline_s = accepted_s + (0.5 if class_name == "chat" else 5)
    return Work(
        id=id,
        class_name=class_name,
        tenant=tenant,
        model=model,
        path=path,
        accepted_s=accepted_s,
        rank=rank if rank is not None else deadline_s if deadline_s is not None else accepted_s,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        sequences=sequences,
        deadline_s=deadline_s,
        pinned_engine=pinned_engine,
        avoid=avoid,
    )


def fresh(value: float) -> Reading:
    return Reading(value, 0.1, Quality.FRESH)


def engine(
    name: str = "e0",
    in_flight: Mapping[str, int] | None = None,
    *,
    state: EngineState = EngineState.UP,
    models: frozenset[str] = frozenset({"m"}),
    prefill_tokens: int = 0,
    seats: Reading = UNKNOWN,
    running: Reading = UNKNOWN,
    max_model_len: Reading = UNKNOWN,
    spot: bool = False,
    canary: float = 1.0,
    speaks_only: str | None = None,
    extra_sequences: Mapping[str, int] | None = None,
) -> EngineView:
    return EngineView(
        name=name,
        state=state,
        models=models,
        in_flight=in_flight or {},
        prefill_tokens=prefill_tokens,
        seats=seats,
        running=running,
        max_model_len=max_model_len,
        spot=spot,
        canary=canary,
        extra_sequences=extra_sequences or {},
        speaks=lambda path: speaks_only is None or path == speaks_only,
    )


CLASSES = ("chat", "code", "night", "scrap", "gone")
NAMES = ("e0", "e1", "e2")

works = st.lists(
    st.builds(
        work,
        id=st.uuids(version=4).map(str),
        class_name=st.sampled_from(CLASSES),
        tenant=st.sampled_from(["t", "heavy", "small"]),
        model=st.sampled_from(["m", "n"]),
        accepted_s=st.floats(NOW_S - 300, NOW_S),
        rank=st.none() | st.floats(0, 2000),
        prompt_tokens=st.integers(0, 9000),
        max_tokens=st.none() | st.integers(0, 500),
        sequences=st.integers(1, 3),
        pinned_engine=st.none() | st.sampled_from(NAMES),
        avoid=st.frozensets(st.sampled_from(NAMES), max_size=2),
    ),
    max_size=40,
    unique_by=lambda one: one.id,
)

engines = st.lists(
    st.builds(
        engine,
        name=st.sampled_from(NAMES),
        in_flight=st.dictionaries(st.sampled_from(CLASSES), st.integers(0, 9)),
        state=st.sampled_from([EngineState.UP, EngineState.UP, *EngineState]),
        models=st.sampled_from([frozenset({"m"}), frozenset({"m", "n"})]),
        prefill_tokens=st.integers(0, 9000),
        seats=st.sampled_from([UNKNOWN, fresh(4), fresh(1), fresh(9)]),
        running=st.sampled_from([UNKNOWN, fresh(6)]),
        max_model_len=st.sampled_from([UNKNOWN, fresh(4096), fresh(8192)]),
        spot=st.booleans(),
        canary=st.sampled_from([1.0, 1.0, 0.3]),
    ),
    max_size=3,
    unique_by=lambda one: one.name,
)

draws = st.floats(0, 1, exclude_max=True)
