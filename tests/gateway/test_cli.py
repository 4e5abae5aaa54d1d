"""The command line as a process sees it: exit codes, and one clear line for each mistake."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from gateway import cli, commands
from gateway.addresses import AddressError
from gateway.cli import COMMANDS, main
from gateway.errors import StartError
from gateway.settings_file import SettingsError
from policies import presets
from policies.yaml_source import DocumentError, Problem

PRESET = Path(presets.__path__[0]) / "balanced.yaml"


def headrace(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *args],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, **environ},
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | int], int]:
    """Run a command that ends so."""

    def ends(end: BaseException | int) -> int:
        module = ModuleType("gateway.commands.serve")

        def run(_args: object) -> int:
            if isinstance(end, BaseException):
                raise end
            return end

        module.add_parser = lambda subparsers: subparsers.add_parser("serve")  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "gateway.commands.serve", module)
        return main(["serve"])

    return ends


def test_the_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"headrace {version('headrace')}\n"


def test_every_module_of_commands_is_a_command() -> None:
    files = {path.stem.replace("_", "-") for path in Path(commands.__path__[0]).glob("*.py")} - {"--init--"}

    assert files == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])

    assert ended.value.code == 0
    assert f"headrace {name}" in capsys.readouterr().out


def test_only_the_command_named_is_imported() -> None:
    source = "import sys, gateway.cli; gateway.cli.main(['key', 'new', 't']); print('aiohttp.web' in sys.modules)"

    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30)

    assert result.stdout.splitlines()[-1] == "False", result.stderr


def test_an_interrupt_while_a_command_is_loaded_is_one_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_name: str) -> ModuleType:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)

    assert main(["serve"]) == cli.INTERRUPTED


def test_nothing_slow_is_loaded_before_an_interrupt_is_understood() -> None:
    source = (
        "import sys, gateway.cli; print([name for name in ('aiohttp', 'pydantic', 'orjson') if name in sys.modules])"
    )

    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30)

    assert result.stdout == "[]\n", result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("args", [("key", "new", "t"), ("policy", "show", str(PRESET))])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_ends_a_command_quietly(args: tuple[str, ...], unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    try:
        result = subprocess.run(
            [sys.executable, "-m", "gateway.cli", *args],
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=30,
            env=environ,
        )
    finally:
        os.close(writing)

    assert result.returncode == cli.UNREAD
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_commands_exit_code_is_the_processs(command: Callable[[BaseException | int], int], code: int) -> None:
    assert command(code) == code


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SettingsError("engines: none given"), "headrace: engines: none given\n"),
        (AddressError("listen address 'x'"), "headrace: listen address 'x'\n"),
        (
            DocumentError([Problem("f.yaml", 3, "a", "1", "must be 2"), Problem("f.yaml", 4, "b", "1", "must be 2")]),
            "headrace: f.yaml:3: a is 1; must be 2\nheadrace: f.yaml:4: b is 1; must be 2\n",
        ),
        (
            ExceptionGroup("g", [ExceptionGroup("g", [OSError(errno.EADDRINUSE, "listen 127.0.0.1:1: taken")])]),
            "headrace: listen 127.0.0.1:1: taken\n",
        ),
        (OSError(errno.EADDRINUSE, "listen 127.0.0.1:1: taken"), "headrace: listen 127.0.0.1:1: taken\n"),
        (StartError("redis_url redis://h: not reachable"), "headrace: redis_url redis://h: not reachable\n"),
    ],
)
def test_an_operators_mistake_is_plain_lines_and_exit_code_2(
    command: Callable[[BaseException | int], int],
    error: Exception,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(error) == 2
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    "bug",
    [
        ValueError("bug"),
        OSError(errno.ENOSPC, "disk full"),
        ExceptionGroup("g", [SettingsError("theirs"), KeyError("ours")]),
    ],
)
def test_a_bug_keeps_its_traceback(command: Callable[[BaseException | int], int], bug: Exception) -> None:
    with pytest.raises(type(bug)):
        command(bug)


def test_an_interrupt_ends_with_the_shells_code(command: Callable[[BaseException | int], int]) -> None:
    assert command(KeyboardInterrupt()) == cli.INTERRUPTED


@pytest.mark.parametrize(
    ("args", "usage"),
    [
        (["check", "engines", "http://gpu1:8000"], "usage: headrace check engines [-h]"),
        (["check", "engines", "--engin", "http://gpu1:8000", "--nope"], "usage: headrace check engines [-h]"),
        (["bench", "fidelity", "--data", "x"], "usage: headrace bench fidelity [-h]"),
        (["key", "new", "--tenant", "t", "more"], "usage: headrace key new [-h]"),
    ],
)
def test_what_a_subcommand_does_not_know_is_told_with_its_own_usage(
    args: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)

    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith(usage)
    assert "unrecognized arguments: " in told.splitlines()[-1]


@pytest.mark.slow
def test_serving_nothing_is_refused_in_one_line() -> None:
    result = headrace("serve")

    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "headrace: engines: none given; add --engine http://HOST:PORT, or an engines list to --config FILE\n"
    )


@pytest.mark.slow
def test_a_bad_settings_file_is_told_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text("engins: []\nlisten: 8080\n")

    result = headrace("serve", "--config", str(file))

    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert lines[0].endswith("headrace.yaml:1: engins is unknown; did you mean engines?")
    assert ":2: listen is 8080" in lines[1]
    assert len(lines) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "value", "workers", "told"),
    [
        ("--state-dir", "taken", "1", "taken: cannot be used (File exists); make room, or give another\n"),
        ("--keys", "nowhere.yaml", "2", "nowhere.yaml: there is no such file; correct the path, or write the file\n"),
        ("--keys", "binary.yaml", "1", "binary.yaml:1: byte 1 is not UTF-8; save the file as UTF-8\n"),
        *(
            (
                "--redis-url",
                "redis://u:hunter2@127.0.0.1:1/0?foo=bar",
                workers,
                "redis-py does not take all its options after the ?; correct them, or leave them out\n",
            )
            for workers in ("1", "2")
        ),
        (
            "--redis-url",
            "redis://u:hunter2@127.0.0.1:1",
            "1",
            "127.0.0.1:1: queue store is not reachable; correct it, or start the server\n",
        ),
    ],
)
def test_what_a_start_needs_and_cannot_have_is_told_in_one_line(
    tmp_path: Path, flag: str, value: str, workers: str, told: str
) -> None:
    (tmp_path / "taken").touch()
    (tmp_path / "binary.yaml").write_bytes(b"\xff")
    given = value if "://" in value else str(tmp_path / value)
    free = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state"))
    quiet = ("--log-level", "error", "--workers", workers)

    result = headrace("serve", "--engine", "http://127.0.0.1:1", *free, *quiet, flag, given)

    assert result.returncode == 2
    assert result.stderr.splitlines(keepends=True)[0].endswith(told)
    assert "Traceback" not in result.stderr
    assert "hunter2" not in result.stderr


def test_no_secret_of_a_flag_is_repeated() -> None:
    result = headrace("serve", "--engine", "http://u:hunter2@h", HEADRACE_REDIS_URL="redis://:hunter2@h")

    assert result.returncode == 2
    assert "hunter2" not in result.stdout + result.stderr


def test_the_module_can_be_run_as_a_script() -> None:
    tree = ast.parse(Path(cli.__file__).read_text())

    assert "sys.exit(main())" in ast.unparse(tree.body[-1])
