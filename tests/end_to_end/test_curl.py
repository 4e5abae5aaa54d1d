"""Plain curl against the whole process: what somebody tries first, and what shell scripts send."""

from __future__ import annotations

import asyncio
import gzip
import shutil
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from tests.end_to_end.conftest import Stage
from tests.end_to_end.scripted_engine import DONE, MODEL, Asked, Wire, answer, delta, event
from tests.end_to_end.scripted_engine import stream as streamed

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

CHAT = "/v1/chat/completions"
JSON = ("-H", "Content-Type: application/json")
WAIT_S = 15.0


@dataclass(frozen=True)
class Got:
    """What curl printed and how it ended."""

    code: int
    body: bytes
    trace: str

    @property
    def heads(self) -> list[str]:
        """Lines that the server sent before the body, interim answers' too."""
        return [line[2:] for line in self.trace.splitlines() if line.startswith("< ")]

    def json(self) -> dict[str, object]:
        found: dict[str, object] = orjson.loads(self.body)
        return found


async def curl(stage: Stage, path: str, *options: str) -> Got:
    process = await started(stage, path, *options)
    async with asyncio.timeout(WAIT_S):
        body, trace = await process.communicate()
    return Got(process.returncode or 0, body, trace.decode())


async def started(stage: Stage, path: str, *options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        "curl", "-q", "-sv", "--noproxy", "*", *options, f"{stage.gateway.public_url}{path}",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


def chat(**more: object) -> str:
    return orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}).decode()


def large_chat(folder: Path) -> Path:
    """A file with a body of 2 MB."""
    file = folder / "body.json"
    file.write_text(chat(x_padding="x" * 2_000_000))
    return file


def play(stage: Stage, script: object) -> None:
    stage.first.play = stage.second.play = script  # type: ignore[assignment]


def arrived(stage: Stage) -> Asked:
    """The one request that an engine got."""
    (asked,) = stage.first.requests + stage.second.requests
    return asked


async def test_a_whole_answer_is_printed(stage: Stage) -> None:
    got = await curl(stage, CHAT, *JSON, "-d", chat())

    assert got.code == 0
    assert got.json()["object"] == "chat.completion"


async def test_an_unbuffered_stream_is_printed_as_it_comes(stage: Stage) -> None:
    go_on = asyncio.Event()

    async def script(_asked: Asked, wire: Wire) -> None:
        await wire.head()
        await wire.part(event(delta("Hel")))
        await go_on.wait()
        await wire.part(event(delta(finish="stop")) + DONE)
        await wire.end()

    play(stage, script)
    process = await started(stage, CHAT, "-N", *JSON, "-d", chat(stream=True))
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        first = await process.stdout.readuntil(b"\n\n")
        go_on.set()
        rest, _ = await process.communicate()

    assert (first, process.returncode) == (event(delta("Hel")), 0)
    assert rest.endswith(DONE)


async def test_a_stream_that_breaks_off_fails_at_the_shell(stage: Stage) -> None:
    play(stage, streamed(event(delta("Hel")), end="rst"))

    got = await curl(stage, CHAT, "-N", *JSON, "-d", chat(stream=True))

    assert got.code != 0
    assert b'"error"' in got.body


async def test_a_large_body_is_asked_for_at_once(stage: Stage, tmp_path: Path) -> None:
    body = large_chat(tmp_path)

    # Without an answer to Expect curl would wait for the time it is told here, past ours.
    expect = ("-H", "Expect: 100-continue", "--expect100-timeout", str(2 * WAIT_S))
    got = await curl(stage, CHAT, *JSON, *expect, "--data-binary", f"@{body}")

    assert [line for line in got.heads if line.startswith("HTTP/")] == ["HTTP/1.1 100 Continue", "HTTP/1.1 200 OK"]
    assert arrived(stage).body == body.read_bytes()
    assert arrived(stage).one("expect") == ""


async def test_a_chunked_upload_reaches_the_engine_whole(stage: Stage, tmp_path: Path) -> None:
    body = large_chat(tmp_path)

    got = await curl(stage, CHAT, *JSON, "-H", "Transfer-Encoding: chunked", "-X", "POST", "-T", str(body))

    assert got.code == 0
    assert "Transfer-Encoding: chunked" in got.trace
    assert arrived(stage).body == body.read_bytes()
    assert arrived(stage).one("content-length") == str(body.stat().st_size)


async def test_http_1_0_gets_a_stream_that_ends_with_the_connection(stage: Stage) -> None:
    play(stage, streamed(event(delta("Hel")), event(delta(finish="stop")), DONE))

    got = await curl(stage, CHAT, "--http1.0", "-N", *JSON, "-d", chat(stream=True))

    assert got.code == 0
    assert got.body == event(delta("Hel")) + event(delta(finish="stop")) + DONE
    assert not any(line.lower().startswith("transfer-encoding") for line in got.heads)


async def test_http_1_0_gets_a_whole_answer(stage: Stage) -> None:
    got = await curl(stage, CHAT, "--http1.0", *JSON, "-d", chat())

    assert (got.code, got.json()["object"]) == (0, "chat.completion")


@pytest.mark.parametrize("coded", [False, True])
async def test_compressed_is_understood_whatever_the_engine_does(stage: Stage, coded: bool) -> None:
    body = orjson.dumps({"object": "chat.completion", "choices": [{"message": {"content": "Hello"}}]})
    play(stage, answer(200, gzip.compress(body), "Content-Encoding: gzip") if coded else answer(200, body))

    got = await curl(stage, CHAT, "--compressed", *JSON, "-d", chat())

    assert (got.code, got.body) == (0, body)


async def test_a_compressed_stream_is_not_asked_of_the_engine(stage: Stage) -> None:
    play(stage, streamed(event(delta("Hel")), event(delta(finish="stop")), DONE))

    got = await curl(stage, CHAT, "-N", "--compressed", *JSON, "-d", chat(stream=True))

    assert got.body.endswith(DONE)
    assert arrived(stage).one("accept-encoding") == "identity"


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/info", "/v1/models/m-fake"])
async def test_head_has_the_fields_of_get_and_no_body(stage: Stage, path: str) -> None:
    head = await curl(stage, path, "--head")
    get = await curl(stage, path)

    def length(got: Got) -> list[str]:
        return [line for line in got.heads if line.lower().startswith("content-length")]

    assert (head.code, get.code) == (0, 0)
    assert head.heads[0] == "HTTP/1.1 200 OK"
    assert length(head) == length(get) != []


async def test_several_requests_share_one_connection(stage: Stage) -> None:
    url = f"{stage.gateway.public_url}/v1/models"

    got = await curl(stage, "/v1/models", url, url)

    assert got.code == 0
    assert got.body.count(b'"object":"list"') == 3
    assert got.trace.count("Re-using existing") + got.trace.count("Reusing existing") == 2


async def test_http_2_prior_knowledge_is_refused_and_not_hung(stage: Stage) -> None:
    got = await curl(stage, "/v1/models", "--http2-prior-knowledge", "--max-time", "5")

    assert got.code not in {0, 28}


async def test_an_upgrade_to_http_2_is_passed_over(stage: Stage) -> None:
    got = await curl(stage, "/v1/models", "--http2")

    assert got.code == 0
    assert got.json()["object"] == "list"
