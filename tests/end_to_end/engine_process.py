"""An engine in a process of its own, so that a test can kill it, freeze it and let it come back at the same address.

Any module that prints `listening on http://HOST:PORT` will do: `headrace simulate` and the llama.cpp server of the demo.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx

START_S = 60.0
STOP_S = 10.0
WAIT_S = 10.0


class EngineProcess:
    """See the module header. `url` stays the same over restarts where `args` name a port.

    python     of another environment than this one's, for engines that bring pins of their own
    patience   times as long to start and to end as a process of ours gets
    """

    def __init__(self, folder: Path, *module_and_args: str, python: str = sys.executable, patience: float = 1) -> None:
        self._log = folder / f"engine-{id(self)}.log"
        self._command = (python, "-m", *module_and_args)
        self._patience = patience
        self._http = httpx.AsyncClient(trust_env=False)
        self.process: asyncio.subprocess.Process | None = None
        self.url = ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._http.aclose()
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S * self._patience):
                await self.ended()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.ended()

    async def start(self) -> None:
        """Start it, or start it again once it has ended."""
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S * self._patience):
            while not (line := (await self.process.stdout.readline()).decode()).startswith("listening on "):
                assert line, f"the engine ended at its start: {self._log.read_text()}"
        self.url = line.removeprefix("listening on ").strip()

    def signal(self, how: signal.Signals) -> None:
        """Signal it, unless it has ended."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(how)

    async def ended(self) -> int:
        """Wait for its end; the exit code."""
        assert self.process is not None
        return await self.process.wait()

    async def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        await self.ended()

    async def metric(self, name: str) -> float:
        """One of its own metrics, summed over its series; 0 when it has none."""
        page = (await self._http.get(f"{self.url}/metrics")).text
        lines = (line for line in page.splitlines() if line and not line.startswith("#"))
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0].split(" ")[0] == name)


def simulated(folder: Path, *options: str, model: str = "sim-8b", listen: str = "127.0.0.1:0") -> EngineProcess:
    """`headrace simulate`, not started yet."""
    return EngineProcess(folder, "gateway.cli", "simulate", "--listen", listen, "--model", model, *options)


def llamacpp(folder: Path, model: str) -> EngineProcess:
    """A real llama.cpp with a small real model, not started yet."""
    return EngineProcess(folder, "gateway.demo.llamacpp", model)


async def eventually(condition: Callable[[], object], within_s: float = WAIT_S) -> None:
    """Wait until a condition, an awaitable's result where it gives one, holds. Fails after `within_s`."""
    async with asyncio.timeout(within_s):
        while True:
            held = condition()
            if asyncio.iscoroutine(held):
                held = await held
            if held:
                return
            await asyncio.sleep(0.02)
