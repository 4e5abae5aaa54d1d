"""Other gateways on the same road: what each adds to a request, and what people wait for when bulk fills the engines.

    make .venv/.peers && python -m tests.benchmarks.bench_peers [--quick] [--only NAME ...] [--part hop|crowd]

Each gets the same engines and the same generator, one after another, as processes of this machine. CPU and memory are
those of all its processes, ours with its private Valkey.

    hop     as bench_gateway: an engine that costs nothing, first tokens directly and through it in turn, CPU and memory
    crowd   two simulated engines whose memory holds a third of the bulk that is sent; people come at a steady rate.
            `headrace load` tells what both saw
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from tests.benchmarks.bench_gateway import POLICY, Bench, Served, Size
from tests.end_to_end.engine_process import EngineProcess, simulated
from tests.end_to_end.gateway_process import GatewayProcess
from tests.ports import free_port

PEERS = Path(__file__).parents[2] / ".venv" / "peers"
MODEL = "fast"
READY_S = 90.0
STOP_S = 20.0
HOP = Size(rounds=3, round_s=5.0, requests=1_000, chunk_streams=32, chunk_tokens=200, held_streams=200)
QUICK_HOP = Size(rounds=1, round_s=2.0, requests=200, chunk_streams=16, chunk_tokens=100, held_streams=50)
ENGINE = ("--kv-tokens", "16000", "--max-num-seqs", "64", "--speed", "0.25")
CROWD_S, QUICK_CROWD_S = 60, 15
CROWD = (
    *("--rate", "2", "--class", "interactive", "--ttft-sla", "interactive=2", "--tpot-sla", "interactive=0.2"),
    *("--clients", "128", "--clients-class", "bulk", "--prompt-tokens", "400", "--output-tokens", "300"),
)
GATE = 48
"""Requests at once that one peer is told to let through: about what both engines' memory holds."""

NGINX = """\
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log error;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_max_body_size 32m; client_body_buffer_size 1m;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engines {{ least_conn; {servers} keepalive 256; }}
  server {{ listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
                  proxy_read_timeout 600s; }} }}
}}
"""
HAPROXY = """\
global
  maxconn 8192
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  timeout queue 600s
  http-reuse always
frontend clients
  bind 127.0.0.1:{port}
  http-request set-priority-class int(-10) if {{ req.hdr(x-headrace-class) interactive }}
  default_backend engines
backend engines
  balance leastconn
{servers}
"""
LITELLM = """\
model_list:
{models}
litellm_settings: {{telemetry: false, request_timeout: 600}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""


@dataclass(frozen=True, slots=True)
class Given:
    """What a peer is started with."""

    folder: Path
    port: int
    engines: Sequence[str]
    model: str


def nginx(given: Given) -> list[str]:
    """Least connections, one worker, no buffering."""
    servers = "".join(f"server {url.removeprefix('http://')};" for url in given.engines)
    config = given.folder / "nginx.conf"
    config.write_text(NGINX.format(folder=given.folder, port=given.port, servers=servers))
    return [shutil.which("nginx") or "nginx", "-c", str(config), "-e", str(given.folder / "nginx.log")]


def haproxy(given: Given, *options: str) -> list[str]:
    """Least connections, one process; options: of each engine."""
    servers = "\n".join(
        " ".join(("  server", f"e{at}", url.removeprefix("http://"), *options)) for at, url in enumerate(given.engines)
    )
    config = given.folder / "haproxy.cfg"
    config.write_text(HAPROXY.format(port=given.port, servers=servers))
    return [shutil.which("haproxy") or "haproxy", "-f", str(config)]


def haproxy_gated(given: Given) -> list[str]:
    """The same with a bound before each engine, and people first in the queue before it."""
    return haproxy(given, "maxconn", str(GATE // len(given.engines)))


def vllm_router(given: Given, *options: str) -> list[str]:
    """Its policy for engines without shared prefixes."""
    return [
        str(PEERS / "vllm-router" / "bin" / "vllm-router"),
        *("--host", "127.0.0.1", "--port", str(given.port), "--prometheus-port", str(free_port())),
        *("--policy", "round_robin", "--log-level", "error", "--worker-urls", *given.engines),
        *options,
    ]


def vllm_router_gated(given: Given) -> list[str]:
    """The same with a bound on requests at once and a queue before it."""
    return vllm_router(
        given, "--max-concurrent-requests", str(GATE), "--queue-size", "1000", "--queue-timeout-secs", "600"
    )


def litellm(given: Given) -> list[str]:
    """One worker, no database."""
    models = "\n".join(
        f"  - {{model_name: {given.model}, litellm_params: "
        f"{{model: openai/{given.model}, api_base: '{url}/v1', api_key: none}}}}"
        for url in given.engines
    )
    config = given.folder / "litellm.yaml"
    config.write_text(LITELLM.format(models=models))
    program = str(PEERS / "litellm" / "bin" / "litellm")
    return [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(given.port), "--num_workers", "1"]


OTHERS: dict[str, Callable[[Given], list[str]]] = {
    "nginx": nginx,
    "haproxy": haproxy,
    f"haproxy, {GATE} at once, people first": haproxy_gated,
    "vllm-router": vllm_router,
    f"vllm-router, {GATE} at once": vllm_router_gated,
    "litellm": litellm,
}
OURS = "headrace"


@dataclass(frozen=True, slots=True)
class Other:
    """A peer that runs."""

    public_url: str
    pid: int


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


@asynccontextmanager
async def running(name: str, folder: Path, engines: Sequence[str], model: str, policy: str) -> AsyncIterator[Served]:
    """A gateway that has answered once. policy: ours; "" is the preset."""
    folder.mkdir()
    if name == OURS:
        (folder / "policy.yaml").write_text(policy)
        listed = ", ".join(f"{{name: e{at}, url: '{url}', gpu: {{source: none}}}}" for at, url in enumerate(engines))
        config = f"engines: [{listed}]\n" + (f"policy_file: {folder / 'policy.yaml'}\n" if policy else "")
        async with GatewayProcess(folder, config) as ours:
            await ours.until_ready()
            yield ours
        return
    given = Given(folder, free_port(), engines, model)
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *OTHERS[name](given), stdout=log, stderr=log, cwd=folder, start_new_session=True
        )
    try:
        other = Other(f"http://127.0.0.1:{given.port}", process.pid)
        await answers(other, model, folder / "log")
        yield other
    finally:
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(STOP_S):
                await process.wait()


async def answers(other: Other, model: str, log: Path) -> None:
    """Wait until a whole answer comes through."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    until_s = time.monotonic() + READY_S
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as http:
        while True:
            try:
                if (await http.post(f"{other.public_url}/v1/chat/completions", json=body)).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < until_s, log.read_text()[-2000:]
            await asyncio.sleep(0.2)


