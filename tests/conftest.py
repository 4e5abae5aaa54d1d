"""What holds for every test: no skip passes unseen where that is asked for, and no test reaches beyond this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("headrace", deadline=None, print_blob=True)
hypothesis.settings.load_profile("headrace")
"""No deadline for single examples: on a shared machine it measures the neighbours."""

NO_SKIP = "HEADRACE_ALLOW_NO_SKIP"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With HEADRACE_ALLOW_NO_SKIP=1 (as in CI, which installs everything) a skipped test is a failed one."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a file that skips itself while it is collected."""
    report = yield
    if report.skipped:
        _refuse_skip(report)
    return report


@pytest.fixture(autouse=True, scope="session")
def _only_loopback() -> Iterator[None]:
    """Refuse a connection to any address that is not this machine's own."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in {socket.AF_INET, socket.AF_INET6}:
            host = str(address[0])
            if not (host.startswith("127.") or host in {"::1", "localhost", "0.0.0.0", "::"}):
                raise AssertionError(f"a test connects to {host}: expected loopback only; start what you need here")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get(NO_SKIP) == "1":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skips are not allowed here ({NO_SKIP}=1): {reason}"
