"""What an operator may write, what comes of it, and what an error tells."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.addresses import ENGINE_KINDS, AddressError, Listen, normalise_url, parse_engine, parse_listen
from gateway.settings import EngineSettings, Limits, Settings, Timeouts
from gateway.settings_file import (
    EngineEntry,
    SettingsDocument,
    SettingsError,
    add_arguments,
    check,
    describe,
    read_file,
    settings_from,
)
from policies.yaml_source import DocumentError


def parsed(*flags: str, environ: Mapping[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings_from(parser.parse_args(flags), environ or {})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "headrace.yaml"


def problems_of(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(DocumentError) as caught:
        read_file(file, {})
    return str(caught.value).replace(str(file.parent) + "/", "")


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "//v1//"])
@pytest.mark.parametrize("base", ["http://gpu1:8000", "https://gpu.example", "http://[::1]:18001", "http://h:1/llm"])
def test_every_form_of_a_base_url_names_the_same_engine(base: str, suffix: str) -> None:
    assert normalise_url(base + suffix) == base


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://gpu1:8000/v1", EngineSettings("gpu1:8000", "http://gpu1:8000")),
        ("tgi+http://gpu2:8080", EngineSettings("gpu2:8080", "http://gpu2:8080", "tgi")),
        ("big=vllm+https://gpu3/llm/", EngineSettings("big", "https://gpu3/llm", "vllm")),
        ("http://[::1]:18001", EngineSettings("[::1]:18001", "http://[::1]:18001")),
    ],
)
def test_an_engine_flag_holds_name_kind_and_url(text: str, expected: EngineSettings) -> None:
    assert parse_engine(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "http://user:hunter2@gpu1:8000",
        "http://hunter2@gpu1:8000",
        "https://gpu1:8000/v1?key=hunter2",
        "https://gpu1:8000/#hunter2",
        "http://u:hunter2@h:notaport",
        "u:hunter2@gpu1:8000",
        "ftp://u:hunter2@gpu1",
        "http://u:a/hunter2@gpu1:8000",
        "http://u:80/hunter2@gpu1:8000",
        "http://u:hunter2/x@gpu1:8000",
        "http://u:hunter2?x@gpu1:8000",
        "http://u:hunter2#x@gpu1:8000",
        "x=vllm+http://u:hunt@hunter2/x@gpu1:8000",
    ],
)
def test_a_url_with_a_credential_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_engine(text)

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "gpu1:8000", "http://", "http://:80", "http://h:99999", "nope+http://h", "a b=http://h", "http://h /x"),
        *("http://h:0", "http://a..b", f"http://{'a' * 64}.example"),
    ],
)
def test_what_names_no_engine_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match="expected"):
        parse_engine(text)


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080, True),
        ("[::1]:0", "::1", 0, True),
        ("localhost:1", "localhost", 1, True),
        (":8080", "0.0.0.0", 8080, False),
        ("[::]:80", "::", 80, False),
        ("10.1.2.3:80", "10.1.2.3", 80, False),
    ],
)
def test_a_listen_address_is_a_host_and_a_port(text: str, host: str, port: int, loopback: bool) -> None:
    listen = parse_listen(text)

    assert (listen, listen.loopback) == (Listen(host, port), loopback)
    assert parse_listen(str(listen)) == listen


@pytest.mark.parametrize("text", ["8080", "::1:80", "h:", "h:x", "h:70000", "h:-1", "h:٣"])
def test_what_is_no_listen_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match="expected host:port"):
        parse_listen(text)


def test_a_file_sets_everything_and_its_paths_are_relative_to_it(file: Path) -> None:
    file.write_text(
        """
listen: 127.0.0.1:9000
redis_url: redis://:hunter2@cache:6379/0
policy_file: spot.yaml
engines:
  - url: http://gpu1:8000/v1/
  - {name: big, kind: vllm, url: 'http://gpu2:8000', api_key_env: BIG_KEY}
