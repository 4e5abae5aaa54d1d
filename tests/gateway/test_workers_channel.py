"""What a supervisor and its processes say to each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Role
from gateway.settings import EngineSettings, Settings, Timeouts
from gateway.workers.channel import Channel, Do, Message, Order, Report, Start

SETTINGS = Settings(
    redis_url="redis://:hunter2@127.0.0.1:6379/0",
    state_dir=Path("state"),
    engines=(EngineSettings("e1", "http://127.0.0.1:8000", "vllm", api_key="hunter2"),),
    keys_file=Path("keys.yaml"),
    aliases=(("gpt-4o", "m"),),
    cors_origins=(),
    timeouts=Timeouts(drain_s=7),
)


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Channel, Channel]]:
    one, other = socket.socketpair()
    channels = (await Channel.on(one), await Channel.on(other))
    yield channels
    for channel in channels:
        channel.close()


def test_settings_arrive_as_they_were_sent() -> None:
    assert Start.of(SETTINGS, role=Role.WORKER, name="0").read_settings() == SETTINGS


def test_a_start_shows_no_secret() -> None:
    assert "hunter2" not in repr(Start.of(SETTINGS, role=Role.WORKER, name="0"))


@pytest.mark.parametrize(
    "message",
    [
        Start.of(SETTINGS, role=Role.DECIDER, name="decider", public_fds=(3, 4), board_fd=5, place=1),
        Order(Do.TELL, 7),
        Report(up=True, session=("s", 2), counts={"a_total": [[["x"], 1.0]]}, status={"engines": [{"name": "e"}]}),
    ],
    ids=lambda message: type(message).__name__,
)
async def test_a_message_arrives_as_it_was_sent(ends: tuple[Channel, Channel], message: Message) -> None:
    kind: type[Any] = type(message)

    ends[0].send(message)

    assert await ends[1].receive(kind) == message


async def test_messages_arrive_one_by_one_in_order(ends: tuple[Channel, Channel]) -> None:
    for seq in range(100):
        ends[0].send(Order(Do.TELL, seq))

    orders = [await ends[1].receive(Order) for _ in range(100)]

    assert [order and order.seq for order in orders] == list(range(100))


async def test_the_end_of_a_channel_is_told_also_within_a_line() -> None:
    one, other = socket.socketpair()
    channel = await Channel.on(other)
    one.send(b'{"do": "drain"}\n{"do": "hur')
    one.close()

    assert await channel.receive(Order) == Order(Do.DRAIN)
    assert await channel.receive(Order) is None
    channel.send(Order(Do.TELL))
    await channel.drained()
    channel.close()


async def test_what_another_version_says_besides_is_passed_over(ends: tuple[Channel, Channel]) -> None:
    one, other = socket.socketpair()
    channel = await Channel.on(other)
    one.sendall(b'{"up": true, "newer": {"x": [1]}}\n')

    assert await channel.receive(Report) == Report(up=True)
    one.close()
    channel.close()


async def test_a_report_of_a_megabyte_arrives(ends: tuple[Channel, Channel]) -> None:
    big = Report(policy={"text": "x" * 1_000_000})

    ends[0].send(big)
    async with asyncio.TaskGroup() as group:
        received = group.create_task(ends[1].receive(Report))
        await ends[0].drained()

    assert received.result() == big
