"""What a client is told that gets no engine: each refusal with what was wrong, and when to come back.

Plain functions from what is known to a `Refusal`; who decides is elsewhere. Draws are uniform in [0, 1) and spread the
hints, so that those refused together do not return together.
"""

from __future__ import annotations

from gateway.control.roster import Roster
from gateway.errors import Refusal, model_not_found
from policies.admission import Shed
from policies.schema import ClassPolicy
from policies.vocabulary import EngineState, Work

NO_ENGINE_RETRY_S = 5.0


def of(shed: Shed) -> Refusal:
    """The class has no room for one more that waits."""
    return Refusal(429, shed.message, "rate_limit_error", shed.reason, retry_after_s=shed.retry_after_s)


def infeasible(work: Work, one: ClassPolicy, retry_s: int, predicted_ttft_s: float | None) -> Refusal:
    """It cannot be in time. predicted_ttft_s counts from acceptance; None: nobody here can tell."""
    objective_s = one.ttft_objective_s(work.prompt_tokens) or 0.0
    if one.ttft_slowdown is not None and work.deadline_s is not None:
        objective_s = work.deadline_s - work.accepted_s
    told = "" if predicted_ttft_s is None else f" (predicted: {predicted_ttft_s:.1f} s)"
    return Refusal(
        429,
        f"class {work.class_name} promises a first token within {objective_s:.3g} s, and this request cannot have it in time"
        f"{told}; retry in {retry_s} s",
        "rate_limit_error",
        "infeasible",
        retry_after_s=retry_s,
        predicted_ttft_s=predicted_ttft_s,
    )


def crowding(work: Work, takes_s: float, most_s: float, retry_s: int) -> Refusal:
    """Others would be late for it. takes_s: that it would keep the engines; most_s: that they can be kept for now."""
    return Refusal(
        429,
        f"this prompt would keep the engines for {takes_s:.1f} s, and others of class {work.class_name} that are expected meanwhile "
        f"would be late: at most {most_s:.1f} s now; send it in a class without an objective, or retry in {retry_s} s",
        "rate_limit_error",
        "crowding",
        retry_after_s=retry_s,
        predicted_ttft_s=takes_s,
    )


def wait_too_long(timer: str, bound_s: float, retry_s: int) -> Refusal:
    """It waited for as long as it may. timer: the name of what bounds it."""
    return Refusal(
        503,
        f"no engine had room within {timer} = {bound_s:g} s; try again later or lower the load",
        "server_error",
        "wait_too_long",
        retry_after_s=retry_s,
    )


def queue_unavailable(*, draw: float) -> Refusal:
    return Refusal(
        503,
        "the queue cannot take requests now; try again",
        "server_error",
        "queue_unavailable",
        retry_after_s=NO_ENGINE_RETRY_S * (0.4 + 0.8 * draw),
    )


def nobody_serves(work: Work, roster: Roster, *, draw: float) -> Refusal:
    """Why no engine can take a work: a path or a model that nobody has is 404, an engine that is away 503."""
    listed = [engine for engine in roster if work.model in engine.models]
    if listed and not any(engine.backend and engine.backend.speaks(work.path) for engine in listed):
        return Refusal(
            404,
            f"model {work.model[:100]!r} is not served at {work.path}: no engine that has it speaks that route",
            reason="route_not_served",
            code="route_not_served",
        )
    if not listed and roster.any_up() and all(one.state is not EngineState.STARTING for one in roster):
        return model_not_found(work.model)
    return Refusal(
        503,
        f"no engine can serve model {work.model[:100]!r} now; try again",
        "server_error",
        "no_engine",
        retry_after_s=NO_ENGINE_RETRY_S * (0.6 + 0.8 * draw),
    )
