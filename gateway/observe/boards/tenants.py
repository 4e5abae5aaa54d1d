"""Tenants: who asks, who waits, who gets what."""

from __future__ import annotations

from gateway import instruments as of
from gateway.observe.panels import Board, Draw, Panel, Query, chosen, gauge, per_second, quantile

_TENANT = chosen("tenant", "class")
_COUNTED = 'tenant=~"$tenant",class=~"$class",result!~"cancelled|client_error"'

BOARD = Board(
    "headrace-tenants",
    "Headrace: tenants",
    "Who asks, who waits, and who gets what.",
    ("tenant", "class"),
    (
        (
            "What they get",
            (
                Panel(
                    "Requests",
                    "Settled each second.",
                    (Query(per_second(of.REQUESTS, "tenant", _TENANT), "{{tenant}}"),),
                    unit="reqps",
                    draw=Draw.STACK,
                ),
                Panel(
                    "Output tokens",
                    "Relayed each second.",
                    (Query(per_second(of.OUTPUT_TOKENS, "tenant", _TENANT), "{{tenant}}"),),
                    unit="cps",
                    draw=Draw.STACK,
                ),
                Panel(
                    "Prompt tokens",
                    "Taken in each second.",
                    (Query(per_second(of.PROMPT_TOKENS, "tenant", _TENANT), "{{tenant}}"),),
                    unit="cps",
                    draw=Draw.STACK,
                ),
                Panel(
                    "Share of output tokens",
                    "Of all that was relayed. Compare with the tenants' weights.",
                    (
                        Query(
                            f"{per_second(of.OUTPUT_TOKENS, 'tenant', _TENANT)} / on () group_left ()"
                            f" {per_second(of.OUTPUT_TOKENS, '')}",
                            "{{tenant}}",
                        ),
                    ),
                    unit="percentunit",
                    high=1.0,
                ),
            ),
        ),
        (
            "How they are served",
            (
                Panel(
                    "TTFT",
                    "95 of 100 are faster; coarsely, since it is kept for every tenant.",
                    (Query(quantile(0.95, of.TENANT_TTFT, "tenant", _TENANT), "{{tenant}}"),),
                    unit="s",
                ),
                Panel(
                    "Inside the objective",
                    "Works completed inside their objective, as a part of those that the tenant did not end itself.",
                    (
                        Query(
                            f"{per_second(of.GOODPUT, 'tenant', _TENANT)} /"
                            f" {per_second(of.REQUESTS, 'tenant', '{' + _COUNTED + '}')}",
                            "{{tenant}}",
                        ),
                    ),
                    unit="percentunit",
                    high=1.0,
                ),
                Panel(
                    "Waiting",
                    "Works in the queue.",
                    (Query(gauge(of.TENANT_QUEUED, "tenant, class", _TENANT), "{{tenant}} {{class}}"),),
                ),
                Panel(
                    "Results",
                    "How the tenants' works end.",
                    (
                        Query(
                            per_second(of.REQUESTS, "tenant, result, status", _TENANT),
                            "{{tenant}} {{result}} {{status}}",
                        ),
                    ),
                    unit="reqps",
                    width=24,
                ),
            ),
        ),
    ),
)
