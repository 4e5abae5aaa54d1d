"""What a run's figures depend on, as one short hash: the code that it imports, its profiles, its cell and its traces.

A policy or bound that did not change is then not run again because another did: code of the contenders that a run does
not use is left out, though it is imported. Reads source files, and executes nothing.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.bench.cells import Cell

ROOT = Path(__file__).parents[2]
START = "gateway.bench.runs"
PACKAGES = ("gateway", "backends", "policies")
OURS_ONLY = frozenset({"policies.limits.token_ledger"})
BOUNDS_ONLY = frozenset({"gateway.bench.clairvoyant", "gateway.bench.foresight"})


def fingerprint(cell: Cell, *, ours: bool, bound: bool) -> str:
    """ours: run under `token_ledger`; bound: under the clairvoyant. Missing traces count as such."""
    left_out = (frozenset() if ours else OURS_ONLY) | (frozenset() if bound else BOUNDS_ONLY)
    digest = hashlib.sha256(_code(left_out))
    digest.update(json.dumps(cell.raw, sort_keys=True).encode())
    for path in cell.files:
        digest.update(_content(path))
    return digest.hexdigest()[:16]


@lru_cache(maxsize=8)
def _code(left_out: frozenset[str]) -> bytes:
    digest = hashlib.sha256()
    profiles = (ROOT / "backends/simulated/profiles").glob("*.json")
    for path in sorted({*_closure(START, left_out), *profiles}):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.digest()


@lru_cache(maxsize=32)
def _content(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"missing"


def _closure(start: str, left_out: Iterable[str]) -> set[Path]:
    """Files of all modules of ours that a module imports, and they, and so on."""
    seen = set(left_out)
    found: set[Path] = set()
    ahead = [start]
    while ahead:
        name = ahead.pop()
        path = _file(name)
        if name in seen or path is None:
            continue
        seen.add(name)
        found.add(path)
        ahead.extend(_imported(path))
    return found


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in PACKAGES)


def _file(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    if (path / "__init__.py").is_file():
        return path / "__init__.py"
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else None
