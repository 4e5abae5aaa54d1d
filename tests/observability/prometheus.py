"""A real Prometheus and a real Alertmanager (Debian's), started on free ports with the files that we ship.

Only what a test cannot wait for is changed in their configuration: addresses, intervals and the `for` of alerts.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from gateway.observe.shipped import export
from tests.ports import free_port

READY_S = 60.0
STOP_S = 20.0


class Server:
    """One of the two, as its HTTP interface shows it."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log
        self._http = httpx.AsyncClient(base_url=url, trust_env=False, timeout=10.0)

    async def get(self, path: str, **query: object) -> Any:
        """The JSON of an answer, whatever its status."""
        return (await self._http.get(path, params={name: str(value) for name, value in query.items()})).json()

    async def ready(self) -> None:
        async with asyncio.timeout(READY_S):
            while True:
                try:
                    if (await self._http.get("/-/ready")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self._http.aclose()

    @property
    def log(self) -> str:
        return self._log.read_text()


class Prometheus(Server):
    """Asked in PromQL."""

    async def points(self, expr: str, *, last_s: float = 30.0, step_s: float = 1.0) -> dict[str, list[float]]:
        """Finite values of each series over the last seconds, by its labels. Raises AssertionError for a bad query."""
        now_s = time.time()
        answer = await self.get("/api/v1/query_range", query=expr, start=now_s - last_s, end=now_s, step=step_s)
        assert answer["status"] == "success", f"{expr}: {answer.get('error')}"
        finite = {
            str(sorted(series["metric"].items())): [
                float(value) for _, value in series["values"] if value not in {"NaN", "+Inf", "-Inf"}
            ]
            for series in answer["data"]["result"]
        }
        return {labels: values for labels, values in finite.items() if values}


@asynccontextmanager
async def monitoring(folder: Path, admin_url: str) -> AsyncIterator[tuple[Prometheus, Server]]:
    """Both, scraping a gateway, evaluating our rules and alerting."""
    export(folder)
    configs = folder / "prometheus"
    alertmanager_port, prometheus_port = free_port(), free_port()
    main = configs / "prometheus.yml"
    main.write_text(
        re.sub(r"(_interval|scrape_timeout): \d+s", r"\1: 1s", main.read_text())
        .replace("127.0.0.1:8081", urlsplit(admin_url).netloc)
        .replace("127.0.0.1:9093", f"127.0.0.1:{alertmanager_port}")
    )
    for rules in configs.glob("headrace-*.yml"):
        text = re.sub(r"(?m)^( +interval): \d+s$", r"\1: 1s", rules.read_text())
        rules.write_text(re.sub(r"(?m)^( +for): \d+[smh]$", r"\1: 1s", text))
    async with (
        _running(
            Server(f"http://127.0.0.1:{alertmanager_port}", folder / "alertmanager.log"),
            folder / "alertmanager.log",
            "prometheus-alertmanager",
            f"--config.file={configs / 'alertmanager.yml'}",
            f"--storage.path={folder / 'alertmanager'}",
            f"--web.listen-address=127.0.0.1:{alertmanager_port}",
            "--cluster.listen-address=",
        ) as alertmanager,
        _running(
            Prometheus(f"http://127.0.0.1:{prometheus_port}", folder / "prometheus.log"),
            folder / "prometheus.log",
            "prometheus",
            f"--config.file={main}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{prometheus_port}",
            "--enable-feature=exemplar-storage",
        ) as prometheus,
    ):
        assert isinstance(prometheus, Prometheus)
        yield prometheus, alertmanager


@asynccontextmanager
async def _running(server: Server, log: Path, *command: str) -> AsyncIterator[Server]:
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
    try:
        await server.ready()
        yield server
    finally:
        await server.close()
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(STOP_S):
            await process.wait()
