"""docs/metrics.md, written from the table: `python -m gateway.observe.metrics_page` prints it.

A test compares, so that a row that is added or changed without its page is a red build.
"""

from __future__ import annotations

import sys

from gateway.instruments import LATENCY_BUCKETS_S, SECTIONS, STEP_BUCKETS_S
from gateway.series import LABEL_MAX_CHARS, OTHER, SERIES_MAX, Instrument, Kind, Merge

_HEAD = f"""# Metrics

What `GET /metrics` on the admin listener says (127.0.0.1:8081 unless set otherwise), in the text format 0.0.4 or, when
asked for, OpenMetrics. This page is written from the table in `gateway/instruments.py` by
`python -m gateway.observe.metrics_page > docs/metrics.md`; a test compares.

- Unknown is absent, never 0: a signal that an engine does not tell, or told too long ago, has no series.
  `headrace_engine_signal_quality` says which and why.
- Labels are bounded. A model counts under its own name only while an engine serves it, else under `{OTHER}`; a value
  is cut at {LABEL_MAX_CHARS} characters, and past {SERIES_MAX:,} series a metric counts all further ones under `{OTHER}`.
- With several workers there is one page: counters and histograms are summed and never fall when a process dies;
  a gauge says what the deciding process knows, except where the table says sum, min or max over the processes.
- Histograms of latencies have bounds from {LATENCY_BUCKETS_S[0]:g} s to {LATENCY_BUCKETS_S[-1]:,.0f} s, doubled until they reach the longest
  time-out that is configured; those of steps, from {STEP_BUCKETS_S[0] * 1000:g} ms to {STEP_BUCKETS_S[-1]:g} s.
- The page also has the `process_*` and `python_gc_*` metrics of the process that answers.
"""


def page() -> str:
    """The whole document."""
    parts = [_HEAD]
    for section in SECTIONS:
        parts.append(f"\n## {section.title}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n")
        parts.extend(map(_row, section.rows))
    return "".join(parts)


def _row(row: Instrument) -> str:
    labels = ", ".join(f"`{label}`" for label in row.labels)
    return f"| `{row.name}` | {_kind(row)} | {labels} | {row.help} |\n"


def _kind(row: Instrument) -> str:
    if row.kind is Kind.GAUGE and row.merge is not Merge.DECIDER:
        return f"{row.kind} ({row.merge})"
    return row.kind.value


if __name__ == "__main__":
    sys.stdout.write(page())
