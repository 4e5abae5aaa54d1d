"""A profile as files: the JSON that `headrace simulate` and `headrace replay` read, a page with its reasons, a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from backends.simulated.step_model import PowerModel, StepModel
from gateway.profiling.advice import Advice, command_line, compose, helm
from gateway.profiling.fit import Fitted
from gateway.profiling.limits import Limits, Workload
from gateway.profiling.observations import Seen, Together
from gateway.profiling.sweep import Facts
from gateway.replay.chart import Line, Panel, svg
from policies.estimators.least_squares import nonnegative

DIGITS = 9


@dataclass(frozen=True, slots=True)
class Profiled:
    """One engine, measured. engine: what it calls itself, with its version; where: the address that was measured."""

    model: str
    kind: str
    engine: str
    where: str
    gpu: str
    day: str
    seen: Seen
    facts: Facts
    fitted: Fitted
    workload: Workload
    limits: Limits
    advice: Sequence[Advice]


def write(folder: Path, of: Profiled) -> None:
    """profile.json, profile.md and profile.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile.json").write_text(json.dumps(profile(of), indent=1) + "\n", encoding="utf-8")
    (folder / "profile.md").write_text(page(of), encoding="utf-8")
    (folder / "profile.svg").write_text(picture(of), encoding="utf-8")


def profile(of: Profiled) -> dict[str, object]:
    """What `backends.simulated.profiles.load_profile` reads. What was not found out has the most that was tried."""
    seen, facts, fitted = of.seen, of.facts, of.fitted
    largest = max((one.batch for one in seen.together), default=1)
    longest = max((one.prompt_tokens for one in seen.alone), default=1)
    held = max([round(one.context_tokens) for one in seen.together] + [longest])
    unknown = [
        name
        for name, value in (
            ("kv_tokens (the most that was held)", facts.kv_tokens),
            ("max_num_seqs (the largest batch that ran)", facts.seats),
            ("max_num_batched_tokens (the longest prompt)", fitted.budget_tokens),
        )
        if value is None
    ]
    document: dict[str, object] = {
        "model": of.model,
        "gpu": of.gpu,
        "step_ms": as_step(fitted.model),
        "engine": {
            "max_num_seqs": facts.seats or largest,
            "max_num_batched_tokens": max(fitted.budget_tokens or longest, facts.seats or largest),
            "kv_tokens": facts.kv_tokens or held,
            "lookahead": bool(facts.lookahead),
        },
        "kind": "profiled",
        "source": f"headrace profile of {of.engine} on {of.day}",
        "derivation": f"not found out: {'; '.join(unknown)}" if unknown else "",
        "fitted_on": (
            f"{fitted.points} points, median error {fitted.error:.1%}, largest {fitted.worst:.1%};"
            f" a request takes {1000 * fitted.overhead_s:.2f} ms beside its steps, which is not part of the profile"
        ),
    }
    document["measured"] = {
        "prompt_tokens, seconds": [astuple(one) for one in seen.alone],
        "batch, context_tokens, seconds, power_w": [astuple(one) for one in seen.together],
        "prompt_tokens, context_tokens, longest_s, usual_s": [astuple(one) for one in seen.stalls],
    }
    power = power_model(seen.together)
    if power is not None:
        document["power_w"] = {name: round(value, 3) for name, value in asdict(power).items()}
    return document


def as_step(model: StepModel) -> dict[str, float]:
    """A step model's part of a profile."""
    return {
        name: round(value, DIGITS)
        for name, value in asdict(model).items()
        if name != "ranks" and (value or name not in {"g", "k"})
    }


def power_model(points: Sequence[Together]) -> PowerModel | None:
    """P(B) = p0 + dp·(1 - exp(-B/b0)) of the batches whose power was seen; None with fewer than three sizes."""
    seen = [(one.batch, one.power_w) for one in points if one.power_w]
    if len({batch for batch, _ in seen}) < 3:
        return None
    best: tuple[float, PowerModel] | None = None
    for tenth in range(31):
        b0 = 10 ** (tenth / 10)
        rows = [(1.0, 1 - math.exp(-batch / b0)) for batch, _ in seen]
        matrix = [[sum(row[i] * row[j] for row in rows) + (1e-9 if i == j else 0.0) for j in (0, 1)] for i in (0, 1)]
        right = [sum(row[i] * watts for row, (_, watts) in zip(rows, seen, strict=True)) for i in (0, 1)]
        p0, dp = nonnegative(matrix, right)
        model = PowerModel(p0, dp, b0)
        cost = sum((model.power_w(batch) - watts) ** 2 for batch, watts in seen)
        if best is None or cost < best[0]:
            best = cost, model
    return None if best is None else best[1]


