"""A virtual engine that listens: engine, driver and HTTP face, started and ended together.

In a process of its own it is `headrace simulate`; in a test or the demo it is `async with SimulatedServer(...)`. It uses
nothing of the loop but its clock, its timers and `create_server`, so a virtual loop can carry it; `protocol_factory`
serves loops that want to make the connections themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from aiohttp import web
from aiohttp.typedefs import Middleware

from backends.simulated.config import Dialect, SimulatedConfig
from backends.simulated.continuous import ContinuousScheduler
from backends.simulated.driver import Driver
from backends.simulated.engine import Engine
from backends.simulated.profiles import continuous_limits, load_profile, reserved_limits
from backends.simulated.reserved import ReservedScheduler
from backends.simulated.scheduler import Totals
from backends.simulated.service import Service
from backends.simulated.tgi_face import TgiFace
from backends.simulated.vllm_face import VllmFace

BODY_MAX_BYTES = 256 * 1024 * 1024
KEEP_ALIVE_S = 5.0
"""Idle connections are closed after this, as vLLM's server does."""

CLOSE_GRACE_S = 0.01
"""What `close` leaves to handlers before it cancels them; whoever wants answers to finish drains first. 0 means ever."""


class Face(Protocol):
    """One dialect's HTTP."""

    def routes(self) -> list[web.RouteDef]:
        """Every route."""
        ...

    def middlewares(self) -> list[Middleware]:
        """What every request goes through."""
        ...


class SimulatedServer:
    """See the module header.

    host, port  where to listen; port 0 takes a free one. host None: do not listen, only `protocol_factory`
    wall_s      wall clock, for `created` fields
    Raises ValueError from the constructor for a profile or options that cannot work, OSError for a taken port.
    """

    def __init__(
        self,
        config: SimulatedConfig,
        *,
        host: str | None = "127.0.0.1",
        port: int = 0,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self._host = host
        self._port = port
        self._wall_s = wall_s
        profile = load_profile(config.profile)
        totals = Totals()
        self._build_face: Callable[[Service], Face]
        if config.dialect is Dialect.VLLM:
            limits = continuous_limits(profile, config.options)
            continuous = ContinuousScheduler(limits, totals)
            self._max_model_len = limits.max_model_len
            self._build_face = lambda service: VllmFace(service, limits)
            self.engine = Engine(
                continuous, profile.step_model, totals, power_model=profile.power_model, lookahead=profile.lookahead
            )
        else:
            reserving = ReservedScheduler(reserved_limits(profile, config.options), totals)
            self._max_model_len = reserving.limits.max_total_tokens
            self._build_face = lambda service: TgiFace(service, reserving)
            self.engine = Engine(reserving, profile.step_model, totals, power_model=profile.power_model)
        self._driver: Driver | None = None
        self._service: Service | None = None
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.AbstractServer | None = None

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        if self._host is None:
            raise RuntimeError("this simulated server does not listen; give it a host")
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def protocol_factory(self) -> Callable[[], asyncio.Protocol]:
        """Makes the protocol of one connection. Only while started."""
        if self._runner is None or self._runner.server is None:
            raise RuntimeError("simulated server is not started; enter it with `async with`")
        return self._runner.server

    @property
    def driver(self) -> Driver:
        """What lets the engine run in the loop's time. Only while started."""
        if self._driver is None:
            raise RuntimeError("simulated server is not started; enter it with `async with`")
        return self._driver

    @property
    def in_flight(self) -> int:
        """Requests being answered, those included that the engine has not seen."""
        return 0 if self._service is None else self._service.stats.in_flight

    def freeze(self) -> None:
        """Stop the engine but not the HTTP face, as when a real engine's core hangs."""
        self.driver.freeze()

    def thaw(self) -> None:
        """Let it go on."""
        self.driver.thaw()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._driver = Driver(self.engine, loop, speed=self.config.speed)
        self._service = Service(self.config, self._driver, max_model_len=self._max_model_len, wall_s=self._wall_s)
        face = self._build_face(self._service)
        application = web.Application(client_max_size=BODY_MAX_BYTES, middlewares=face.middlewares())
        application.add_routes(face.routes())
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=CLOSE_GRACE_S,
            access_log=None,
        )
        await self._runner.setup()
        if self._host is not None:
            try:
                self._listener = await loop.create_server(self.protocol_factory, self._host, self._port)
            except OSError:
                await self.close()
                raise
            sockets = getattr(self._listener, "sockets", ())
            self._port = sockets[0].getsockname()[1] if sockets else self._port
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def drain(self) -> None:
        """Take no new work; let what is in flight finish within `shutdown_timeout_s`, then cut the rest.

        With a time-out, new connections are accepted and health and metrics answer until the end; without one new
        connections are refused at once.
        """
        if self._service is None:
            return
        self._service.draining = True
        if self.config.shutdown_timeout_s == 0 and self._listener is not None:
            self._listener.close()
        if self.config.shutdown_timeout_s > 0:
            try:
                async with asyncio.timeout(self.config.shutdown_timeout_s):
                    await self._service.idle()
            except TimeoutError:
                pass
        self._service.cut_all()
        await self._service.idle()

    async def close(self) -> None:
        """Stop listening, abort what is in flight, close all connections. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        if self._driver is not None:
            self._driver.close()

    def __repr__(self) -> str:
        return f"<SimulatedServer {self.config.dialect} {self.config.model} {self._host}:{self._port} {self.engine!r}>"
