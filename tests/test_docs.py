"""The documents keep their word: every command of the README runs, no setting is left out; links are in test_docs_commands.

A fenced `sh` or `python` block of the README is run here, in order, with addresses put in the place of the printed
ones: one gateway before one simulated engine stands for all of them. A block that is too much for that names, in a
comment just above it, the test that runs it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.control.presence import LEADER_VALID_S
from gateway.settings import Limits, Timeouts
from gateway.settings_file import read_file
from policies.schema import TokenLedgerSizing

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(?:<!-- (?P<test>\S+) -->\n)?```(?P<language>sh|python)\n(?P<text>.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of the README."""

    language: str
    text: str
    test: str


BLOCKS = [
    Block(found["language"], found["text"], found["test"] or "")
    for found in BLOCK.finditer((ROOT / "README.md").read_text())
]
RUN_HERE = [block for block in BLOCKS if not block.test]


def commands(text: str) -> list[str]:
    """The commands of a block, continued lines joined."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line]


@dataclass(frozen=True)
class Stand:
    """What stands in for the README's addresses."""

    engine_url: str
    public_url: str
    admin_url: str
    folder: Path

    def put_in(self, text: str) -> str:
        """The text with the stand's addresses and with the commands of this environment."""
        for printed, real in (
            ("http://127.0.0.1:8000", self.engine_url),
            ("http://127.0.0.1:8080", self.public_url),
            ("http://127.0.0.1:8081", self.admin_url),
        ):
            text = text.replace(printed, real)
        return re.sub(r"^curl ", "curl -sS --fail-with-body --max-time 20 ", text)


def started(args: list[str], pattern: str, folder: Path) -> tuple[subprocess.Popen[str], re.Match[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(pattern, line):
            return process, found
    raise AssertionError(f"{args}: {process.communicate()[1]}")


def ended(process: subprocess.Popen[str]) -> int:
    process.terminate()
    process.communicate(timeout=30)
    return process.returncode


SERVING = r"serving on (http://\S+), metrics on (http://\S+)/metrics"
ON_FREE_PORTS = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    folder = tmp_path_factory.mktemp("readme")
    engine, at = started(["simulate", "--listen", "127.0.0.1:0", "--model", "sim-8b"], r"listening on (\S+)", folder)
    try:
        gateway, urls = started(["serve", "--engine", at[1], *ON_FREE_PORTS], SERVING, folder)
        try:
            yield Stand(at[1], urls[1], urls[2], folder)
        finally:
            assert ended(gateway) == 0
    finally:
        ended(engine)


@pytest.mark.slow
@pytest.mark.parametrize("block", RUN_HERE, ids=lambda block: commands(block.text)[0][:50])
def test_a_block_of_the_readme_does_what_it_says(block: Block, stand: Stand) -> None:
    if block.language == "python":
        result = subprocess.run(
            [sys.executable, "-c", stand.put_in(block.text)], capture_output=True, text=True, timeout=30
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip()
        return
    for command in commands(block.text):
        told = run_command(stand.put_in(command), stand.folder)
        if "curl" in command:
            assert told.strip(), command


def run_command(command: str, folder: Path) -> str:
    """Run one line; a gateway that serves is one that says so, and ends when asked."""
    if command.startswith("headrace serve"):
        process, _ = started([*command.split()[1:], *ON_FREE_PORTS, "--state-dir", "other"], SERVING, folder)
        assert ended(process) == 0
        return ""
    line = re.sub(r"^headrace ", f"{sys.executable} -m gateway.cli ", command)
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, cwd=folder)
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    return result.stdout


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.test], ids=lambda block: block.test)
def test_a_block_that_is_run_elsewhere_names_a_test_that_is_there(block: Block) -> None:
    file, _, name = block.test.partition("::")

    assert f"def {name}(" in (ROOT / file).read_text()


def make(*args: str) -> subprocess.CompletedProcess[str]:
    """As from a shell, even where make itself runs these tests; with -n what it would do."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *args], capture_output=True, text=True, cwd=ROOT, timeout=20, env=environ)


def test_the_first_command_of_the_readme_is_the_demo() -> None:
    assert BLOCKS[0].text == "make demo\n"
    shown = make("-n", "demo", "ARGS=--for 20")
    assert shown.stdout.splitlines()[-1] == ".venv/bin/headrace demo --for 20", shown.stderr


def test_make_by_itself_lists_every_target_with_what_it_does() -> None:
    told = make().stdout
    phony = re.search(r"(?m)^\.PHONY: (.*)$", (ROOT / "Makefile").read_text())

    assert phony is not None
    assert {line.split()[1] for line in told.splitlines() if len(line.split()) > 2} == set(phony[1].split())


@pytest.mark.parametrize("target", ["help", "test", "lint", "bench", "simulate"])
def test_every_make_target_named_is_there(target: str) -> None:
    shown = make("-n", target)

    assert shown.returncode == 0, shown.stderr
    assert f"make {target}" in (ROOT / "README.md").read_text()


def test_the_settings_page_shows_a_file_that_can_be_read(tmp_path: Path) -> None:
    found = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "settings.md").read_text(), re.DOTALL)
    assert found is not None
    file = tmp_path / "headrace.yaml"
    file.write_text(found[1])

    settings = read_file(file, {"TGI_KEY": "k"})

    assert [engine.kind for engine in settings.engines] == ["auto", "tgi"]
    assert settings.timeouts == Timeouts()
    assert settings.limits == Limits()


def test_the_controller_page_tells_the_risk_of_running_out_of_memory_that_is_the_default() -> None:
    text = (ROOT / "docs" / "controller.md").read_text()

    assert re.findall(r"at a risk of ([\d.]+) %", text) == [f"{100 * TokenLedgerSizing().kv_risk:g}"]


def test_the_scale_page_tells_for_how_long_a_leader_s_record_is_valid() -> None:
    text = (ROOT / "docs" / "scale.md").read_text()

    assert re.findall(r"a record that is\s+valid for ([\d.]+) s", text) == [f"{LEADER_VALID_S:g}"]


def test_decisions_are_numbered_without_gaps_and_say_what_would_change_our_mind() -> None:
    records = sorted((ROOT / "docs" / "decisions").glob("*.md"))

    assert [int(record.name[:4]) for record in records] == list(range(1, len(records) + 1))
    for record in records:
        text = record.read_text()
        assert text.startswith(f"# {record.name[:4]}: ")
        assert all(
            f"- {part}:" in text
            for part in ("Status", "Context", "Decision", "Consequences", "What would change our mind")
        )
