"""Interactive requests beside bulk on one real engine: alone, with bulk straight at it, and with both through the gateway.

The engine decides how much traffic that is. One request after another shows how long one takes; interactive requests
come at a part of that rate, and its objective is a multiple of what their first tokens take with nobody else there. Bulk
is a closed loop that always has more to do. The three arms take turns within a round, with the same interactive requests
at the same times, so that whatever else the machine does falls on all of them; between arms the engine is idle again.

Bulk is counted in tokens that its clients got while interactive requests came. No prompt begins like another one, so a
prefix cache helps nobody.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Protocol

from backends.base import BackendError, Sample, Signal
from gateway.load.arrivals import arrivals, steady
from gateway.load.client import Client, Exchange, Target
from gateway.load.figures import Figures, Objectives, Record, figures
from gateway.load.lengths import Workload
from gateway.load.run import ClosedLoop, answered, open_loop
from gateway.load.traffic import at_once, made_up
from gateway.replay.trace import Request
from policies import presets

INTERACTIVE: Final = "interactive"
BULK: Final = "bulk"
BEGINNING_TOKENS: Final = 8
BULK_SEED: Final = 1_000
WARM_REQUESTS: Final = 3
SCALE_ARMS: Final = 2
"""Arms' time in which the objective is measured."""
SETTLE_S: Final = 30.0
LOOK_S: Final = 0.1
TTFT_BAR: Final = 1.5
"""Protected p95 of first tokens over that of interactive requests alone: at most."""
BULK_BAR: Final = 0.8
"""Protected bulk tokens over unprotected ones: at least."""
_INTERACTIVE: Final = Workload(200, 24, 0.5, 1)
_BULK: Final = Workload(100, 120, 0.5, 2)


class Arm(StrEnum):
    """Who sends, and where to."""

    ALONE = "alone"
    UNPROTECTED = "unprotected"
    PROTECTED = "protected"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played.

    rounds         of three arms each, after one that is not counted
    for_s          of interactive requests in an arm
    lead_s         of bulk before the first of them
    share          interactive requests come at this part of the rate at which the engine answers one after another
    bulk_clients   with one request each, all the time
    slack          the objective, in p95 of first tokens alone
    """

    rounds: int = 6
    for_s: float = 30.0
    lead_s: float = 5.0
    share: float = 0.3
    bulk_clients: int = 16
    slack: float = TTFT_BAR
    interactive: Workload = _INTERACTIVE
    bulk: Workload = _BULK
    probe_requests: int = 20
    seed: int = 1

    @property
    def least_s(self) -> float:
        """What it takes at least: that of which the time is given. Single requests, and the ends of answers, come on top."""
        round_s = len(Arm) * self.for_s + (len(Arm) - 1) * self.lead_s
        return self.lead_s + (1 + SCALE_ARMS) * self.for_s + (1 + self.rounds) * round_s


@dataclass(frozen=True, slots=True)
class Scale:
    """What the engine does with interactive requests one after another: seconds of a whole one, and what follows."""

    request_s: float
    rate_rps: float
    objective_s: float


@dataclass(frozen=True, slots=True)
class Played:
    """One arm of one round. bulk_tokens: what bulk's clients got in for_s."""

    arm: Arm
    record: Record
    bulk_tokens: int
    bulk_errors: Mapping[str, int]
    for_s: float

    @property
    def ttft_p95_s(self) -> float | None:
        """Of this arm alone; few requests, so read it beside the others."""
        return figures([self.record], self.for_s).ttft.p95_s


