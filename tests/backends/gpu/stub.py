"""The NVML library without a GPU (nvml_stub.c): built, put before the real pynvml, and told what to play."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

SOURCE: Final = Path(__file__).with_name("nvml_stub.c")
ROOT: Final = Path(__file__).parents[3]
SONAME: Final = "libnvidia-ml.so.1"


class Stub:
    """What the library plays. Takes effect at the next call, in whatever process reads the file."""

    def __init__(self, rules: Path) -> None:
        self._rules = rules
        self.play()

    @property
    def environ(self) -> dict[str, str]:
        return {"NVML_STUB": str(self._rules)}

    def play(self, *rules: str) -> None:
        """Play these rules and nothing else; without any: one healthy card."""
        beside = self._rules.with_suffix(".new")
        beside.write_text("".join(f"{rule}\n" for rule in rules))
        beside.replace(self._rules)


def build(folder: Path, *defines: str) -> Path:
    """The library in a folder of its own, fit for LD_LIBRARY_PATH; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: the NVML stub cannot be built")
    library = folder / SONAME
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-Wl,-soname,{SONAME}", *defines, "-o", str(library), str(SOURCE)], check=True
    )
    return library


def environ(library: Path | None, stub: Stub | None = None) -> dict[str, str]:
    """The environment of a process that finds this library, or none."""
    inherited = {name: value for name, value in os.environ.items() if name not in {"NVML_STUB", "CUDA_VISIBLE_DEVICES"}}
    folder = "/nonexistent" if library is None else str(library.parent)
    return {**inherited, "LD_LIBRARY_PATH": folder, **({} if stub is None else stub.environ)}


def python(code: str, env: dict[str, str], *, timeout_s: float = 20.0) -> str:
    """What a fresh Python prints that runs this code."""
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
