"""The admin listener, asked over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from gateway import instruments as table
from gateway.admin.api import admin_app, metrics_app
from gateway.admin.page import MetricsPage
from gateway.series import Kind
from gateway.telemetry import Telemetry

Client = TestClient[web.Request, web.Application]


@dataclass
class Gateway:
    """A gateway as the admin API sees it."""

    reason: str = ""
    shown: Mapping[str, object] = field(default_factory=lambda: {"engines": {"e1": {"state": "up"}}})

    def unready(self) -> str:
        return self.reason

    def status(self) -> Mapping[str, object]:
        return self.shown

    def policy(self) -> Mapping[str, object]:
        return {"version": "abc"}


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry(version="1.2.3")


@pytest.fixture
async def client(gateway: Gateway, telemetry: Telemetry) -> AsyncIterator[Client]:
    async with TestClient(TestServer(admin_app(gateway, MetricsPage(telemetry)))) as client:
        yield client


async def test_the_first_page_lists_the_others_and_each_of_them_answers(client: Client) -> None:
    listed = (await (await client.get("/")).text()).splitlines()

    paths = [line.split()[0] for line in listed]
    assert paths == ["/metrics", "/healthz", "/readyz", "/admin/v1/status", "/admin/v1/policy"]
    assert [(await client.get(path)).status for path in paths] == [200] * 5


async def test_metrics_are_served_in_the_format_asked_for(client: Client) -> None:
    plain = await client.get("/metrics")
    open_metrics = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})

    assert plain.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'headrace_build_info{version="1.2.3"} 1.0' in await plain.text()
    assert open_metrics.headers["Content-Type"].startswith("application/openmetrics-text")
    assert (await open_metrics.text()).endswith("# EOF\n")


async def test_a_page_is_refreshed_before_it_is_rendered(client: Client, telemetry: Telemetry) -> None:
    telemetry.on_refresh(lambda telemetry: telemetry.set(table.CONNECTIONS, 42))

    assert "headrace_client_connections 42.0" in await (await client.get("/metrics")).text()


async def test_readiness_tells_what_is_missing(client: Client, gateway: Gateway) -> None:
    assert (await client.get("/readyz")).status == 200

    gateway.reason = "no engine is ready"
    answer = await client.get("/readyz")

    assert (answer.status, await answer.text()) == (503, "no engine is ready\n")
    assert (await client.get("/healthz")).status == 200


async def test_status_and_policy_are_json(client: Client) -> None:
    status = await (await client.get("/admin/v1/status")).json()
    policy = await (await client.get("/admin/v1/policy")).json()

    assert status["engines"]["e1"]["state"] == "up"
    assert policy == {"version": "abc"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_nothing_can_be_changed_here(client: Client, method: str) -> None:
    assert (await client.request(method, "/admin/v1/policy")).status == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8081", "127.0.0.1.evil.example"])
async def test_a_rebound_name_gets_nothing(client: Client, host: str) -> None:
    assert (await client.get("/admin/v1/status", headers={"Host": host})).status == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:8081", "127.0.0.1:1", "[::1]:8081", "[::1]", "10.0.0.7"])
async def test_addresses_and_localhost_are_answered(client: Client, host: str) -> None:
    assert (await client.get("/healthz", headers={"Host": host})).status == 200


async def test_a_listener_for_others_answers_under_any_name(gateway: Gateway, telemetry: Telemetry) -> None:
    async with TestClient(TestServer(admin_app(gateway, MetricsPage(telemetry), any_host=True))) as client:
        assert (await client.get("/healthz", headers={"Host": "headrace.svc:8081"})).status == 200


class Jammed(Telemetry):
    """Telemetry whose pages come out only when the test lets them."""

    def __init__(self) -> None:
        super().__init__(version="0")
        self.rendered = 0
        self.go = threading.Event()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        self.rendered += 1
        self.go.wait(10)
        return super().render(accept)


async def test_scrapes_that_meet_share_one_page_and_none_holds_the_loop() -> None:
    telemetry = Jammed()
    page = MetricsPage(telemetry)

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        scrapes = [group.create_task(page.get("")) for _ in range(10)]
        await asyncio.sleep(0)
        telemetry.go.set()

    assert telemetry.rendered == 1
    assert len({scrape.result() for scrape in scrapes}) == 1
    page.close()


async def test_a_page_that_takes_too_long_is_a_503_and_the_next_one_is_served() -> None:
    telemetry = Jammed()
    app = admin_app(Gateway(), MetricsPage(telemetry))
    page = next(value for value in app.values() if isinstance(value, MetricsPage))
    page._render_s = 0.01
    async with TestClient(TestServer(app)) as client:
        late = await client.get("/metrics")

        telemetry.go.set()
        page._render_s = 10.0
        good = await client.get("/metrics")

    assert (late.status, good.status) == (503, 200)


@pytest.mark.slow
async def test_fifty_thousand_series_are_served_while_the_loop_keeps_turning(gateway: Gateway) -> None:
    telemetry = Telemetry(version="0")
    for row in table.INSTRUMENTS:
        if row.kind is Kind.HISTOGRAM and row.labels:
            for number in range(200):
                telemetry.observe(row, 1.0, *[f"v{number}"] * len(row.labels))
    for number in range(2_000):
        telemetry.add(table.RETRIES, 1, f"e{number}", "x")
        telemetry.set(table.IN_FLIGHT, 1, f"e{number}", "x")
    server = TestServer(admin_app(gateway, MetricsPage(telemetry)))
    await server.start_server()
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.005)

    async with ClientSession() as session, asyncio.TaskGroup() as group:
        turning = group.create_task(turn())

        async with session.get(server.make_url("/metrics")) as answer:
            turns_meanwhile = turns
            page = await answer.text()

        turning.cancel()
    await server.close()
    series = sum(len(family.samples) for family in text_string_to_metric_families(page))
    assert series > 30_000
    assert turns_meanwhile > 10, "the loop did not turn while the page was rendered"


async def test_the_metrics_listener_has_the_page_and_a_sign_of_life_and_nothing_else(telemetry: Telemetry) -> None:
    page = MetricsPage(telemetry)
    try:
        async with TestClient(TestServer(metrics_app(page))) as client:
            found = {
                path: (await client.get(path, headers={"Host": "gateway.example"})).status
                for path in ("/metrics", "/healthz", "/readyz", "/admin/v1/status", "/admin/v1/policy", "/")
            }
            assert (await client.post("/metrics")).status == 405
    finally:
        page.close()

    assert found == {
        "/metrics": 200, "/healthz": 200, "/readyz": 404, "/admin/v1/status": 404, "/admin/v1/policy": 404, "/": 404,
    }  # fmt: skip
