"""A real vLLM on the CPU, as `python -m gateway.bench.vllm_cpu NAME [FLAG ...]`, from the environment below ours.

`make .venv/.vllm` installs it and makes its model. It runs as three processes: the API server, EngineCore and Worker. The
first one's end leaves the other two behind, so they are a process group of their own and end together.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ENVIRONMENT = Path(sys.prefix) / "vllm"
MODEL = ENVIRONMENT / "tiny"
REMEDY = "make .venv/.vllm"
START_S = 600.0
"""25 s on two idle cores."""
LOOK_S = 0.5


def missing(environment: Path = ENVIRONMENT) -> str:
    """What to run before this can; "" when all is there."""
    return "" if (environment / "bin" / "python").exists() and (environment / "tiny").exists() else REMEDY


def command(name: str, port: int, *flags: str, environment: Path = ENVIRONMENT) -> list[str]:
    """The API server's command line; `vllm serve` itself does not start with this package."""
    return [
        *(str(environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"),
        *("--model", str(environment / "tiny"), "--served-model-name", name),
        *("--host", "127.0.0.1", "--port", str(port), *flags),
    ]


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that it needs, on top of ours; no hub is asked, nothing is told to anybody."""
    return {
        **{name: value for name, value in environ.items() if name != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


def main(name: str, *flags: str) -> int:
    """Serve until SIGTERM or Ctrl-C; 1 if vLLM ended by itself."""
    over = threading.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda _number, _frame: over.set())
    port = _free_port()
    server = subprocess.Popen(  # noqa: S603 - the caller's own words
        command(name, port, *flags), stdout=sys.stderr, env=variables(os.environ), process_group=0
    )
    try:
        listening = False
        while not over.wait(LOOK_S):
            if server.poll() is not None:
                return 1
            if not listening and (listening := _answers(port)):
                sys.stdout.write(f"listening on http://127.0.0.1:{port}\n")
                sys.stdout.flush()
        return 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=LOOK_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
