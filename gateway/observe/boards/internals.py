"""The gateway itself: its loops, decisions, Redis, processes and policy."""

from __future__ import annotations

from gateway import instruments as of
from gateway.observe.panels import (
    RANGE,
    Board,
    Draw,
    Panel,
    Query,
    gauge,
    none_is_zero,
    per_second,
    quantile,
    quantiles,
)

_REASON = "{{process}} {{reason}}"

BOARD = Board(
    "headrace-internals",
    "Headrace: gateway internals",
    "The gateway's loops, decisions, Redis, processes and policy.",
    (),
    (
        (
            "Time",
            (
                Panel(
                    "Loop lag",
                    "How late the event loops ran a timer. Every stream waits so long, too.",
                    quantiles(of.LOOP_LAG, "", "", (0.5, 0.99)),
                    unit="s",
                ),
                Panel(
                    "Decision time",
                    "Of a round over what waits, and of an arrival that may start at once.",
                    quantiles(of.DECISION_TIME, "kind", "", (0.5, 0.99)),
                    unit="s",
                ),
                Panel(
                    "CPU",
                    "Of the process that answers the scrape; with workers, that is the supervisor.",
                    (Query(f"sum by (instance) (rate(process_cpu_seconds_total[{RANGE}]))", "{{instance}}"),),
                    unit="percentunit",
                ),
            ),
        ),
        (
            "Pool and Redis",
            (
                Panel(
                    "Redis round trip",
                    "By script or command.",
                    (Query(quantile(0.99, of.REDIS_LATENCY, "operation"), "p99 {{operation}}"),),
                    unit="s",
                ),
                Panel(
                    "Redis calls and errors",
                    "Each second.",
                    (
                        Query(f"sum(rate({of.REDIS_LATENCY.name}_count[{RANGE}]))", "calls"),
                        Query(none_is_zero(per_second(of.REDIS_ERRORS, "")), "errors"),
                    ),
                    unit="ops",
                ),
                Panel(
                    "Redis answers",
                    "0 while a gateway's session is not certainly valid.",
                    (Query(gauge(of.REDIS_UP, "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Who decides",
                    "Processes that lead the pool, and the number of the leadership: a change is a takeover.",
                    (
                        Query(f"sum({of.LEADER.name})", "leaders"),
                        Query(f"changes({of.LEADER_EPOCH.name}[{RANGE}])", "takeovers {{instance}}"),
                    ),
                ),
                Panel(
                    "Events that no leader heard",
                    "What other processes had to tell of their attempts and could not; the learned state lacks it.",
                    (Query(none_is_zero(per_second(of.EVENTS_DROPPED, ""))),),
                    unit="ops",
                ),
                Panel(
                    "Clock error",
                    "How wrong a gateway's estimate of the pool clock may be; past 0.1 s it may not lead.",
                    (Query(gauge(of.CLOCK_ERROR, "instance"), "{{instance}}"),),
                    unit="s",
                    steps=((0.0, "green"), (0.1, "red")),
                ),
            ),
        ),
        (
            "Processes",
            (
                Panel(
                    "Client connections",
                    "Open now.",
                    (Query(gauge(of.CONNECTIONS, "instance"), "{{instance}}"),),
                    width=6,
                ),
                Panel(
                    "Bodies held",
                    "Request bodies in memory.",
                    (Query(gauge(of.BODIES_HELD, "instance"), "{{instance}}"),),
                    unit="bytes",
                    width=6,
                ),
                Panel(
                    "Workers that answer",
                    "With --workers; a single process has none.",
                    (Query(f"sum by (instance) ({of.WORKER_UP.name})", "{{instance}}"),),
                    width=6,
                ),
                Panel(
                    "Processes replaced",
                    "In an hour: died is a fault, reload and left are your doing.",
                    (Query(f"sum by (process, reason) (increase({of.WORKER_RESTARTS.name}[1h]))", _REASON),),
                    width=6,
                ),
                Panel(
                    "Memory",
                    "Resident, of the process that answers the scrape.",
                    (Query("max by (instance) (process_resident_memory_bytes)", "{{instance}}"),),
                    unit="bytes",
                    width=12,
                ),
                Panel(
                    "Scrape",
                    "How long Prometheus waits for the page.",
                    (Query('max by (instance) (scrape_duration_seconds{job="headrace"})', "{{instance}}"),),
                    unit="s",
                    width=12,
                ),
            ),
        ),
        (
            "Policy",
            (
                Panel(
                    "Policy in force",
                    "By content hash; two at a time mean that two gateways read different files.",
                    (Query(f"count by (version) ({of.POLICY_INFO.name})", "{{version}}"),),
                    draw=Draw.STACK,
                ),
                Panel(
                    "Policies since start",
                    "And whether the newest file is refused.",
                    (
                        Query(gauge(of.POLICY_GENERATION, "instance"), "{{instance}}"),
                        Query(gauge(of.POLICY_RELOAD_FAILED, "instance"), "refused {{instance}}"),
                    ),
                ),
                Panel(
                    "Version",
                    "Gateways by version.",
                    (Query(f"count by (version) ({of.BUILD_INFO.name})", "{{version}}"),),
                    draw=Draw.STACK,
                ),
            ),
        ),
    ),
)
