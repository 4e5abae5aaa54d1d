"""The admin listener as a running thing, and what listeners have in common: bound with a remedy, told by URL."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from aiohttp import web

from gateway.addresses import Listen, parse_listen
from gateway.admin.api import Administered, admin_app, metrics_app
from gateway.admin.page import MetricsPage
from gateway.telemetry import Telemetry

CLOSE_S = 5.0


async def listen_admin(
    stack: AsyncExitStack,
    administered: Administered,
    telemetry: Telemetry,
    listen: str,
    gather: Callable[[], Awaitable[None]] | None = None,
    *,
    metrics_listen: str | None = None,
) -> str:
    """Serve `admin_app` until the stack is left, and `metrics_app` where it has a listener; the admin listener's URL.

    Raises OSError when an address cannot be had.
    """
    page = MetricsPage(telemetry)
    address = parse_listen(listen)
    url = await _serve(
        stack, admin_app(administered, page, any_host=not address.loopback, gather=gather), address, "admin_listen"
    )
    if metrics_listen is not None:
        await _serve(stack, metrics_app(page, gather=gather), parse_listen(metrics_listen), "metrics_listen")
    return url


async def _serve(stack: AsyncExitStack, app: web.Application, address: Listen, setting: str) -> str:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    server = await bound(loop.create_server(runner.server, address.host, address.port), setting, address)
    stack.callback(server.close)
    return url_of(server.sockets[0], address)


async def bound(listening: Awaitable[asyncio.Server], setting: str, address: Listen) -> asyncio.Server:
    """The server, or OSError with the setting, the address and what to do."""
    try:
        return await listening
    except OSError as error:
        raise cannot_listen(error, setting, address) from None


def cannot_listen(error: OSError, setting: str, address: Listen) -> OSError:
    """The error as it is told to an operator."""
    return OSError(
        error.errno, f"{setting} {address}: {error.strerror or error}; choose another address or stop what holds it"
    )


def url_of(sock: socket.socket, configured: Listen) -> str:
    """Where a listener can be reached: the configured host (a loopback for a wildcard) with the real port."""
    port = sock.getsockname()[1]
    host = "127.0.0.1" if configured.host in {"0.0.0.0", "::"} else configured.host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
