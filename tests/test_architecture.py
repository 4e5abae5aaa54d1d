"""The rules of docs/architecture.md that a machine can check: who may import whom, and what the decision core may not.

The arrows are read from the source text, so that a late import inside a function counts too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("gateway", "backends", "policies")
MAY_IMPORT = {"policies": {"policies"}, "backends": {"backends"}, "gateway": set(PACKAGES)}
IMPURE = frozenset(
    {
        "aiohttp", "asyncio", "concurrent", "http", "httpx", "logging", "multiprocessing", "os", "pynvml", "random",
        "redis", "requests", "secrets", "select", "selectors", "signal", "socket", "ssl", "structlog", "subprocess",
        "threading", "time", "urllib3", "uuid", "uvloop",
    }
)  # fmt: skip
VAGUE_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "misc", "manager"})
SOURCES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, anywhere in it."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            yield node.lineno, node.module or ""


def calls(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every call by name."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_package_imports_only_what_its_arrow_allows(path: Path) -> None:
    wrong = [
        f"{path}:{line}: imports {name}"
        for line, name in imports(path)
        if name.partition(".")[0] in {*PACKAGES, "tests"} - MAY_IMPORT[path.parts[0]]
    ]

    assert wrong == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[0] == "policies"], ids=str)
def test_the_decision_core_has_no_clock_no_chance_and_no_io(path: Path) -> None:
    imported = [f"{path}:{line}: imports {name}" for line, name in imports(path) if name.partition(".")[0] in IMPURE]
    awaited = [
        f"{path}:{node.lineno}: {type(node).__name__}"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith)
    ]
    opened = [f"{path}:{line}: calls {name}" for line, name in calls(path) if name in {"open", "input", "print"}]

    assert imported + awaited + opened == []


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_every_file_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(parsed(path))

    assert docstring, f"{path}: has no docstring; say what it is, then why"
    assert docstring.splitlines()[0].rstrip()[-1] in ".:", f"{path}: the first line is no sentence"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_file_is_a_drawer_for_everything(path: Path) -> None:
    assert path.stem not in VAGUE_NAMES


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_every_task_has_an_owner_and_no_state_is_global(path: Path) -> None:
    bare = [
        f"{path}:{line}: {name}"
        for line, name in calls(path)
        if name in {"asyncio.create_task", "asyncio.ensure_future", "asyncio.gather"}
    ]
    declared_global = [
        f"{path}:{node.lineno}: global" for node in ast.walk(parsed(path)) if isinstance(node, ast.Global)
    ]

    assert bare + declared_global == []


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_promise_stands_for_code(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")

    assert [word for word in ("TODO", "FIXME", "XXX", "NotImplementedError") if word in text] == []


def test_the_composition_roots_alone_make_a_queue() -> None:
    makers = {
        str(path)
        for path in SOURCES
        for _, name in imports(path)
        if name in {"gateway.queue.redis_queue", "gateway.queue.memory_queue"}
        and path.parts[:2] != ("gateway", "queue")
    }

    assert makers == {"gateway/app.py", "gateway/replay/world.py"}
