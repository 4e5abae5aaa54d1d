"""The demo's parts by themselves: what it sends, what it counts, what it shows, and how its engines end."""

from __future__ import annotations

import asyncio
import io
import os
import re
import socket
import sys
import textwrap
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from backends.simulated.tokenizer import Tokenizer, shipped_tokenizer
from gateway.demo.engines import EngineDidNotStart, engine_process
from gateway.demo.load import Load
from gateway.demo.ports import free_port
from gateway.demo.show import Stage
from gateway.demo.tally import Tally
from gateway.demo.view import busy_host, closing_lines, live_view, plain_line
from gateway.demo.watch import GatewayPage, lag_p99_s, parse_page
from gateway.demo.workload import conversation, summarisation
from gateway.instruments import LOOP_LAG
from gateway.load.score import RECENT_S, Figures, Score
from gateway.load.text import prompt_text
from gateway.replay.trace import Request
from gateway.settings_file import SettingsError
from gateway.telemetry import Telemetry
from policies.sizing import Window
from policies.vocabulary import EngineState, EngineView, Quality, Reading

DATA = Path(__file__).parents[1] / "data"


class Stepped:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


# What is sent.


def test_interactive_traffic_is_ten_minutes_of_the_trace_again_and_again() -> None:
    first, *_, last, again = islice(conversation(), 2868)

    assert first == Request(0.0, 374, 44, class_name="interactive")
    assert 590 < last.arrival_s < 600
    assert again == replace(first, arrival_s=600.0)


def test_a_higher_rate_brings_the_same_requests_sooner() -> None:
    plain, denser = list(islice(conversation(), 100)), list(islice(conversation(2.0), 100))

    assert [one.prompt_tokens for one in plain] == [one.prompt_tokens for one in denser]
    assert denser[-1].arrival_s == pytest.approx(plain[-1].arrival_s / 2)


def test_bulk_never_ends() -> None:
    assert sum(1 for _ in islice(summarisation(), 5000)) == 5000


@pytest.mark.parametrize("name", ["azure_conv_10min.csv", "arxiv_summarization_lengths.csv"])
def test_every_trace_names_its_source_and_licence(name: str) -> None:
    shipped = Path(sys.modules["gateway.demo"].__path__[0]) / "data" / name

    assert re.search(r"Source: .*(CC-BY 4\.0|MIT)", shipped.read_text().splitlines()[0])


def test_the_tests_copy_of_the_trace_is_the_demos() -> None:
    shipped = Path(sys.modules["gateway.demo"].__path__[0]) / "data" / "azure_conv_10min.csv"

    assert (DATA / "azure_conv_10min.csv").read_bytes() == shipped.read_bytes()


@pytest.mark.parametrize("tokens", [1, 27, 1000, 4000])
def test_a_prompt_has_about_the_tokens_asked_for(tokens: int) -> None:
    tokenizer: Tokenizer = shipped_tokenizer()

    counted = len(tokenizer.encode(prompt_text(tokens, 123)))

    assert abs(counted - tokens) <= max(4, tokens * 0.02)


def test_no_two_prompts_begin_alike() -> None:
    assert len({prompt_text(100, number)[:12] for number in range(1000)}) == 1000


# What is counted.


def test_a_score_forgets_what_is_not_recent() -> None:
    clock = Stepped()
    score = Score(clock)
    score.first_token(0.4)
    score.tokens(1500)
    at_once = score.figures()

    clock.now_s += RECENT_S + 1
    later = score.figures()

    assert at_once.tokens_per_s > 0
    assert (later.ttft_p50_s, later.tokens_per_s) == (None, 0.0)


# The clients, against a server that plays the gateway.


