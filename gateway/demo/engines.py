"""Engines as processes of their own: started, waited for, ended by pid.

A process says where it listens in one line, `listening on http://HOST:PORT`, and is believed from then on. It is a
session of its own, so that Ctrl-C at the terminal reaches the demo alone, which drains before it ends its engines; on Linux
it ends by itself when the demo was killed.
"""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.with_parent import with_parent

START_S = 60.0
END_S = 5.0
_LISTENING = re.compile(rb"listening on (http://\S+)")


class EngineDidNotStart(RuntimeError):
    """The process ended, or said nothing, instead of listening. The message ends with its last words."""


def simulated(*, model: str, profile: str) -> list[str]:
    """Arguments of `headrace simulate` for one engine on a free port."""
    return ["gateway.cli", "simulate", "--listen", "127.0.0.1:0", "--model", model, "--profile", profile]


def real(*, model: str) -> list[str]:
    """Arguments of a llama.cpp server with SmolLM2 on a free port."""
    return ["gateway.demo.llamacpp", model]


@asynccontextmanager
async def engine_process(
    name: str, module_and_args: Sequence[str], log_dir: Path, *, start_s: float = START_S
) -> AsyncIterator[str]:
    """Run `python -m MODULE ARGS`, yield its URL, and end it. Raises EngineDidNotStart."""
    log = log_dir / f"{name}.log"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *with_parent([sys.executable, "-m", *module_and_args]), stdout=PIPE, stderr=stderr, start_new_session=True
        )
    try:
        url = await _url_of(process, name, log, start_s)
        drain = asyncio.get_running_loop().create_task(_drain(process))
        try:
            yield url
        finally:
            drain.cancel()
            await asyncio.wait([drain])
    finally:
        await _end(process)


async def _url_of(process: Process, name: str, log: Path, start_s: float) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(start_s):
            while line := await process.stdout.readline():
                if match := _LISTENING.search(line):
                    return match[1].decode()
    except TimeoutError:
        raise EngineDidNotStart(
            f"engine {name}: silent for {start_s:g} s; its last words: {_last_words(log)}"
        ) from None
    raise EngineDidNotStart(f"engine {name}: ended instead of listening; its last words: {_last_words(log)}")


async def _drain(process: Process) -> None:
    """Read on, so that the process never stops in a write to a full pipe."""
    assert process.stdout is not None
    while await process.stdout.read(65536):
        pass


async def _end(process: Process) -> None:
    """Ask, wait a little, then make it."""
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
    await process.wait()


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return " / ".join(line.strip() for line in lines[-4:] if line.strip()) or "none"
