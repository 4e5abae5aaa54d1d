"""What is in deploy/ is read here as its users' tools read it: hadolint, Docker Compose, Helm's own code, Kubernetes' schemas,
systemd. Settings and policies found there are read by the gateway's own readers. Images are not built.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gateway.settings_file import read_file
from policies.document import parse

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TOOLS = ROOT / ".venv" / "deploy" / "bin"
KUBERNETES = "1.35"
ENGINE = {"name": "vllm-0", "url": "http://vllm-0.vllm:8000", "kind": "vllm"}
SPARSE: Mapping[str, Any] = {"engines": [ENGINE]}
FULL: Mapping[str, Any] = {
    "engines": [ENGINE],
    "keys": {"existingSecret": "team-keys"},
    "policy": {"version": 1, "classes": {"interactive": {"ttft_sla_s": 1.0}, "bulk": {}}},
    "settings": {"aliases": {"gpt-4o": "m"}, "timeouts": {"total_s": 900}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboards": {"enabled": True},
    "ingress": {"enabled": True, "host": "llm.example", "tlsSecret": "llm-tls", "className": "nginx"},
    "networkPolicy": {"monitoring": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    "keda": {
        "enabled": True,
        "engines": [
            {"name": "vllm", "engines": "vllm-.*", "maxReplicas": 4, "inFlightPerReplica": 48},
            {"name": "big", "kind": "LeaderWorkerSet", "engines": "big-.*", "maxReplicas": 2, "inFlightPerReplica": 8},
        ],
    },
}

pytestmark = pytest.mark.deploy


def run(*command: str | Path, given: str = "", where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(
        list(map(str, command)), input=given, cwd=where, env=env, text=True, capture_output=True, timeout=60
    )


def documents(text: str) -> list[dict[str, Any]]:
    return [one for one in YAML(typ="safe").load_all(text) if one is not None]


def render(values: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("render_chart.py")
    return run(TOOLS / "python", script, DEPLOY / "helm" / "headrace", given=json.dumps(values))


def manifests(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    done = render(values)
    assert done.returncode == 0, done.stderr
    rendered: dict[str, str] = json.loads(done.stdout)
    return [one for name, text in rendered.items() if name.endswith(".yaml") for one in documents(text)]


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in found if one["kind"] == kind]


def test_the_dockerfile_pleases_hadolint() -> None:
    done = run(TOOLS / "hadolint", DEPLOY / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_the_image_holds_what_it_takes_to_build_the_wheel_and_nothing_else() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}

    assert kept == {
        "gateway",
        "backends",
        "policies",
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "constraints.txt",
    }


@pytest.mark.parametrize(("env_file", "engines"), [(".env", {"sim-vllm", "sim-tgi"}), ("gpu.env", {"vllm"})])
def test_compose_starts_two_gateways_before_the_engines_that_they_name(env_file: str, engines: set[str]) -> None:
    done = run(TOOLS / "docker-compose", "--env-file", env_file, "config", "--format", "json", where=DEPLOY)
    assert done.returncode == 0, done.stderr
    services: dict[str, Any] = json.loads(done.stdout)["services"]

    assert {"gateway-1", "gateway-2", "valkey", "prometheus", "grafana"} <= set(services)
    assert engines <= set(services)
    mounts = {one["target"]: Path(one["source"]) for one in services["gateway-1"]["volumes"]}
    settings = read_file(mounts["/etc/headrace/headrace.yaml"], {})
    assert {engine.url for engine in settings.engines} == {f"http://{name}:8000" for name in engines}
    for name, service in services.items():
        for mount in service.get("volumes", ()):
            assert mount["type"] != "bind" or Path(mount["source"]).exists(), (name, mount)


def test_vllm_is_started_with_room_for_activations_and_a_bounded_batch() -> None:
    done = run(TOOLS / "docker-compose", "--env-file", "gpu.env", "config", "--format", "json", where=DEPLOY)

    command = json.loads(done.stdout)["services"]["vllm"]["command"]
    assert {"--max-num-seqs=64", "--gpu-memory-utilization=0.90"} <= set(command)


def test_prometheus_in_compose_scrapes_every_gateway_and_reads_the_rules_that_we_ship() -> None:
    config = documents((DEPLOY / "compose" / "prometheus.yml").read_text())[0]
    services = documents((DEPLOY / "compose.yaml").read_text())[0]["services"]

    targets = config["scrape_configs"][0]["static_configs"][0]["targets"]
    assert {target.partition(":")[0] for target in targets} == {name for name in services if name.startswith("gateway")}
    for rules in config["rule_files"]:
        assert (DEPLOY / "prometheus" / Path(rules).name).is_file(), rules


POLICIES = [DEPLOY / "compose" / "policy.yaml", *sorted((DEPLOY / "policies").glob("*.yaml"))]


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_a_policy_that_we_ship_is_one_that_the_gateway_takes(path: Path) -> None:
    assert parse(path.read_text(), path.name).classes


@pytest.mark.parametrize("values", [SPARSE, FULL], ids=["sparse", "full"])
def test_what_the_chart_makes_is_valid_in_kubernetes(values: Mapping[str, Any], tmp_path: Path) -> None:
    found = manifests(values)

    known = [one for one in found if not re.search(r"keda\.sh|coreos\.com", one["apiVersion"])]
    assert {one["kind"] for one in known} >= {
        "ConfigMap",
        "Deployment",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
    }
    for number, one in enumerate(known):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(one))
        done = run(TOOLS / "kubernetes-validate", "--strict", "-k", KUBERNETES, path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", [SPARSE, FULL], ids=["sparse", "full"])
def test_the_settings_in_the_chart_are_ones_that_the_gateway_takes(values: Mapping[str, Any], tmp_path: Path) -> None:
    (config,) = [one for one in of_kind(manifests(values), "ConfigMap") if "headrace.yaml" in one["data"]]
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)

    settings = read_file(tmp_path / "headrace.yaml", {})

    assert [engine.name for engine in settings.engines] == ["vllm-0"]
    assert settings.timeouts.drain_s == 120
    assert (settings.keys_file is None) == settings.allow_no_keys == ("keys" not in values)
    if settings.policy_file is not None:
        assert parse((tmp_path / "policy.yaml").read_text(), "policy.yaml").classes["interactive"].ttft_sla_s == 1.0


def test_a_pod_has_the_time_that_a_drain_takes_and_may_write_to_its_state_only() -> None:
    (deployment,) = of_kind(manifests(FULL), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]

    assert pod["terminationGracePeriodSeconds"] > 120 + 5
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["runAsNonRoot"] is True
    writable = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
    assert writable == {"/var/lib/headrace", "/tmp"}  # noqa: S108 - a mount in the pod
    assert "replicas" not in deployment["spec"], "KEDA and the chart would fight over it"


def test_the_chart_brings_every_dashboard() -> None:
    shipped = {path.name for path in (ROOT / "grafana" / "dashboards").glob("*.json")}

    brought = [one for one in of_kind(manifests(FULL), "ConfigMap") if "headrace.yaml" not in one["data"]]

    assert {name for one in brought for name in one["data"]} == shipped
    for one in brought:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert all(json.loads(text)["panels"] for text in one["data"].values())


def test_keda_scales_the_gateways_and_each_engine_workload_from_zero() -> None:
    scaled = {one["metadata"]["name"]: one["spec"] for one in of_kind(manifests(FULL), "ScaledObject")}

    assert set(scaled) == {"llm", "llm-vllm", "llm-big"}
    assert scaled["llm"]["minReplicaCount"] == 2
    assert scaled["llm-vllm"]["minReplicaCount"] == 0
    assert scaled["llm-vllm"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "vllm"}
    assert scaled["llm-big"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "engines is empty"),
        ({"engines": [{"url": "gpu1:8000"}]}, "/engines/0/url"),
        ({**SPARSE, "replica": 3}, "additional properties 'replica' not allowed"),
        ({**SPARSE, "redis": {"existingSecret": ""}}, "/redis/existingSecret"),
        ({**SPARSE, "ingress": {"enabled": True}}, "ingress.host is empty"),
    ],
)
def test_the_chart_refuses_values_that_cannot_work(values: Mapping[str, Any], told: str) -> None:
    done = render(values)

    assert done.returncode == 1
    assert told in done.stderr


@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda path: path.name)
def test_a_plain_manifest_is_valid_in_kubernetes(path: Path) -> None:
    done = run(TOOLS / "kubernetes-validate", "--strict", "-k", KUBERNETES, path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: path.name)
def test_a_unit_starts_a_command_that_there_is(path: Path) -> None:
    text = path.read_text()

    command = re.search(r"(?m)^ExecStart=/opt/headrace/bin/headrace (\S+)", text)
    assert command is not None
    assert run(TOOLS.parents[1] / "bin" / "headrace", command[1], "--help").returncode == 0
    if analyze := shutil.which("systemd-analyze"):
        done = run(analyze, "verify", "--man=no", path)
        faults = [line for line in done.stderr.splitlines() if "is not executable" not in line]
        assert not [line for line in faults if path.name in line], faults


def test_values_in_comments_of_the_chart_are_ones_that_the_schema_takes() -> None:
    """The examples that people uncomment."""
    text = (DEPLOY / "helm" / "headrace" / "values.yaml").read_text()
    example = re.search(r"(?m)^  #   - name: vllm\n(?:  #     .*\n)+", text)
    assert example is not None
    scaled = YAML(typ="safe").load(io.StringIO(re.sub(r"(?m)^  # {3}", "", example[0])))

    assert render({**SPARSE, "keda": {"enabled": True, "engines": scaled}}).returncode == 0
