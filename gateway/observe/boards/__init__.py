"""The dashboards, one a file, from the page that is looked at first to what lies below it.

Every metric of the table is asked for by some panel, or stands in `UNUSED` with the reason why not; a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.instruments import POLICY_INFO
from gateway.observe.boards import energy, engines, gpus, internals, overview, queues, tenants
from gateway.observe.panels import Board

BOARDS: tuple[Board, ...] = (
    overview.BOARD,
    queues.BOARD,
    engines.BOARD,
    gpus.BOARD,
    energy.BOARD,
    tenants.BOARD,
    internals.BOARD,
)

UNUSED: Mapping[str, str] = {}
"""Name of a metric that no panel asks for -> why."""

NEW_POLICY = f"max by (version) ({POLICY_INFO.name}) unless max by (version) ({POLICY_INFO.name} offset 1m)"
"""True for the first minute of a policy: marks on every board where it came into force."""
