"""The main job, once: a stream and a whole answer through a real process, and the numbers that moved."""

from __future__ import annotations

import orjson
import pytest

from tests.end_to_end.conftest import Stage
from tests.end_to_end.scripted_engine import DONE, MODEL
from tests.gateway.ingress.raw_client import RawClient, request

pytestmark = pytest.mark.asyncio(loop_scope="module")


def chat(*, stream: bool = False, **more: object) -> bytes:
    """A chat request's bytes."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        **({"stream": True} if stream else {}),
        **more,
    }
    return request("POST", "/v1/chat/completions", orjson.dumps(body), "Content-Type: application/json")


async def test_a_stream_and_a_whole_answer_pass_and_are_counted(stage: Stage) -> None:
    before = await stage.gateway.metrics()

    async with RawClient(stage.port) as client:
        streamed = await client.ask(chat(stream=True))
        whole = await client.ask(chat())

    assert streamed.status == whole.status == 200
    assert streamed.body.endswith(DONE)
    assert whole.json()["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    after = await stage.gateway.metrics()
    series = f'headrace_requests_total{{class="interactive",model="{MODEL}",result="completed",status="200",tenant="default"}}'
    assert after[series] - before.get(series, 0.0) == 2
