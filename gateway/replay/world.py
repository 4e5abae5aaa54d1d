"""A replay: one gateway without its network, before virtual engines, in virtual time.

What runs is what `serve` runs: dispatcher, ledger, owner, presence, poller, the queue (its verified fake in memory) and
the policies. Left out are sockets, bodies and the relay; in their place the world takes requests from a trace, and hands
granted works to `EngineHost`s. As in `gateway.dispatch.service`, a work is classified, admitted or shed, started at
once or queued, tried on another engine when one has died, and ends with exactly one `Outcome` and one `Row`.

Two kinds of traffic: requests at the times of a trace, and a backlog, of which WAITING works are always in the queue
until the run is over, as many of each tenant. With a backlog the run ends after `duration_s`: what is left of the backlog
is aborted, and counted with what it had been served by then; the requests of the trace are waited for, SETTLE_S at most.

Answers are streamed: the gateway sees their tokens as they come, and cannot take back what it has seen. With `whole_bulk`
those of classes without an objective are told whole: it sees nothing of them before their end, and can give them up until
then.

Nobody decides with knowledge that a gateway cannot have, with one exception that says so by its name: `privileged` makes
a sizing policy from the world itself, for the clairvoyant bound.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from backends.simulated import sequence as simulated
from backends.simulated.blocks import BLOCK_TOKENS
from gateway.dispatch.owner import QueueFull, TooLate
from gateway.dispatch.queued import LOOK_AHEAD_OTHER
from gateway.dispatch.service import MAX_ATTEMPTS
from gateway.exchange import Facts
from gateway.logs import Log
from gateway.queue.memory_queue import MemoryQueue
from gateway.replay.host import MODEL, Attempt, EngineHost, EngineSpec
from gateway.replay.loop import VirtualLoop, run
from gateway.replay.replica import Replica
from gateway.replay.rows import UNFINISHED, Row
from gateway.replay.trace import Request
from policies.admission import admit
from policies.classify import Caller, classify
from policies.limits import FollowingSizing
from policies.schema import Policy
from policies.sizing import SizingPolicy
from policies.vocabulary import Decision, EngineState, Grant, Outcome, Result, Work

ORIGIN_S = 3.0
"""Loop time at which the trace begins: presence, leadership and polls have settled."""
PATH = "/v1/completions"
WAITING = LOOK_AHEAD_OTHER
"""Backlog works kept in the queue: a dispatcher never sees more of them at once."""
WATCH_S = 1.0
SETTLE_S = 300.0
"""How long after the end of a backlog the requests of the trace are waited for; those left then are `unfinished`."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Work that is always there. lengths are (prompt, output) tokens, taken in turn for ever."""

    lengths: Sequence[tuple[int, int]]
    class_name: str = "bulk"
    tenants: tuple[str, ...] = ("bulk",)


