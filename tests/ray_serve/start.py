"""Ray with the model on it, as `python -m tests.ray_serve.start PORT REPLICAS`, in an environment of its own (make .venv/.ray).

All of Ray's processes are this one's children. It ends with all of them when it is told to.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

# Before Ray is imported: addresses of loopback for its own traffic (the switch works on Linux too), nothing told to its makers,
# and for its processes the way to our module.
os.environ |= {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}

import ray
from ray import serve

from tests.ray_serve.model import SEATS, Model

OBJECT_STORE_BYTES = 80 * 2**20
"""About the least that Ray takes; nothing is stored here."""


def main(port: int, replicas: int) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    ends = {signal.SIGTERM, signal.SIGINT}
    # In /tmp, wherever other temporary files are: the paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=replicas + 1,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=folder,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(serve.deployment(Model, num_replicas=replicas, max_ongoing_requests=SEATS).bind())
            signal.pthread_sigmask(signal.SIG_BLOCK, ends)
            sys.stdout.write(f"listening on http://127.0.0.1:{port}\n")
            sys.stdout.flush()
            signal.sigwait(ends)
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
