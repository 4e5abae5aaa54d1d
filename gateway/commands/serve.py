"""`headrace serve`: the gateway, until it is told to stop.

The first SIGTERM or Ctrl-C drains: no new work, running answers finish (bounded by `timeouts.drain_s`), exit code 0. A
second one ends at once, streams and all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys

import uvloop

from gateway.app import Gateway
from gateway.logs import Log, open_logs
from gateway.settings import Settings
from gateway.settings_file import add_arguments, describe, settings_from
from gateway.stop_signals import stop_signals


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
    settings = settings_from(args, os.environ)
    allow_open_files(2 * settings.limits.connections_max)
    logs = open_logs(log_format=settings.log_format, log_level=settings.log_level)
    logs.adopt_stdlib()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(settings, logs.log))
    finally:
        logs.close()


def allow_open_files(wanted: int) -> None:
    """Raise the soft limit of open files towards `wanted`, as far as the hard limit lets us: each stream needs two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def serve(settings: Settings, log: Log) -> int:
    """Run the gateway until the first stop signal, then drain it; 0, or 1 where a second signal cut that short."""
    with stop_signals() as (first, second):
        log.info("starting", settings=describe(settings))
        async with Gateway(settings, log=log) as gateway:
            log.info("serving", public=gateway.public_url, admin=gateway.admin_url)
            sys.stdout.write(f"serving on {gateway.public_url}, metrics on {gateway.admin_url}/metrics\n")
            sys.stdout.flush()
            await first.wait()
            log.info("draining", at_most_s=settings.timeouts.drain_s)
            return 0 if await _drained(gateway, second) else 1


async def _drained(gateway: Gateway, second: asyncio.Event) -> bool:
    """True when all that ran has ended; False when the second signal came first."""
    async with asyncio.TaskGroup() as group:
        drain = group.create_task(gateway.drain())
        hurry = group.create_task(second.wait())
        await asyncio.wait([drain, hurry], return_when=asyncio.FIRST_COMPLETED)
        finished = drain.done()
        drain.cancel()
        hurry.cancel()
    return finished
