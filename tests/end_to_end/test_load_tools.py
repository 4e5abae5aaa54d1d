"""Other people's load generators against the gateway, with the commands of docs/load.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.end_to_end.engine_process import simulated
from tests.end_to_end.gateway_process import GatewayProcess

pytestmark = [pytest.mark.load_tools, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv" / "load-tools"
MAKE_TOKENIZER = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = [f"word{number}" for number in range(2000)] + ["<unk>", "<s>", "</s>"]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>",
    model_max_length=100000,
)
fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
fast.save_pretrained(sys.argv[1])
"""


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    async with simulated(tmp_path) as engine:
        config = f"engines: [{{name: e, url: '{engine.url}', kind: vllm, gpu: {{source: none}}}}]\n"
        async with GatewayProcess(tmp_path / "gateway", config) as running:
            yield running


def documented(tool: str) -> str:
    """The command of the page, in one line."""
    page = (ROOT / "docs" / "load.md").read_text().replace("\\\n", " ")
    found = re.search(rf"^\$ ({tool} .*)$", page, re.MULTILINE)
    assert found is not None
    return found[1]


def ran(tool: str, gateway: GatewayProcess, folder: Path) -> str:
    """Run the documented command in `folder`; what it printed."""
    tokenizer = folder / "tokenizer"
    environ = {**os.environ, "COLUMNS": "200"}  # offline, aiperf would look for the folder in its cache only
    python = TOOLS / tool / "bin" / "python"
    subprocess.run([python, "-c", MAKE_TOKENIZER, tokenizer], check=True, env=environ, timeout=120)
    command = documented(tool).replace("http://127.0.0.1:8080", gateway.public_url).replace("TOKENIZER", tokenizer.name)
    words = shlex.split(command)
    result = subprocess.run(
        [TOOLS / tool / "bin" / words[0], *words[1:]],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environ,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


async def test_guidellm_measures_the_gateway(gateway: GatewayProcess, tmp_path: Path) -> None:
    ran("guidellm", gateway, tmp_path)

    report = json.loads((tmp_path / "guidellm.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] >= 30
    assert totals["errored"] == 0


async def test_aiperf_measures_the_gateway(gateway: GatewayProcess, tmp_path: Path) -> None:
    ran("aiperf", gateway, tmp_path)

    exported = next(tmp_path.rglob("profile_export_aiperf.json"))
    report = json.loads(exported.read_text())
    assert report["request_count"]["avg"] == 40
    assert report["time_to_first_token"]["p50"] > 0
