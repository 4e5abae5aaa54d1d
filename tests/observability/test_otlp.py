"""A real gateway, a real exporter and a collector that reads OTLP: what a request leaves there, and what off means."""

from __future__ import annotations

import gzip
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from gateway.app import Gateway
from gateway.errors import StartError
from gateway.settings import Settings, TracesSettings
from gateway.settings_file import SettingsError, read_file
from policies.yaml_source import DocumentError
from tests.end_to_end.engine_process import eventually
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import MODEL, ScriptedEngine
from tests.observability.test_tracing import CLIENT, TRACE_ID

NAMES = {"request", "queue", "dispatch", "attempt", "first_token", "relay"}
SECRET_PROMPT = "the-prompt-that-nobody-may-see"


@dataclass
class Collector:
    """Keeps the spans that it is sent."""

    url: str = ""
    spans: dict[str, Any] = field(default_factory=dict)
    bytes: bytes = b""

    async def _traces(self, request: web.Request) -> web.Response:
        body = await request.read()
        body = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        self.bytes += body
        message = ExportTraceServiceRequest()
        message.ParseFromString(body)
        self.spans |= {
            span.name: span for sent in message.resource_spans for scope in sent.scope_spans for span in scope.spans
        }
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Collector]:
        app = web.Application()
        app.router.add_post("/v1/traces", self._traces)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
            yield self
        finally:
            await runner.cleanup()


async def ask(gateway: GatewayProcess, **headers: str) -> int:
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": SECRET_PROMPT}]}
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as http:
        return (await http.post(f"{gateway.public_url}/v1/chat/completions", json=body, headers=headers)).status_code


@pytest.mark.slow
async def test_a_trace_goes_from_the_client_through_us_to_the_engine(tmp_path: Path) -> None:
    async with (
        Collector().serving() as collector,
        ScriptedEngine() as engine,
        GatewayProcess(
            tmp_path, f"engines: [{{name: e0, url: '{engine.url}'}}]\ntraces: {{url: '{collector.url}'}}\n"
        ) as gateway,
    ):
        assert await ask(gateway, traceparent=CLIENT, tracestate="vendor=1") == 200
        await eventually(lambda: collector.spans.keys() >= NAMES)

        sent = engine.requests[-1]
        spans = collector.spans
        assert sent.one("traceparent") == f"00-{TRACE_ID}-{spans['attempt'].span_id.hex()}-01"
        assert sent.one("tracestate") == "vendor=1"
        assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
        assert spans["request"].parent_span_id.hex() == CLIENT.split("-")[2]
        assert spans["relay"].parent_span_id == spans["attempt"].span_id
        assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans.values())
        assert SECRET_PROMPT.encode() not in collector.bytes

        async with httpx.AsyncClient(trust_env=False) as http:
            page = await http.get(
                f"{gateway.admin_url}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
            )
        assert f'# {{trace_id="{TRACE_ID}"}}' in page.text


@pytest.mark.slow
async def test_a_collector_that_is_away_costs_no_request(tmp_path: Path) -> None:
    async with (
        ScriptedEngine() as engine,
        GatewayProcess(
            tmp_path,
            f"engines: [{{name: e0, url: '{engine.url}'}}]\ntraces: {{url: 'http://127.0.0.1:9/v1/traces'}}\n",
        ) as gateway,
    ):
        assert [await ask(gateway) for _ in range(3)] == [200] * 3
        assert await gateway.stop() == 0
    assert SECRET_PROMPT not in gateway.log


async def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gateway.observe.otlp", None)
    settings = Settings(traces=TracesSettings(url="http://127.0.0.1:9/v1/traces"))

    async with AsyncExitStack() as stack:
        with pytest.raises(StartError, match=r"pip install 'headrace\[otel\]'"):
            Gateway(settings, log=structlog.get_logger())._open_tracer(stack, "x")


@pytest.mark.parametrize(
    "traces",
    [
        "{url: 'collector:4318'}",
        "{url: 'http://user:pass@c/v1/traces'}",
        "{url: 'http://user:80/x/user:pass@c/v1/traces'}",
        "{url: 'http://c/v1?k=1'}",
        "{sample_ratio: 2}",
    ],
)
def test_a_mistake_in_the_settings_is_told_without_its_secret(traces: str, tmp_path: Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(f"engines: [{{url: 'http://e'}}]\ntraces: {traces}\n")

    with pytest.raises((DocumentError, SettingsError)) as told:
        read_file(file, {})

    assert "traces" in str(told.value)
    assert "user:pass" not in str(told.value)
