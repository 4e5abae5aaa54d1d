"""Settings for an engine, each with its reason, and ready to use: a command line, a compose service, Helm values.

What a setting is called differs by kind of engine; what it should be follows from the profile. An engine of no known
kind gets the numbers without names. Nothing here takes the last tenth of a GPU's memory: engines allocate beside what
they plan for (activations of a long prompt, CUDA graphs, collectives), and end when that fails.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.profiling.fit import Fitted
from gateway.profiling.limits import KV_SHARE, Limits, Workload
from gateway.profiling.sweep import Facts

HEADROOM: Final = 0.10
STALL_S: Final = 0.15
"""A step with a chunk of a prompt in it: how long everybody else's next token may wait."""
IDLE_S: Final = 4
"""The gateway reuses a connection for so long."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One setting. flag "": it is set in the environment, or is only to be known."""

    name: str
    value: str
    reason: str
    flag: str = ""
    environment: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The numbers behind the advice.

    seats     sequences at once
    budget    tokens of a step
    memory    share of the GPU memory that the engine may plan with
    """

    seats: int
    seats_why: str
    budget: int
    budget_why: str
    memory: float
    memory_why: str
    kv_tokens: int | None
    context_tokens: int


def plan(fitted: Fitted, found: Limits, facts: Facts, workload: Workload) -> Plan:
    """The numbers for this workload."""
    seats, seats_why = _seats(found, workload)
    budget, budget_why = _budget(fitted, seats, workload)
    memory, memory_why = _memory(facts)
    context = max(workload.whole_tokens, facts.max_model_len or 0)
    return Plan(seats, seats_why, budget, budget_why, memory, memory_why, facts.kv_tokens, context)


def advise(kind: str, numbers: Plan) -> list[Advice]:
    """In the words of one kind of engine."""
    return _BY_KIND.get(kind, _plain)(numbers)


def command_line(kind: str, model: str, advice: Sequence[Advice]) -> str:
    """What to start the engine with; "" for a kind that has no command of its own."""
    start = _COMMANDS.get(kind)
    if start is None:
        return ""
    environment = [one.environment for one in advice if one.environment]
    flags = [part for one in advice if one.flag for part in (one.flag, one.value) if part]
    return " ".join([*environment, start.format(model=shlex.quote(model)), *flags])


def compose(kind: str, model: str, advice: Sequence[Advice]) -> str:
    """A service of a compose file; "" for a kind without an image."""
    image = _IMAGES.get(kind)
    if image is None:
        return ""
    lines = ["services:", "  engine:", f"    image: {image}", f"    command: {_arguments(kind, model, advice)}"]
    environment = [one.environment for one in advice if one.environment]
    if environment:
        lines.append("    environment:")
        lines.extend(f"      {name}: '{value}'" for name, _, value in (one.partition("=") for one in environment))
    lines += ["    ports: ['8000:8000']", "    ipc: host", "    deploy:", "      resources:", "        reservations:"]
    lines.append("          devices: [{driver: nvidia, count: all, capabilities: [gpu]}]")
    return "\n".join(lines) + "\n"


def helm(kind: str, model: str, advice: Sequence[Advice]) -> str:
    """Container values of a chart: image, arguments and environment; "" for a kind without an image."""
    image = _IMAGES.get(kind)
    if image is None:
        return ""
    lines = ["engine:", f"  image: {image}", f"  args: {_arguments(kind, model, advice)}"]
    environment = [one.environment.partition("=") for one in advice if one.environment]
    if environment:
        lines.append("  env:")
        lines.extend(f"    - {{name: {name}, value: '{value}'}}" for name, _, value in environment)
    lines += ["  resources:", "    limits: {nvidia.com/gpu: 1}"]
    return "\n".join(lines) + "\n"


def _arguments(kind: str, model: str, advice: Sequence[Advice]) -> str:
    flags = [part for one in advice if one.flag for part in (one.flag, one.value) if part]
    words = [_MODEL_FLAGS.get(kind, "--model"), model, *flags]
    return "[" + ", ".join("'" + word.replace("'", "''") + "'" for word in words) + "]"


# -- the numbers ---------------------------------------------------------------------------------------------------


def _seats(found: Limits, workload: Workload) -> tuple[int, str]:
    by_speed = max(found.knee_batch, found.tpot_batch)
    context = f"with prompts of {workload.prompt_tokens:,} and answers of {workload.output_tokens:,} tokens"
    speed = (
        f"a batch of {found.tpot_batch} keeps gaps of {1000 * workload.tpot_s:.0f} ms, and the knee is at"
        f" {found.knee_batch} {context}"
    )
    if found.kv_batch is None:
        return _round(by_speed), f"{speed}; the size of the KV memory is not told, so it may hold fewer"
    if found.kv_batch < by_speed:
        return max(1, found.kv_batch), (
            f"the KV memory holds {found.kv_batch} {context}; more would be preempted and computed again ({speed})"
        )
    return _round(by_speed), f"{speed}; the KV memory would hold {found.kv_batch}"


def _round(batch: int) -> int:
    return batch if batch < 8 else batch // 8 * 8


def _budget(fitted: Fitted, seats: int, workload: Workload) -> tuple[int, str]:
    """The largest chunk beside a full batch that stalls nobody for longer than STALL_S."""
    model, context = fitted.model, round(seats * workload.context_tokens)
    tokens = 256
    while tokens < 16_384 and model.step_s(seats, context, [(tokens * 2, 0)]) <= STALL_S:
        tokens *= 2
    step_s = model.step_s(seats, context, [(tokens, 0)])
    budget = max(tokens, _up(seats, 256))
    return budget, (
        f"a step with a chunk of {tokens:,} tokens beside a full batch takes {1000 * step_s:.0f} ms, the next size up"
        f" more than {1000 * STALL_S:.0f} ms, for which everybody else would wait"
    )


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _memory(facts: Facts) -> tuple[float, str]:
    free = facts.vram_free_fraction
    most = 1 - HEADROOM
    if free is None:
        return most, "no GPU was visible from here; this leaves a tenth of its memory, which activations need"
    if free < HEADROOM:
        return most, (
            f"only {free:.0%} of the tightest GPU was free at the largest batch, less than the tenth that activations"
            " need; lower what the engine takes"
        )
    return most, f"{free:.0%} of the tightest GPU was free at the largest batch; this leaves at least a tenth"


# -- the words -----------------------------------------------------------------------------------------------------


def _vllm(numbers: Plan) -> list[Advice]:
    return [
        Advice("seats", str(numbers.seats), numbers.seats_why, "--max-num-seqs"),
        Advice("GPU memory", f"{numbers.memory:.2f}", numbers.memory_why, "--gpu-memory-utilization"),
        Advice("tokens of a step", str(numbers.budget), numbers.budget_why, "--max-num-batched-tokens"),
        Advice(
            "scheduling",
            "priority",
            "when KV memory runs out, bulk is evicted before interactive work; it frees no seat, which the gateway's"
            " windows do",
            "--scheduling-policy",
        ),
        Advice(
            "keep-alive",
            "30 s",
            f"the gateway reuses a connection for {IDLE_S} s, less than vLLM's own 5 s; the difference is the room for a"
            " loaded server that closes early",
            environment="VLLM_HTTP_TIMEOUT_KEEP_ALIVE=30",
        ),
    ]


def _tgi(numbers: Plan) -> list[Advice]:
    found = [
        Advice("seats", str(numbers.seats), numbers.seats_why, "--max-batch-size"),
        Advice(
            "requests at once",
            str(max(128, 2 * numbers.seats)),
            "beyond it TGI refuses at once; twice the seats lets the gateway decide",
            "--max-concurrent-requests",
        ),
        Advice("GPU memory", f"{numbers.memory:.2f}", numbers.memory_why, "--cuda-memory-fraction"),
        Advice("tokens of a prefill", str(numbers.budget), numbers.budget_why, "--max-batch-prefill-tokens"),
    ]
    if numbers.kv_tokens is not None:
        total = int(KV_SHARE * numbers.kv_tokens)
        why = f"{KV_SHARE:.0%} of the {numbers.kv_tokens:,} tokens that the KV memory holds"
        found.append(Advice("tokens of a batch", str(total), why, "--max-batch-total-tokens"))
    return found


def _sglang(numbers: Plan) -> list[Advice]:
    return [
        Advice("seats", str(numbers.seats), numbers.seats_why, "--max-running-requests"),
        Advice("GPU memory", f"{numbers.memory:.2f}", numbers.memory_why, "--mem-fraction-static"),
        Advice("tokens of a chunk", str(numbers.budget), numbers.budget_why, "--chunked-prefill-size"),
        Advice(
            "scheduling",
            "",
            "bulk waits behind interactive work in the engine as well",
            "--enable-priority-scheduling",
        ),
    ]


def _llamacpp(numbers: Plan) -> list[Advice]:
    context = numbers.context_tokens
    return [
        Advice("slots", str(numbers.seats), numbers.seats_why, "--parallel"),
        Advice(
            "context of all slots",
            str(numbers.seats * context),
            f"{context:,} tokens for each slot; the context is divided among them",
            "--ctx-size",
        ),
        Advice("tokens of a step", str(numbers.budget), numbers.budget_why, "--batch-size"),
        Advice("metrics", "", "the gateway reads what runs and waits from them", "--metrics"),
    ]


def _plain(numbers: Plan) -> list[Advice]:
    return [
        Advice("seats", str(numbers.seats), numbers.seats_why),
        Advice("tokens of a step", str(numbers.budget), numbers.budget_why),
        Advice("GPU memory", f"{numbers.memory:.2f}", numbers.memory_why),
    ]


_BY_KIND: Final = {"vllm": _vllm, "tgi": _tgi, "sglang": _sglang, "llamacpp": _llamacpp}
_COMMANDS: Final[Mapping[str, str]] = {
    "vllm": "vllm serve {model}",
    "tgi": "text-generation-launcher --model-id {model}",
    "sglang": "python -m sglang.launch_server --model-path {model}",
    "llamacpp": "llama-server --model {model}",
}
_MODEL_FLAGS: Final[Mapping[str, str]] = {
    "vllm": "--model",
    "tgi": "--model-id",
    "sglang": "--model-path",
    "llamacpp": "--model",
}
_IMAGES: Final[Mapping[str, str]] = {
    "vllm": "vllm/vllm-openai",
    "tgi": "ghcr.io/huggingface/text-generation-inference",
    "sglang": "lmsysorg/sglang",
    "llamacpp": "ghcr.io/ggml-org/llama.cpp:server-cuda",
}
