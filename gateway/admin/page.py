"""The metrics page, rendered beside the loop and never twice at once.

A page of many thousand series takes a second of Python: on the loop it would stop every stream. It is rendered in one
thread of its own; scrapes that arrive meanwhile share its result, and one that would wait longer than `RENDER_S` is
answered 503, which Prometheus counts as a failed scrape.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from gateway.telemetry import Telemetry

RENDER_S = 8.0

Page = tuple[bytes, str]


class MetricsPage:
    """Renders pages on demand. Owns one thread; `close` lets a page under way end by itself."""

    def __init__(self, telemetry: Telemetry, *, render_s: float = RENDER_S) -> None:
        self._telemetry = telemetry
        self._render_s = render_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="headrace-metrics")
        self._under_way: dict[str, asyncio.Future[Page]] = {}

    async def get(self, accept: str) -> Page:
        """The page and its content type. Raises TimeoutError when it is not ready in time."""
        kind = "application/openmetrics-text" if "openmetrics" in accept else "text/plain"
        page = self._under_way.get(kind)
        if page is None:
            if not self._under_way:  # what is being rendered must not be changed half-way
                self._telemetry.refresh()
            page = asyncio.get_running_loop().run_in_executor(self._executor, self._telemetry.render, accept)
            self._under_way[kind] = page
            page.add_done_callback(lambda _: self._under_way.pop(kind))
        async with asyncio.timeout(self._render_s):
            return await asyncio.shield(page)

    def close(self) -> None:
        """Take no more pages."""
        self._executor.shutdown(wait=False, cancel_futures=True)
