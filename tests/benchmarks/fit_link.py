"""How the profiles of two RTX PRO 6000 came about: what is measured, what is derived, and the two numbers that are fitted.

    python -m tests.benchmarks.fit_link

Measured, per layer and by tokens: the kernels of Qwen3-32B halved over two GPUs, of Qwen3-30B-A3B's attention on one, and
of its experts halved over two (`KERNELS_US`, `EXPERTS_US`; LLMServingSim, see SOURCE). Derived: everything in a step but
the link between the GPUs, which no file measures for the machine of the logs. It is given a latency and a bandwidth for
each collective, and these two are fitted: on the first half of the requests of the Qwen3-32B log, in order of arrival,
and on nothing else. The other half, and the whole log of Qwen3-30B-A3B with the same link, are for validation.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from backends.simulated.profiles import Profile, load_profile
from backends.simulated.step_model import StepModel
from gateway.bench.fidelity import LOGS_DIR, Residuals, play, read_log, residuals

DENSE, MIXTURE = "rtxpro6000x2_qwen3_32b_tp2", "rtxpro6000_qwen3_30b_a3b"
SOURCE = "LLMServingSim profiler/perf/RTXPRO6000 (MIT): Qwen3-32B tp2 and Qwen3-30B-A3B tp1 dense.csv, moe.csv (ep 2)"

KERNELS_US = {
    DENSE: {1: 359.6, 128: 430.2, 256: 508.2, 512: 790.5, 1024: 1442.6, 2048: 2752.9},
    MIXTURE: {16: 34.8, 128: 44.5, 256: 61.8, 512: 101.1, 1024: 178.8, 2048: 318.4},
}
"""Projections, norms, rotation and activation of one layer, summed, by tokens in the step."""

LAYERS = {DENSE: 64, MIXTURE: 48}
HEAD_MS = {DENSE: 0.65, MIXTURE: 0.5}
"""Language head and sampler, once a step."""

HIDDEN_BYTES = {DENSE: 5120 * 2, MIXTURE: 2048 * 2}
"""What one token sends in each of the two collectives of a layer."""

EXPERTS_US = (20.0, 6.45, 0.0687)
"""One layer's experts on one of two GPUs: per step, per expert read, per token; 64 of 128 experts live there."""

HOST_MS = (1.0, 0.02)
"""h0 and h1, as rtxpro6000_llama31_8b_tp1 has them, of the same host."""

MS_PER_KV_BYTE = 8.7e-5 / 131_072
"""Reading KV in decoding: the same on this GPU for Llama-3.1-8B and Qwen3-32B within 0.3 %."""


def dense(latency_us: float, gb_per_s: float) -> StepModel:
    """Two tensor-parallel GPUs: half of each kernel, half of the KV, two all-reduces a layer."""
    floor, line = _lines(DENSE)
    once_ms, token_ms = _link(DENSE, latency_us, gb_per_s)
    return StepModel(
        a=floor[0] + once_ms, b=floor[1] + token_ms, d=line[0] + once_ms, e=line[1] + token_ms,
        c=MS_PER_KV_BYTE * 262_144 / 2, f=9.6e-6 / 2,
        h0=HOST_MS[0], h1=HOST_MS[1],
    )  # fmt: skip


def mixture(latency_us: float, gb_per_s: float) -> StepModel:
    """Two data-parallel ranks, experts spread over both: all-gather and reduce-scatter a layer, of the rank's tokens.

    A token of the experts' work counts one and a half times, since the decoding ones of the other rank come too and its
    prefill mostly does not.
    """
    floor, line = _lines(MIXTURE)
    once_ms, token_ms = _link(MIXTURE, latency_us, gb_per_s)
    step_us, expert_us, token_us = EXPERTS_US
    layers = LAYERS[MIXTURE]
    once_ms += layers * step_us / 1000
    token_ms += 1.5 * layers * token_us / 1000
    return StepModel(
        a=floor[0] + once_ms, b=floor[1] + token_ms, d=line[0] + once_ms, e=line[1] + token_ms,
        c=MS_PER_KV_BYTE * 98_304, f=9.6e-6 * (48 * 32) / (64 * 64), g=layers * 64 * expert_us / 1000, k=8 / 128,
        ranks=2, h0=HOST_MS[0], h1=HOST_MS[1],
    )  # fmt: skip


def fit() -> tuple[float, float]:
    """(latency_us, gb_per_s) with the least squared error of the fitted half's figures, on a grid of 1 us and 0.1 GB/s."""
    profile, log = load_profile(DENSE), read_log(LOGS_DIR / "vllm_log_rtxpro6000_qwen3_32b.csv")
    half = len(log) // 2

    def error(latency_us: float, gb_per_s: float) -> float:
        played, _ = play(replace(profile, step_model=dense(latency_us, gb_per_s)), log)
        found = residuals(played[:half], log[:half])
        return sum(found[name].error ** 2 for name in ("ttft_p50_s", "ttft_p90_s", "tpot_p50_s"))

    best = (35.0, 15.0)
    for step_us, step_gb in ((10.0, 1.0), (5.0, 0.5), (1.0, 0.1)):
        grid = [(best[0] + i * step_us, best[1] + j * step_gb) for i in range(-4, 5) for j in range(-4, 5)]
        best = min((one for one in grid if one[0] >= 0), key=lambda one: error(*one))
    return round(best[0], 3), round(best[1], 3)


def _lines(name: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """(at 0 tokens, per token) in ms: of the floor, through the smallest size and 128, and of the line above 512."""
    layers, us = LAYERS[name], KERNELS_US[name]
    least = min(us)
    floor_slope = (us[128] - us[least]) / (128 - least)
    line_slope = (us[2048] - us[512]) / (2048 - 512)
    return tuple(
        (layers * (us[at] - slope * at) / 1000 + HEAD_MS[name], layers * slope / 1000)
        for at, slope in ((128, floor_slope), (512, line_slope))
    )  # type: ignore[return-value]


def _link(name: str, latency_us: float, gb_per_s: float) -> tuple[float, float]:
    """(per step, per token of the rank) in ms: two collectives a layer."""
    collectives = 2 * LAYERS[name]
    return collectives * latency_us / 1000, collectives * HIDDEN_BYTES[name] / gb_per_s / 1e6


def _tell(title: str, found: Residuals) -> None:
    shown = "  ".join(f"{name} {one.error:+.1%}" for name, one in found.items())
    sys.stdout.write(f"{title:34} {shown}\n")


def main() -> None:
    """Fit, then tell the errors of the fitted half, of the other half and of the log that took no part."""
    link = fit()
    sys.stdout.write(f"link: {link[0]:g} us and {link[1]:g} GB/s a collective\n")
    models = {DENSE: dense(*link), MIXTURE: mixture(*link)}
    for name, model in models.items():
        sys.stdout.write(f"{name}: {model}\n")
    log = read_log(LOGS_DIR / "vllm_log_rtxpro6000_qwen3_32b.csv")
    played, _ = play(_with(DENSE, models), log)
    half = len(log) // 2
    _tell("Qwen3-32B, fitted half", residuals(played[:half], log[:half]))
    _tell("Qwen3-32B, other half", residuals(played[half:], log[half:]))
    log = read_log(LOGS_DIR / "vllm_log_rtxpro6000_qwen3_30b_a3b.csv")
    _tell("Qwen3-30B-A3B, nothing fitted", residuals(play(_with(MIXTURE, models), log)[0], log))


def _with(name: str, models: dict[str, StepModel]) -> Profile:
    return replace(load_profile(name), step_model=models[name])


if __name__ == "__main__":
    main()
