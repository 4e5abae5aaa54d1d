"""From `headrace.yaml`, the environment and flags to one frozen `Settings`; the only reader of all three.

A later source wins: defaults, file, environment, flags. The environment carries only what should not stand in a file
or a process list: `HEADRACE_REDIS_URL`, `HEADRACE_KEYS_FILE` and `HEADRACE_ENGINE_API_KEY` (for engines that have no
key of their own). Paths in the file are relative to the file.

The file is checked whole and strictly: every problem at once, each with line, key, value and what was expected. What
no field alone can tell is checked after that by `check`, again all of it at once: engines there and named once, no
listener that others can reach without keys, a store's options, files that are there. Secrets are shown by nothing here; `describe` is
what is printed at start.
"""

from __future__ import annotations

import dataclasses
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, create_model

from backends.gpu.devices import check_device
from backends.simulated.profiles import load_profile
from gateway.addresses import (
    ENGINE_KINDS,
    AddressError,
    Listen,
    check_name,
    engine_at,
    normalise_url,
    parse_engine,
    parse_listen,
)
from gateway.logs import FORMATS, LEVELS
from gateway.queue.store_url import StoreUrlError, shown
from gateway.settings import (
    EngineSettings,
    GpuSettings,
    HealthSettings,
    Limits,
    RecorderSettings,
    Settings,
    Timeouts,
    TracesSettings,
)
from policies.yaml_source import Finding, load

WORKERS_MAX = 256
FILE_BYTES_MIN = 64 * 1024
"""A bound against slips of the pen; far above any machine where more would help."""


class SettingsError(ValueError):
    """The settings cannot be used; the message has a line for the operator for each mistake."""


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `headrace serve`. Each one that is absent leaves its setting as the file or the default has it."""
    add_engine_arguments(parser)
    parser.add_argument("--listen", metavar="HOST:PORT", help="public listener (127.0.0.1:8080)")
    parser.add_argument("--admin-listen", metavar="HOST:PORT", help="metrics and admin listener (127.0.0.1:8081)")
    parser.add_argument(
        "--metrics-listen", metavar="HOST:PORT", help="a listener for the metrics page alone (none by default)"
    )
    parser.add_argument("--redis-url", metavar="URL", help="Redis or Valkey; without it a private Valkey is started")
    parser.add_argument("--policy", dest="policy_file", type=Path, metavar="FILE", help="policy document, hot-reloaded")
    parser.add_argument("--keys", dest="keys_file", type=Path, metavar="FILE", help="API keys, hashed")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="where the private Valkey keeps its data")
    parser.add_argument("--mount-path", metavar="PATH", help="prefix of the public listener, e.g. /llm")
    parser.add_argument(
        "--workers", type=_workers, metavar="N", help="processes that serve; 1 by default, auto for one a core"
    )
    parser.add_argument("--log-format", choices=FORMATS, help="json, human, or auto by terminal")
    parser.add_argument("--log-level", choices=tuple(LEVELS))
    parser.add_argument(
        "--allow-no-keys", action="store_true", default=None, help="serve beyond loopback without API keys"
    )


def add_engine_arguments(parser: ArgumentParser) -> None:
    """Those of them that say which engines there are."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file (headrace.yaml)")
    parser.add_argument(
        "--engine",
        action="append",
        metavar="[NAME=][KIND+]URL",
        help=f"an engine; repeatable; kind is one of {', '.join(ENGINE_KINDS)}; replaces the file's list",
    )


def settings_from(args: Namespace, environ: Mapping[str, str]) -> Settings:
    """Read all sources. Raises SettingsError, or DocumentError with every problem of the file."""
    changes: dict[str, Any] = {
        name: value
        for name, value in (
            ("redis_url", environ.get("HEADRACE_REDIS_URL")),
            ("keys_file", Path(environ["HEADRACE_KEYS_FILE"]) if environ.get("HEADRACE_KEYS_FILE") else None),
        )
        if value
    }
    for name in (
        "listen",
        "admin_listen",
        "metrics_listen",
        "redis_url",
        "policy_file",
        "keys_file",
        "state_dir",
        "mount_path",
        "workers",
        "log_format",
        "log_level",
        "allow_no_keys",
    ):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    try:
        return check(dataclasses.replace(_with_engines(args, environ), **changes))
    except AddressError as error:
        raise SettingsError(str(error)) from None


def engines_from(args: Namespace, environ: Mapping[str, str]) -> Settings:
    """Read the sources of `add_engine_arguments`; what has to do with serving is not checked. Raises as `settings_from`."""
    try:
        settings = _with_engines(args, environ)
    except AddressError as error:
        raise SettingsError(str(error)) from None
    mistakes = list(_of_engines(settings.engines))
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return settings


