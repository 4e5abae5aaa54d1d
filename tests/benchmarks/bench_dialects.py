"""CPU per chunk of splitter and reader together, and per metrics page. Run: python tests/benchmarks/bench_dialects.py

Chunks are shaped like the recorded ones; the best of several rounds is printed, since the machine may be busy.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backends.dialects import open_reader
from backends.exposition import parse
from backends.sse import EventSplitter
from backends.vllm import METRICS

DATA = Path(__file__).parent.parent / "data" / "engines"
CHUNKS = 20_000
ROUNDS = 7


def vllm_chunk(number: int) -> bytes:
    choice = {
        "index": 0,
        "delta": {"content": f" w{number}"},
        "logprobs": None,
        "finish_reason": None,
        "token_ids": None,
    }
    head = {
        "id": "chatcmpl-b417e7c32a347ca8",
        "object": "chat.completion.chunk",
        "created": 1795969411,
        "model": "tiny",
    }
    return b"data: " + json.dumps({**head, "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def with_usage(number: int) -> bytes:
    usage = {"prompt_tokens": 17, "total_tokens": 17 + number, "completion_tokens": number}
    return vllm_chunk(number)[:-3] + b',"usage":' + json.dumps(usage).encode() + b"}\n\n"


def responses_chunk(number: int) -> bytes:
    payload = {
        "type": "response.output_text.delta",
        "sequence_number": number,
        "item_id": "msg_1",
        "delta": f" w{number}",
    }
    return b"event: response.output_text.delta\ndata: " + json.dumps(payload).encode() + b"\n\n"


def tgi_chunk(number: int) -> bytes:
    token = {"id": number, "text": f" w{number}", "logprob": -0.5, "special": False}
    return (
        b"data:"
        + json.dumps({"index": number, "token": token, "generated_text": None, "details": None}).encode()
        + b"\n\n"
    )


def stream_us(chunks: list[bytes], dialect: str) -> float:
    """Microseconds a chunk for a relay's two calls."""
    splitter = EventSplitter()
    reader = open_reader(dialect, "/", sequences=1, strip_usage=True)
    feed, inspect = splitter.feed, reader.inspect
    start_s = time.process_time()
    for chunk in chunks:
        ready = feed(chunk)
        if ready and inspect(ready) is not None:
            raise AssertionError(chunk)
    used_s = time.process_time() - start_s
    if reader.tokens < CHUNKS:
        raise AssertionError(reader)
    return used_s / CHUNKS * 1e6


def page() -> bytes:
    """A page as long as vLLM's (52 KB): the recorded excerpt and histogram buckets."""
    recorded = (DATA / "vllm_metrics.txt").read_bytes()
    buckets = b"".join(
        b'vllm:request_decode_time_seconds_bucket{engine="0",le="%d.0",model_name="tiny"} 32.0\n' % le
        for le in range(500)
    )
    return recorded + buckets


def best(measure: Callable[[], float]) -> float:
    return min(measure() for _ in range(ROUNDS))


def main() -> None:
    plain = [vllm_chunk(n) for n in range(CHUNKS)]
    three_a_read = [b"".join(plain[n : n + 3]) for n in range(0, CHUNKS, 3)]
    split = [half for chunk in plain for half in (chunk[:100], chunk[100:])]
    for name, chunks, dialect in (
        ("vLLM chunk", plain, "openai"),
        ("vLLM chunk, three a read", three_a_read, "openai"),
        ("vLLM chunk, each cut in two", split, "openai"),
        ("vLLM chunk with usage", [with_usage(n) for n in range(CHUNKS)], "openai"),
        ("Responses delta", [responses_chunk(n) for n in range(CHUNKS)], "responses"),
        ("TGI token", [tgi_chunk(n) for n in range(CHUNKS)], "tgi"),
    ):
        print(f"{name:32} {best(partial(stream_us, chunks, dialect)):8.2f} us a chunk")
    text = page()

    def page_us() -> float:
        start_s = time.process_time()
        for _ in range(100):
            parse(text, METRICS)
        return (time.process_time() - start_s) * 1e4

    print(f"{f'metrics page of {len(text) / 1000:.0f} KB':32} {best(page_us):8.0f} us a page")


if __name__ == "__main__":
    main()
