"""Paths, methods, keys, browsers and what goes on to engines: the same on every route."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.commands import key as key_command
from gateway.errors import Dialect, Refusal
from gateway.ingress.auth import Caller, Key, KeyRing, digest
from gateway.ingress.keys_file import KeysFile, parse
from gateway.ingress.routes import parse_target
from gateway.logs import Logs
from gateway.settings import Settings
from policies import presets
from policies.yaml_source import DocumentError
from tests.gateway.ingress.conftest import Start
from tests.gateway.ingress.raw_client import Answer, RawClient, chat, request

CHAT = "/v1/chat/completions"
RING = KeyRing([Key("acme", bytes.fromhex(digest("sk-good")), "k1", "bulk")])
KEY = "Authorization: Bearer sk-good"
WORK = [
    CHAT,
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/score",
    "/score",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/audio/speech",
    "/pooling",
    "/classify",
    "/v1/something/new",
    "/",
    "/generate",
    "/generate_stream",
]


async def ask(port: int, method: str, path: str, body: bytes | None = None, *headers: str) -> Answer:
    async with RawClient(port) as client:
        return await client.ask(request(method, path, body, *headers), method)


@pytest.mark.parametrize("path", WORK)
async def test_every_route_of_work_is_treated_alike(start: Start, path: str) -> None:
    stand = await start(ring=RING)
    headers = (KEY, "Cookie: a=b", "X-Custom: kept", "traceparent: 00-1-2-01", "X-Request-Id: r-1", "TE: trailers")

    refused = await ask(stand.port, "POST", path, chat())
    answer = await ask(stand.port, "POST", path, chat(), *headers)

    sent = dict(stand.service.served[0].headers)
    assert (refused.status, answer.status, answer.body, answer.one("x-request-id")) == (401, 200, chat(), "r-1")
    assert sent == {b"x-custom": b"kept", b"traceparent": b"00-1-2-01", b"x-request-id": b"r-1"}
    assert (stand.service.served[0].path, stand.service.served[0].tenant) == (path, "acme")


@pytest.mark.parametrize(
    "path", [CHAT + "/", "//v1//chat/completions", "/v1/%63hat/completions", "http://evil.test/v1/chat/completions"]
)
async def test_path_variants_reach_the_same_route_without_a_redirect(start: Start, path: str) -> None:
    stand = await start()

    answer = await ask(stand.port, "POST", path + "?x=1&y=%2F", chat())

    assert (answer.status, stand.service.served[0].target) == (200, b"/v1/chat/completions?x=1&y=%2F")


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/admin/",
        "/admin/policies",
        "/config",
        "/docs",
        "/debug",
        "/policies",
        "/v1/v1/chat/completions",
        "/v1/v1",
        "/v1/../metrics",
        "/v1/%2e%2e/metrics",
        "/v1/..%2f..%2fmetrics",
        "/v1/..%5c..%5cmetrics",
        "/v1/..;a=b/metrics",
        "/v1/x%2f.",
        "/v1/files",
        "/v1/batches/x",
        "/%00",
        "/nowhere",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_is_not_served_is_a_404_with_an_error_object(start: Start, method: str, path: str) -> None:
    stand = await start()

    answer = await ask(stand.port, method, path, b"{}" if method == "POST" else None)

    assert (answer.status, answer.error()["code"]) == (404, "unknown_path")
    assert not stand.service.served


async def test_a_base_url_without_v1_is_named_as_what_is_wrong(start: Start) -> None:
    stand = await start()

    answer = await ask(stand.port, "POST", "/chat/completions", b"{}")

    assert answer.status == 404
    assert "did you mean /v1/chat/completions? The base URL ends with /v1" in str(answer.error()["message"])


async def test_a_mounted_gateway_serves_below_its_mount_and_health_everywhere(start: Start) -> None:
    stand = await start(Settings(mount_path="/llm"))

    below = await ask(stand.port, "POST", "/llm" + CHAT, chat())
    beside = await ask(stand.port, "POST", CHAT, chat())
    lookalike = await ask(stand.port, "POST", "/llmx" + CHAT, chat())
    health = await ask(stand.port, "GET", "/health")

    assert (below.status, beside.status, lookalike.status, health.status) == (200, 404, 404, 200)
    assert stand.service.served[0].target == CHAT.encode()


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, "POST, OPTIONS"),
        ("POST", "/v1/models", "GET, HEAD, OPTIONS"),
        ("PATCH", "/v1/audio/speech", "POST, OPTIONS"),
    ],
)
async def test_a_wrong_method_is_405_and_names_the_right_ones(start: Start, method: str, path: str, allow: str) -> None:
    stand = await start()

    answer = await ask(stand.port, method, path)

    assert (answer.status, answer.one("allow"), answer.error()["code"]) == (405, allow, "method_not_allowed")


@pytest.mark.parametrize("method", ["GET", "DELETE", "PATCH"])
async def test_a_path_below_v1_that_nobody_is_known_to_have_is_a_404_for_what_no_engine_is_asked(
    start: Start, method: str
) -> None:
    stand = await start()

    answer = await ask(stand.port, method, "/v1/nothing")

    assert (answer.status, answer.error()["code"]) == (404, "unknown_path")
    assert "/v1/nothing" in str(answer.error()["message"])


async def test_head_is_answered_like_get_without_a_body(start: Start) -> None:
    stand = await start()

    async with RawClient(stand.port) as client:
        head = await client.ask(request("HEAD", "/v1/models"), "HEAD")
        get = await client.ask(request("GET", "/v1/models"), "GET")

    assert (head.status, head.one("content-length")) == (200, get.one("content-length"))


async def test_models_keep_the_engines_fields_and_are_found_by_name(start: Start) -> None:
    stand = await start()

    listed = await ask(stand.port, "GET", "/v1/models")
    one = await ask(stand.port, "GET", "/v1/models/tiny")
    slashed = await ask(stand.port, "GET", "/v1/models/org/large")
    escaped = await ask(stand.port, "GET", "/v1/models/org%2Flarge")
    missing = await ask(stand.port, "GET", "/v1/models/none")

    assert listed.json()["object"] == "list"
    assert one.json()["max_model_len"] == 2048
    assert slashed.json() == escaped.json() == {"id": "org/large", "object": "model"}
    assert (missing.status, missing.error()["code"]) == (404, "model_not_found")


async def test_health_needs_no_key_and_info_does(start: Start) -> None:
    stand = await start(Settings(tgi_default_model="tiny"), ring=RING)

    health = [(await ask(stand.port, "GET", path)).status for path in ("/health", "/ping", "/health?x=1")]
    without = await ask(stand.port, "GET", "/info")
    with_key = await ask(stand.port, "GET", "/info", None, KEY)

    assert health == [200] * 3
    assert (without.status, with_key.json()["model_id"]) == (401, "tiny")


async def test_tgi_bodies_without_a_model_go_to_the_default(start: Start) -> None:
    stand = await start(Settings(tgi_default_model="tiny"))

    answer = await ask(stand.port, "POST", "/generate_stream", b'{"inputs":"x"}')

    exchange = stand.service.served[0]
    assert answer.status == 200
    assert (exchange.facts.model, exchange.facts.stream, exchange.dialect) == ("tiny", True, Dialect.TGI)


async def test_a_default_that_is_an_alias_is_taken_under_its_engines_name(start: Start) -> None:
    """A body that names no model has no alias to be replaced: nothing must be written into it."""
    stand = await start(Settings(tgi_default_model="any", aliases=(("any", "tiny"),)), ring=RING)

    await ask(stand.port, "POST", "/generate", b'{"inputs":"x"}', KEY)
    info = await ask(stand.port, "GET", "/info", None, KEY)

    assert (stand.service.served[0].facts.model, info.json()["model_id"]) == ("tiny", "tiny")


async def test_without_a_default_a_missing_model_is_a_400_in_the_dialect(start: Start) -> None:
    stand = await start()

    tgi = await ask(stand.port, "POST", "/generate", b'{"inputs":"x"}')
    messages = await ask(stand.port, "POST", "/v1/messages", b'{"messages":[]}')

    assert (tgi.status, tgi.json()["error_type"]) == (400, "validation")
    assert (messages.status, messages.json()["type"]) == (400, "error")


async def test_an_unknown_model_is_404_and_an_alias_is_known(start: Start) -> None:
    stand = await start(Settings(aliases=(("gpt", "tiny"), ("gone", "unknown"))))

    known = await ask(stand.port, "POST", CHAT, chat(model="gpt"))
    unknown = await ask(stand.port, "POST", CHAT, chat(model="unknown"))
    dangling = await ask(stand.port, "POST", CHAT, chat(model="gone"))

    assert (known.status, unknown.status, dangling.status) == (200, 404, 404)
    assert stand.service.served[0].facts.model == "gpt"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel"), ("DELETE", "/v1/responses/resp_1")],
)
async def test_a_stored_response_is_asked_for_by_its_id(start: Start, method: str, path: str) -> None:
    stand = await start()

    answer = await ask(stand.port, method, path, b"" if method == "POST" else None)

    exchange = stand.service.served[0]
    assert answer.status == 200
    assert (exchange.method, exchange.facts.previous_response_id, exchange.dialect) == (
        method.encode(),
        "resp_1",
        Dialect.RESPONSES,
    )


async def test_a_multipart_body_passes_byte_for_byte_with_its_content_type(start: Start) -> None:
    stand = await start()
    body = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n\x00\xff\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--b--'
    content_type = 'multipart/form-data; charset=x; boundary="b"'

    answer = await ask(stand.port, "POST", "/v1/audio/transcriptions", body, f"Content-Type: {content_type}")

    assert (answer.status, stand.service.served[0].body) == (200, body)
    assert dict(stand.service.served[0].headers)[b"content-type"] == content_type.encode()


@pytest.mark.parametrize(
    "credential",
    [
        "Authorization: bearer sk-good",
        "Authorization: BEARER   sk-good  ",
        "X-Api-Key: sk-good",
        "api-key: sk-good",
    ],
)
async def test_a_good_key_is_taken_in_each_field(start: Start, credential: str) -> None:
    stand = await start(ring=RING)

    answer = await ask(stand.port, "POST", CHAT, chat(), credential)

    exchange = stand.service.served[0]
    assert answer.status == 200
    assert (exchange.tenant, exchange.key_id, exchange.max_class) == ("acme", "k1", "bulk")


@pytest.mark.parametrize(
    "credential",
    [
        b"Authorization: Bearer sk-bad",
        b"Authorization: Bearer ",
        b"Authorization: Bearer",
        b"Authorization: sk-good",
        b"Authorization: Basic c2stZ29vZA==",
        b"Authorization:",
        "Authorization: Bearer sk-gé".encode(),
        "Authorization: Bearer \U0001f511".encode(),
        b"Authorization: Bearer \xff\xfe",
        b"Authorization: Bearer sk-good\r\nAuthorization: Bearer sk-good",
        b"X-Api-Key: \xff",
        b"X-Api-Key: sk-good\r\nX-Api-Key: sk-good",
        b"X-Nothing: 1",
    ],
)
async def test_any_other_credential_is_a_401(start: Start, credential: bytes) -> None:
    stand = await start(ring=RING)

    async with RawClient(stand.port) as client:
        answer = await client.ask(request("POST", CHAT, chat()).replace(b"Host:", credential + b"\r\nHost:", 1))

    assert (answer.status, answer.error()["type"]) == (401, "authentication_error")
    assert answer.one("www-authenticate").startswith("Bearer")
    assert b"sk-" not in answer.body


async def test_a_key_without_the_word_bearer_is_told_how_to_send_it(start: Start) -> None:
    stand = await start(ring=RING)

    answer = await ask(stand.port, "POST", CHAT, chat(), "Authorization: sk-good")

    assert answer.status == 401
    assert "send `Authorization: Bearer KEY`" in str(answer.error()["message"])


async def test_keys_are_in_no_log_and_in_nothing_sent_on(start: Start) -> None:
    stand = await start(ring=RING)

    for path in (CHAT + "?api_key=sk-good&x=1&key=sk-good", "/nowhere?token=sk-good"):
        for credential in (KEY, "Authorization: Bearer sk-wrong"):
            await ask(stand.port, "POST", path, chat(), credential)
    await stand.ingress.close()

    assert b"sk-" not in stand.log.getvalue()
    assert (stand.service.served[0].target, b"sk-good" in repr(stand.service.served[0].headers).encode()) == (
        b"/v1/chat/completions?x=1",
        False,
    )
    assert "sk-good" not in str(stand.service.served[0].rule_headers)


async def test_what_a_client_names_steers_nothing(start: Start) -> None:
    stand = await start()
    body = chat(api_base="http://169.254.169.254", base_url="http://10.0.0.1", custom_llm_provider="x")

    answer = await ask(
        stand.port, "POST", CHAT, body, "X-Backend: evil", "X-Forwarded-Host: evil", "X-Real-IP: 1.2.3.4"
    )

    sent = dict(stand.service.served[0].headers)
    assert (answer.status, stand.service.served[0].body) == (200, body)
    assert b"host" not in sent
    assert b"x-forwarded-host" not in sent
    assert b"x-real-ip" not in sent


async def test_forwarded_fields_pass_only_when_trusted(start: Start) -> None:
    stand = await start(Settings(trust_forwarded=True))

    await ask(stand.port, "POST", CHAT, chat(), "X-Forwarded-For: 10.1.1.1")

    assert dict(stand.service.served[0].headers)[b"x-forwarded-for"] == b"10.1.1.1"


async def test_fields_named_by_connection_stay_on_this_hop(start: Start) -> None:
    stand = await start()

    await ask(
        stand.port,
        "POST",
        CHAT,
        chat(),
        "Connection: X-Hop, keep-alive",
        "X-Hop: 1",
        "Keep-Alive: 5",
        "Accept-Encoding: gzip",
    )

    assert [name for name, _ in stand.service.served[0].headers] == [b"x-request-id"]
    assert stand.service.served[0].rule_headers["accept-encoding"] == "gzip"


@pytest.mark.parametrize("given", ["a b", "x" * 200, "é", 'a"b', ""])
async def test_an_unfit_request_id_is_replaced(start: Start, given: str) -> None:
    stand = await start()

    answer = await ask(stand.port, "POST", CHAT, chat(), f"X-Request-Id: {given}")

    assert len(answer.one("x-request-id")) == 24
    assert dict(stand.service.served[0].headers)[b"x-request-id"].decode() == answer.one("x-request-id")


@pytest.mark.parametrize(
    ("given", "seconds"), [("20", 20.0), ("0", None), ("nan", None), ("1e99", None), ("soon", None)]
)
async def test_the_clients_own_time_out_is_read(start: Start, given: str, seconds: float | None) -> None:
    stand = await start()

    await ask(stand.port, "POST", CHAT, chat(), f"x-stainless-read-timeout: {given}")

    assert stand.service.served[0].read_timeout_s == seconds


async def test_our_own_time_out_field_is_read_and_goes_before_the_sdks(start: Start) -> None:
    stand = await start()

    await ask(stand.port, "POST", CHAT, chat(), "x-headrace-timeout-s: 2.5", "x-stainless-read-timeout: 600")

    assert stand.service.served[0].read_timeout_s == 2.5


@pytest.mark.parametrize("given", ["-5", "0", "soon", "", "nan", "inf", "86401", "1, 2"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/generate"])
async def test_nonsense_in_our_own_time_out_field_is_refused_in_the_callers_dialect(
    start: Start, path: str, given: str
) -> None:
    stand = await start()

    answer = await ask(stand.port, "POST", path, chat(), f"x-headrace-timeout-s: {given}")

    told = json.loads(answer.body)
    message = told["error"] if path == "/generate" else told["error"]["message"]
    assert answer.status == 400
    assert message.startswith(f"x-headrace-timeout-s is {given!r}: expected seconds above 0, at most 86400")
    assert (told.get("error_type") == "validation") is (path == "/generate")
    assert (told.get("type") == "error") is (path == "/v1/messages")
    assert not stand.service.served


async def test_a_preflight_needs_no_key_and_errors_carry_cors_too(start: Start) -> None:
    stand = await start(ring=RING)
    asked = ("Origin: https://app.test", "Access-Control-Request-Headers: authorization, x-one")

    preflight = await ask(stand.port, "OPTIONS", CHAT, None, *asked, "Access-Control-Request-Method: POST")
    refused = await ask(stand.port, "POST", CHAT, chat(), "Origin: https://app.test", "Authorization: Bearer sk-bad")

    assert (preflight.status, preflight.body) == (204, b"")
    assert preflight.one("access-control-allow-headers") == "authorization, x-one"
    assert "POST" in preflight.one("access-control-allow-methods")
    assert (refused.status, refused.one("access-control-allow-origin")) == (401, "*")
    assert preflight.one("access-control-allow-credentials") == refused.one("access-control-allow-credentials") == ""


async def test_named_origins_are_echoed_and_others_get_nothing(start: Start) -> None:
    stand = await start(Settings(cors_origins=("https://app.test",)))

    named = await ask(stand.port, "POST", CHAT, chat(), "Origin: https://app.test")
    other = await ask(stand.port, "OPTIONS", CHAT, None, "Origin: https://evil.test")

    assert (named.one("access-control-allow-origin"), named.one("vary")) == ("https://app.test", "origin")
    assert other.one("access-control-allow-origin") == other.one("access-control-allow-methods") == ""


async def test_without_cors_there_are_no_cors_fields(start: Start) -> None:
    stand = await start(Settings(cors_origins=()))

    answer = await ask(stand.port, "POST", CHAT, chat(), "Origin: https://app.test")

    assert not [name for name, _ in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("raw", ["/v1/" + "%" * 10, "/v1/a%zz", "/v1/a?b#c", "*", "", "http:", "/%2F"])
def test_odd_targets_are_a_target_or_refused(raw: str) -> None:
    with contextlib.suppress(Refusal):
        assert parse_target(raw, "").line.startswith(b"/")


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "API-Key",
        "apikey",
        "x-api-key",
        "api%5Fkey",
        "k%65y",
        "token",
        "auth_token",
        "Authorization",
        "x-goog-api-key",
    ],
)
def test_a_query_goes_on_without_what_is_called_like_a_key_however_it_is_spelled(name: str) -> None:
    assert parse_target(f"/v1/x?a=1&{name}=sk-good&b=2&&c", "").query == "a=1&b=2&&c"


@pytest.mark.parametrize("query", ["max_tokens=5", "keyword=a", "tokenizer=b", "stream=true", "monkey=1", "&", "a=1&"])
def test_a_query_of_other_names_goes_on_as_it_is(query: str) -> None:
    assert parse_target(f"/v1/x?{query}", "").query == query


def test_a_ring_finds_a_key_by_its_digest_alone() -> None:
    assert RING.find(b"sk-good") == Caller("acme", "k1", "bulk")
    assert RING.find(b"sk-goo") is None


def entry(secret: str, tenant: str = "acme") -> str:
    return key_command.entry(tenant, secret)


async def test_a_keys_file_is_taken_anew_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    path, logs = tmp_path / "keys.yaml", Logs(io.BytesIO())
    path.write_text(entry("one"))
    keys = KeysFile(path, logs.log)

    path.write_text(entry("one") + entry("two", "beta"))
    await keys.poll()
    taken = keys.current.find(b"two")
    path.write_text("- tenant: [broken")
    await keys.poll()
    broken = (keys.failed, keys.current.find(b"two"))
    path.unlink()
    await keys.poll()
    path.write_text(entry("three"))
    await keys.poll()
    logs.close()

    assert taken is not None
    assert (taken.tenant, broken) == ("beta", (True, taken))
    assert (keys.failed, keys.current.find(b"two"), keys.generation) == (False, None, 3)


async def test_a_keys_file_that_goes_away_or_becomes_a_pipe_may_come_back_as_it_was(tmp_path: Path) -> None:
    path, logs = tmp_path / "keys.yaml", Logs(io.BytesIO())
    path.write_text(entry("one"))
    keys = KeysFile(path, logs.log)

    path.unlink()
    os.mkfifo(path)
    async with asyncio.timeout(5.0):
        await keys.poll()
    piped = keys.failed
    path.unlink()
    path.write_text(entry("one"))
    await keys.poll()
    logs.close()

    assert (piped, keys.failed, keys.current.find(b"one") is None) == (True, False, False)


async def test_a_keys_file_behind_a_swapped_symlink_is_seen(tmp_path: Path) -> None:
    logs = Logs(io.BytesIO())
    for name, secret in (("v1", "one"), ("v2", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.yaml").write_text(entry(secret))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    keys = KeysFile(tmp_path / "keys.yaml", logs.log)

    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    await keys.poll()
    logs.close()

    assert (keys.current.find(b"one"), keys.current.find(b"two") is None) == (None, False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "at least one key"),
        ("- tenant: a\n", "sha256"),
        ("- tenant: a\n  sha256: abc\n", "sha256"),
        (entry("one") + "  max_clas: x\n", "max_class"),
        (entry("one") + entry("one", "beta"), "entry 0"),
    ],
)
def test_a_bad_keys_file_says_what_is_wrong_without_a_digest(text: str, told: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse(text.encode(), "keys.yaml")

    assert told in str(caught.value)
    assert digest("one") not in str(caught.value)


def test_the_key_command_prints_a_key_that_its_entry_admits(capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(action="new", tenant="acme", max_class="bulk", id="", policy=None)

    code = key_command.run(args)
    printed = capsys.readouterr()

    secret = next(word for word in printed.err.split() if word.startswith("sk-"))
    assert (code, parse(printed.out.encode(), "keys.yaml").find(secret.encode())) == (
        0,
        Caller("acme", digest(secret)[:8], "bulk"),
    )
    assert secret not in printed.out


def test_the_key_command_refuses_a_name_that_would_break_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    code = key_command.run(argparse.Namespace(action="new", tenant='a"\n- x', max_class="", id="", policy=None))

    assert (code, capsys.readouterr().out) == (2, "")


def test_the_key_command_refuses_a_class_that_the_policy_given_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(presets.text("balanced"))

    code = main(["key", "new", "t", "--max-class", "nosuch", "--policy", str(policy)])

    told = capsys.readouterr()
    assert (code, told.out) == (2, "")
    assert told.err.startswith("headrace: key: --max-class nosuch: must be one of interactive, bulk")
    assert main(["key", "new", "t", "--max-class", "bulk", "--policy", str(policy)]) == 0


def test_the_key_command_warns_of_a_class_that_only_a_policy_of_yours_can_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["key", "new", "t", "--max-class", "nosuch"])

    told = capsys.readouterr()
    assert code == 0
    assert 'max_class: "nosuch"' in told.out
    assert told.err.splitlines()[0].startswith("headrace key: --max-class nosuch is no class of the preset balanced")
