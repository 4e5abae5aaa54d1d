"""What an operator can have an opinion about, in one frozen value, parsed at the edge and printed at start.

How work is treated (classes, objectives, windows) is policy and lives in the policy document; here is what the
process itself needs: addresses, engines, files, time-outs and bounds. Every bound is named and has a unit; no time-out
is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """Where an engine's GPUs are read.

    source    "nvml" (this host), "dcgm" (an exporter at url), "none"; "auto": dcgm with a url, else nvml for an engine
              on a loopback address, else none
    devices   the engine's own: indices, GPU-<uuid> or MIG-<uuid>; None for all that can be seen
    url       of a DCGM exporter or `headrace gpu-exporter`, without /metrics
    """

    source: str = "auto"
    devices: tuple[str, ...] | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine. kind is "auto" (probe it) or an adapter's name.

    metrics_url      where its metrics are, if not at url, without /metrics
    priority         it was started so that a request's `priority` has an effect; None: only where the engine says so
    profile          a shipped profile's name, or a path ending in .json, that what is learned in service is compared with
    gpus             how many it has, where no telemetry tells; for its price
    gpu_hour_price   of one of them, in any currency; None: not known, and no cost is told
    spot             it is rented as spot capacity: its cost is told apart, and bulk goes there first
    canary           part of the works that could run there that may; 1 for an engine like any other
    pads             it runs a request's array of inputs as one padded batch: bulk with one input each goes there in arrays
    """

    name: str
    url: str
    kind: str = "auto"
    api_key: str | None = field(default=None, repr=False)
    metrics_url: str | None = None
    priority: bool | None = None
    gpu: GpuSettings = GpuSettings()
    profile: str | None = None
    gpus: int | None = None
    gpu_hour_price: float | None = None
    spot: bool = False
    canary: float = 1.0
    pads: bool = False


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Each one is named in the error and the metric when it fires. Time in our queue counts towards none but total_s.

    first_byte_s     request sent to first body byte of the engine's reply; for one that is not streamed it runs anew whenever
                     the engine's counters of tokens have moved
    inter_token_s    longest silence inside a reply; longer than an engine's preemption gap
    total_s          accepted to last byte
    stalled_client_s a client that takes no byte for so long is cut and its engine call aborted
    request_head_s   first byte of a request to the end of its head; request_body_s: head to end of body, per 60 s of
                     silence
    """

    connect_s: float = 5.0
    first_byte_s: float = 120.0
    inter_token_s: float = 60.0
    total_s: float = 1800.0
    stalled_client_s: float = 120.0
    request_head_s: float = 20.0
    request_body_s: float = 60.0
    queue_headers_after_s: float = 10.0
    keepalive_comment_s: float = 15.0
    nonstream_wait_s: float = 50.0
    drain_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what clients can make the process hold.

    body_max_bytes    one request body; beyond: 413
    bodies_held_bytes all request bodies held at once; beyond: 503 with Retry-After
    header_max_bytes  one header field; beyond: 431
    connections_max   open client connections
    """

    body_max_bytes: int = 64 * MIB
    bodies_held_bytes: int = 1024 * MIB
    header_max_bytes: int = 64 * 1024
    connections_max: int = 20_000


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """When an engine leaves the rotation (gateway.control.health).

    failures    answers in a row that broke
    silence_s   its streams wait and none moves for so long; longer than an engine's preemption gap
    """

    failures: int = 5
    silence_s: float = 5.0


@dataclass(frozen=True, slots=True)
class RecorderSettings:
    """The log of traffic (gateway.recorder).

    folder          where its files lie; None records nothing
    file_bytes      size of one file; files: how many are kept, of all processes together
    prefix_hashes   also keep keyed hashes of the beginnings of prompts
    """

    folder: Path | None = None
    file_bytes: int = 8 * MIB
    files: int = 16
    prefix_hashes: bool = False


@dataclass(frozen=True, slots=True)
class TracesSettings:
    """Where spans go (gateway.observe).

    url            of an OTLP/HTTP collector, with its path (http://host:4318/v1/traces); None traces nothing
    sample_ratio   of the requests that bring no decision of their own, 0 to 1
    """

    url: str | None = None
    sample_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole of it. `redis_url` None: a private Valkey is started (gateway.queue.embedded).

    pool               what is decided together: gateways of one store and one pool share queue and engines; any other
                       pool in the same store has its own
    mount_path         prefix under which the public listener is mounted, e.g. "/llm"; "" for none
    aliases            client's model name -> engine's model name
    trust_forwarded    keep X-Forwarded-* of clients (only behind a proxy of yours)
    cors_origins       origins allowed by CORS; () sends no CORS headers, ("*",) allows all without credentials
    allow_no_keys      serve beyond loopback without API keys
    idempotency_s      how long the answer to a request with an Idempotency-Key is kept; 0: the header is not read
    kwh_price          of energy, in the currency of gpu_hour_price; None: not told apart
    metrics_listen     a second listener for the metrics page alone; None: only admin_listen has it
    workers            processes that serve, under a supervisor when more than one; 0: one for each core
    """

    listen: str = "127.0.0.1:8080"
    admin_listen: str = "127.0.0.1:8081"
    metrics_listen: str | None = None
    redis_url: str | None = field(default=None, repr=False)
    pool: str = "default"
    state_dir: Path = Path(".headrace")
    engines: tuple[EngineSettings, ...] = ()
    policy_file: Path | None = None
    keys_file: Path | None = None
    tgi_default_model: str | None = None
    mount_path: str = ""
    aliases: tuple[tuple[str, str], ...] = ()
    trust_forwarded: bool = False
    cors_origins: tuple[str, ...] = ("*",)
    allow_no_keys: bool = False
    idempotency_s: float = 600.0
    kwh_price: float | None = None
    workers: int = 1
    poll_s: float = 0.5
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    health: HealthSettings = HealthSettings()
    recorder: RecorderSettings = RecorderSettings()
    traces: TracesSettings = TracesSettings()
    log_format: str = "auto"
    log_level: str = "info"