def page(of: Profiled) -> str:
    """The profile as Markdown."""
    facts, fitted, found = of.facts, of.fitted, of.limits
    model = of.fitted.model
    parts = [
        f"# {of.model} on {of.engine}",
        "",
        f"Measured by `headrace profile` on {of.day} in {facts.took_s:.0f} s"
        + (f"; it stopped early: {facts.stopped}." if facts.stopped else "."),
        "",
        "| | |",
        "|---|---|",
        f"| a step | max({model.a:.4g} + {model.b:.4g}·n, {model.d:.4g} + {model.e:.4g}·n) + {model.c:.4g}·ctx"
        f" + {model.f:.4g}·attention + {model.h1:.4g}·sequences"
        + (f" + {model.g:.4g}·(1 - {1 - model.k:.4g}ⁿ)" if model.g else "")
        + " ms |",
        f"| beside its steps a request takes | {1000 * fitted.overhead_s:.2f} ms |",
        f"| fit | {fitted.points} points, median error {fitted.error:.1%}, largest {fitted.worst:.1%} |",
        f"| KV memory | {_shown(facts.kv_tokens)} tokens |",
        f"| seats | {_shown(facts.seats)} |",
        f"| tokens of a step | {_shown(fitted.budget_tokens)} |",
        f"| steps are planned one ahead | {'unknown' if facts.lookahead is None else 'yes' if facts.lookahead else 'no'} |",
        f"| knee | a batch of {found.knee_batch} |",
        *(
            f"| at once with {context // 1024}k tokens | {'unknown' if most is None else f'{most:,}'} |"
            for context, most in found.peaks.items()
        ),
        *([f"| idle | {facts.idle_power_w:.0f} W |"] if facts.idle_power_w is not None else []),
        "",
        "## Settings",
        "",
        "| setting | value | why |",
        "|---|---|---|",
        *(f"| {f'`{one.flag}`' if one.flag else one.name} | {one.value or 'on'} | {one.reason} |" for one in of.advice),
        "",
        *_ready(of),
        "![Steps, first tokens, throughput and energy](profile.svg)",
        "",
    ]
    return "\n".join(parts)


def picture(of: Profiled) -> str:
    """Measured and fitted: steps over the batch, first tokens over the prompt, throughput, energy. As SVG."""
    model, seen = of.fitted.model, of.seen
    short = min((one.context_tokens / one.batch for one in seen.together), default=0.0)
    batches = sorted({one.batch for one in seen.together})
    few = [one for one in seen.together if one.context_tokens / one.batch < 2 * short]
    many = [one for one in seen.together if one.context_tokens / one.batch >= 2 * short]
    context = of.workload.context_tokens
    steps_s = {batch: model.step_s(batch, round(batch * context)) for batch in batches}
    joules = [
        (float(one.batch), one.power_w * one.seconds / one.batch) for one in seen.together if one.power_w is not None
    ]
    panels = [
        Panel(
            "step of a decoding batch",
            [
                Line("measured", [(one.batch, 1000 * one.seconds) for one in few], dots=True),
                Line(
                    "fitted",
                    sorted((one.batch, 1000 * model.step_s(one.batch, round(one.context_tokens))) for one in few),
                ),
                Line("long contexts", [(one.batch, 1000 * one.seconds) for one in many], dots=True),
            ],
            "ms",
            x_unit="",
            log_x=True,
        ),
        Panel(
            "first token of a prompt that is alone",
            [
                Line("measured", [(one.prompt_tokens, one.seconds) for one in seen.alone], dots=True),
                Line(
                    "fitted",
                    [
                        (one.prompt_tokens, of.fitted.overhead_s + model.step_s(0, 0, [(one.prompt_tokens, 0)]))
                        for one in seen.alone
                    ],
                ),
            ],
            "s",
            x_unit="",
            log_x=True,
            log_y=True,
        ),
        Panel(
            f"tokens per second with {context:,.0f} tokens of context each",
            [Line("fitted", [(float(batch), batch / step_s) for batch, step_s in steps_s.items()])],
            x_unit="",
            log_x=True,
            levels=[
                (
                    "at the knee",
                    of.limits.knee_batch / model.step_s(of.limits.knee_batch, round(of.limits.knee_batch * context)),
                )
            ],
        ),
    ]
    if joules:
        panels.append(
            Panel("energy per token", [Line("measured", joules, dots=True)], "J", x_unit="", log_x=True, log_y=True)
        )
    return svg(f"{of.model} on {of.engine}", panels)


def _ready(of: Profiled) -> list[str]:
    parts: list[str] = []
    for head, language, text in (
        ("Ready to use", "sh", command_line(of.kind, of.model, of.advice)),
        ("For compose", "yaml", compose(of.kind, of.model, of.advice)),
        ("For Helm", "yaml", helm(of.kind, of.model, of.advice)),
    ):
        if text:
            parts += [f"{head}:", "", f"```{language}", text.rstrip(), "```", ""]
    return parts


def _shown(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
