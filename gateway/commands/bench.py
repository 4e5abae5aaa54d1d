"""`headrace bench NAME`: how good the product is, measured. `gateway.bench.NAME_command` describes and runs each.

Each prints what it measured, also where that falls short, and exits with 0: it reports and does not judge.
"""

from __future__ import annotations

import argparse
import importlib

BENCHMARKS = ("fidelity", "scheduling", "curve", "real")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its benchmarks."""
    parser = subparsers.add_parser("bench", help="run a benchmark", description="Run a benchmark of the product.")
    benchmarks = parser.add_subparsers(metavar="BENCHMARK", required=True)
    for name in BENCHMARKS:
        module = importlib.import_module(f"gateway.bench.{name}_command")
        module.add_parser(benchmarks)
        benchmarks.choices[name].set_defaults(benchmark=module.run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark named."""
    return int(args.benchmark(args))
