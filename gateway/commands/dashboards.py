"""`headrace dashboards`: write the dashboards, rules and alerts to a folder, or put the dashboards into a Grafana."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gateway.observe.shipped import PushRefused, export, push


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser("dashboards", help="Grafana dashboards, Prometheus rules and alerts")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    to_folder = actions.add_parser(
        "export", help="write dashboards, provisioning, scrape job, rules and alerts below a folder"
    )
    to_folder.add_argument("folder", metavar="DIR", type=Path, help="made if it is not there")
    to_grafana = actions.add_parser(
        "push",
        help="put the dashboards into a running Grafana",
        description="A service account's token is read from GRAFANA_TOKEN; without one no credentials are sent.",
    )
    to_grafana.add_argument("--grafana", metavar="URL", required=True, help="its address, e.g. http://127.0.0.1:3000")


def run(args: argparse.Namespace) -> int:
    """0, or 2 where the folder cannot be written or Grafana refuses."""
    try:
        if args.action == "export":
            told = [str(path) for path in export(args.folder)]
        else:
            token = os.environ.get("GRAFANA_TOKEN", "")
            told = push(args.grafana, {"authorization": f"Bearer {token}"} if token else {})
    except OSError as error:
        sys.stderr.write(f"headrace: {args.folder}: {error.strerror or error}; choose another folder\n")
        return 2
    except PushRefused as error:
        sys.stderr.write(f"headrace: {error}\n")
        return 2
    print("\n".join(told))
    return 0
