"""What the demo shows of the gateway, read where an operator would read it: the admin listener's metrics page."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]


@dataclass(slots=True)
class EngineLine:
    """One engine as the page tells of it; None: the page does not say. in_flight and window are by class."""

    state: str = "down"
    kv_used_fraction: float | None = None
    in_flight: dict[str, int] = field(default_factory=dict)
    window: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class GatewayPage:
    """The few numbers that the demo shows. loop_lag: how many timers ran no later than so many seconds."""

    queued: dict[str, int] = field(default_factory=dict)
    objective_s: dict[str, float] = field(default_factory=dict)
    engines: dict[str, EngineLine] = field(default_factory=lambda: defaultdict(EngineLine))
    loop_lag: dict[float, float] = field(default_factory=dict)


async def read_page(session: aiohttp.ClientSession, admin_url: str) -> GatewayPage:
    """Read the page once. Raises aiohttp.ClientError or TimeoutError."""
    async with session.get(f"{admin_url}/metrics", raise_for_status=True) as answer:
        return parse_page(await answer.text())


def parse_page(text: str) -> GatewayPage:
    """Pick the demo's numbers out of a page."""
    page = GatewayPage()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            _take(page, sample.name, sample.labels, sample.value)
    return page


def lag_p99_s(now: Mapping[float, float], before: Mapping[float, float]) -> float | None:
    """How late the loop was between two pages, from their buckets as Prometheus takes it; None: no timer ran between them."""
    counts = [(0.0, 0.0), *((bound_s, count - before.get(bound_s, 0.0)) for bound_s, count in sorted(now.items()))]
    rank = 0.99 * counts[-1][1]
    for (low_s, below), (high_s, upto) in pairwise(counts):
        if upto >= rank > below:
            return low_s if math.isinf(high_s) else low_s + (high_s - low_s) * (rank - below) / (upto - below)
    return None


def _take(page: GatewayPage, name: str, labels: Labels, value: float) -> None:
    match name:
        case "headrace_queued":
            page.queued[labels["class"]] = int(value)
        case "headrace_ttft_objective_seconds":
            page.objective_s[labels["class"]] = value
        case "headrace_engine_state" if value == 1:
            page.engines[labels["engine"]].state = labels["state"]
        case "headrace_engine_kv_used_ratio":
            page.engines[labels["engine"]].kv_used_fraction = value
        case "headrace_in_flight":
            page.engines[labels["engine"]].in_flight[labels["class"]] = int(value)
        case "headrace_loop_lag_seconds_bucket":
            page.loop_lag[float(labels["le"])] = value
        case "headrace_window":
            page.engines[labels["engine"]].window[labels["class"]] = int(value)
