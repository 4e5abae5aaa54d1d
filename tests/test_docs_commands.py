"""What pages tell a reader to type can be typed, and where they point there is something.

Blocks of the README are run (test_docs.py). Everywhere else a whole line of a block must be taken by the parser of our
commands; a mention in a sentence must name a command that there is, with options that it has. `make` needs its target,
`python` its module or file. Addresses of other people's pages are not visited.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.cli import parser

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"(?m)^```(\w*)\n(.*?)^```$", re.DOTALL)
IN_A_SENTENCE = re.compile(r"(?<!`)`([^`]+?)`(?!`)", re.DOTALL)
HEADING = re.compile(r"(?m)^#+ +(.+?)\s*$")
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
ASSIGNED = re.compile(r"[A-Z_]+=.*")
PATH = re.compile(r"(?:gateway|backends|policies|tests|deploy|grafana|docs)/[\w./-]*\w/?")
OURS = parser()
RUNNERS = {"python", "python3", ".venv/bin/python", "pytest"}


@dataclass(frozen=True)
class Command:
    """A command as it stands on a page; whole: a line of a block, else a mention in a sentence."""

    page: str
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def prose(document: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", document.read_text())


def commands() -> Iterator[Command]:
    """Everything that a page shows as something to type."""
    for document in DOCUMENTS:
        page = str(document.relative_to(ROOT))
        for language, text in FENCE.findall(document.read_text()):
            if language in {"sh", "console"}:
                yield from _lines(page, text, language)
        for said in IN_A_SENTENCE.findall(prose(document)):
            with contextlib.suppress(ValueError):  # a quotation mark alone: no command
                yield Command(page, _words(said), whole=False)


def _lines(page: str, text: str, language: str) -> Iterator[Command]:
    for line in text.replace("\\\n", " ").splitlines():
        if language == "console" and not line.startswith("$ "):
            continue  # what the command printed
        words = list(_words(line.removeprefix("$ ")))
        while "&&" in words:
            at = words.index("&&")
            yield Command(page, tuple(words[:at]), whole=True)
            words = words[at + 1 :]
        yield Command(page, tuple(words), whole=True)


def _words(text: str) -> tuple[str, ...]:
    """The words of a command, without assignments before it and redirections after it."""
    words = shlex.split(text, comments=True)
    while words and ASSIGNED.fullmatch(words[0]):
        del words[0]
    return tuple(words[: next((at for at, word in enumerate(words) if word[0:1] in {">", "|"}), len(words))])


def starting_with(*programs: str) -> list[Command]:
    found = {command for command in commands() if command.words[1:] and command.words[0] in programs}
    return sorted(found, key=str)


@pytest.mark.parametrize("command", starting_with("headrace"), ids=str)
def test_a_command_of_ours_is_one_that_there_is(command: Command) -> None:
    words = list(command.words[1:])
    if command.whole:
        assert refused(words) == ""
        return

    at = OURS
    while words and (choices := _subcommands(at)):
        assert words[0] in choices or words[0].startswith("--"), f"{words[0]}: expected one of {', '.join(choices)}"
        if words[0] not in choices:
            break
        at = choices[words.pop(0)]
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert options - set(at._option_string_actions) == set()


def refused(words: list[str]) -> str:
    """What the parser says against a whole command line; "" when it takes it."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        OURS.parse_args(words)
    return told.getvalue()


def _subcommands(of: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next((dict(action.choices) for action in of._actions if isinstance(action, argparse._SubParsersAction)), {})


@pytest.mark.parametrize("command", starting_with("make"), ids=str)
def test_what_make_is_asked_for_is_a_target(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text()

    for word in command.words[1:]:
        name, assigned, _ = word.partition("=")
        wanted = rf"(?m)^{name} \?=" if assigned else rf"(?m)^{re.escape(name)}:"
        assert re.search(wanted, makefile), f"the Makefile has no {name}"


@pytest.mark.parametrize("command", starting_with(*RUNNERS), ids=str)
def test_what_python_is_given_is_a_module_or_a_file(command: Command) -> None:
    program, what, *rest = command.words

    if what == "-m":
        assert importlib.util.find_spec(rest[0]) is not None
    else:
        assert program == "pytest" or what.endswith(".py")
        assert (ROOT / what.partition("::")[0]).exists()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(document: Path) -> None:
    broken = [
        f"{path}#{heading}"
        for path, heading in LINK.findall(prose(document))
        if not _leads_somewhere((document.parent / path) if path else document, heading)
    ]

    assert broken == []


def _leads_somewhere(path: Path, heading: str) -> bool:
    return path.exists() and (not heading or heading in _anchors(path))


def _anchors(path: Path) -> set[str]:
    """The names under which headings can be linked to, as code hosts make them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(prose(path))}


def _is_there(path: str) -> bool:
    return bool((ROOT / path).exists() or list(ROOT.glob(f"{path}.*")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_of_ours_that_is_named_is_there(document: Path) -> None:
    named = {said.partition("::")[0] for said in IN_A_SENTENCE.findall(prose(document)) if _is_path(said)}

    assert sorted(path for path in named if not _is_there(path)) == []


def _is_path(said: str) -> bool:
    return bool(PATH.fullmatch(said.partition("::")[0]))