def _with_engines(args: Namespace, environ: Mapping[str, str]) -> Settings:
    settings = Settings() if args.config is None else read_file(args.config, environ)
    if args.engine:
        settings = dataclasses.replace(settings, engines=tuple(parse_engine(text) for text in args.engine))
    return _with_default_key(settings, environ.get("HEADRACE_ENGINE_API_KEY"))


def read_file(path: Path, environ: Mapping[str, str]) -> Settings:
    """Read a settings file alone. Raises SettingsError or DocumentError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingsError(f"settings file {path}: cannot be read ({reason}); give --config a readable file") from None
    document = load(text, SettingsDocument, str(path), check=lambda found: _findings(found, environ))
    values = {name: getattr(document, name) for name in document.model_fields_set}
    for name in ("policy_file", "keys_file", "state_dir"):
        if values.get(name) is not None:
            values[name] = path.parent / values[name]
    if "engines" in values:
        values["engines"] = tuple(_engine(entry, environ, path.parent) for entry in document.engines)
    if values.get("redis_url") is not None:
        values["redis_url"] = cast("SecretStr", values["redis_url"]).get_secret_value()
    for name, section in (("timeouts", Timeouts), ("limits", Limits), ("health", HealthSettings)):
        if name in values:
            values[name] = section(**cast("BaseModel", values[name]).model_dump())
    if "recorder" in values:
        folder = document.recorder.folder
        recorder = RecorderSettings(**document.recorder.model_dump())
        values["recorder"] = dataclasses.replace(recorder, folder=None if folder is None else path.parent / folder)
    if "traces" in values:
        values["traces"] = TracesSettings(**document.traces.model_dump())
    if "aliases" in values:
        values["aliases"] = tuple(values["aliases"].items())
    return Settings(**values)


def check(settings: Settings) -> Settings:
    """The settings in their one form, if they can be served. Raises SettingsError with every mistake, or AddressError."""
    listen, admin_listen = parse_listen(settings.listen), parse_listen(settings.admin_listen)
    metrics_listen = None if settings.metrics_listen is None else str(parse_listen(settings.metrics_listen))
    mount_path = "/" + settings.mount_path.strip("/") if settings.mount_path.strip("/") else ""
    checked = dataclasses.replace(
        settings,
        listen=str(listen),
        admin_listen=str(admin_listen),
        metrics_listen=metrics_listen,
        mount_path=mount_path,
    )
    mistakes = [
        *_of_engines(settings.engines),
        *_of_listeners(settings, listen, admin_listen),
        *_of_loops(settings),
        *_of_the_rest(checked),
    ]
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return checked


def _of_engines(engines: Sequence[EngineSettings]) -> Iterator[str]:
    if not engines:
        yield "engines: none given; add --engine http://HOST:PORT, or an engines list to --config FILE"
    names = [engine.name for engine in engines]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"engine name {name!r}: given {names.count(name)} times; give each --engine its NAME="
    for engine in engines:
        if engine.profile is not None:
            try:
                load_profile(engine.profile)
            except ValueError as error:
                yield f"engine {engine.name}: {error}"
        if engine.api_key is not None and not _API_KEY.fullmatch(engine.api_key):
            yield f"api_key of engine {engine.name}: must be one line of visible ASCII; correct it"


def _of_listeners(settings: Settings, listen: Listen, admin_listen: Listen) -> Iterator[str]:
    for setting, address, keyed in (
        ("listen", listen, settings.keys_file is not None),
        ("admin_listen", admin_listen, False),
    ):
        if not (address.loopback or keyed or settings.allow_no_keys):
            yield (
                f"{setting} {address}: others can reach it and it asks for no key; "
                + ("give --keys FILE, or " if setting == "listen" else "keep it on 127.0.0.1, or ")
                + "say --allow-no-keys where the network is yours alone"
            )


def _of_loops(settings: Settings) -> Iterator[str]:
    """Engines that are this gateway: it would list no model and ask itself for ever."""
    for setting in ("listen", "admin_listen", "metrics_listen"):
        text = getattr(settings, setting)
        for engine in settings.engines if text else ():
            if parse_listen(text).reached_by(engine.url):
                yield (
                    f"engine {engine.name}: {engine.url} is the gateway's own {setting}, {text}; give the engine's address, "
                    "or have the gateway listen elsewhere"
                )


def _of_the_rest(settings: Settings) -> Iterator[str]:
    """What the files hold is read, and told, by those who watch them."""
    if settings.redis_url is not None:
        from gateway.queue.redis_client import connect  # a fifth of a second that other commands need not wait for

        try:
            connect(settings.redis_url, pool=settings.pool)
        except StoreUrlError as error:
            yield f"redis_url {error}"
    for setting, path in (("policy_file", settings.policy_file), ("keys_file", settings.keys_file)):
        if path is not None:
            try:
                path.stat()
            except (FileNotFoundError, NotADirectoryError):
                yield f"{setting} {path}: there is no such file; correct the path, or write the file"
            except OSError:
                continue  # who reads it says why it cannot
    if not _MOUNT_PATH.fullmatch(settings.mount_path):
        yield (
            f"mount_path {settings.mount_path[:80]!r}: expected segments of letters, digits, - _ ~ and . (no . or ..)"
            " between slashes; e.g. /llm"
        )


_API_KEY = re.compile(r"[\x21-\x7e]+")
_MOUNT_PATH = re.compile(r"(?:/(?!\.\.?(?:/|$))[A-Za-z0-9._~-]+)*")


def describe(settings: Settings) -> dict[str, object]:
    """What is printed at start: everything that differs from the defaults, and never a secret."""
    shown: dict[str, object] = {}
    defaults = Settings()
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value != getattr(defaults, field.name) or field.name in {"listen", "admin_listen"}:
            shown[field.name] = _shown(field.name, value)
    return shown


def _shown(name: str, value: Any) -> object:
    if name == "engines":
        return [f"{engine.name}={engine.kind}+{engine.url}" for engine in value]
    if name == "redis_url":
        return shown(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value) if isinstance(value, Path) else value


def _with_default_key(settings: Settings, api_key: str | None) -> Settings:
    if not api_key:
        return settings
    keyed = tuple(
        engine if engine.api_key is not None else dataclasses.replace(engine, api_key=api_key)
        for engine in settings.engines
    )
    return dataclasses.replace(settings, engines=keyed)


def _workers(text: str) -> int:
    if text == "auto":
        return 0
    if not text.isascii() or not text.isdigit() or int(text) > WORKERS_MAX:
        raise ArgumentTypeError(
            f"{text!r}: expected auto or a number up to {WORKERS_MAX}; leave it out for one process"
        )
    return int(text)


def _engine(entry: EngineEntry, environ: Mapping[str, str], folder: Path) -> EngineSettings:
    api_key = entry.api_key.get_secret_value() if entry.api_key is not None else None
    if entry.api_key_env is not None:
        api_key = environ[entry.api_key_env]
    engine = engine_at(entry.url, name=entry.name, kind=entry.kind, api_key=api_key)
    devices = None if entry.gpu.devices is None else tuple(map(str, entry.gpu.devices))
    profile = entry.profile
    return dataclasses.replace(
        engine,
        gpu=GpuSettings(entry.gpu.source, devices, entry.gpu.url),
        metrics_url=entry.metrics_url,
        priority=entry.priority,
        profile=str(folder / profile) if profile is not None and profile.endswith(".json") else profile,
        gpus=entry.gpus,
        gpu_hour_price=entry.gpu_hour_price,
        spot=entry.spot,
        canary=entry.canary,
        pads=entry.pads,
    )


def _findings(document: SettingsDocument, environ: Mapping[str, str]) -> Iterator[Finding]:
    for index, entry in enumerate(document.engines):
        name = entry.api_key_env
        if name is not None and not environ.get(name):
            yield ("engines", index, "api_key_env"), name, "that environment variable is empty; set it before the start"
        gpu = entry.gpu
        if gpu.source == "dcgm" and gpu.url is None:
            yield ("engines", index, "gpu", "source"), "dcgm", "needs the exporter's url, e.g. http://HOST:9400"
        if gpu.source in {"nvml", "none"} and gpu.url is not None:
            yield ("engines", index, "gpu", "url"), "given", "is only for source dcgm; remove it or set source: dcgm"


# The file's schema. Fields of the frozen settings that an operator writes as plain numbers are taken over by name, so
# that a new time-out or bound is a key of the file at once.


ListenText = Annotated[str, AfterValidator(lambda text: str(parse_listen(text)))]


def _workers_setting(given: object) -> object:
    if given == "auto":
        return 0
    if type(given) is int and 0 <= given <= WORKERS_MAX:
        return given
    raise ValueError(f"must be auto (one a core) or a whole number up to {WORKERS_MAX}; leave it out for one process")


EngineUrl = Annotated[str, AfterValidator(normalise_url), Field(repr=False)]
EngineName = Annotated[str, AfterValidator(check_name)]
PoolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Device = Annotated[int | str, AfterValidator(lambda device: check_device(str(device)))]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(strict=True, gt=0)]
Flag = Annotated[bool, Field(strict=True)]
Workers = Annotated[int, Field(strict=True, ge=0, le=WORKERS_MAX), BeforeValidator(_workers_setting)]

_STRICT = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def _exporter_url(text: str) -> str:
    return normalise_url(text.strip().rstrip("/").removesuffix("/metrics"), what="gpu url")


def _metrics_url(text: str) -> str:
    return normalise_url(text.strip().rstrip("/").removesuffix("/metrics"), what="metrics_url")


def _section(name: str, settings: type[Timeouts | Limits | HealthSettings]) -> type[BaseModel]:
    fields: dict[str, Any] = {
        field.name: (Positive if isinstance(field.default, float) else PositiveInt, field.default)
        for field in dataclasses.fields(settings)
    }
    return create_model(name, __config__=_STRICT, **fields)


class GpuEntry(BaseModel):
    """Where one engine's GPUs are read."""

    model_config = _STRICT

    source: Literal["auto", "nvml", "dcgm", "none"] = "auto"
    devices: Annotated[list[Device], Field(min_length=1)] | None = None
    url: Annotated[str, AfterValidator(_exporter_url)] | None = None


