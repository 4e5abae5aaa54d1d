"""A log for replays in tests: a warning is a failure, since nothing in a replay goes wrong by chance."""

from __future__ import annotations

from typing import Any

import structlog


def _refuse(_logger: object, level: str, event: Any) -> Any:
    if level in {"warning", "error", "critical", "exception"}:
        raise AssertionError(f"logged: {event}")
    raise structlog.DropEvent


QUIET = structlog.wrap_logger(None, processors=[_refuse], wrapper_class=structlog.make_filtering_bound_logger(20))
