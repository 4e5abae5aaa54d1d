"""`headrace simulate`: a virtual vLLM or TGI on a port, for trying the gateway without a GPU.

Prints one line, `listening on http://HOST:PORT`, once it answers, and then nothing: other programs read that line, and
with port 0 it is how they learn the port. SIGTERM and Ctrl-C drain and end it with exit code 0; a second one ends it at
once.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from backends.simulated.config import Dialect, SimulatedConfig
from backends.simulated.continuous import SchedulingPolicy
from backends.simulated.profiles import EngineOptions, profile_names
from backends.simulated.server import SimulatedServer


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "simulate",
        help="run a virtual inference engine",
        description="Run a virtual vLLM or TGI: real HTTP, real scheduling, timings of a measured GPU, made-up words.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="port 0 takes a free one")
    parser.add_argument("--dialect", choices=[str(dialect) for dialect in Dialect], default=str(Dialect.VLLM))
    parser.add_argument("--model", default="sim-8b", help="name under which the model is served")
    parser.add_argument(
        "--profile",
        default="h100_llama31_8b_tp1",
        help=f"engine and GPU to imitate: {', '.join(profile_names())}, or a .json file",
    )
    engine = parser.add_argument_group("engine, by default as in the profile")
    engine.add_argument("--max-num-seqs", type=_positive, metavar="N", help="sequences that decode together")
    engine.add_argument("--max-num-batched-tokens", type=_positive, metavar="N", help="tokens of one step")
    engine.add_argument("--max-model-len", type=_positive, metavar="N", help="longest prompt plus answer, in tokens")
    engine.add_argument("--kv-tokens", type=_positive, metavar="N", help="KV cache, in tokens")
    engine.add_argument(
        "--scheduling-policy",
        choices=[str(policy) for policy in SchedulingPolicy],
        default=str(SchedulingPolicy.FCFS),
        help="whether the body's priority counts",
    )
    engine.add_argument("--enable-prefix-caching", action="store_true", help="vLLM: find beginnings of prompts again")
    refusing = parser.add_argument_group("refusing")
    refusing.add_argument("--max-num-queued-reqs", type=int, metavar="N", help="vLLM: 503 beyond so many waiting")
    refusing.add_argument(
        "--max-num-queued-tokens", type=int, metavar="N", help="vLLM: 503 beyond so many prompt tokens in prefill"
    )
    refusing.add_argument("--max-concurrent-requests", type=int, default=128, metavar="N", help="TGI: 429 beyond")
    refusing.add_argument("--api-key", help="vLLM: key that /v1 routes demand")
    running = parser.add_argument_group("running")
    running.add_argument("--speed", type=float, default=1.0, metavar="X", help="engine seconds per second")
    running.add_argument("--seed", type=int, default=0, help="of answer lengths and ids")
    running.add_argument(
        "--shutdown-timeout", type=float, default=0.0, metavar="SECONDS", help="for running requests when stopped"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop. Returns the exit code: 0, or 2 for options that cannot work."""
    try:
        host, port = _split_address(args.listen)
        server = SimulatedServer(_config(args), host=host, port=port)
    except ValueError as error:
        sys.stderr.write(f"headrace simulate: {error}\n")
        return 2
    try:
        asyncio.run(_serve(server))
    except OSError as error:
        sys.stderr.write(f"headrace simulate: --listen {args.listen}: {error.strerror}; choose another port\n")
        return 2
    return 0


async def _serve(server: SimulatedServer) -> None:
    loop = asyncio.get_running_loop()
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with server:
        sys.stdout.write(f"listening on {server.url}\n")
        sys.stdout.flush()
        await stop.wait()
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(server.drain())
            hurrying = tasks.create_task(stop_now.wait())
            await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            hurrying.cancel()


def _config(args: argparse.Namespace) -> SimulatedConfig:
    options = EngineOptions(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_tokens=args.kv_tokens,
        max_model_len=args.max_model_len,
        scheduling_policy=SchedulingPolicy(args.scheduling_policy),
        prefix_caching=args.enable_prefix_caching,
    )
    return SimulatedConfig(
        model=args.model,
        profile=args.profile,
        dialect=Dialect(args.dialect),
        options=options,
        speed=args.speed,
        seed=args.seed,
        api_key=args.api_key,
        max_num_queued_reqs=args.max_num_queued_reqs,
        max_num_queued_tokens=args.max_num_queued_tokens,
        max_concurrent_requests=args.max_concurrent_requests,
        shutdown_timeout_s=args.shutdown_timeout,
    )


def _split_address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"--listen {listen}: expected HOST:PORT with a port of 0 to 65535; try 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number >= 1")
    return int(text)