aliases: {gpt-4o: llama}
timeouts: {first_byte_s: 30, total_s: 7200.5}
limits: {connections_max: 10}
cors_origins: ['https://chat.example']
"""
    )

    settings = read_file(file, {"BIG_KEY": "k2"})

    assert settings == Settings(
        listen="127.0.0.1:9000",
        redis_url="redis://:hunter2@cache:6379/0",
        policy_file=file.parent / "spot.yaml",
        engines=(
            EngineSettings("gpu1:8000", "http://gpu1:8000"),
            EngineSettings("big", "http://gpu2:8000", "vllm", "k2"),
        ),
        aliases=(("gpt-4o", "llama"),),
        timeouts=Timeouts(first_byte_s=30.0, total_s=7200.5),
        limits=Limits(connections_max=10),
        cors_origins=("https://chat.example",),
    )


def test_flags_win_over_environment_and_environment_over_file(file: Path) -> None:
    keys = file.parent / "keys.yaml"
    keys.touch()
    file.write_text(
        "redis_url: redis://file\nlisten: 127.0.0.1:1\nlog_level: debug\nengines: [{url: 'http://file:1'}]\n"
    )
    environ = {"HEADRACE_REDIS_URL": "redis://env", "HEADRACE_KEYS_FILE": str(keys), "HEADRACE_ENGINE_API_KEY": "k"}

    settings = parsed("--config", str(file), "--engine", "http://flag:2", "--listen", "127.0.0.1:3", environ=environ)

    assert settings.redis_url == "redis://env"
    assert settings.keys_file == keys
    assert settings.listen == "127.0.0.1:3"
    assert settings.log_level == "debug"
    assert settings.engines == (EngineSettings("flag:2", "http://flag:2", api_key="k"),)


def test_every_problem_of_a_file_is_named_with_its_line(file: Path) -> None:
    text = """listen: nowhere
engines:
  - {url: 'http://gpu1:8000', knd: vllm}
  - {url: 'http://u:hunter2@gpu2', api_key: hunter2}
timeouts:
  total_s: -3
  first_byte_s: .nan
