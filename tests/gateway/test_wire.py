"""What a work's record carries: every field, and those that an older version does not know."""

from __future__ import annotations

from dataclasses import replace

from gateway.queue.base import Began, InFlight, SessionReport, Told
from gateway.queue.wire import pack_events, pack_report, unpack_events, unpack_report
from tests.policies.worlds import work


def test_a_work_with_all_that_placing_needs_is_read_as_it_was_written() -> None:
    one = replace(work("w", "night", rank=0.0), prefix="0a0b0c0d.01020304", finish_by_s=0.1 + 0.2)

    (told,) = unpack_events(pack_events([Told(1, 0, Began(one, "e0", 1))]))

    assert told.event == Began(one, "e0", 1)


def test_a_report_comes_back_as_it_was_told_and_one_of_an_older_release_names_no_floors() -> None:
    told = SessionReport({("gpu/ü", "chat"): InFlight(2, 512, 64)}, grants_seq=7, floors={("gpu/ü", "chat"): 1})

    assert unpack_report(pack_report(told)) == told
    assert unpack_report(b'{"grants_seq":7}') == SessionReport(grants_seq=7)
