"""The stub library in this process: loaded first under its name, so that pynvml's own loading finds it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.gpu.nvml import NvmlThread
from tests.backends.gpu.stub import Stub, build


class Ticks:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, by_s: float) -> None:
        self.now_s += by_s


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built stub, loaded into this process too."""
    path = build(tmp_path_factory.mktemp("nvml"))
    ctypes.CDLL(str(path))
    return path


@pytest.fixture
def stub(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """One healthy card, until told otherwise."""
    made = Stub(tmp_path / "rules")
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


@pytest.fixture
def thread(ticks: Ticks) -> Iterator[NvmlThread]:
    made = NvmlThread(ticks)
    yield made
    made.close()
