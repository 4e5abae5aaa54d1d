"""Every check of the Lua scripts is taken out once, and the contract notices: see `script_mutants`."""

from __future__ import annotations

import hashlib
import inspect
import random

import pytest
import structlog
from fakeredis import FakeAsyncRedis, FakeServer

from gateway.queue.lua import SHARED, Script, load
from gateway.queue.redis_queue import RedisQueue
from tests.contracts import test_queue, test_queue_losses
from tests.contracts.script_mutants import MUTANTS, ScriptMutant
from tests.queue_checks import check_keys

CHOICES = {"how": "swept"}
"""For tests of the contract that have cases."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
async def test_a_script_without_one_of_its_checks_fails_the_contract(mutant: ScriptMutant) -> None:
    whole, edited = _queue(), _queue()
    _mutate(edited, mutant)

    await _hold(mutant.noticed_by, whole)

    with pytest.raises((Exception, pytest.fail.Exception)):
        await _hold(mutant.noticed_by, edited)


def _queue() -> RedisQueue:
    client = FakeAsyncRedis(server=FakeServer(server_type="valkey"), protocol=2)
    return RedisQueue(client, log=structlog.get_logger(), rng=random.Random(1), pool="mutants")


async def _hold(name: str, queue: RedisQueue) -> None:
    """Run a test of the contract; where nothing was taken from the store, what it leaves there is checked as well."""
    module = test_queue if hasattr(test_queue, name) else test_queue_losses
    test = getattr(module, name)
    cases = {case: CHOICES[case] for case in inspect.signature(test).parameters if case != "queue"}
    try:
        await test(queue, **cases)
        if module is test_queue:
            await check_keys(queue._client, "mutants")
    finally:
        await queue.close()


def _mutate(queue: RedisQueue, mutant: ScriptMutant) -> None:
    """Take the check out of the scripts that this queue sends. Raises LookupError when it is not there once."""
    for name in list(queue._scripts) if mutant.script == SHARED else [mutant.script]:
        text = load(name).text
        times = text.count(mutant.check)
        if times != 1:
            raise LookupError(
                f"{mutant.script}.lua: {mutant.check!r} stands there {times} times, expected once;"
                " name the check anew, or drop the mutant with it"
            )
        edited = text.replace(mutant.check, mutant.without)
        queue._scripts[name] = Script(name, edited, hashlib.sha1(edited.encode(), usedforsecurity=False).hexdigest())