@dataclass(frozen=True, slots=True)
class Seen:
    """One engine at one moment, for pictures. queued is by class, over the whole pool."""

    at_s: float
    engine: str
    running: int
    waiting: int
    kv_used_fraction: float
    in_flight: Mapping[str, int]
    windows: Mapping[str, int | None]
    queued: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is replayed.

    requests     by arrival
    duration_s   needed with a backlog; without one the run ends when every request has
    sizing       in place of the policy's own
    privileged   likewise, and knows the world: for bounds, not for policies
    front        a balancer in front of the pool that ties each work to an engine: names of those up, and outstanding
                 works by engine -> name; None: the gateway places
    foreign      requests that reach an engine past the gateway: (engine, request)
    replicas     gateways that share the queue; requests reach them in turn
    drift        (from_s, factor): answers of the backlog are that much longer from then on
    whole_bulk       see the module header
    estimate_error   sizes of prompts as the gateway estimates them are off by as much as this part, either way
    engine_priority   works carry their class's precedence to the engine, for one that orders by it
    on_decision  told of each decision, synchronously
    on_time      told the replay's time once a second
    """

    engines: tuple[EngineSpec, ...]
    policy: Policy
    requests: Sequence[Request]
    backlog: Backlog | None = None
    duration_s: float | None = None
    seed: int = 1
    sizing: Callable[[Policy], SizingPolicy] | None = None
    privileged: Callable[[World], SizingPolicy] | None = None
    front: Callable[[Sequence[str], Mapping[str, int]], str] | None = None
    foreign: Sequence[tuple[str, Request]] = ()
    replicas: int = 1
    drift: tuple[float, float] | None = None
    whole_bulk: bool = False
    estimate_error: float = 0.0
    engine_priority: bool = False
    on_decision: Callable[[Decision], None] | None = None
    on_time: Callable[[float], None] | None = None


@dataclass(slots=True)
class Played:
    """What came of a replay. decision_s are CPU seconds, the one thing here that differs between runs.

    end_s   when preemptions, recomputed tokens and energy were read: the plan's duration_s, or the end of a run that was over
            before or has none
    """

    rows: list[Row] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    decision_s: list[float] = field(default_factory=list)
    preemptions: int = 0
    recomputed_tokens: int = 0
    energy_j: float | None = 0.0
    end_s: float = 0.0


@dataclass(slots=True)
class Course:
    """One request on its way. `waiter` while it waits, `attempt` while it runs; wasted_tokens are prompt and answer of
    attempts that failed or were given up."""

    request: Request
    work: Work
    replica: Replica
    attempts: int = 0
    granted_s: float | None = None
    waiter: asyncio.Task[None] | None = None
    attempt: Attempt | None = None
    grant: Grant | None = None
    first_token_s: float | None = None
    wasted_tokens: int = 0

    def waste(self) -> None:
        """What the attempt has made is thrown away: what it held when it was given up, or died."""
        if self.attempt is not None:
            self.wasted_tokens += self.attempt.lost_tokens


class World:
    """See the module header. One run."""

    def __init__(self, plan: Plan, loop: VirtualLoop, log: Log) -> None:
        self.plan = plan
        self.loop = loop
        self.result = Played()
        self.courses: dict[str, Course] = {}
        self.hosts = {spec.name: EngineHost(spec, loop, origin_s=ORIGIN_S) for spec in plan.engines}
        self.next_request = 0
        self._rng = random.Random(f"replay {plan.seed}")
        self._estimates = random.Random(f"estimates {plan.seed}")
        self._queue = MemoryQueue(lambda: int(loop.time() * 1000))
        self._numbers = itertools.count(1)
        self._open_requests = len(plan.requests)
        self._arrivals_over = not plan.requests
        self._backlog_open = plan.backlog is not None
        self._backlog_number = itertools.count()
        self._over = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self.replicas = [
            Replica(
                number,
                of=plan.replicas,
                seed=plan.seed,
                policy=plan.policy,
                sizing=self._sizing(),
                queue=self._queue,
                hosts=self.hosts,
                loop=loop,
                on_decision=plan.on_decision or _ignore,
                log=log,
            )
            for number in range(plan.replicas)
        ]

    def _sizing(self) -> SizingPolicy:
        if self.plan.privileged is not None:
            return self.plan.privileged(self)
        return FollowingSizing(self.plan.policy) if self.plan.sizing is None else self.plan.sizing(self.plan.policy)

    @property
    def now_s(self) -> float:
        """The replay's clock: 0 when the trace begins."""
        return self.loop.time() - ORIGIN_S

    async def run(self) -> Played:
        """Play it all."""
        async with asyncio.TaskGroup() as background, self._tasks:
            for replica in self.replicas:
                await replica.start(background)
            await asyncio.sleep(ORIGIN_S - self.loop.time())
            self._set_stage()
            if self.plan.backlog is not None:
                tenants = self.plan.backlog.tenants
                for number in range(WAITING):
                    self._add_to_backlog(tenants[number % len(tenants)])
            self._next_arrival()
            self._watch()
            await self._until_over()
            for replica in self.replicas:
                replica.stop()
        self._sum_up()
        return self.result

    # -- what happens when ---------------------------------------------------------------------------------------------

    def _set_stage(self) -> None:
        for host in self.hosts.values():
            spec = host.spec
            if spec.interrupted_at_s is not None:
                self._at(max(0.0, spec.interrupted_at_s - spec.notice_s), self._notice, spec.name)
                self._at(spec.interrupted_at_s, host.kill)
            if spec.killed_at_s is not None:
                self._at(spec.killed_at_s, host.kill)
                self._at(spec.killed_at_s + spec.down_s, host.start)
        for number, (engine, request) in enumerate(self.plan.foreign):
            self._at(request.arrival_s, self._foreign, engine, request, number)

    def _at(self, at_s: float, callback: Callable[..., object], *args: object) -> None:
        self.loop.call_at(ORIGIN_S + at_s, callback, *args)

    def _notice(self, engine: str) -> None:
        """The cloud has said that it will take the machine: nothing new goes there."""
        for replica in self.replicas:
            replica.roster[engine].drain()

    def _foreign(self, engine: str, request: Request, number: int) -> None:
        self.hosts[engine].send(_sequence(f"foreign-{number}", request), _ignore, _ignore)

    def _next_arrival(self) -> None:
        if self.next_request < len(self.plan.requests):
            self._at(self.plan.requests[self.next_request].arrival_s, self._arrive)

    def _arrive(self) -> None:
        """Let in every request that is due now, and come back for the next."""
        requests, now_s = self.plan.requests, self.now_s
        while self.next_request < len(requests) and requests[self.next_request].arrival_s <= now_s + 1e-9:
            request = requests[self.next_request]
            self.next_request += 1
            self._accept(request)
        self._next_arrival()

    def _watch(self) -> None:
        for host in self.hosts.values():
            host.catch_up()
            self.result.seen.append(self._seen(host))
        if self.plan.on_time is not None:
            self.plan.on_time(self.now_s)
        self.loop.call_later(WATCH_S, self._watch)

    def _seen(self, host: EngineHost) -> Seen:
        first, scheduler = self.replicas[0], host.scheduler
        view = first.roster[host.name].view(self.loop.time())
        return Seen(
            at_s=self.now_s,
            engine=host.name,
            running=scheduler.running,
            waiting=scheduler.waiting,
            kv_used_fraction=scheduler.kv_used_fraction,
            in_flight=dict(view.in_flight),
            windows={name: first.sizing.window(view, name).requests for name in self.plan.policy.classes},
            queued=dict(sorted(first.dispatcher.queued.depths().items())),
        )

    async def _until_over(self) -> None:
        if self.plan.backlog is not None:
            assert self.plan.duration_s is not None, "a backlog never ends: give the plan a duration_s"
            await asyncio.sleep(self.plan.duration_s - self.now_s)
            self._close_backlog()
        elif self.plan.duration_s is not None:
            self._at(self.plan.duration_s, self._note_totals)
        if self._open_requests:
            try:
                async with asyncio.timeout(None if self.plan.backlog is None else SETTLE_S):
                    await self._over.wait()
            except TimeoutError:
                self._cut_short(list(self.courses.values()))

    # -- one request ---------------------------------------------------------------------------------------------------

    def _accept(self, request: Request) -> None:
        """Classify, admit or shed, start or queue."""
        number = next(self._numbers)
        replica = self.replicas[number % len(self.replicas)]
        course = Course(request, self._work(request, number, replica), replica)
        policy, name = self.plan.policy, course.work.class_name
        self.courses[course.work.id] = course
        refused = admit(
            name,
            depth=replica.dispatcher.queued.depth(name),
            policy=policy,
            served_per_s=replica.flow.per_s(name, self.loop.time()),
            draw=self._rng.random(),
        )
        if refused is not None:
            self._settle(course, Result.SHED, refused.reason)
            return
        self._start_or_queue(course)

    def _work(self, request: Request, number: int, replica: Replica) -> Work:
        accepted_s, policy = replica.clock.pool_s(), self.plan.policy
        class_name = request.class_name
        prompt_tokens = self._estimated(request.prompt_tokens)
        alone_s = replica.dispatcher.planner.alone_s(MODEL, prompt_tokens)
        if not class_name:
            facts = Facts(model=MODEL, stream=True, prompt_tokens=prompt_tokens)
            caller = Caller(tenant=request.tenant, path=PATH)
            class_name = classify(facts, headers={}, caller=caller, policy=policy, accepted_s=accepted_s).class_name
        objective_s = policy.class_policy(class_name).ttft_objective_s(prompt_tokens, alone_s)
        deadline_s = None if objective_s is None else accepted_s + objective_s
        return Work(
            id=f"w{number:x}",
            class_name=class_name,
            tenant=request.tenant,
            model=MODEL,
            path=PATH,
            accepted_s=accepted_s,
            rank=accepted_s if deadline_s is None else deadline_s,
            prompt_tokens=prompt_tokens,
            deadline_s=deadline_s,
            finish_by_s=policy.finish_by_s(class_name, accepted_s, None),
            prefix=request.prefix,
            streams=policy.class_policy(class_name).has_ttft_objective or not self.plan.whole_bulk,
        )

    def _estimated(self, prompt_tokens: int) -> int:
        """What the gateway takes a prompt to have."""
        error = self.plan.estimate_error
        if not error:
            return prompt_tokens
        return max(1, round(prompt_tokens * (1 + self._estimates.uniform(-error, error))))

    def _start_or_queue(self, course: Course) -> None:
        course.work = self._placed_in_front(course.work)
        grant = course.replica.owner.start_now(course.work)
        if grant is None:
            course.waiter = self._tasks.create_task(self._queued(course))
        else:
            self._send(course, grant)

    def _placed_in_front(self, work: Work) -> Work:
        if self.plan.front is None:
            return work
        up = [engine.name for engine in self.replicas[0].roster if engine.state is EngineState.UP]
        outstanding = {name: len(self.hosts[name].sequences) for name in up}
        return replace(work, pinned_engine=self.plan.front(up, outstanding)) if up else work

    async def _queued(self, course: Course) -> None:
        policy = self.plan.policy
        max_wait_s = policy.class_policy(course.work.class_name).max_wait_s
        left_s = course.work.accepted_s + max_wait_s - course.replica.clock.pool_s()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                grant = await course.replica.owner.wait(
                    course.work, {name: one.max_queue for name, one in policy.classes.items()}
                )
        except QueueFull:
            self._settle(course, Result.SHED, "queue_full")
        except TooLate:
            self._settle(course, Result.SHED, "infeasible")
        except TimeoutError:
            self._settle(course, Result.SHED, "wait_too_long")
        else:
            self._send(course, grant)

    def _send(self, course: Course, grant: Grant) -> None:
        now_s = self.loop.time()
        course.waiter = None
        course.grant = grant
        course.attempts += 1
        if course.granted_s is None:
            course.granted_s = now_s
        course.replica.flow.left(course.work.class_name, now_s)

        def on_first_token(attempt: Attempt) -> None:
            at_s = self.loop.time()
            course.first_token_s = at_s
            if not attempt.whole:
                course.replica.dispatcher.first_token(course.work, grant, at_s - attempt.sent_s)

        def on_end(attempt: Attempt, finished: bool) -> None:
            self._ended(course, attempt, finished=finished)

        try:
            course.attempt = self.hosts[grant.engine].send(
                _sequence(course.work.id, course.request, self._engine_priority(course.work)),
                on_first_token,
                on_end,
                whole=not course.work.streams,
            )
        except ValueError:
            self._settle(course, Result.CLIENT_ERROR, "too_long")
            return
        if not self.plan.policy.class_policy(course.work.class_name).has_ttft_objective:
            course.attempt.on_recall = functools.partial(self._recalled, course, grant)
        course.replica.dispatcher.attach(grant, course.attempt)

    def _engine_priority(self, work: Work) -> int:
        """As the service forwards it: low is sooner."""
        return self.plan.policy.precedence.index(work.class_name) if self.plan.engine_priority else 0

    @property
    def _backlog_class(self) -> str | None:
        return None if self.plan.backlog is None else self.plan.backlog.class_name

    def _ended(self, course: Course, attempt: Attempt, *, finished: bool) -> None:
        grant = course.grant
        assert grant is not None
        if finished:
            course.replica.roster[grant.engine].served(self.loop.time())
            self._settle(course, Result.COMPLETED, "")
            return
        replica = course.replica
        replica.roster[grant.engine].refused("connection refused", self.loop.time())
        again = replace(
            course.work, attempt=course.work.attempt + 1, avoid=course.work.avoid | {grant.engine}, pinned_engine=None
        )
        course.waste()
        told = attempt.sequence.generated_tokens > 0 and not attempt.whole
        if told or course.attempts >= MAX_ATTEMPTS or not self._somebody_serves(again):
            self._settle(course, Result.ENGINE_FAILED, "engine_died")
            return
        replica.owner.finished(course.work, grant, None)
        course.work, course.grant, course.attempt, course.first_token_s = again, None, None, None
        self._start_or_queue(course)

    def _recalled(self, course: Course, grant: Grant) -> None:
        """The gateway gave an attempt up: back to the queue, and what it made is wasted."""
        if course.grant is not grant or course.attempt is None:
            return
        course.waste()
        course.replica.owner.finished(course.work, grant, None)
        course.work = replace(course.work, attempt=course.work.attempt + 1)
        course.attempts -= 1
        course.grant, course.attempt, course.first_token_s = None, None, None
        self._start_or_queue(course)

    def _somebody_serves(self, work: Work) -> bool:
        return any(host.up and name not in work.avoid for name, host in self.hosts.items())

    def _settle(self, course: Course, result: Result, reason: str) -> None:
        """The work's one outcome and row."""
        now_s, work, grant, attempt = self.loop.time(), course.work, course.grant, course.attempt
        accepted_s = course.request.arrival_s + ORIGIN_S
        output_tokens = 0 if attempt is None else attempt.sequence.generated_tokens
        first_s = course.first_token_s
        outcome = Outcome(
            work_id=work.id,
            class_name=work.class_name,
            tenant=work.tenant,
            model=MODEL,
            engine="" if grant is None else grant.engine,
            result=result,
            reason=reason,
            status=_STATUS.get(result, 503),
            attempts=course.attempts,
            prompt_tokens=course.request.prompt_tokens if result is Result.COMPLETED else work.prompt_tokens,
            output_tokens=output_tokens,
            total_s=now_s - accepted_s,
            queued_s=None if course.granted_s is None else course.granted_s - accepted_s,
            ttft_s=None if first_s is None else first_s - accepted_s,
            engine_ttft_s=None if first_s is None or attempt is None or attempt.whole else first_s - attempt.sent_s,
        )
        if grant is not None:
            course.replica.owner.finished(work, grant, outcome)
        else:
            course.replica.owner.ended(work)
        self._record(course, str(result), output_tokens)
        del self.courses[work.id]
        if course.request.class_name == self._backlog_class:
            return
        self._open_requests -= 1
        if not self._open_requests:
            self._over.set()

    def _record(self, course: Course, outcome: str, output_tokens: int) -> None:
        request, attempt = course.request, course.attempt
        self.result.rows.append(
            Row(
                arrival_s=request.arrival_s,
                class_name=course.work.class_name,
                tenant=request.tenant,
                prompt_tokens=request.prompt_tokens,
                output_tokens=output_tokens,
                engine="" if course.grant is None else course.grant.engine,
                sent_s=None if attempt is None else attempt.sent_s - ORIGIN_S,
                first_token_s=None if course.first_token_s is None else course.first_token_s - ORIGIN_S,
                end_s=self.now_s,
                outcome=outcome,
                wasted_tokens=course.wasted_tokens,
            )
        )

    # -- the backlog ---------------------------------------------------------------------------------------------------

    def _add_to_backlog(self, tenant: str) -> None:
        backlog = self.plan.backlog
        assert backlog is not None
        number = next(self._backlog_number)
        prompt_tokens, output_tokens = backlog.lengths[number % len(backlog.lengths)]
        if self.plan.drift is not None and self.now_s >= self.plan.drift[0]:
            output_tokens = round(output_tokens * self.plan.drift[1])
        request = Request(self.now_s, prompt_tokens, output_tokens, tenant, backlog.class_name)
        replica = self.replicas[number % len(self.replicas)]
        work = self._placed_in_front(self._work(request, next(self._numbers), replica))
        course = self.courses[work.id] = Course(request, work, replica)
        course.waiter = self._tasks.create_task(self._from_backlog(course))

    async def _from_backlog(self, course: Course) -> None:
        """Wait as long as it takes; a work that leaves the backlog is followed by another of its tenant."""
        grant = await course.replica.owner.wait(course.work, {course.work.class_name: _NO_BOUND})
        self._send(course, grant)
        if self._backlog_open:
            self._add_to_backlog(course.request.tenant)

    def _close_backlog(self) -> None:
        """The run is over for the backlog: what runs of it is counted as it stands and aborted."""
        self._backlog_open = False
        self._note_totals()
        self._cut_short([one for one in self.courses.values() if one.request.class_name == self._backlog_class])

    def _cut_short(self, courses: list[Course]) -> None:
        """Count what runs as it stands and abort it, and what waits as never served."""
        for course in courses:
            attempt, grant = course.attempt, course.grant
            if course.waiter is not None:
                course.waiter.cancel()
            if attempt is not None and grant is not None:
                self._record(course, UNFINISHED, attempt.sequence.generated_tokens)
                self.hosts[grant.engine].abort(attempt)
                course.replica.owner.finished(course.work, grant, None)
                course.replica.owner.ended(course.work)
            else:
                self._record(course, UNFINISHED, 0)
            del self.courses[course.work.id]

    # -- the end -------------------------------------------------------------------------------------------------------

    def _note_totals(self) -> None:
        """What the engines have done by `duration_s`; where the run is over before, or there is none, by its end."""
        hosts = self.hosts.values()
        result = self.result
        for host in hosts:
            host.catch_up()
        result.end_s = self.now_s
        result.preemptions = sum(host.preemptions for host in hosts)
        result.recomputed_tokens = sum(host.recomputed_tokens for host in hosts)
        energies = [host.energy_j for host in hosts]
        result.energy_j = None if None in energies else sum(energy for energy in energies if energy is not None)

    def _sum_up(self) -> None:
        if self.plan.duration_s is None or self.now_s < self.plan.duration_s:
            self._note_totals()
        for replica in self.replicas:
            self.result.decision_s.extend(replica.dispatcher.decision_s)


def replay(plan: Plan, log: Log) -> Played:
    """Play a plan from beginning to end on a loop of its own."""

    async def main() -> Played:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return await World(plan, loop, log).run()

    return run(main())


_NO_BOUND = 1 << 30

_STATUS = {Result.COMPLETED: 200, Result.SHED: 429, Result.CLIENT_ERROR: 400}


def _sequence(id: str, request: Request, priority: int = 0) -> simulated.Sequence:
    return simulated.Sequence(
        id,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        priority=priority,
        cached_prompt_tokens=request.cached_prompt_tokens,
        block_ids=request.block_ids(BLOCK_TOKENS) if request.prefix_ids else (),
    )


def _ignore(*_args: object) -> None:
    """For what nobody wants to be told."""
