"""The admin listener: what an operator, a probe or Prometheus may ask. Read-only, on 127.0.0.1:8081 by default.

    GET /                    these pages, a line each
    GET /metrics             text 0.0.4, or OpenMetrics when asked for
    GET /healthz             200 while the process's loop turns; says nothing of engines
    GET /readyz              200, or 503 with the reason, while there is nothing to serve with
    GET /admin/v1/status     engines, windows, queues, policy and latest decisions, as JSON
    GET /admin/v1/policy     the policy in force, as JSON

It asks for no key, which is why it is not the public listener; nothing it shows holds a key, a prompt or a credential.
A page of another origin cannot read it: no CORS header is sent, and a request whose Host is a name (as after a rebound
DNS answer) is refused unless that name is `localhost`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import orjson
from aiohttp import web

from gateway.admin.page import MetricsPage

Gather = Callable[[], Awaitable[None]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Administered(Protocol):
    """What the admin API needs of the gateway. Synchronous, cheap, and never raising."""

    def unready(self) -> str:
        """Why no work can be served now; "" when it can."""
        ...

    def status(self) -> Mapping[str, object]:
        """JSON-ready: engines, windows, queues, policy version, latest decisions. Without secrets."""
        ...

    def policy(self) -> Mapping[str, object]:
        """JSON-ready: the policy in force with its version, generation and the last reload's problems."""
        ...


ADMINISTERED: web.AppKey[Administered] = web.AppKey("administered")
PAGE: web.AppKey[MetricsPage] = web.AppKey("page", MetricsPage)
GATHER: web.AppKey[Gather] = web.AppKey("gather")


def admin_app(
    administered: Administered, page: MetricsPage, *, any_host: bool = False, gather: Gather | None = None
) -> web.Application:
    """The application; closing it closes the page.

    any_host   answer under any Host name (a listener for others)
    gather     awaited before each answer that tells anything: fetches what other processes know
    """
    app = web.Application(middlewares=[] if any_host else [_only_own_host])
    app[ADMINISTERED] = administered
    app[PAGE] = page
    app[GATHER] = gather or _nothing_to_gather
    app.on_cleanup.append(_close_page)
    app.router.add_get("/", _index)
    for path, (handler, _) in _PAGES.items():
        app.router.add_get(path, handler)
    return app


def metrics_app(page: MetricsPage, *, gather: Gather | None = None) -> web.Application:
    """The page and a sign of life, for a listener that a Prometheus elsewhere may reach: no status, no policy."""
    app = web.Application()
    app[PAGE] = page
    app[GATHER] = gather or _nothing_to_gather
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/healthz", _healthz)
    return app


async def _index(_request: web.Request) -> web.Response:
    return web.Response(text="".join(f"{path:<18} {text}\n" for path, (_, text) in _PAGES.items()))


async def _metrics(request: web.Request) -> web.Response:
    await request.app[GATHER]()
    try:
        body, content_type = await request.app[PAGE].get(request.headers.get("Accept", ""))
    except TimeoutError:
        return web.Response(status=503, text="the metrics page was not ready in time; scrape less often\n")
    return web.Response(body=body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})


async def _healthz(_request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _readyz(request: web.Request) -> web.Response:
    await request.app[GATHER]()
    reason = request.app[ADMINISTERED].unready()
    return web.Response(status=503 if reason else 200, text=f"{reason or 'ready'}\n")


async def _status(request: web.Request) -> web.Response:
    await request.app[GATHER]()
    return _json(request.app[ADMINISTERED].status())


async def _policy(request: web.Request) -> web.Response:
    await request.app[GATHER]()
    return _json(request.app[ADMINISTERED].policy())


_PAGES: Mapping[str, tuple[Handler, str]] = {
    "/metrics": (_metrics, "for Prometheus"),
    "/healthz": (_healthz, "whether the process lives"),
    "/readyz": (_readyz, "whether work can be served, else why not"),
    "/admin/v1/status": (_status, "engines, windows, queues and latest decisions, as JSON"),
    "/admin/v1/policy": (_policy, "the policy in force, as JSON"),
}


def _json(value: Mapping[str, object]) -> web.Response:
    body = orjson.dumps(value, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    return web.Response(body=body + b"\n", content_type="application/json", headers={"Cache-Control": "no-store"})


@web.middleware
async def _only_own_host(request: web.Request, handler: Handler) -> web.StreamResponse:
    if not _is_address_or_localhost(request.host):
        return web.Response(status=421, text="this listener answers by address or as localhost only\n")
    return await handler(request)


def _is_address_or_localhost(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    if name in {"", "localhost"}:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


async def _nothing_to_gather() -> None:
    """All is known in this process."""


async def _close_page(app: web.Application) -> None:
    app[PAGE].close()
