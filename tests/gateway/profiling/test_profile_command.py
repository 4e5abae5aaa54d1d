"""`headrace profile` against a simulated engine in real time, a real llama.cpp, and a gateway's admin listener."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from sys import executable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from backends.simulated.profiles import load_profile
from gateway.cli import main
from gateway.errors import StartError
from gateway.profiling.live import exported

SMALL = ["--max-batch", "2", "--max-prompt-tokens", "200", "--gpu", "none"]


@contextmanager
def engine(*command: str) -> Iterator[str]:
    process = Popen([executable, "-m", *command], stdout=PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("listening on ").strip()
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.mark.slow
def test_a_small_sweep_of_a_simulated_engine_is_told_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine("gateway.cli", "simulate", "--listen", "127.0.0.1:0") as url:
        code = main(["profile", url, "--out", str(tmp_path), *SMALL])

    told, warned = capsys.readouterr()
    found = load_profile(str(tmp_path / "profile.json"))
    assert code == 0 or "this machine was not quiet" in warned
    assert "--max-num-seqs" in told
    assert found.kv_tokens == 420_000
    assert found.step_model.decode_run_s(1, 100, 1) > 0.004
    assert (tmp_path / "profile.md").exists()


@pytest.mark.many
@pytest.mark.timeout(300)
def test_a_real_llamacpp_is_profiled_as_far_as_the_time_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine("gateway.demo.llamacpp", "smollm2") as url:
        main(["profile", url, "--out", str(tmp_path), "--json", "--for", "200", *SMALL, "--max-prompt-tokens", "100"])

    found = json.loads(capsys.readouterr().out)
    assert found["source"].startswith("headrace profile of llamacpp")
    assert found["engine"]["kv_tokens"] == 8192
    assert found["engine"]["max_num_seqs"] == 4
    assert len(found["measured"]["prompt_tokens, seconds"]) == 3
    assert found["step_ms"]["a"] > 0


def test_nobody_there_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err == (
        "headrace: profile http://127.0.0.1:9: nothing there answers as an engine; start it, or correct the URL\n"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--for", "0"], "--for 0: must be > 0"),
        (["--max-batch", "-1"], "--max-batch -1: must be > 0"),
        (["--key-env", "NO_SUCH_VARIABLE"], "the environment has no such variable"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "http://127.0.0.1:9", *flags]) == 2
    assert said in capsys.readouterr().err


async def test_what_a_gateway_has_learned_is_exported_from_its_status_page() -> None:
    learned = {
        "base_s": 0.0075,
        "per_sequence_s": 4.9e-5,
        "per_context_token_s": 5e-8,
        "per_prompt_token_s": 3e-5,
        "error": 0.05,
        "seen": 500,
    }

    async def status(_request: web.Request) -> web.Response:
        return web.json_response({"engines": [{"name": "e", "models": ["m"], "learned_step": learned, "seats": 64}]})

    app = web.Application()
    app.router.add_get("/admin/v1/status", status)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        found = await exported(url, "e")
        with pytest.raises(StartError, match="answered 404; give the admin listener"):
            await exported(f"{url}/elsewhere", "e")

    assert found["kind"] == "learned in service"
    assert isinstance(found["step_ms"], dict)
    assert found["step_ms"]["a"] == pytest.approx(7.5, rel=0.05)
