"""A real vLLM on the CPU, in its own environment below .venv/vllm (`make .venv/.vllm`), with a tiny random model.

It runs as three processes: the API server, EngineCore and Worker. Killing the first with -9 leaves the other two behind, so
all of them are ended by their ids, taken from the process group that we start.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from gateway.bench import vllm_cpu
from gateway.bench.vllm_cpu import START_S
from tests.ports import free_port

ENVIRONMENT = Path(__file__).parents[2] / ".venv" / "vllm"
MODEL = "tiny"
SEATS = 4


class RealVllm:
    """See the module header. flags: of the API server, beside model and address."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._log = folder / f"vllm-{id(self)}.log"
        self._flags = flags
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=60)
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.http.aclose()
        await self.end()

    async def start(self) -> None:
        """Start it at its address, and wait until it is ready."""
        assert not vllm_cpu.missing(ENVIRONMENT), f"no vLLM at {ENVIRONMENT}; run: {vllm_cpu.REMEDY}"
        environ = {**vllm_cpu.variables(os.environ), "VLLM_SERVER_DEV_MODE": "1"}
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *vllm_cpu.command(MODEL, self.port, *self._flags, environment=ENVIRONMENT),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )
        until_s = time.monotonic() + START_S
        while not await self._ready():
            assert self.process.returncode is None, f"vLLM ended at its start: {self._log.read_text()[-2000:]}"
            assert time.monotonic() < until_s, f"vLLM was not ready in time: {self._log.read_text()[-2000:]}"
            await asyncio.sleep(0.5)

    async def end(self) -> None:
        """All of its processes, and nothing else."""
        for pid in self.pids():
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            await self.process.wait()
        while self.pids():
            await asyncio.sleep(0.05)

    def pids(self, name: str = "") -> list[int]:
        """Living processes of the group that we started; name: those whose title holds it."""
        assert self.process is not None
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
                title = (entry / "cmdline").read_bytes().decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[2] == str(self.process.pid) and fields[0] != "Z" and name in title:
                found.append(int(entry.name))
        return found

    def freeze(self, how: signal.Signals) -> None:
        """Stop or continue the engine behind the web server."""
        pids = self.pids("EngineCore")
        assert pids, "no process is called EngineCore"
        for pid in pids:
            os.kill(pid, how)

    def terminate(self) -> None:
        """SIGTERM to the API server, as an operator or Kubernetes does."""
        assert self.process is not None
        self.process.terminate()

    async def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def metric(self, name: str) -> float:
        """One of its own metrics, summed over its series."""
        page = (await self.http.get("/metrics")).text
        lines = (line for line in page.splitlines() if line.startswith(name) and line[len(name)] in "{ ")
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def _ready(self) -> bool:
        try:
            return (await self.http.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False
