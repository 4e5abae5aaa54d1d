"""`headrace serve`: the gateway, until it is told to stop.

The first SIGTERM or Ctrl-C drains: no new work, running answers finish (bounded by `timeouts.drain_s`), exit code 0. A
second one ends at once, streams and all.

With `--workers N` the same holds for all processes together, and SIGHUP replaces them one by one
(`gateway.workers.supervisor`). A single process has nobody to take its place: it says so, and goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import uvloop

from gateway.app import Gateway
from gateway.logs import Log, open_logs
from gateway.settings import Settings
from gateway.settings_file import add_arguments, describe, settings_from
from gateway.stop_signals import finished_before, stop_signals

CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""Quota and period in microseconds of the container that we are in (cgroup version 2)."""

SPARE_FILES = 64
"""Open files for all but streams: the log, the listeners, Redis, samples of engines, files read anew."""

USAGE = 2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "serve",
        help="run the gateway in front of your engines",
        epilog="environment: HEADRACE_REDIS_URL, HEADRACE_KEYS_FILE, HEADRACE_ENGINE_API_KEY",
    )
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    given = settings_from(args, os.environ)
    files = allow_open_files(2 * given.limits.connections_max + SPARE_FILES)
    settings = within_open_files(given, files)
    workers = settings.workers or cores()
    logs = open_logs(log_format=settings.log_format, log_level=settings.log_level)
    logs.adopt_stdlib()
    if settings != given:
        logs.log.info("few open files are allowed", files=files, connections_max=settings.limits.connections_max)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if workers == 1:
                return runner.run(serve(settings, logs.log))
            return runner.run(
                supervise(
                    settings, logs.log, workers, lambda: within_open_files(settings_from(args, os.environ), files)
                )
            )
    finally:
        logs.close()


def allow_open_files(wanted: int) -> int:
    """Raise the soft limit of open files towards `wanted`, as far as the hard limit lets us, and return what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def within_open_files(settings: Settings, files: int) -> Settings:
    """The settings with no more connections than that many open files can carry, two for each stream.

    A connection past `connections_max` is answered 503; one past the open files is reset by the system, unlogged.
    """
    connections_max = max(1, (files - SPARE_FILES) // 2)
    if settings.limits.connections_max <= connections_max:
        return settings
    return replace(settings, limits=replace(settings.limits, connections_max=connections_max))


def cores() -> int:
    """Cores that this process may use: by affinity, and by the container's quota, rounded up."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = CGROUP_CPU_MAX.read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, -(-int(quota) // int(period))))


async def supervise(settings: Settings, log: Log, workers: int, reread: Callable[[], Settings]) -> int:
    """Run the gateway in several processes; see `gateway.workers.supervisor`. 2: one of them did not start."""
    from gateway.workers.crew import ProcessRefused
    from gateway.workers.supervisor import Supervisor

    code = USAGE
    try:
        code = await Supervisor(settings, workers=workers, log=log, reread=reread).run()
    except* ProcessRefused as refused:
        first: BaseException = refused
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        log.error("not started", reason=str(first))  # noqa: TRY400 - its traceback says nothing more
    return code


async def serve(settings: Settings, log: Log) -> int:
    """Run the gateway until the first stop signal, then drain it; 0, or 1 where a second signal cut that short."""
    with stop_signals() as (first, second), _bearing_hangups(log):
        log.info("starting", settings=describe(settings))
        async with Gateway(settings, log=log) as gateway:
            log.info("serving", public=gateway.public_url, admin=gateway.admin_url)
            sys.stdout.write(f"serving on {gateway.public_url}, metrics on {gateway.admin_url}/metrics\n")
            sys.stdout.flush()
            await first.wait()
            begun_s = time.monotonic()
            log.info("draining", at_most_s=settings.timeouts.drain_s)
            finished = await finished_before(second, gateway.drain())
            cut = gateway.ingress.in_flight
        log.info("stopped", requests_cut=cut, took_s=round(time.monotonic() - begun_s, 3))
        return 0 if finished else 1


@contextmanager
def _bearing_hangups(log: Log) -> Iterator[None]:
    """SIGHUP asks for a reload, as it does of workers, and must not end what runs."""
    loop = asyncio.get_running_loop()
    told = "one process alone takes settings only at a start; policy and keys are read anew by themselves"
    loop.add_signal_handler(signal.SIGHUP, lambda: log.warning("settings not read again", reason=told))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
