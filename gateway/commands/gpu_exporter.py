"""`headrace gpu-exporter`: this host's GPUs on a page, under the names of a DCGM exporter.

For the host of a remote engine: it needs the driver's library and this package, no DCGM, and any scraper that knows
DCGM's names can read it too. A page is made when it is asked for, at most every FRESH_S, and never waits for a driver
longer than one bounded read; without a GPU the page says so and the exporter goes on trying.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import socket
import sys
import time

from aiohttp import web

from backends.gpu.base import GPU_UNSEEN, GpuSample, GpuSource
from backends.gpu.dcgm_page import CONTENT_TYPE, page
from backends.gpu.devices import DeviceError, check_device
from backends.gpu.nvml import NvmlSource, NvmlThread
from gateway.addresses import parse_listen
from gateway.admin.listener import bound, url_of
from gateway.stop_signals import stop_signals

FRESH_S = 0.25
"""Scrapes that come closer together are answered with the same read."""

CLOSE_S = 2.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "gpu-exporter",
        help="show this host's GPUs to a gateway elsewhere",
        description="Serve /metrics with the GPUs of this host under DCGM's names, and /health.",
    )
    parser.add_argument("--listen", default="127.0.0.1:9400", metavar="HOST:PORT", help="port 0 takes a free one")
    parser.add_argument(
        "--devices",
        nargs="+",
        type=_device,
        metavar="DEVICE",
        help="indices, GPU-<uuid> or MIG-<uuid>; by default what CUDA_VISIBLE_DEVICES leaves, or all",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    asyncio.run(_serve(args.listen, args.devices))
    return 0


def exporter_app(source: GpuSource, *, host: str) -> web.Application:
    """The application. host: what the page calls this host; in a pod its node, as DCGM exporters do."""
    exporter = _Exporter(source, host)
    app = web.Application()
    app.router.add_get("/metrics", exporter.metrics)
    app.router.add_get("/health", exporter.health)
    return app


class _Exporter:
    def __init__(self, source: GpuSource, host: str) -> None:
        self._source = source
        self._host = host
        self._one_at_a_time = asyncio.Lock()
        self._sample = GPU_UNSEEN
        self._read_s = -math.inf

    async def metrics(self, _request: web.Request) -> web.Response:
        body = page(await self._fresh(), host=self._host)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def health(self, _request: web.Request) -> web.Response:
        sample = await self._fresh()
        return web.Response(status=200 if sample.up else 503, text=f"{sample.detail or 'ok'}\n")

    async def _fresh(self) -> GpuSample:
        async with self._one_at_a_time:
            if time.monotonic() - self._read_s > FRESH_S:
                self._sample = await self._source.read()
                self._read_s = time.monotonic()
            return self._sample


def _device(text: str) -> str:
    try:
        return check_device(text)
    except DeviceError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


async def _serve(listen: str, devices: list[str] | None) -> None:
    address = parse_listen(listen)
    thread = NvmlThread(time.monotonic)
    source = NvmlSource(thread, devices)
    runner = web.AppRunner(
        exporter_app(source, host=os.environ.get("NODE_NAME") or socket.gethostname()),
        access_log=None,
        shutdown_timeout=CLOSE_S,
    )
    with stop_signals() as (stop, _):
        try:
            await runner.setup()
            assert runner.server is not None
            loop = asyncio.get_running_loop()
            server = await bound(loop.create_server(runner.server, address.host, address.port), "--listen", address)
            sys.stdout.write(f"listening on {url_of(server.sockets[0], address)}\n")
            sys.stdout.flush()
            await stop.wait()
            server.close()
        finally:
            await runner.cleanup()
            thread.close()
