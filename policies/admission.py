"""Whether a work may wait, and when one that may not should come back.

The only ground to refuse here is the class's bound on waiting works. Predictions of waiting time are too uncertain to
refuse by (they are learned from admitted works only), but good enough to say when to return: the hint is the time in
which the works ahead will have left the queue at the rate observed, so it grows with the queue. It is spread by a draw,
so that everybody shed in one burst does not return in another; and it stays within 1 to 60 s, since clients ignore
longer hints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.schema import Policy

RETRY_AFTER_MIN_S = 1
RETRY_AFTER_MAX_S = 60
SPREAD = 0.2
DRAIN_UNKNOWN_S, WORK_UNKNOWN_S = 30.0, 2.0
"""Times that a full queue is taken to need, and each work of it, while no service rate has been observed: the shorter counts."""
QUEUE_FULL = "queue_full"


@dataclass(frozen=True, slots=True)
class Shed:
    """A refusal to let a work wait. `reason` is a stable word; `message` is for the client and names bound and hint."""

    reason: str
    retry_after_s: int
    message: str


def admit(
    class_name: str, *, depth: int, policy: Policy, served_per_s: float | None, draw: float, works: int = 1
) -> Shed | None:
    """Refuse a request when its class already holds max_queue waiting works, else None.

    works          that the request will let wait at a time; all of them find room or none, but an empty queue takes any
    depth          works of the class waiting now, without this one
    served_per_s   works of the class that leave the queue per second, as observed; None: unknown
    draw           uniform in [0, 1)
    """
    bound = policy.class_policy(class_name).max_queue
    if depth + works - 1 < bound or not depth:
        return None
    return shed(class_name, depth=depth, bound=bound, served_per_s=served_per_s, draw=draw)


def shed(class_name: str, *, depth: int, bound: int, served_per_s: float | None, draw: float) -> Shed:
    """The refusal of a work for which the queue (which judges atomically) had no room."""
    retry_s = retry_after_s(depth, bound=bound, served_per_s=served_per_s, draw=draw)
    return Shed(
        QUEUE_FULL,
        retry_s,
        f"class {class_name} has {depth} requests waiting: at most {bound} may; retry in {retry_s} s",
    )


def retry_after_s(depth: int, *, bound: int, served_per_s: float | None, draw: float) -> int:
    """Whole seconds, 1 to 60, until the `depth` works ahead have been served, +-20 % by `draw` in [0, 1).

    Without an observed rate a full queue (`bound` works) is taken to need DRAIN_UNKNOWN_S, or less if it is short; at a rate
    of 0 the hint is the longest.
    """
    return spread_retry_s(wait_s(depth, bound=bound, served_per_s=served_per_s), draw=draw)


def wait_s(depth: int, *, bound: int, served_per_s: float | None) -> float:
    """Seconds until the works ahead have been served, as in `retry_after_s`, without spread and limits."""
    if served_per_s is None or math.isnan(served_per_s):
        return depth * min(WORK_UNKNOWN_S, DRAIN_UNKNOWN_S / max(1, bound))
    return depth / served_per_s if served_per_s > 0 else math.inf


def spread_retry_s(seconds: float, *, draw: float) -> int:
    """A hint of about so many seconds: whole ones, 1 to 60, +-20 % by `draw` in [0, 1)."""
    spread = 1 - SPREAD + 2 * SPREAD * draw
    return max(RETRY_AFTER_MIN_S, min(RETRY_AFTER_MAX_S, math.ceil(min(seconds, RETRY_AFTER_MAX_S) * spread)))
