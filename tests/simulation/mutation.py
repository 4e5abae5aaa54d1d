"""The gateway with one of its checks taken out: a line of its source is replaced for the time of one run.

A mutant is a small edit, written as the text before and after, of one function or of one constant. The function is
compiled anew from the edited source in its own module, so that a mutant is exactly what a mistaken commit would be. When
the text is not found exactly once, the check has moved, and its mutant has to be written again.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import io
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.simulation.faults import Kind
from tests.simulation.invariants import Invariant, InvariantBroken
from tests.simulation.world import simulate


@dataclass(frozen=True, slots=True)
class Mutant:
    """One check that is taken out.

    name      says what the gateway does without it
    where     module:Class.function, or module:CONSTANT
    check     text in that function that does the check; for a constant, what it is
    without   what stands there instead; for a constant, the value as Python text
    breaks    the invariant that is found broken, or what is raised; None: nothing, for another check stands behind
    seed      of a run in which that is found
    scene     the kind of that run, or a scene's name
    """

    name: str
    where: str
    check: str
    without: str
    breaks: Invariant | type[BaseException] | None
    seed: int
    scene: str = Kind.STORM

    def __str__(self) -> str:
        return self.name


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Run the block with the check taken out. Raises LookupError when it is not where the mutant says."""
    module_name, _, path = mutant.where.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for one in owners:
        owner = getattr(owner, one)
    found = inspect.getattr_static(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(found, int | float):
            if found != type(found)(mutant.check):
                raise LookupError(
                    f"mutant {mutant.name!r}: {mutant.where} is {found}, expected {mutant.check}; write it anew"
                )
            patch.setattr(owner, name, type(found)(mutant.without))
        else:
            # Its code and not the function: other modules may have imported it by name.
            function = _plain(found)
            patch.setattr(function, "__code__", _edited(function, mutant))
        yield


def caught(mutants: Iterable[Mutant], seed: int, kind: str) -> BaseException | None:
    """What a seed shows without all of these checks; None when it passes."""
    found: BaseException | None = None
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder, _abandoning():
        for mutant in mutants:
            stack.enter_context(mutated(mutant))
        try:
            simulate(seed, Path(folder), kind)
        except Exception as error:  # an invariant, or whatever else breaks without the check
            found = error.with_traceback(None)
            found.__cause__ = found.__context__ = None
    return found


@contextmanager
def _abandoning() -> Iterator[None]:
    """A run that fails leaves sockets and tasks behind: let them go here, and say nothing of it."""
    hook = sys.unraisablehook
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        sys.unraisablehook = lambda _: None
        try:
            yield
            gc.collect()
        finally:
            sys.unraisablehook = hook


def breaks(error: BaseException | None) -> Invariant | type[BaseException] | None:
    """Which invariant it was; of what else was raised, its type."""
    if isinstance(error, InvariantBroken):
        return error.invariant
    return None if error is None else type(error)


def _edited(function: Any, mutant: Mutant) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    times = source.count(mutant.check)
    if times != 1:
        raise LookupError(
            f"mutant {mutant.name!r}: {mutant.check!r} stands {times} times in {mutant.where}, expected once;"
            " name the check anew where it stands now, or drop the mutant with its check"
        )
    local: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace(mutant.check, mutant.without)
    exec(compile(code, f"<{mutant.name}>", "exec"), function.__globals__, local)  # noqa: S102
    edited: CodeType = _plain(local[function.__name__]).__code__
    return edited


def _plain(found: Any) -> Any:
    """The function that a property or a class method is made of."""
    return found.fget if isinstance(found, property) else getattr(found, "__func__", found)
