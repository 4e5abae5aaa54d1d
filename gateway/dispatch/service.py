"""One request from acceptance to its single outcome: classify, admit, wait, try, relay, settle.

This is the path of a request (docs/architecture.md) written down once, for every route. What may differ between routes
(dialect, terminator, usage) is inside the relay's readers; what may differ between engines is inside the backends.

Exactly one `Outcome` leaves here per exchange that was given a class, also when the handler is cancelled because the
client left. An attempt that failed before a byte reached the client moves to another engine once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from backends.base import Backend, EngineRequest, Headers, Priority
from gateway.clock import Clock
from gateway.control.policy_store import PolicyStore
from gateway.control.pulse import Blame
from gateway.control.roster import Roster
from gateway.dispatch import refusals
from gateway.dispatch.affinity import Affinity
from gateway.dispatch.assembly import PARTS_AT_ONCE, Assembly, Batch, PartFailed, split
from gateway.dispatch.capacity import Capacity
from gateway.dispatch.coalesce import Coalescer, may_join
from gateway.dispatch.course import Course, deadline_met, sla_met
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.faults import Fault, blame
from gateway.dispatch.flow import Flow
from gateway.dispatch.follow_ups import FollowUps
from gateway.dispatch.intake import CLIENTS_SHARE, Intake
from gateway.dispatch.owner import NO_BOUND, Owner, QueueFull, TooLate
from gateway.dispatch.planner import Sink
from gateway.dispatch.relay import AttemptEnd, Relay
from gateway.dispatch.reply import Outlet, Reply
from gateway.dispatch.retries import RetryBudget
from gateway.dispatch.watchdog import Watchdog
from gateway.errors import Refusal
from gateway.exchange import Exchange
from gateway.ingress.body_edits import edited
from gateway.instruments import ITL, REQUEST_PARTS, RETRIES_WITHHELD
from gateway.logs import Log
from gateway.observe.tracing import Tracer
from gateway.queue.base import QueueUnavailable
from gateway.settings import Settings
from gateway.telemetry import Telemetry
from policies.admission import admit, retry_after_s, shed, spread_retry_s, wait_s
from policies.behaviour import Behaviours
from policies.classify import Classified
from policies.ordering.shedding import Infeasible
from policies.schema import ClassPolicy, Degrade, Policy
from policies.vocabulary import Grant, Outcome, Result, Work

MAX_ATTEMPTS = 2
DEADLINE = "its deadline"
_LIMIT_FIELD = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_completion_tokens"}
_USAGE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


class Service:
    """See the module header. One per process; `serve` runs in the client's handler task."""

    def __init__(
        self,
        *,
        settings: Settings,
        store: PolicyStore,
        owner: Owner,
        dispatcher: Dispatcher,
        roster: Roster,
        capacity: Capacity,
        behaviours: Behaviours,
        sink: Sink,
        watchdog: Watchdog,
        telemetry: Telemetry,
        clock: Clock,
        rng: random.Random,
        log: Log,
        work_ids: str,
        on_outcome: Callable[[Outcome], None] | None = None,
        record: Callable[[Work, Outcome, bytes], None] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """work_ids: prefix of this process's work ids, unique among the pool's processes.

        record: told of each work that ended, with the client's body.
        """
        self._timeouts = settings.timeouts
        self._store = store
        self._owner = owner
        self._dispatcher = dispatcher
        self._roster = roster
        self._capacity = capacity
        self._behaviours = behaviours
        self._watchdog = watchdog
        self._telemetry = telemetry
        self._clock = clock
        self._rng = rng
        self._log = log
        self._on_outcome = on_outcome
        self._record = record
        self._tracer = tracer
        self._affinity = Affinity()
        self._follow_ups = FollowUps(
            self._affinity, roster=roster, watchdog=watchdog, clock=clock, timeouts=settings.timeouts
        )
        self._intake = Intake(
            aliases=dict(settings.aliases),
            alone_s=dispatcher.planner.alone_s,
            affinity=self._affinity,
            sink=sink,
            telemetry=telemetry,
            clock=clock,
            work_ids=work_ids,
        )
        self._coalescer = Coalescer()
        self._flow = Flow()
        self._retries = RetryBudget(clock.now_s())
        # A client may use one request id for several requests, and engines make their own ids from it: the second one
        # in flight, or the second attempt, needs another.
        self._request_ids: Counter[str] = Counter()

    async def serve(self, exchange: Exchange) -> None:
        """Answer an exchange; see `gateway.ingress.server.Service`."""
        reply = Reply(exchange, self._clock, self._timeouts)
        if exchange.facts.previous_response_id is not None and not exchange.facts.model:
            await self._follow_ups.serve(exchange, reply)
            return
        policy = self._store.current
        key, left = f"{exchange.tenant}/{exchange.key_id}", False
        pattern = self._behaviours.arrived(key, streamed=exchange.facts.stream, now_s=self._clock.now_s())
        self._watchdog.add(reply)
        try:
            found = self._intake.classified(exchange, policy, pattern)
            batch = split(exchange, policy.class_policy(found.class_name).inputs_max)
            if batch is None:
                await self._serve_work(exchange, reply, Course(self._intake.work(exchange, found, policy)), policy)
            else:
                await self._serve_parts(batch, reply, found, policy)
        except asyncio.CancelledError:
            left = not reply.ended
            raise
        finally:
            self._watchdog.discard(reply)
            self._behaviours.ended(key, left=left, now_s=self._clock.now_s())

    async def _serve_work(self, exchange: Exchange, reply: Outlet, course: Course, policy: Policy) -> None:
        """Carry one work to its outcome."""
        self._request_ids[exchange.request_id] += 1
        _name_work(exchange, course.work)
        if self._tracer is not None:
            course.trace = self._tracer.begin(exchange.rule_headers.get("traceparent"))
        try:
            await self._carry(exchange, reply, course, policy)
        except Refusal as refusal:
            course.reason = refusal.reason
            self._capacity.explain(refusal, course.work)
            reply.fail(refusal)
        except asyncio.CancelledError:
            course.cancelled(reply)
            raise
        except Exception:
            course.reason = "internal_error"
            raise
        finally:
            self._request_ids[exchange.request_id] -= 1
            if not self._request_ids[exchange.request_id]:
                del self._request_ids[exchange.request_id]
            self._settle(exchange, reply, course, policy)

    async def _serve_parts(self, batch: Batch, reply: Reply, found: Classified, policy: Policy) -> None:
        """Carry a request batch in parts, each a work, and its answer as one. It is admitted, or refused, as a whole."""
        exchange = batch.exchange
        course = Course(self._intake.work(exchange, found, policy))
        try:
            self._admit(course, policy, works=min(len(batch), PARTS_AT_ONCE))
        except Refusal as refusal:
            course.reason = refusal.reason
            self._capacity.explain(refusal, course.work)
            _name_work(exchange, course.work)
            reply.fail(refusal)
            self._settle(exchange, reply, course, policy)
            return
        self._telemetry.add(REQUEST_PARTS, len(batch), found.class_name)
        assembly = Assembly(batch, reply, self._clock)
        try:
            async with asyncio.timeout(self._timeouts.total_s), asyncio.TaskGroup() as group:
                watch = group.create_task(assembly.watch(), name="watch a request batch")
                tasks = []
                for number in range(len(batch)):
                    part = await assembly.start(number)
                    part_found = self._intake.part_of(found, part.exchange, number, policy)
                    work = self._intake.work(part.exchange, part_found, policy)
                    part_course = Course(work, accepted=True)
                    tasks.append(group.create_task(self._serve_work(part.exchange, part, part_course, policy)))
                await asyncio.wait(tasks)
                watch.cancel()
        except* PartFailed:
            pass
        except* TimeoutError:
            message = f"the request's parts took longer than total_s = {self._timeouts.total_s:g} s; send fewer inputs"
            assembly.failed(Refusal(504, message, "timeout_error", "total"), None, "")
        assembly.end()

    # -- before the queue ------------------------------------------------------------------------------------------

    def _admit(self, course: Course, policy: Policy, works: int = 1) -> None:
        """Refuse what no engine can take now, and what its class has no room for: so many works at a time."""
        work = course.work
        if not self._somebody_serves(work):
            refusal = refusals.nobody_serves(work, self._roster, draw=self._rng.random())
            course.result = Result.CLIENT_ERROR if refusal.status == 404 else Result.UNAVAILABLE
            raise refusal
        if course.accepted:
            return
        refused = admit(
            work.class_name,
            depth=self._dispatcher.queued.depth(work.class_name),
            policy=policy,
            served_per_s=self._flow.per_s(work.class_name, self._clock.now_s()),
            draw=self._rng.random(),
            works=works,
        )
        if refused is not None:
            course.result = Result.SHED
            raise refusals.of(refused)

    def _somebody_serves(self, work: Work) -> bool:
        return any(
            engine.name not in work.avoid and work.pinned_engine in {None, engine.name}
            for engine in self._roster.serving(work.model, work.path)
        )

    # -- waiting and trying ----------------------------------------------------------------------------------------

    async def _carry(self, exchange: Exchange, reply: Outlet, course: Course, policy: Policy) -> None:
        self._admit(course, policy)
        while True:
            work = course.work
            grant = self._owner.start_now(work) or await self._wait(exchange, course, policy)
            if grant is None:
                continue
            course.grant = grant
            if course.granted_s is None:
                course.granted_s = self._clock.now_s()
            self._flow.left(work.class_name, self._clock.now_s())
            if course.trace is not None:
                course.trace.granted(grant.engine, queued_s=exchange.accepted_s, now_s=self._clock.now_s())
            end = await self._attempt(exchange, reply, course, grant, policy)
            fault = end.fault
            if fault is None:
                course.result = Result.COMPLETED
                return
            again = replace(work, attempt=work.attempt + 1)
            if fault.requeue:
                course.preempted += 1
                self._telemetry.preempted(grant.engine, work.class_name, end.output_tokens)
            else:
                again = replace(again, avoid=work.avoid | {grant.engine})
            if (
                end.committed
                or not fault.elsewhere
                or course.attempts - course.preempted >= MAX_ATTEMPTS
                or not self._somebody_serves(again)
                or not self._may_retry(grant.engine, fault)
            ):
                course.result, course.reason = fault.result, fault.refusal.reason
                if not end.committed:
                    self._capacity.explain(fault.refusal, work)
                    reply.relay_error(fault.refusal, fault.body, fault.content_type)
                return
            self._owner.finished(work, grant, None)
            course.grant = None
            course.work = again
            if not fault.requeue:
                self._telemetry.retry(grant.engine, fault.refusal.reason)

    def _may_retry(self, engine: str, fault: Fault) -> bool:
        """Whether the budget has one more second attempt. One that cost no engine anything, or was our doing, needs none."""
        if fault.requeue or fault.refusal.reason == "connect_refused" or self._retries.take(self._clock.now_s()):
            return True
        self._telemetry.add(RETRIES_WITHHELD, 1, engine)
        return False

    async def _wait(self, exchange: Exchange, course: Course, policy: Policy) -> Grant | None:
        """Wait in the queue for a grant, as long as the class, the client and the kind of answer allow.

        None: the work could not be in time and was made a smaller one, which is to be tried now.
        """
        work, one = course.work, policy.class_policy(course.work.class_name)
        refusable = one.on_infeasible != "late" and not (course.degraded or course.accepted or work.attempt)
        bounds = {name: NO_BOUND if course.accepted else of.max_queue for name, of in policy.classes.items()}
        bound_s, timer = self._patience(exchange, one.max_wait_s)
        if refusable and work.deadline_s is not None and not self._dispatcher.leads:
            # The pool's decider is another process: it cannot refuse what waits here, so this one does, at the end.
            bound_s, timer = min((bound_s, timer), (work.deadline_s - work.accepted_s, DEADLINE))
        left_s = exchange.accepted_s + bound_s - self._clock.now_s()
        if not self._dispatcher.queued.depth(work.class_name):
            self._flow.waits(work.class_name, self._clock.now_s())
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                return await self._owner.wait(work, bounds, refusable=refusable)
        except TooLate as error:
            self._too_late(exchange, course, one, error.infeasible)
            return None
        except QueueFull:
            course.result = Result.SHED
            depth = self._dispatcher.queued.depth(work.class_name)
            refused = shed(
                work.class_name,
                depth=depth,
                bound=bounds[work.class_name],
                served_per_s=self._flow.per_s(work.class_name, self._clock.now_s()),
                draw=self._rng.random(),
            )
            raise refusals.of(refused) from None
        except QueueUnavailable as error:
            course.result = Result.UNAVAILABLE
            self._log.warning("queue unavailable", error=str(error), repeat_key="queue unavailable")
            raise refusals.queue_unavailable(draw=self._rng.random()) from None
        except TimeoutError:
            if timer == DEADLINE:
                self._too_late(exchange, course, one, None)
                return None
            course.result = Result.SHED
            retry_s = retry_after_s(
                self._dispatcher.queued.depth(work.class_name),
                bound=bounds[work.class_name],
                served_per_s=self._flow.per_s(work.class_name, self._clock.now_s()),
                draw=self._rng.random(),
            )
            raise refusals.wait_too_long(timer, bound_s, retry_s) from None

    def _too_late(self, exchange: Exchange, course: Course, one: ClassPolicy, infeasible: Infeasible | None) -> None:
        """A work cannot be in time: make it a smaller one if its class says so, else raise the refusal with a hint."""
        work = course.work
        if one.on_infeasible == "degrade" and not course.degraded:
            course.degraded = True
            course.work = self._degraded(work, one.degrade)
            _name_work(exchange, course.work)
            exchange.response_headers.append(("x-headrace-degraded", "1"))
            return
        course.result = Result.SHED
        if infeasible is None:
            served_per_s = self._flow.per_s(work.class_name, self._clock.now_s())
            wait = wait_s(
                self._dispatcher.queued.depth(work.class_name), bound=one.max_queue, served_per_s=served_per_s
            )
            raise refusals.infeasible(work, one, spread_retry_s(wait, draw=self._rng.random()), None)
        predicted_s = self._clock.now_s() - exchange.accepted_s + infeasible.first_token_in_s
        retry_s = spread_retry_s(infeasible.feasible_in_s, draw=self._rng.random())
        if infeasible.most_s is not None:
            raise refusals.crowding(work, infeasible.first_token_in_s, infeasible.most_s, retry_s)
        raise refusals.infeasible(work, one, retry_s, predicted_s)

    def _degraded(self, work: Work, degrade: Degrade) -> Work:
        """The smaller work: another model where an engine serves it, and a shorter answer."""
        model, most = work.model, work.max_tokens
        if degrade.model is not None and self._roster.serving(degrade.model, work.path):
            model = degrade.model
        if degrade.max_tokens is not None:
            most = degrade.max_tokens if most is None else min(most, degrade.max_tokens)
        return replace(work, id=self._intake.new_id(), model=model, max_tokens=most)

    def _patience(self, exchange: Exchange, max_wait_s: float) -> tuple[float, str]:
        """The smallest of the bounds on waiting, from acceptance, with its name."""
        bounds = [(max_wait_s, "max_wait_s"), (self._timeouts.total_s, "total_s")]
        if not exchange.facts.stream:
            bounds.append((self._timeouts.nonstream_wait_s, "nonstream_wait_s"))
        if exchange.read_timeout_s is not None:
            bounds.append((exchange.read_timeout_s * CLIENTS_SHARE, "the client's own time-out, less a tenth,"))
        return min(bounds)

    async def _attempt(
        self, exchange: Exchange, reply: Outlet, course: Course, grant: Grant, policy: Policy
    ) -> AttemptEnd:
        """One try on one engine. The engine's call never outlives this."""
        work = course.work
        engine = self._roster[grant.engine]
        backend = engine.backend
        assert backend is not None, "only engines with a backend are ever UP"
        course.attempts += 1
        if course.attempts == 1:
            self._retries.attempted()
        self._telemetry.attempt(grant.engine, work.class_name)
        strip_usage = _asks_usage(exchange, backend)
        relay = Relay(
            exchange,
            reply,
            engine=grant.engine,
            clock=self._clock,
            timeouts=self._timeouts,
            strip_usage=strip_usage,
            on_first_token=lambda ttft_s: self._dispatcher.first_token(work, grant, ttft_s),
            on_gap=self._telemetry.keep(ITL, grant.engine, work.class_name).observe,
            gone=lambda: engine.gone,
            counted_s=lambda: engine.counted_s,
        )
        course.relay = relay
        self._dispatcher.attach(grant, relay)
        _set_header(exchange, "x-headrace-engine", grant.engine)
        self._watchdog.add(relay)
        engine.pulse.began(relay)
        try:
            request = self._request(exchange, work, backend, strip_usage=strip_usage)
            if course.trace is not None:
                request = replace(request, headers=course.trace.sent(request.headers, self._clock.now_s()))
            if engine.settings.pads and may_join(work, one := policy.class_policy(work.class_name)):
                call = self._coalescer.call(backend, request, relay, work, inputs_max=one.inputs_max)
            else:
                call = backend.call(request, relay)
            relay.attach(call)
            end = await relay.done
            engine.pulse.ended(relay, blame(end.fault))
        finally:
            engine.pulse.ended(relay, Blame.NEITHER)
            self._watchdog.discard(relay)
            relay.close()
        if course.trace is not None:
            failed = "" if end.fault is None else end.fault.refusal.reason
            course.trace.ended(self._clock.now_s(), engine_ttft_s=end.engine_ttft_s, failed=failed)
        course.tried(end)
        if end.fault is None:
            engine.served(self._clock.now_s())
        elif end.fault.refusal.reason == "connect_refused":
            engine.refused(end.fault.refusal.message, self._clock.now_s())
        if end.response_id:
            self._affinity.keep(end.response_id, grant.engine)
        return end

    def _request(self, exchange: Exchange, work: Work, backend: Backend, *, strip_usage: bool) -> EngineRequest:
        priority = backend.capabilities.priority
        body = edited(
            exchange.body,
            model=work.model if work.model != exchange.facts.model else None,
            include_usage=strip_usage,
            priority=None if priority is None else self._engine_priority(work.class_name, priority),
            output_limit=work.max_tokens if work.max_tokens != exchange.facts.max_tokens else None,
            limit_field=_LIMIT_FIELD.get(exchange.path, "max_tokens"),
        )
        headers = exchange.headers
        if work.attempt or self._request_ids[exchange.request_id] > 1:
            headers = _with_request_id(headers, f"{exchange.request_id}-{work.id}-{work.attempt + 1}")
        return EngineRequest(exchange.method, exchange.target, headers, body)

    def _engine_priority(self, class_name: str, priority: Priority) -> int:
        """Our order of classes as the engine counts it: 0 is the most urgent, or the highest number is."""
        order = self._store.current.precedence
        place = order.index(class_name) if class_name in order else len(order)
        return place if priority is Priority.LOWER_FIRST else len(order) - place

    # -- the end ---------------------------------------------------------------------------------------------------

    def _settle(self, exchange: Exchange, reply: Outlet, course: Course, policy: Policy) -> None:
        """The exchange's one outcome."""
        now_s = self._clock.now_s()
        outcome, work = course.outcome(exchange, reply, now_s), course.work
        if course.grant is not None:
            self._owner.finished(work, course.grant, outcome)
        else:
            self._owner.ended(work)
        self._telemetry.observe_outcome(
            outcome,
            sla_met=sla_met(outcome, work, policy),
            deadline_met=deadline_met(outcome, work, policy),
            sequences=work.sequences,
            trace_id=course.trace_id(exchange),
            at_s=self._clock.pool_s(),
        )
        if course.trace is not None and self._tracer is not None:
            self._tracer.settled(course.trace, outcome, request_id=exchange.request_id, path=exchange.path, now_s=now_s)
        if self._on_outcome is not None:
            self._on_outcome(outcome)
        if self._record is not None:
            self._record(work, outcome, exchange.body)
        if outcome.result not in _QUIET:
            self._log.warning(
                "request failed",
                request_id=exchange.request_id,
                work_id=work.id,
                result=outcome.result,
                reason=outcome.reason,
                status=outcome.status,
                engine=outcome.engine,
                attempts=outcome.attempts,
                repeat_key=f"{outcome.result} {outcome.reason} {outcome.engine}",
            )


_QUIET = frozenset({Result.COMPLETED, Result.CANCELLED, Result.CLIENT_ERROR})


def _asks_usage(exchange: Exchange, backend: Backend) -> bool:
    """Whether to ask the engine for the usage event that the client did not ask for."""
    return (
        exchange.facts.stream
        and not exchange.facts.wants_usage
        and exchange.path in _USAGE_PATHS
        and backend.capabilities.include_usage
    )


def _name_work(exchange: Exchange, work: Work) -> None:
    """Tell the client the name by which decisions, also other processes', call its request."""
    _set_header(exchange, "x-headrace-work", work.id)


def _set_header(exchange: Exchange, name: str, value: str) -> None:
    exchange.response_headers[:] = [pair for pair in exchange.response_headers if pair[0] != name]
    exchange.response_headers.append((name, value))


def _with_request_id(headers: Headers, request_id: str) -> Headers:
    return [*(pair for pair in headers if pair[0] != b"x-request-id"), (b"x-request-id", request_id.encode())]
