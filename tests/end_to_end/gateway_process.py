"""A real `headrace serve` in a process of its own, started on free ports and ended by pid."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

START_S = 30.0
STOP_S = 15.0
_SERVING = re.compile(r"serving on (http://\S+), metrics on (http://\S+)/metrics")


class GatewayProcess:
    """See the module header. `config` is the text of headrace.yaml without the listeners.

    log_path   everything the process printed, standard output and error
    """

    def __init__(self, folder: Path, config: str, *, environ: dict[str, str] | None = None) -> None:
        self._folder = folder
        self._config = config
        self._environ = environ or {}
        self.log_path = folder / "gateway.log"
        self.public_url = self.admin_url = ""
        self.process: asyncio.subprocess.Process | None = None
        self._admin = httpx.AsyncClient(trust_env=False)

    @property
    def port(self) -> int:
        return urlsplit(self.public_url).port or 0

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.returncode is not None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    async def __aenter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "headrace.yaml"
        state = self._folder / "state"
        config.write_text(
            f"listen: 127.0.0.1:0\nadmin_listen: 127.0.0.1:0\nstate_dir: {state}\nlog_format: json\n{self._config}"
        )
        with self.log_path.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gateway.cli",
                "serve",
                "--config",
                str(config),
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environ},
            )
        try:
            async with asyncio.timeout(START_S):
                while not (found := _SERVING.search(self.log)):
                    assert self.process.returncode is None, f"the gateway ended at its start:\n{self.log}"
                    await asyncio.sleep(0.02)
        except BaseException:
            await self._end()
            raise
        self.public_url, self.admin_url = found[1], found[2]
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._admin.aclose()
        await self._end()

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait for its exit code."""
        assert self.process is not None
        self.process.send_signal(how)
        async with asyncio.timeout(STOP_S):
            return await self.process.wait()

    async def until_ready(self) -> None:
        """Wait until /readyz says yes: behind a shared Redis a process first has to find out who leads."""
        async with asyncio.timeout(START_S):
            while (await self._admin.get(f"{self.admin_url}/readyz")).status_code != 200:
                await asyncio.sleep(0.02)

    async def metrics(self) -> dict[str, float]:
        """The admin page as series -> value."""
        page = (await self._admin.get(f"{self.admin_url}/metrics")).text
        pairs = (line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
        return {series: float(value) for series, value in pairs}

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self._admin.get(f"{self.admin_url}/admin/v1/status")).json()
        return found

    def rss_bytes(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"process {self.pid} has no VmRSS: it ended")

    async def _end(self) -> None:
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