class Public:
    """Plays the public port: streams, refuses or breaks, as told by the test."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, object]]] = []
        self.tail = b"data: [DONE]\n\n"
        self.status = 200

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.headers["X-Headrace-Class"], await request.json()))
        if self.status != 200:
            return web.Response(status=self.status, headers={"Retry-After": "7"})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        await reply.write(b": waiting\n\n")
        for _ in range(3):
            await reply.write(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
        await reply.write(self.tail)
        await reply.write_eof()
        return reply


async def test_the_demos_clients_send_the_class_and_lengths_and_count_what_comes() -> None:
    public, clock = Public(), asyncio.get_running_loop().time
    app = web.Application()
    app.router.add_post("/v1/chat/completions", public.chat)
    async with TestServer(app) as server:
        score = Score(clock)
        load = Load(str(server.make_url("")).rstrip("/"), "m", {"interactive": score, "bulk": Score(clock)})

        await load.interactive(Request(at, 50, 9 - n, class_name="interactive") for n, at in enumerate((0.0, 0.01)))
        while score.completed < 2:
            await asyncio.sleep(0.005)
        await load.close()

    assert score.figures().tokens_per_s > 0
    assert [(name, body["max_tokens"], body["stream"]) for name, body in public.seen] == [
        ("interactive", 9, True),
        ("interactive", 8, True),
    ]


# What is shown.


def page() -> GatewayPage:
    telemetry = Telemetry(version="0")
    view = EngineView(
        "big", EngineState.UP, frozenset({"m"}), {"bulk": 3}, kv_used_fraction=Reading(0.5, 0.1, Quality.FRESH)
    )
    telemetry.engine(view, {"bulk": Window(requests=16), "interactive": Window(requests=64)}, sample_age_s=0.1)
    telemetry.queue({"interactive": 0, "bulk": 24})
    telemetry.policy("v", generation=1, reload_failed=False, objectives={"interactive": 0.5})
    return parse_page(telemetry.render()[0].decode())


def test_the_page_is_read_by_the_names_of_the_table() -> None:
    read = page()

    assert read.queued == {"interactive": 0, "bulk": 24}
    assert read.objective_s == {"interactive": 0.5}
    assert read.engines["big"].state == "up"
    assert read.engines["big"].kv_used_fraction == 0.5
    assert read.engines["big"].in_flight == {"bulk": 3, "interactive": 0}
    assert read.engines["big"].window == {"bulk": 16, "interactive": 64}


def test_a_plain_line_holds_both_classes_the_sla_and_the_rate() -> None:
    clock = Stepped()
    scores = {"interactive": Score(clock), "bulk": Score(clock)}
    scores["interactive"].ttft_sla_s = 0.5
    scores["interactive"].start()
    scores["interactive"].first_token(0.12)
    clock.now_s += 1
    scores["bulk"].tokens(900)

    line = plain_line(1.0, page(), {name: score.figures() for name, score in scores.items()})

    assert "interactive: 1 open, 0 queued, TTFT p50 0.12 s p99 0.12 s of SLA 0.50 s, 100.0% inside" in line
    assert "bulk: 0 open, 24 queued, 0 done" in line
    assert "900 tokens/s (900 bulk)" in line
    assert "\n" not in line


def test_the_closing_words_are_of_the_whole_time() -> None:
    clock = Stepped()
    tallies = {name: Tally(Score(clock)) for name in ("interactive", "bulk")}
    tallies["interactive"].score.ttft_sla_s = 0.5
    for ttft_s in (0.1, 0.9):
        tallies["interactive"].start()
        tallies["interactive"].first_token(ttft_s)
    tallies["bulk"].tokens(4000, None)
    clock.now_s += 2 * RECENT_S

    first, interactive, bulk = closing_lines(40.0, tallies, 0.01)

    assert first == "After 40 s:"
    assert "2 requests (0 done, 0 refused, 0 failed, 2 cut by the end), 50.0% inside the SLA of 0.50 s" in interactive
    assert "TTFT p50 0.10 s p99 0.90 s" in interactive
    assert bulk.endswith(" 100 tokens/s")
    assert "cut" not in bulk


def test_a_host_that_is_late_itself_is_named_while_it_is() -> None:
    telemetry = Telemetry(version="0")
    lag = telemetry.keep(LOOP_LAG)

    def buckets() -> dict[float, float]:
        return parse_page(telemetry.render()[0].decode()).loop_lag

    lag.observe(2.0)
    start = buckets()
    lag.observe(0.002)
    calm = buckets()
    lag.observe(0.2)
    busy = buckets()

    assert (busy_host(lag_p99_s(start, start)), busy_host(lag_p99_s(calm, start))) == ("", "")
    assert re.match(
        r"this host is too busy: the loop is (1[5-9]\d|2[0-4]\d|250) ms late", busy_host(lag_p99_s(busy, start))
    )
    assert closing_lines(1.0, {}, lag_p99_s(busy, start))[-1].strip().startswith("this host is too busy")


def test_the_live_view_shows_windows_and_cache() -> None:
    figures = {name: Score(Stepped()).figures() for name in ("interactive", "bulk")}
    console = Console(width=120, record=True, file=io.StringIO())

    console.print(live_view(3.0, page(), figures, ["note"]))

    text = console.export_text()
    assert "bulk 3/16" in text
    assert "interactive 0/64" in text
    assert "50%" in text
    assert "note" in text


def test_the_live_view_fits_a_terminal_of_80_columns() -> None:
    busy = Figures(1000, 345, 1200, 12, 3, 0.03, 10.16, 1.0, 12_221.0)
    console = Console(width=80, record=True, file=io.StringIO())

    console.print(live_view(3.0, page(), {"interactive": busy, "bulk": busy}, []))

    text = console.export_text()
    assert "…" not in text
    assert "TTFT p50" in text
    assert "10.16 s" in text


def test_the_curl_line_is_ready_to_paste() -> None:
    stage = Stage("http://127.0.0.1:8080", "http://127.0.0.1:8081", "sim-8b", 1.0, 4)

    assert stage.curl.startswith(
        "curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' -d '{"
    )


# Engines and ports.


def script(tmp_path: Path, name: str, body: str) -> None:
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(body))


@pytest.fixture
def engines_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("stubborn", [False, True])
async def test_an_engine_is_ended_by_its_pid_even_when_it_will_not(
    engines_path: Path, stubborn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.demo.engines.END_S", 0.2)
    script(
        engines_path,
        "playing_engine",
        f"""
        import os, signal, sys
        if {stubborn}: signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("some other line", flush=True)
        print("listening on http://127.0.0.1:1/" + str(os.getpid()), flush=True)
        while True: signal.pause()
        """,
    )

    async with engine_process("e", ["playing_engine"], engines_path) as url:
        pid = int(url.rpartition("/")[2])
        assert alive(pid)

    assert not alive(pid)


@pytest.mark.slow
async def test_an_engine_that_ends_instead_of_listening_tells_its_last_words(engines_path: Path) -> None:
    script(engines_path, "failing_engine", "import sys; sys.exit('no such profile: h900')")

    with pytest.raises(EngineDidNotStart, match=r"engine e: ended instead of listening.*no such profile: h900"):
        async with engine_process("e", ["failing_engine"], engines_path):
            pass


@pytest.mark.slow
async def test_an_error_beside_a_running_engine_is_raised_as_it_is(engines_path: Path) -> None:
    script(engines_path, "quiet_engine", "import signal; print('listening on http://h:1', flush=True); signal.pause()")

    with pytest.raises(ValueError, match="of the body"):
        async with engine_process("e", ["quiet_engine"], engines_path):
            raise ValueError("of the body")


def test_a_taken_port_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]

        assert free_port(taken) > taken


def test_no_free_port_is_told_with_the_remedy() -> None:
    with pytest.raises(SettingsError, match="--port"):
        free_port(65_535, taken={65_535})
