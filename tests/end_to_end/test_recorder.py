"""What a real gateway records of its traffic: it replays, and nothing that a client wrote is in it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import orjson
import pytest

from gateway.cli import main
from gateway.replay.trace import read_trace
from tests.end_to_end.conftest import StartGateway, engines_yaml
from tests.end_to_end.scripted_engine import MODEL, ScriptedEngine
from tests.gateway.ingress.raw_client import RawClient, request

SECRETS = ("Mildred", "sk-live-4711", "my-request-id")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.many)])
async def test_recorded_traffic_replays_and_holds_no_text(
    workers: int, start_gateway: StartGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ScriptedEngine() as engine:
        config = engines_yaml(engine) + f"recorder: {{folder: traffic, prefix_hashes: true}}\nworkers: {workers}\n"
        async with start_gateway(config) as gateway, RawClient(gateway.port) as client:
            for number in range(12):
                body = orjson.dumps(
                    {
                        "model": MODEL if number else "Mildred",
                        "stream": True,
                        "max_tokens": 20 + number,
                        "messages": [{"role": "user", "content": "Mildred is my cat. " * (40 + 40 * number)}],
                    }
                )
                headers = ("Authorization: Bearer sk-live-4711", "X-Request-Id: my-request-id")
                answer = await client.ask(request("POST", "/v1/chat/completions", body, *headers))
                assert answer.status == (200 if number else 404)
            assert await gateway.stop() == 0

    traffic = tmp_path / "gateway" / "traffic"
    text = "".join(path.read_text() for path in traffic.iterdir())
    assert not [secret for secret in SECRETS if secret in text]
    requests = read_trace(traffic)
    assert len(requests) == 11
    assert requests[0].arrival_s == 0.0
    assert {one.class_name for one in requests} == {"interactive"}
    assert requests[-1].prefix_ids[:2] == requests[-2].prefix_ids[:2] != ()

    code = await asyncio.to_thread(main, ["replay", str(traffic), "--prefix-caching", "--json"])
    assert code == 0
    assert json.loads(capsys.readouterr().out)["outcomes"] == {"completed": 11}