async def hop(name: str, folder: Path, size: Size) -> dict[str, Any]:
    """What it adds to one request."""
    async with EngineProcess(folder, "tests.benchmarks.fast_engine") as engine:
        async with running(name, folder / "hop", [engine.url], MODEL, POLICY) as gateway:
            told = await Bench(engine, gateway, size, counted=tree).all()
    return {
        "added_ttft_p50_ms": told.added_ttft_p50_us / 1e3,
        "added_ttft_p99_ms": told.added_ttft_p99_us / 1e3,
        "cpu_ms_per_request": told.gateway_us_per_request / 1e3,
        "cpu_us_per_chunk": told.gateway_us_per_chunk,
        "idle_mib": told.rss_idle_mib,
        "kib_per_stream": told.rss_kib_per_stream,
        "failed": told.failed,
    }


async def crowd(name: str, folder: Path, for_s: int) -> dict[str, Any]:
    """What people and bulk see when there is more bulk than fits."""
    async with (
        simulated(folder, *ENGINE, model=MODEL) as first,
        simulated(folder, *ENGINE, "--seed", "1", model=MODEL) as second,
        running(name, folder / "crowd", [first.url, second.url], MODEL, "") as gateway,
    ):
        command = ("load", gateway.public_url, "--model", MODEL, "--for", str(for_s), *CROWD, "--json")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.cli", *command), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        preempted = await first.metric("vllm:num_preemptions_total") + await second.metric("vllm:num_preemptions_total")
    of = json.loads(out)["classes"]
    people, bulk = of["interactive"], of["bulk"]
    return {
        "interactive_ttft_p50_s": people["ttft"]["p50_s"],
        "interactive_ttft_p99_s": people["ttft"]["p99_s"],
        "interactive_attainment": people["attainment"],
        "bulk_tokens_per_s": bulk["output_tokens_per_s"],
        "engine_preemptions": preempted,
        "errors": sum(people["errors"].values()) + sum(bulk["errors"].values()),
    }


async def main(args: argparse.Namespace) -> None:
    """One after another, each told as soon as it is measured."""
    for name in args.only or (OURS, *OTHERS):
        with tempfile.TemporaryDirectory(prefix="headrace-peers-") as text:
            folder = Path(text)
            told: dict[str, Any] = {"name": name}
            if args.part != "crowd" and not name.endswith("at once"):
                told |= await hop(name, folder, QUICK_HOP if args.quick else HOP)
            if args.part != "hop":
                told |= await crowd(name, folder, QUICK_CROWD_S if args.quick else CROWD_S)
        print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in told.items()}))
        sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=(OURS, *OTHERS))
    parser.add_argument("--part", choices=("hop", "crowd"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parser.parse_args()))
