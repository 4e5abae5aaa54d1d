"""The unit and the DaemonSet of the GPU exporter start a command that there is, on the port that they name."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from backends.gpu.throttle import BY_HARDWARE, HARMLESS
from gateway.commands import gpu_exporter
from gateway.instruments import INSTRUMENTS

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "headrace-gpu-exporter.service"
DAEMON_SET = ROOT / "deploy" / "kubernetes" / "gpu-exporter-daemonset.yaml"


def parsed(command: list[str]) -> argparse.Namespace:
    """The arguments of a `headrace` command line, as the command itself reads them."""
    parser = argparse.ArgumentParser()
    gpu_exporter.add_parser(parser.add_subparsers())
    program, *args = command
    assert Path(program).name == "headrace"
    return parser.parse_args(args)


@pytest.mark.parametrize("options", ["", "--devices 0 GPU-8932f937"])
def test_the_unit_starts_the_exporter(options: str) -> None:
    text = UNIT.read_text()
    listen = re.search(r"(?m)^Environment=LISTEN=(.*)$", text)
    start = re.search(r"(?m)^ExecStart=(.*)$", text)
    assert listen is not None
    assert start is not None

    args = parsed(shlex.split(start[1].replace("${LISTEN}", listen[1]).replace("$OPTIONS", options)))

    assert args.listen == "0.0.0.0:9400"
    assert args.devices == (["0", "GPU-8932f937"] if options else None)


def container() -> dict[str, Any]:
    (found,) = YAML(typ="safe").load(DAEMON_SET)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_the_daemon_set_starts_the_exporter_on_the_port_that_it_opens() -> None:
    args = parsed(container()["command"])

    (port,) = container()["ports"]
    assert args.listen == f"0.0.0.0:{port['containerPort']}"
    assert port["hostPort"] == port["containerPort"]


def test_the_daemon_set_runs_without_rights() -> None:
    context = container()["securityContext"]

    assert context["runAsNonRoot"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}


def test_the_daemon_set_selects_the_pods_that_it_makes() -> None:
    spec = YAML(typ="safe").load(DAEMON_SET)["spec"]

    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_the_gpu_page_names_every_gpu_metric() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    told = page.replace("{total,used,free,reserved}", "total")

    names = {row.name for row in INSTRUMENTS if row.name.startswith("headrace_gpu_")}
    memory = {f"headrace_gpu_memory_{part}_bytes" for part in ("total", "used", "free", "reserved")}
    assert [name for name in sorted(names - memory | {"headrace_gpu_memory_total_bytes"}) if name not in told] == []


def test_what_brakes_the_hardware_is_never_harmless() -> None:
    assert not BY_HARDWARE & HARMLESS
