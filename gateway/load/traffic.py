"""What a load sends: a trace, or made-up requests of given classes, lengths and arrivals."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, repeat

from gateway.load.lengths import Workload
from gateway.replay.trace import Request

NO_CLASS: Mapping[str, float] = {"": 1.0}


def made_up(
    times_s: Iterable[float],
    workload: Workload,
    *,
    classes: Mapping[str, float] = NO_CLASS,
    tenants: Sequence[str] = ("default",),
) -> Iterator[Request]:
    """A request for each time, with lengths of the workload, a class drawn by its share, and tenants in turn.

    classes   name -> share > 0; "" sends none, and the server decides
    """
    dice = random.Random(f"classes {workload.seed}")
    names, shares = list(classes), list(classes.values())
    for time_s, (prompt_tokens, output_tokens), tenant in zip(
        times_s, workload.lengths(), cycle(tenants), strict=False
    ):
        name = names[0] if len(names) == 1 else dice.choices(names, shares)[0]
        yield Request(time_s, prompt_tokens, output_tokens, tenant=tenant, class_name=name)


def at_once() -> Iterator[float]:
    """Times for a closed loop, whose requests are due when somebody is ready to send them."""
    return repeat(0.0)


def first(requests: Iterator[Request], count: int | None) -> Iterator[Request]:
    """The first `count` of them; None: all."""
    return requests if count is None else (request for request, _ in zip(requests, range(count), strict=False))
