"""The admin listener of a supervisor asks its processes first."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from aiohttp.test_utils import TestClient, TestServer

from gateway.admin.api import admin_app
from gateway.admin.page import MetricsPage
from gateway.telemetry import Telemetry


class Elsewhere:
    """What other processes know; nothing of it is here before `gather`."""

    def __init__(self) -> None:
        self.known = False

    async def gather(self) -> None:
        self.known = True

    def unready(self) -> str:
        return "" if self.known else "nothing is known"

    def status(self) -> Mapping[str, object]:
        return {"known": self.known}

    def policy(self) -> Mapping[str, object]:
        return {"known": self.known}


@pytest.mark.parametrize(
    ("path", "told"), [("/readyz", "ready"), ("/admin/v1/status", "true"), ("/admin/v1/policy", "true")]
)
async def test_what_other_processes_know_is_fetched_before_it_is_told(path: str, told: str) -> None:
    elsewhere = Elsewhere()
    app = admin_app(elsewhere, MetricsPage(Telemetry(version="0")), gather=elsewhere.gather)
    async with TestClient(TestServer(app)) as client:
        answer = await client.get(path)

        assert answer.status == 200
        assert told in await answer.text()


async def test_liveness_asks_nobody() -> None:
    elsewhere = Elsewhere()
    async with TestClient(
        TestServer(admin_app(elsewhere, MetricsPage(Telemetry(version="0")), gather=elsewhere.gather))
    ) as client:
        assert (await client.get("/healthz")).status == 200

    assert not elsewhere.known
