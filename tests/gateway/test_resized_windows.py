"""Other windows by the policy: what was begun or told before everybody went by them is no share of a process that is cut off."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.dispatch.credit import RESIZED_S
from gateway.dispatch.member import Member
from gateway.queue.base import Renewed
from gateway.queue.memory_queue import MemoryQueue
from gateway.settings import EngineSettings, Settings
from policies.schema import Policy
from policies.vocabulary import Grant, Work
from tests.gateway.members import member as made
from tests.gateway.replay.quiet import QUIET
from tests.policies.worlds import policy

PLACE = ("e", "chat")
BEGIN_S = 100.0


def document(total: int, *, sla_s: int = 1) -> str:
    return f"version: 1\nclasses: {{chat: {{ttft_sla_s: {sla_s}}}}}\nsizing: {{fixed: {{total: {total}, windows: {{chat: {total}}}}}}}\n"


def windows(total: int, *, sla_s: int = 1) -> Policy:
    return policy(document(total, sla_s=sla_s))


class Clocked:
    """A process, and its time."""

    def __init__(self) -> None:
        self.now_s = BEGIN_S
        self.member: Member = made(
            MemoryQueue(lambda: int(self.now_s * 1000)), "a", windows(8), candidate=False, now_s=lambda: self.now_s
        )

    def begin(self, name: str) -> tuple[Work, Grant]:
        work = Work(name, "chat", "t", "m", "/v1/completions", self.now_s, self.now_s, prompt_tokens=10)
        grant = Grant(name, "e", 1, 1, self.now_s + 5.0)
        self.member.dispatcher.accept(work, grant)
        return work, grant

    def renew(self) -> None:
        """It reports and is answered."""
        self.member.dispatcher.report(0)
        self.member.credit.renewed(Renewed({}), sent_s=self.now_s, now_ms=int(self.now_s * 1000))

    @property
    def share(self) -> int:
        return self.member.credit.share(PLACE, self.now_s)


async def test_works_that_were_begun_under_other_windows_make_no_share_and_later_ones_do() -> None:
    process = Clocked()
    process.begin("before")
    process.renew()
    shares = [process.share]

    process.member.dispatcher.policy_changed(windows(8), windows(2))
    shares.append(process.share)
    process.now_s += RESIZED_S + 1.0
    process.renew()
    shares.append(process.share)
    process.begin("after")
    process.renew()
    shares.append(process.share)

    assert shares == [1, 0, 0, 1]


async def test_once_all_that_is_older_has_ended_everything_counts_as_before() -> None:
    process = Clocked()
    before = process.begin("before")
    process.member.dispatcher.policy_changed(windows(8), windows(2))
    process.now_s += RESIZED_S + 1.0
    process.begin("after")
    process.renew()

    process.member.dispatcher.finished(*before, None)
    process.renew()

    assert process.share == 1
    assert process.member.dispatcher._resized_s < 0


@pytest.mark.parametrize("sla_s", [1, 2])
async def test_a_policy_with_the_same_windows_changes_no_share(sla_s: int) -> None:
    process = Clocked()
    process.begin("w")
    process.renew()

    process.member.dispatcher.policy_changed(windows(8), windows(8, sla_s=sla_s))

    assert process.share == 1


class SlowToLead(MemoryQueue):
    """A store that tells who leads only when something else has happened."""

    until: Any = None

    async def lead(self, *args: Any, **kwargs: Any) -> Any:
        await self.until()
        return await super().lead(*args, **kwargs)


async def test_windows_that_are_edited_while_a_gateway_starts_are_in_force_before_it_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.control.policy_store.POLL_S", 0.01)
    file = tmp_path / "policy.yaml"
    file.write_text(document(8))
    queue = SlowToLead(lambda: int(BEGIN_S * 1000))
    settings = Settings(
        listen="127.0.0.1:0",
        admin_listen="127.0.0.1:0",
        engines=(EngineSettings("e", "http://127.0.0.1:1"),),
        policy_file=file,
        allow_no_keys=True,
    )
    gateway = Gateway(settings, log=QUIET, queue=queue, sole=True)

    async def edited() -> None:
        file.write_text(document(2))
        while gateway.store.current.sizing.fixed.total != 2:
            await asyncio.sleep(0.01)

    queue.until = edited

    async with asyncio.timeout(10), gateway:
        assert gateway.presence.leads