@dataclass(frozen=True, slots=True)
class Side:
    """One arm over all rounds. bulk_tokens_per_s: None for an arm without bulk."""

    figures: Figures
    bulk_tokens_per_s: float | None
    bulk_errors: Mapping[str, int]
    rounds_p95_s: Sequence[float | None]
    rounds_bulk: Sequence[float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One engine's. ttft_ratio: protected p95 over alone; bulk_ratio: protected over unprotected."""

    scale: Scale
    sides: Mapping[Arm, Side]
    ttft_ratio: float | None
    bulk_ratio: float | None
    rounds_ttft_ratio: Sequence[float | None] = field(default=())


class Engine(Protocol):
    """What is asked of an adapter."""

    async def sample(self) -> Sample: ...


class Bulk:
    """Counts what bulk's clients get; a `gateway.load.client.Watch`."""

    def __init__(self) -> None:
        self.got_tokens = 0
        self.errors: dict[str, int] = {}

    def start(self) -> None: ...

    def first_token(self, ttft_s: float) -> None: ...

    def tokens(self, count: int, gap_s: float | None) -> None:  # noqa: ARG002
        """More came."""
        self.got_tokens += count

    def ended(self, exchange: Exchange) -> None:
        """It is over; what the end of the arm cut off is no error."""
        if exchange.failure not in {"", "cut"}:
            self.errors[exchange.failure] = self.errors.get(exchange.failure, 0) + 1


class Bench:
    """Plays one engine. straight: its own address; on_step: told what is done; clock: monotonic seconds."""

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        straight: Target,
        *,
        on_step: Callable[[str], None] = lambda _text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._straight = straight
        self._on_step = on_step
        self._clock = clock
        self._ids = itertools.count(plan.seed * 1_000_000)

    async def scale(self) -> Scale:
        """Measure what the load and the objective follow from, on an idle engine."""
        plan = self._plan
        self._on_step(
            f"scale, a warm-up round and {plan.rounds} round{'s' * (plan.rounds > 1)} of {len(Arm)} arms: "
            f"{plan.least_s / 60:.0f} min at least"
        )
        self._on_step("scale: one request after another")
        watch = Record(self._clock, Objectives())
        client = Client(self._straight, {INTERACTIVE: watch}, clock=self._clock)
        requests = self._requests(itertools.repeat(0.0), plan.interactive, INTERACTIVE)
        try:
            for request in itertools.islice(requests, WARM_REQUESTS + plan.probe_requests):
                client.send(request, client.clock())
                await answered(client, within_s=self._straight.timeout_s)
        finally:
            await client.close()
        found = figures([watch], 1.0)
        if found.completed < len(watch.rows):
            kind, text = next(iter(found.examples.items()))
            raise RuntimeError(
                f"{self._straight.url}: {found.errors[kind]} of {found.sent} requests failed: {kind} {text}"
            )
        each_s = [row.end_s - row.sent_s for row in watch.rows[WARM_REQUESTS:] if row.sent_s is not None]
        request_s = sum(each_s) / len(each_s)
        rate_rps = plan.share / request_s
        # An engine is slower until it has seen batches of every size: that would be taken for the objective of a warm one.
        self._on_step("scale: bulk beside interactive requests, to warm the engine up")
        await self._play(Arm.UNPROTECTED, self._straight, rate_rps, seed=plan.seed)
        self._on_step("scale: interactive requests alone, for the objective")
        alone = await self._play(Arm.ALONE, self._straight, rate_rps, seed=plan.seed, for_s=SCALE_ARMS * plan.for_s)
        p95_s = alone.ttft_p95_s
        if p95_s is None:
            raise RuntimeError(
                f"{self._straight.url}: no interactive request was answered in {plan.for_s:g} s; give it longer"
            )
        return Scale(request_s, rate_rps, plan.slack * p95_s)

    async def run(self, scale: Scale, through: Target) -> Outcome:
        """All rounds; the first one, in which the gateway gets to know the engine, is not counted.

        through   the gateway's address
        """
        plan, played = self._plan, list[Played]()
        targets = {Arm.ALONE: self._straight, Arm.UNPROTECTED: self._straight, Arm.PROTECTED: through}
        for number in range(plan.rounds + 1):
            first = number % len(Arm)
            for arm in [*Arm][first:] + [*Arm][:first]:
                self._on_step(f"{f'round {number} of {plan.rounds}' if number else 'warm-up round'}, {arm}")
                one = await self._play(arm, targets[arm], scale.rate_rps, seed=plan.seed + number)
                if number:
                    played.append(one)
        return concluded(scale, played, plan.for_s)

    async def _play(
        self, arm: Arm, target: Target, rate_rps: float, *, seed: int, for_s: float | None = None
    ) -> Played:
        plan = self._plan
        for_s = plan.for_s if for_s is None else for_s
        record, bulk = Record(self._clock, Objectives()), Bulk()
        people = Client(target, {INTERACTIVE: record}, clock=self._clock)
        machines = Client(target, {BULK: bulk}, clock=self._clock)
        times_s = arrivals(steady(rate_rps, for_s), cv=1.0, seed=seed)
        requests = self._requests(times_s, replace(plan.interactive, seed=seed), INTERACTIVE)
        many = self._requests(at_once(), replace(plan.bulk, seed=BULK_SEED + seed), BULK)
        loop = ClosedLoop(machines, many, clients=0 if arm is Arm.ALONE else plan.bulk_clients)
        await self._idle()
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(loop.run())
                await asyncio.sleep(0 if arm is Arm.ALONE else plan.lead_s)
                before = bulk.got_tokens
                counting = group.create_task(_after(for_s, lambda: bulk.got_tokens))
                await open_loop(people, requests)
                got = await counting - before
                await answered(people, within_s=target.timeout_s)
                running.cancel()
        finally:
            await people.close()
            await machines.close()
        return Played(arm, record, got, bulk.errors, for_s)

    def _requests(self, times_s: Iterator[float], workload: Workload, class_name: str) -> Iterator[Request]:
        """Requests that begin like no other ones."""
        for request in made_up(times_s, workload, classes={class_name: 1.0}):
            yield replace(request, prefix_ids=(next(self._ids),), id_tokens=BEGINNING_TOKENS)

    async def _idle(self) -> None:
        """Wait until the engine says that it runs nothing, where it says it. Raises RuntimeError when it does not come to that."""
        try:
            async with asyncio.timeout(SETTLE_S):
                while (await self._engine.sample()).value(Signal.RUNNING):  # noqa: ASYNC110 - an engine only tells when asked
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise RuntimeError(
                f"{self._straight.url}: it still ran requests after {SETTLE_S:g} s without ours; keep others from it"
            ) from None
        except BackendError as error:
            raise RuntimeError(f"{error}; it has to last until the end") from None


def scaled_policy(objective_s: float) -> str:
    """The preset `balanced` with this objective, and with nothing else changed."""
    text, count = re.subn(r"(?m)^( +ttft_sla_s:) [\d.]+$", rf"\1 {objective_s:.4f}", presets.text(presets.DEFAULT))
    assert count == 1, "the preset has one objective"
    return text


def concluded(scale: Scale, played: Sequence[Played], for_s: float) -> Outcome:
    """The figures of all rounds together."""
    sides = {arm: _side([one for one in played if one.arm is arm], for_s) for arm in Arm}
    alone, unprotected, protected = (sides[arm] for arm in Arm)
    return Outcome(
        scale,
        sides,
        _over(protected.figures.ttft.p95_s, alone.figures.ttft.p95_s),
        _over(protected.bulk_tokens_per_s, unprotected.bulk_tokens_per_s),
        [_over(ours, of) for ours, of in zip(protected.rounds_p95_s, alone.rounds_p95_s, strict=True)],
    )


def _side(played: Sequence[Played], for_s: float) -> Side:
    duration_s = for_s * len(played)
    errors: dict[str, int] = {}
    for one in played:
        for kind, count in one.bulk_errors.items():
            errors[kind] = errors.get(kind, 0) + count
    per_s = [one.bulk_tokens / for_s for one in played]
    return Side(
        figures([one.record for one in played], duration_s),
        None if played[0].arm is Arm.ALONE else sum(per_s) / len(per_s),
        errors,
        [one.ttft_p95_s for one in played],
        per_s,
    )


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


async def _after(seconds: float, read: Callable[[], int]) -> int:
    await asyncio.sleep(seconds)
    return read()