Price = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class EngineEntry(BaseModel):
    """One item of `engines`."""

    model_config = _STRICT

    url: EngineUrl
    name: EngineName | None = None
    kind: Literal["auto", "vllm", "tgi", "sglang", "llamacpp", "trtllm", "triton", "openai"] = "auto"
    api_key: SecretStr | None = None
    api_key_env: str | None = None
    metrics_url: Annotated[str, AfterValidator(_metrics_url)] | None = None
    priority: Flag | None = None
    gpu: GpuEntry = GpuEntry()
    profile: Annotated[str, Field(min_length=1)] | None = None
    gpus: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = None
    gpu_hour_price: Price | None = None
    spot: Flag = False
    canary: Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)] = 1.0
    pads: Flag = False


TimeoutsSection = _section("TimeoutsSection", Timeouts)
LimitsSection = _section("LimitsSection", Limits)
HealthSection = _section("HealthSection", HealthSettings)


class RecorderSection(BaseModel):
    """The log of traffic; leave it out to record nothing."""

    model_config = _STRICT

    folder: Path | None = None
    file_bytes: Annotated[int, Field(strict=True, ge=FILE_BYTES_MIN)] = RecorderSettings().file_bytes
    files: Annotated[int, Field(strict=True, ge=2)] = RecorderSettings().files
    prefix_hashes: Flag = False


