"""What may be wrong with the world: each perturbation bends a run's plan, and nobody tells the policy.

They run for ten simulated minutes, for our own policy and the clairvoyant, which is told everything.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from backends.simulated.profiles import Profile
from gateway.bench.cells import Cell
from gateway.replay.host import EngineSpec
from gateway.replay.trace import Request
from gateway.replay.world import Plan

LONGEST_S = 600.0
SILENCE_S = 30.0
FOREIGN_SHARE = 0.2
PREFIX_SHARE = 0.37
LENGTH_FACTOR = 2.0
REPLICAS = 3
ESTIMATE_ERROR = 0.3


@dataclass(frozen=True, slots=True)
class Perturbed:
    """A plan, and the cell that it came from."""

    plan: Plan
    cell: Cell

    @property
    def middle_s(self) -> float:
        return (self.plan.duration_s or LONGEST_S) / 2

    def cut(self) -> Perturbed:
        """The first LONGEST_S of it, where it is longer."""
        plan = self.plan
        if plan.duration_s is None or plan.duration_s <= LONGEST_S:
            return self
        requests = tuple(one for one in plan.requests if one.arrival_s < LONGEST_S)
        return replace(self, plan=replace(plan, duration_s=LONGEST_S, requests=requests))

    def engines(self, change: Callable[[EngineSpec], EngineSpec]) -> Perturbed:
        return replace(self, plan=replace(self.plan, engines=tuple(map(change, self.plan.engines))))

    def requests(self, change: Callable[[Request], Request]) -> Perturbed:
        return replace(self, plan=replace(self.plan, requests=tuple(map(change, self.plan.requests))))


def profile_off(factor: float) -> Callable[[Perturbed], Perturbed]:
    """The engines are not what their profile says: steps take 1/factor times as long, so the profile is `factor` of it."""

    def perturb(run: Perturbed) -> Perturbed:
        return run.engines(lambda spec: replace(spec, profile=scaled(spec.profile, 1 / factor)))

    return perturb


def scaled(profile: Profile, factor: float) -> Profile:
    """A profile whose steps take `factor` times as long."""
    return replace(profile, step_model=profile.step_model.scaled(factor))


def length_drift(run: Perturbed) -> Perturbed:
    """From the middle of the run on all answers are LENGTH_FACTOR times as long, bulk's too."""

    def longer(one: Request) -> Request:
        late = one.arrival_s >= run.middle_s
        return replace(one, output_tokens=round(one.output_tokens * LENGTH_FACTOR)) if late else one

    longer_run = run.requests(longer)
    return replace(longer_run, plan=replace(longer_run.plan, drift=(run.middle_s, LENGTH_FACTOR)))


def no_polls(run: Perturbed) -> Perturbed:
    """No metrics for SILENCE_S in the middle of the run."""
    return run.engines(lambda spec: replace(spec, silent_s=(run.middle_s, run.middle_s + SILENCE_S)))


def engine_killed(run: Perturbed) -> Perturbed:
    """The last engine of a pool that stays dies in the middle of the run, and comes back empty after a minute."""
    lasting = [spec.name for spec in run.plan.engines if spec.interrupted_at_s is None]
    return run.engines(
        lambda spec: replace(spec, killed_at_s=run.middle_s) if len(lasting) > 1 and spec.name == lasting[-1] else spec
    )


def three_replicas(run: Perturbed) -> Perturbed:
    """Requests reach three gateways in turn, which share the queue; one of them leads."""
    return replace(run, plan=replace(run.plan, replicas=REPLICAS))


def foreign_traffic(run: Perturbed) -> Perturbed:
    """A fifth more of the interactive traffic reaches the engines past the gateway."""
    rng = random.Random(f"foreign {run.plan.seed}")
    names = [spec.name for spec in run.plan.engines if spec.interrupted_at_s is None]
    foreign = [
        (rng.choice(names), replace(one, arrival_s=rng.uniform(0, 2 * run.middle_s)))
        for one in run.plan.requests
        if rng.random() < FOREIGN_SHARE
    ]
    return replace(run, plan=replace(run.plan, foreign=sorted(foreign, key=lambda pair: pair[1].arrival_s)))


def prefix_hits(run: Perturbed) -> Perturbed:
    """The engine finds 37 % of each interactive prompt in its cache, and says so only in its counters."""
    return run.requests(lambda one: replace(one, cached_prompt_tokens=round(one.prompt_tokens * PREFIX_SHARE)))


def prompt_estimates(run: Perturbed) -> Perturbed:
    """The gateway's estimates of prompt sizes are off by up to ESTIMATE_ERROR, either way."""
    return replace(run, plan=replace(run.plan, estimate_error=ESTIMATE_ERROR))


def whole_bulk(run: Perturbed) -> Perturbed:
    """Answers of bulk are not streamed: nothing of them is seen before their end."""
    return replace(run, plan=replace(run.plan, whole_bulk=True))


PERTURBATIONS: Mapping[str, Callable[[Perturbed], Perturbed]] = {
    "profile_x0.6": profile_off(0.6),
    "profile_x1.6": profile_off(1.6),
    "length_drift": length_drift,
    "no_polls": no_polls,
    "engine_killed": engine_killed,
    "three_replicas": three_replicas,
    "foreign_traffic": foreign_traffic,
    "prefix_hits": prefix_hits,
    "prompt_estimates": prompt_estimates,
    "whole_bulk": whole_bulk,
}
"""By the name that `--perturb` takes."""
POOL_ONLY = frozenset({"engine_killed"})
"""Need a cell with more than one engine."""
