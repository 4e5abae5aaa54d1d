"""Objectives and queues: whether classes are served in time, and where time goes before the first token."""

from __future__ import annotations

from gateway import instruments as of
from gateway.observe.panels import (
    Board,
    Click,
    Draw,
    Panel,
    Query,
    chosen,
    gauge,
    mean,
    none_is_zero,
    per_second,
    quantile,
    quantiles,
)

_CLASS = chosen("class")
_BOTH = chosen("class", "model")
_TO_ENGINES = Click("Why is this engine so?", "headrace-engines", ("engine",))

BOARD = Board(
    "headrace-queues",
    "Headrace: queues and SLA",
    "Whether classes are served in time, and where the time goes before the first token.",
    ("class", "model"),
    (
        (
            "Objectives",
            (
                Panel(
                    "TTFT and its objective",
                    "Accepted to first content byte at the client. The objective is the policy's for a short prompt.",
                    (
                        *quantiles(of.TTFT, "class", _BOTH),
                        Query(gauge(of.OBJECTIVE, "class", _CLASS), "objective {{class}}"),
                    ),
                    unit="s",
                    width=12,
                ),
                Panel(
                    "TTFT attainment",
                    "Part of the works that met the objective.",
                    (
                        Query(
                            f"{per_second(of.SLA, 'class', chosen('class', 'model', outcome='met'))} /"
                            f" {per_second(of.SLA, 'class', _BOTH)}",
                            "{{class}}",
                        ),
                    ),
                    unit="percentunit",
                    width=6,
                    high=1.0,
                    steps=((0.0, "red"), (0.97, "orange"), (0.99, "green")),
                ),
                Panel(
                    "Deadlines met",
                    "Part of the works of classes with a deadline for whole answers that ended in time.",
                    (
                        Query(
                            f"{per_second(of.DEADLINES, 'class', chosen('class', 'model', outcome='met'))} /"
                            f" {per_second(of.DEADLINES, 'class', _BOTH)}",
                            "{{class}}",
                        ),
                    ),
                    unit="percentunit",
                    width=6,
                    high=1.0,
                    steps=((0.0, "red"), (0.97, "orange"), (0.99, "green")),
                ),
                Panel(
                    "Goodput of all",
                    "Works completed inside their objective, as a part of all works.",
                    (
                        Query(
                            f"{per_second(of.GOODPUT, 'class', _BOTH)} / {per_second(of.REQUESTS, 'class', _BOTH)}",
                            "{{class}}",
                        ),
                    ),
                    unit="percentunit",
                    width=6,
                    high=1.0,
                ),
            ),
        ),
        (
            "Where the time goes",
            (
                Panel(
                    "Mean wait and mean engine time",
                    "The two parts of a first token: in our queue, and from sending to the engine's first byte.",
                    (
                        Query(mean(of.QUEUE_WAIT, "class", _CLASS), "queue {{class}}"),
                        Query(mean(of.ENGINE_TTFT, "class", _CLASS), "engine {{class}}"),
                    ),
                    unit="s",
                    draw=Draw.STACK,
                ),
                Panel(
                    "Queue wait",
                    "Accepted to granted. Long waits with free engines are a matter of guards and shares.",
                    quantiles(of.QUEUE_WAIT, "class", _CLASS, (0.5, 0.95)),
                    unit="s",
                    click=Click("Which guard holds it back?", "headrace-engines", ("class",)),
                ),
                Panel(
                    "Engine TTFT by engine",
                    "Sent to the engine's first byte. One engine above the others is slow or too full.",
                    (Query(quantile(0.95, of.ENGINE_TTFT, "engine", _CLASS), "p95 {{engine}}"),),
                    unit="s",
                    click=_TO_ENGINES,
                ),
                Panel(
                    "TTFT",
                    "The whole distribution; exemplars lead to traces.",
                    (Query(f"sum by (le) (rate({of.TTFT.name}_bucket{_BOTH}[$__rate_interval]))", "{{le}}"),),
                    unit="s",
                    draw=Draw.HEATMAP,
                    width=12,
                ),
                Panel(
                    "Time between tokens",
                    "Gaps as they are relayed, and the mean gap of whole answers (TPOT).",
                    (
                        *quantiles(of.ITL, "class", _CLASS, (0.5, 0.99)),
                        Query(quantile(0.95, of.TPOT, "class", _BOTH), "TPOT p95 {{class}}"),
                    ),
                    unit="s",
                    width=6,
                ),
                Panel(
                    "Whole requests",
                    "Accepted to settled.",
                    quantiles(of.DURATION, "class", _BOTH, (0.5, 0.95)),
                    unit="s",
                    width=6,
                ),
            ),
        ),
        (
            "Queue",
            (
                Panel(
                    "Queue depth",
                    "Works that wait with us.",
                    (Query(gauge(of.QUEUED, "class", _CLASS), "{{class}}"),),
                    width=6,
                ),
                Panel(
                    "Oldest",
                    "Age of the work that has waited longest, while one waits.",
                    (Query(gauge(of.OLDEST, "class", _CLASS), "{{class}}"),),
                    unit="s",
                    width=6,
                ),
                Panel(
                    "Refused",
                    "By reason: queue_full at the bound, wait_too_long after it.",
                    (Query(per_second(of.SHEDS, "class, reason", _CLASS), "{{class}} {{reason}}"),),
                    unit="reqps",
                    width=6,
                ),
                Panel(
                    "Sequences in a request",
                    "How many sequences one request asks for.",
                    quantiles(of.REQUEST_BATCH, "class", _CLASS, (0.5, 0.95)),
                    width=6,
                ),
                Panel(
                    "Parts of split requests",
                    "Works each second that are parts of a request too large for one.",
                    (Query(none_is_zero(per_second(of.REQUEST_PARTS, "", _CLASS))),),
                    unit="reqps",
                    width=6,
                ),
                Panel(
                    "Classified",
                    "Requests by the class they got and what gave it. Much by shape alone: write a rule for it.",
                    (Query(per_second(of.CLASSIFIED, "class, reason", _CLASS), "{{class}} {{reason}}"),),
                    unit="reqps",
                    width=6,
                ),
                Panel(
                    "Refused at the door",
                    "Requests that became no work: no key, no such model or route, too large.",
                    (
                        Query(
                            none_is_zero(f"sum by (status, reason) (rate({of.REFUSALS.name}[$__rate_interval]))"),
                            "{{status}} {{reason}}",
                        ),
                    ),
                    unit="reqps",
                    width=6,
                ),
                Panel(
                    "Requests with an Idempotency-Key",
                    "Each second, by what the key led to.",
                    (Query(none_is_zero(per_second(of.IDEMPOTENT, "outcome")), "{{outcome}}"),),
                    unit="reqps",
                    width=6,
                ),
            ),
        ),
    ),
)