def _collector_url(text: str) -> str:
    """Whole, with its path: nothing is added. Credentials in it would be shown, so that they are refused."""
    parts = urlsplit(text.strip())
    if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in text or parts.query or parts.fragment:
        raise ValueError(
            "must be http(s)://HOST:PORT/v1/traces without credentials or a query; a collector's key goes into"
            " OTEL_EXPORTER_OTLP_HEADERS"
        )
    return text.strip()


class TracesSection(BaseModel):
    """Where spans go; leave it out to trace nothing."""

    model_config = _STRICT

    url: Annotated[str, AfterValidator(_collector_url)] | None = None
    sample_ratio: Annotated[float, Field(strict=True, ge=0, le=1)] = TracesSettings().sample_ratio


class SettingsDocument(BaseModel):
    """The whole of `headrace.yaml`; names and meanings are those of `gateway.settings.Settings`."""

    model_config = _STRICT

    listen: ListenText = "127.0.0.1:8080"
    admin_listen: ListenText = "127.0.0.1:8081"
    metrics_listen: ListenText | None = None
    redis_url: SecretStr | None = None
    pool: PoolName = "default"
    state_dir: Path = Path(".headrace")
    engines: list[EngineEntry] = Field(default_factory=list)
    policy_file: Path | None = None
    keys_file: Path | None = None
    tgi_default_model: str | None = None
    mount_path: str = ""
    aliases: dict[str, str] = Field(default_factory=dict)
    trust_forwarded: Flag = False
    cors_origins: tuple[str, ...] = ("*",)
    allow_no_keys: Flag = False
    idempotency_s: Annotated[float, Field(strict=True, ge=0, le=86_400, allow_inf_nan=False)] = 600.0
    kwh_price: Price | None = None
    workers: Workers = 1
    poll_s: Annotated[float, Field(strict=True, ge=0.05, allow_inf_nan=False)] = 0.5
    timeouts: TimeoutsSection = TimeoutsSection()  # type: ignore[valid-type]
    limits: LimitsSection = LimitsSection()  # type: ignore[valid-type]
    health: HealthSection = HealthSection()  # type: ignore[valid-type]
    recorder: RecorderSection = RecorderSection()
    traces: TracesSection = TracesSection()
    log_format: Literal["auto", "json", "human"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
