"""Frameworks that many applications use to speak to engines: LangChain, LlamaIndex and Vercel's AI SDK on Node.

Each runs in a process and an environment of its own (`make .venv/.clients`), since they need other releases of the
OpenAI client than each other's and ours. What each of them prints is compared with what the engine says when it is
asked directly.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio

from tests.end_to_end.conftest import SHORT_TIMEOUTS
from tests.end_to_end.engine_process import simulated
from tests.end_to_end.gateway_process import GatewayProcess

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.many]

MODEL = "sim-8b"
SCRIPTS = Path(__file__).parent / "clients"
INSTALLED = Path(__file__).parents[2] / ".venv" / "clients"
CLIENT_S = 30.0


@dataclass(frozen=True)
class Framework:
    """One client. needs: what has to be there for its script to run; runs: program and script."""

    name: str
    needs: Path
    runs: tuple[str, Path]

    def __str__(self) -> str:
        return self.name


PYTHON = str(INSTALLED / "python" / "bin" / "python")
FRAMEWORKS = [
    Framework("langchain", Path(PYTHON), (PYTHON, SCRIPTS / "with_langchain.py")),
    Framework("llamaindex", Path(PYTHON), (PYTHON, SCRIPTS / "with_llama_index.py")),
    Framework("vercel", INSTALLED / "node" / "node_modules" / "ai", ("node", INSTALLED / "node" / "with_ai_sdk.mjs")),
]


@dataclass(frozen=True)
class Served:
    """A gateway before one engine, and the engine's own answer to what the frameworks ask."""

    gateway: GatewayProcess
    text: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("frameworks")
    async with simulated(folder, model=MODEL) as engine:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Say something about water."}],
            "x_simulated_output_tokens": 7,
        }
        async with httpx.AsyncClient(trust_env=False) as client:
            direct = (await client.post(f"{engine.url}/v1/chat/completions", json=body)).json()
        config = f"engines: [{{name: e0, url: '{engine.url}'}}]\n{SHORT_TIMEOUTS}"
        async with GatewayProcess(folder / "gateway", config) as gateway:
            yield Served(gateway, direct["choices"][0]["message"]["content"])


async def ran(framework: Framework, url: str) -> dict[str, Any]:
    """What a framework's script printed."""
    if not framework.needs.exists() or shutil.which(framework.runs[0]) is None:
        pytest.skip(f"{framework} is not installed; make .venv/.clients (Vercel's needs node and npm)")
    program, script = framework.runs
    if not script.exists() or script.is_relative_to(INSTALLED):  # Node looks for packages beside the script
        shutil.copy(SCRIPTS / "vercel" / script.name, script)
    environ = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    process = await asyncio.create_subprocess_exec(
        program, str(script), url, MODEL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environ
    )
    try:
        async with asyncio.timeout(CLIENT_S):
            said, complained = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, complained.decode()
    found: dict[str, Any] = orjson.loads(said.splitlines()[-1])
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=str)
async def test_a_framework_gets_answers_streams_tool_calls_and_errors_as_from_an_engine(
    served: Served, framework: Framework
) -> None:
    got = await ran(framework, served.gateway.public_url)

    assert got["whole"] == served.text
    assert "".join(got["pieces"]) == served.text
    assert len(got["pieces"]) > 1
    assert got["tool"][0] == "weather"
    assert isinstance(got["tool"][1]["text"], str)
    assert got["refused"] == 404