limits: {conections_max: 1}
lisen: x
"""

    told = problems_of(file, text)

    lines = [line.split(": ")[0] for line in told.splitlines()]
    assert lines == [f"headrace.yaml:{line}" for line in (1, 3, 4, 6, 7, 8, 9)]
    assert "did you mean kind?" in told
    assert "did you mean connections_max?" in told
    assert "did you mean listen?" in told
    assert "timeouts.total_s is -3; must be > 0" in told
    assert "hunter2" not in told


def test_an_empty_key_variable_is_a_problem_of_its_line(file: Path) -> None:
    told = problems_of(file, "engines:\n  - url: http://gpu1:8000\n    api_key_env: NO_SUCH_KEY\n")

    assert told.startswith("headrace.yaml:3: engines[0].api_key_env is NO_SUCH_KEY; ")


def test_a_file_that_is_not_there_is_told_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yaml: cannot be read \(No such file or directory\); give"):
        parsed("--config", str(tmp_path / "none.yaml"))


ONE_ENGINE = Settings(engines=(EngineSettings("e", "http://e"),))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"engines": ()}, "add --engine"),
        ({"engines": ONE_ENGINE.engines * 2}, "given 2 times"),
        ({"listen": "0.0.0.0:8080"}, "listen 0.0.0.0:8080: .*--keys FILE.*--allow-no-keys"),
        ({"admin_listen": "[::]:8081", "keys_file": Path("k")}, r"admin_listen \[::\]:8081: .*--allow-no-keys"),
        ({"redis_url": "http://u:hunter2@h"}, "redis_url 'http://h'"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        check(dataclasses.replace(ONE_ENGINE, **changes))  # type: ignore[arg-type]


def test_all_that_cannot_be_served_is_told_at_once(tmp_path: Path) -> None:
    wrong = dataclasses.replace(
        ONE_ENGINE,
        redis_url="redis://u:hunter2@h/0?foo=bar",
        policy_file=tmp_path / "policy.yaml",
        keys_file=tmp_path / "keys.yaml",
        mount_path="/..",
    )

    with pytest.raises(SettingsError) as caught:
        check(wrong)

    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "redis_url",
        "policy_file",
        "keys_file",
        "mount_path",
    ]
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"listen": "0.0.0.0:8080", "keys_file": Path(__file__)},
        {"listen": "0.0.0.0:8080", "allow_no_keys": True},
        {"admin_listen": "0.0.0.0:8081", "allow_no_keys": True},
    ],
)
def test_a_listener_for_others_is_served_with_keys_or_when_told(changes: dict[str, object]) -> None:
    settings = dataclasses.replace(ONE_ENGINE, **changes)  # type: ignore[arg-type]

    assert check(settings) == settings


@pytest.mark.parametrize(("written", "kept"), [("llm", "/llm"), ("/llm/", "/llm"), ("/", ""), ("", "")])
def test_a_mount_path_has_one_form(written: str, kept: str) -> None:
    assert check(dataclasses.replace(ONE_ENGINE, mount_path=written)).mount_path == kept


@pytest.mark.parametrize("written", ["/a b", "/../x", "/a/..", "a?b", "/ü", "/a//b", "/."])
def test_a_mount_path_that_no_request_can_have_is_refused(written: str) -> None:
    with pytest.raises(SettingsError, match="mount_path"):
        check(dataclasses.replace(ONE_ENGINE, mount_path=written))


@pytest.mark.parametrize("key", ["hunter2\n", "hunter2 x", "", "h\u00fcnter2"])
def test_an_api_key_that_no_header_can_hold_is_refused_without_being_shown(key: str) -> None:
    engine = EngineSettings("e", "http://e", api_key=key)

    with pytest.raises(SettingsError, match="api_key of engine e") as refused:
        check(dataclasses.replace(ONE_ENGINE, engines=(engine,)))

    assert "unter2" not in str(refused.value)


def test_what_is_printed_at_start_holds_no_secret() -> None:
    engine = EngineSettings("e", "http://e", api_key="hunter2")
    settings = dataclasses.replace(ONE_ENGINE, engines=(engine,), redis_url="redis://:hunter2@cache/0")

    shown = describe(settings)

    assert shown["redis_url"] == "redis://cache/0"
    assert shown["engines"] == ["e=auto+http://e"]
    assert "hunter2" not in repr(shown) + repr(settings)


def test_the_file_knows_every_setting_with_its_default() -> None:
    names = {field.name: field.default for field in dataclasses.fields(Settings)}
    document = SettingsDocument()

    assert set(SettingsDocument.model_fields) == set(names)
    for name, default in names.items():
        if name == "aliases":
            assert document.aliases == {}
        elif name == "engines":
            assert document.engines == []
        elif name in {"timeouts", "limits", "health", "recorder", "traces"}:
            assert getattr(document, name).model_dump() == dataclasses.asdict(getattr(Settings(), name))
        else:
            assert getattr(document, name) == default


def test_an_engines_kinds_are_the_same_in_file_and_flag() -> None:
    for kind in ENGINE_KINDS:
        assert EngineEntry(url="http://h", kind=kind).kind == kind  # type: ignore[arg-type]


def test_an_engine_may_have_a_profile_and_prices(file: Path) -> None:
    file.write_text(
        "kwh_price: 0.3\n"
        "engines:\n"
        "  - {url: http://a:1, profile: h100_llama31_8b_tp1, gpu_hour_price: 2.5, gpus: 4, spot: true, canary: 0.1}\n"
        "  - {url: http://b:1, profile: mine/profile.json}\n"
    )

    settings = read_file(file, {})

    first, second = settings.engines
    assert settings.kwh_price == 0.3
    assert (first.profile, first.gpu_hour_price, first.gpus, first.spot) == ("h100_llama31_8b_tp1", 2.5, 4, True)
    assert first.canary == 0.1
    assert second.profile == str(file.parent / "mine/profile.json")
    with pytest.raises(SettingsError, match=r"engine b:1: profile '.*profile\.json': not found"):
        check(settings)


def test_an_engine_pads_where_the_operator_says_so_and_nowhere_else(file: Path) -> None:
    file.write_text("engines: [{url: http://a:1, pads: true}, {url: http://b:1}]\n")

    assert [engine.pads for engine in read_file(file, {}).engines] == [True, False]
    assert "engines[0].pads" in problems_of(file, "engines: [{url: http://a:1, pads: 3}]\n")


@pytest.mark.parametrize("given", ["-3", "257", "2.5", "many", "'4'", "[1]"])
def test_how_many_workers_is_auto_or_a_number(file: Path, given: str) -> None:
    told = problems_of(file, f"workers: {given}\n")

    assert "headrace.yaml:1: workers is " in told
    assert "must be auto (one a core) or a whole number up to 256; leave it out for one process" in told


@pytest.mark.parametrize(
    ("listen", "url", "itself"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080", True),
        ("127.0.0.1:8080", "http://localhost:8080/llm", True),
        ("localhost:8080", "http://127.0.0.1:8080", True),
        ("0.0.0.0:8080", "http://127.0.0.1:8080", True),
        ("[::]:8080", "http://[::1]:8080", True),
        ("0.0.0.0:80", "http://localhost", True),
        ("gpu1:8080", "http://GPU1:8080", True),
        ("127.0.0.1:8080", "http://127.0.0.1:8000", False),
        ("127.0.0.1:8080", "http://gpu1:8080", False),
        ("127.0.0.1:8080", "http://[::1]:8080", False),
        ("10.0.0.5:8080", "http://127.0.0.1:8080", False),
        ("0.0.0.0:8080", "http://10.0.0.5:8080", False),
    ],
)
def test_an_engine_that_is_the_gateway_is_refused_with_the_setting_that_it_meets(
    listen: str, url: str, *, itself: bool
) -> None:
    settings = Settings(listen=listen, allow_no_keys=True, engines=(parse_engine(url),))

    if not itself:
        assert check(settings).engines == settings.engines
        return
    with pytest.raises(SettingsError, match=r"is the gateway's own listen, .*; give the engine's address, or"):
        check(settings)


@pytest.mark.parametrize("setting", ["admin_listen", "metrics_listen"])
def test_an_engine_is_no_listener_of_ours_for_operators_either(setting: str) -> None:
    own: dict[str, Any] = {setting: "127.0.0.1:7777"}
    settings = dataclasses.replace(Settings(engines=(parse_engine("http://127.0.0.1:7777"),)), **own)

    with pytest.raises(
        SettingsError, match=f"engine 127.0.0.1:7777: http://127.0.0.1:7777 is the gateway's own {setting}"
    ):
        check(settings)


def test_a_key_that_is_like_no_other_is_not_taken_for_one(file: Path) -> None:
    told = problems_of(file, "foo: 1\n")

    assert "foo is unknown; known keys are " in told
    assert "mean" not in told


def test_a_price_is_a_number_that_is_not_negative(file: Path) -> None:
    told = problems_of(file, "kwh_price: -1\nengines: [{url: http://a:1, gpus: 0, gpu_hour_price: .inf}]\n")

    assert all(f"{name}" in told for name in ("kwh_price", "engines[0].gpus", "engines[0].gpu_hour_price"))


@pytest.mark.parametrize(
    "line",
    [
        *("timeouts: {total_s: true}", "timeouts: {total_s: '5'}", "limits: {connections_max: '9'}", "poll_s: '0.5'"),
        *(
            "poll_s: 1e-9",
            "workers: true",
            "idempotency_s: true",
            "recorder: {files: '3'}",
            "traces: {sample_ratio: true}",
        ),
        *("kwh_price: '1'", "allow_no_keys: 'yes'", "trust_forwarded: 1", "engines: [{url: http://a:1, spot: 'on'}]"),
    ],
)
def test_a_number_is_no_text_and_no_yes_or_no(file: Path, line: str) -> None:
    key = line.replace("{", "").split(":")
    assert (key[1].strip() if "{" in line and "engines" not in line else key[0]) in problems_of(file, line + "\n")
