"""`headrace check engines`: what each engine tells, which need of the controller that serves, and what is missing.

It asks the engines themselves, not a running gateway, as the settings of `headrace serve` name them: twice, since a
counter that does not move and a page that comes late show only then. Nothing is generated unless `--try` says so.

Exit code 0 when nothing is wrong, 1 when an engine cannot serve or tells something wrong, 2 for settings that cannot be used.
What an engine merely does not tell is shown with what stands in for it, and is no failure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson
from rich.console import Console
from rich.table import Table

from backends.base import BackendError, EngineAddress
from backends.connection import EnginePool
from backends.detect import detect, make_backend
from backends.openai_compatible import OpenAICompatible
from gateway.control.needs import PROBLEMS, Finding, Row, as_plain, findings, meaning_of, rows
from gateway.control.poller import TRIAL_S
from gateway.control.roster import Engine
from gateway.dispatch.ledger import EngineLedger
from gateway.settings import EngineSettings, Settings
from gateway.settings_file import add_engine_arguments, engines_from

APART_S = 1.0
UNCUT_WIDTH = 10_000
"""In columns, where no terminal has a width: names of metrics stay whole for whoever reads lines."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser("check", help="look at the engines: what they tell, and what is missing")
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    engines = kinds.add_parser("engines", help="ask each engine of the settings")
    add_engine_arguments(engines)
    engines.add_argument("--json", action="store_true", help="one JSON document")
    engines.add_argument("--try", dest="trial", action="store_true", help="have each engine make one token")


def run(args: argparse.Namespace) -> int:
    """Ask all, tell all."""
    settings = engines_from(args, os.environ)
    checked = asyncio.run(check_all(settings, trial=args.trial))
    if args.json:
        print(orjson.dumps([_plain(one) for one in checked], option=orjson.OPT_INDENT_2).decode())
    else:
        show(checked)
    return 0 if all(one.sound for one in checked) else 1


@dataclass(frozen=True, slots=True)
class Checked:
    """One engine. problem: why it cannot serve, "" when it can."""

    name: str
    kind: str
    version: str
    models: tuple[str, ...]
    priority: str
    problem: str
    table: Sequence[Row] = ()
    found: tuple[tuple[Finding, str], ...] = ()

    @property
    def sound(self) -> bool:
        """It serves, and what it tells can be believed."""
        return not self.problem and not any(finding in PROBLEMS for finding, _ in self.found)


async def check_all(settings: Settings, *, trial: bool) -> list[Checked]:
    """All engines at once, in the order of the settings."""
    connect_s = settings.timeouts.connect_s
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_check(engine, connect_s, trial=trial)) for engine in settings.engines]
    return [task.result() for task in tasks]


async def _check(settings: EngineSettings, connect_s: float, *, trial: bool) -> Checked:
    address = EngineAddress(settings.name, settings.url, settings.api_key, connect_s=connect_s)
    pool = EnginePool(address)
    elsewhere = None
    if settings.metrics_url is not None:
        elsewhere = EnginePool(replace(address, base_url=settings.metrics_url, api_key=None))
    kind = await detect(pool, metrics_pool=elsewhere) if settings.kind == "auto" else settings.kind
    if kind is None:
        backend = OpenAICompatible(address, pool, metrics=elsewhere)
        reason = (await backend.probe()).detail or "it began to answer just now"
        await backend.close()
        return Checked(settings.name, "unknown", "", (), "", f"does not answer as an engine: {reason}")
    backend = make_backend(kind, address, pool, priority_honoured=settings.priority, metrics_pool=elsewhere)
    engine = Engine(settings, EngineLedger(), APART_S, backend=backend)
    try:
        problem = await _listen(engine)
        if trial and not problem:
            problem = await backend.try_generation(TRIAL_S)
    finally:
        await backend.close()
    now_s = time.monotonic()
    view = engine.view(now_s)
    return Checked(
        settings.name,
        kind,
        engine.version,
        tuple(sorted(engine.models)),
        meaning_of(backend.capabilities.priority),
        problem,
        rows(engine, view),
        tuple(findings(engine, view, engine.frozen).items()),
    )


async def _listen(engine: Engine) -> str:
    """Two polls; why the engine cannot serve, "" when it can. A sample that fails leaves its findings to tell."""
    backend = engine.backend
    assert backend is not None
    for again in (False, True):
        if again:
            await asyncio.sleep(APART_S)
        probe = await backend.probe()
        engine.heard(probe, time.monotonic())
        if not probe.ready:
            return probe.detail
        try:
            engine.sampled(await backend.sample(), time.monotonic())
        except BackendError as error:
            engine.detail = str(error)
    return ""


def _plain(one: Checked) -> dict[str, object]:
    return {
        "name": one.name,
        "kind": one.kind,
        "version": one.version,
        "models": list(one.models),
        "priority": one.priority,
        "problem": one.problem,
        "sound": one.sound,
        **as_plain(one.table, {finding.value: text for finding, text in one.found}),
    }


def show(checked: Sequence[Checked]) -> None:
    """For people, and for whoever reads lines."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=UNCUT_WIDTH)
    for one in checked:
        told = f"{one.kind} {one.version}".strip()
        console.print(
            f"[bold]{one.name}[/bold]  {told}  models: {', '.join(one.models) or 'none'}  priority: {one.priority}"
        )
        if one.problem:
            console.print(f"  [red]cannot serve[/red]: {one.problem}", soft_wrap=True)
        table = Table(box=None, padding=(0, 2, 0, 2), show_edge=False)
        for heading in ("need", "now", "quality", "from", "without it"):
            table.add_column(heading, overflow="fold")
        for row in one.table:
            value = "" if row.value is None else f"{row.value:.10g}"
            table.add_row(row.need, value, row.quality.value, row.source, row.instead)
        if one.table:
            console.print(table)
        for finding, text in one.found:
            colour = "red" if finding in PROBLEMS else "yellow"
            console.print(f"  [{colour}]{finding.value}[/{colour}]: {text}", soft_wrap=True)
