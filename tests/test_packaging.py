"""The wheel, built and installed elsewhere: what it owns, what is inside, and that its command works from there.

Offline: the build backend and every dependency come from the environment that runs the tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"gateway", "backends", "policies"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(build, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has only the wheel and, by path, this environment's dependencies."""
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(folder, with_pip=False)
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    flags = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    result = subprocess.run([*pip, *flags, str(wheel)], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    (purelib / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run(program: Path, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Without PYTHONPATH, by which another tree's modules would be found in place of those installed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([str(program), *args], capture_output=True, text=True, timeout=60, cwd=cwd, env=env)


def test_the_wheel_owns_exactly_our_three_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()

    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_everything_beside_the_code_is_inside(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    in_tree = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    assert {name for name in inside if name.partition("/")[0] in PACKAGES} == in_tree
    for pattern in (
        r"gateway/queue/scripts/\w+\.lua",
        r"policies/presets/balanced\.yaml",
        r"gateway/demo/data/azure_conv_10min\.csv",
        r"backends/simulated/profiles/\w+\.json",
        r"gateway/bench/data/cells\.json",
        r"gateway/bench/data/traces/[\w-]+\.(csv|jsonl\.gz)",
    ):
        assert any(re.fullmatch(pattern, name) for name in inside), pattern


def test_the_wheel_brings_a_working_command(installed: Path, tmp_path: Path) -> None:
    shown = run(installed / "headrace", "--version", cwd=tmp_path)
    made = run(installed / "headrace", "policy", "init", "policy.yaml", cwd=tmp_path)
    checked = run(installed / "headrace", "policy", "check", "policy.yaml", cwd=tmp_path)
    where = run(installed / "python", "-c", "import gateway; print(gateway.__file__)", cwd=tmp_path)

    assert (shown.stdout, shown.returncode) == (f"headrace {version('headrace')}\n", 0), shown.stderr
    assert made.returncode == checked.returncode == 0, made.stderr + checked.stdout + checked.stderr
    assert str(installed.parent) in where.stdout


def test_what_the_code_reads_beside_itself_is_found_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    source = """
import gateway.queue, pathlib
from backends.simulated.profiles import PROFILES_DIR, load_profile
from backends.simulated.tokenizer import shipped_tokenizer
from gateway.bench.cells import load_cells, shipped_data
from gateway.demo.workload import conversation, summarisation
from gateway.queue.lua import load as load_script
from policies import presets
next(conversation()), next(summarisation()), shipped_tokenizer()
for cell in load_cells(shipped_data()): cell.workload(1)
for name in presets.PRESETS: presets.load(name)
for path in PROFILES_DIR.glob("*.json"): load_profile(path.stem)
for path in (pathlib.Path(gateway.queue.__path__[0]) / "scripts").glob("*.lua"): load_script(path.stem)
"""

    result = run(installed / "python", "-c", source, cwd=tmp_path)

    assert result.returncode == 0, result.stderr


def test_every_dependency_is_pinned_to_a_version_that_satisfies_it() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = {canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in lines)}

    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert lines == sorted(lines)
