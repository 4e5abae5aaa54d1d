"""What a work's record carries: every field, and those that an older version does not know."""

from __future__ import annotations

from dataclasses import replace

from gateway.queue.base import Began, Told
from gateway.queue.wire import pack_events, unpack_events
from tests.policies.worlds import work


def test_a_work_with_all_that_placing_needs_is_read_as_it_was_written() -> None:
    one = replace(work("w", "night", rank=0.0), prefix="0a0b0c0d.01020304", finish_by_s=0.1 + 0.2)

    (told,) = unpack_events(pack_events([Told(1, 0, Began(one, "e0", 1))]))

    assert told.event == Began(one, "e0", 1)
