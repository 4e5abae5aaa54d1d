"""What a client is told whose request cannot be in time: by policy it is late, refused with a hint, or made smaller.

One place, and an engine that holds it: whoever else comes has no chance within the class's objective.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.end_to_end.conftest import StartGateway, engines_yaml
from tests.end_to_end.dialects import CHAT
from tests.end_to_end.scripted_engine import Asked, ScriptedEngine, Wire, hello
from tests.gateway.ingress.raw_client import Answer, RawClient

OBJECTIVE_S = 0.5
POLICY = """\
version: 1
classes:
  interactive: {{ttft_sla_s: {objective_s}, {what}}}
sizing:
  policy: fixed
  fixed: {{total: 1, windows: {{interactive: 1}}}}
"""
LONG = [{"role": "user", "content": "word " * 4000}]


@asynccontextmanager
async def crowded(
    start_gateway: StartGateway, folder: Path, what: str
) -> AsyncIterator[tuple[RawClient, ScriptedEngine, asyncio.Event]]:
    """A client behind another one whose request holds the only place until the event is set."""
    policy = folder / "policy.yaml"
    policy.write_text(POLICY.format(objective_s=OBJECTIVE_S, what=what))
    free, held = asyncio.Event(), asyncio.Event()
    free.set()

    async def play(asked: Asked, wire: Wire) -> None:
        if not free.is_set():
            held.set()
        await free.wait()
        await hello(asked, wire)

    async with ScriptedEngine(play=play, models=[CHAT.model]) as engine, AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(
            start_gateway(f"{engines_yaml(engine)}policy_file: {policy}\npoll_s: 0.2\n")
        )
        first, second = [await stack.enter_async_context(RawClient(gateway.port)) for _ in range(2)]
        await first.ask(CHAT.ask(messages=LONG))  # from which the gateway learns how fast prompts are taken in
        free.clear()
        await first.send(CHAT.ask())
        async with asyncio.timeout(5):
            await held.wait()
        yield second, engine, free
        free.set()


async def test_a_request_that_cannot_be_in_time_is_refused_with_the_time_predicted_and_when_to_return(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with crowded(start_gateway, tmp_path, "on_infeasible: shed") as (client, engine, _):
        asked_s = asyncio.get_running_loop().time()
        refused = await client.ask(CHAT.ask(messages=LONG))
        took_s = asyncio.get_running_loop().time() - asked_s
        asked = len(engine.requests)

    assert (refused.status, refused.error()["type"], refused.error()["code"]) == (429, "rate_limit_error", "infeasible")
    assert refused.one("x-headrace-batch-fits") == "0"
    assert 1 <= int(refused.one("retry-after")) <= 60
    assert float(str(refused.error()["predicted_ttft_s"])) > 0
    assert took_s >= 0.5 * OBJECTIVE_S
    assert asked == 2


async def test_a_request_that_cannot_be_in_time_is_shortened_and_served_late(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    what = "on_infeasible: degrade, degrade: {max_tokens: 7, model: nobody has it}"
    async with crowded(start_gateway, tmp_path, what) as (client, engine, free):
        late = asyncio.create_task(client.ask(CHAT.ask(messages=LONG, max_tokens=500)))
        await asyncio.wait([late], timeout=2 * OBJECTIVE_S)
        waits = not late.done()
        free.set()
        answer: Answer = await late

    assert waits
    assert (answer.status, answer.whole, answer.one("x-headrace-degraded")) == (200, True, "1")
    assert engine.requests[-1].json()["max_tokens"] == 7
    assert engine.requests[-1].json()["model"] == CHAT.model


async def test_a_client_that_waits_for_less_than_the_class_promises_is_answered_within_its_own_time(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with crowded(start_gateway, tmp_path, "on_infeasible: shed") as (client, _, _):
        async with asyncio.timeout(OBJECTIVE_S - 0.1):
            answer = await client.ask(CHAT.ask("x-headrace-timeout-s: 0.2", messages=LONG))

    assert answer.status in {429, 503}
