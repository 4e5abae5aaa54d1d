"""One request from acceptance to its single outcome: classify, admit, wait, try, relay, settle.

This is the path of a request (docs/architecture.md) written down once, for every route. What may differ between routes
(dialect, terminator, usage) is inside the relay's readers; what may differ between engines is inside the backends.

Exactly one `Outcome` leaves here per exchange that was given a class, also when the handler is cancelled because the
client left. An attempt that failed before a byte reached the client moves to another engine once; a stored response's
follow-up (GET, cancel, DELETE) goes straight to the engine that keeps it, since it decodes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from backends.base import Backend, EngineRequest, Headers, Priority
from gateway.clock import Clock
from gateway.control.policy_store import PolicyStore
from gateway.control.pulse import Blame
from gateway.control.roster import Roster
from gateway.dispatch import refusals
from gateway.dispatch.affinity import Affinity
from gateway.dispatch.assembly import PARTS_AT_ONCE, Assembly, Batch, PartFailed, split
from gateway.dispatch.capacity import Capacity
from gateway.dispatch.dispatcher import Dispatcher, Sink
from gateway.dispatch.faults import Fault, blame
from gateway.dispatch.flow import Flow
from gateway.dispatch.owner import NO_BOUND, Owner, QueueFull, TooLate
from gateway.dispatch.relay import AttemptEnd, Relay
from gateway.dispatch.reply import Outlet, Reply
from gateway.dispatch.retries import RetryBudget
from gateway.dispatch.watchdog import Watchdog
from gateway.errors import Refusal
from gateway.exchange import Exchange
from gateway.ingress.body_edits import edited
from gateway.instruments import CLASSIFIED, ITL, REQUEST_PARTS, RETRIES_WITHHELD
from gateway.logs import Log
from gateway.observe.tracing import Trace, Tracer, read_traceparent
from gateway.queue.base import QueueUnavailable
from gateway.settings import Settings
from gateway.telemetry import Telemetry
from policies.admission import admit, retry_after_s, shed, spread_retry_s, wait_s
from policies.behaviour import Behaviours, Pattern
from policies.classify import By, Caller, Classified, UnknownClass, classify, placed
from policies.ordering.shedding import Infeasible
from policies.schema import ClassPolicy, Degrade, Policy
from policies.vocabulary import Action, Decision, EngineState, Grant, Outcome, Result, Work

MAX_ATTEMPTS = 2
PREFIX_BYTES = 1024
RANK_STEP_S = 1e-6
"""Between the ranks of two parts of one request: keeps them in order, and lets nobody pass who came a moment later."""
CLIENTS_SHARE = 0.9
"""Of the time that a client says it waits: the rest is the way there and back."""
DEADLINE = "its deadline"
_LIMIT_FIELD = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_completion_tokens"}
_USAGE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


@dataclass(slots=True)
class _Course:
    """What became of one work so far; its `Outcome` is made from it at the end.

    accepted   it is part of a request that was admitted: no bound on waiting works refuses it any more
    trace      the marks that it leaves; None: it is not traced
    """

    work: Work
    accepted: bool = False
    grant: Grant | None = None
    attempts: int = 0
    granted_s: float | None = None
    result: Result = Result.ENGINE_FAILED
    reason: str = ""
    prompt_tokens: int | None = None
    output_tokens: int = 0
    engine_ttft_s: float | None = None
    relay: Relay | None = None
    degraded: bool = False
    preempted: int = 0
    trace: Trace | None = None


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
        self._aliases = dict(settings.aliases)
        self._store = store
        self._owner = owner
        self._dispatcher = dispatcher
        self._roster = roster
        self._capacity = capacity
        self._behaviours = behaviours
        self._sink = sink
        self._watchdog = watchdog
        self._telemetry = telemetry
        self._clock = clock
        self._rng = rng
        self._log = log
        self._on_outcome = on_outcome
        self._record = record
        self._tracer = tracer
        self._ids = (f"{work_ids}-{number:x}" for number in itertools.count(1))
        self._affinity = Affinity()
        self._flow = Flow()
        self._retries = RetryBudget(clock.now_s())
        # A client may use one request id for several requests, and engines make their own ids from it: the second one
        # in flight, or the second attempt, needs another.
        self._request_ids: Counter[str] = Counter()

    async def serve(self, exchange: Exchange) -> None:
        """Answer an exchange; see `gateway.ingress.server.Service`."""
        reply = Reply(exchange, self._clock, self._timeouts)
        if exchange.facts.previous_response_id is not None and not exchange.facts.model:
            await self._stored(exchange, reply)
            return
        policy = self._store.current
        key, left = f"{exchange.tenant}/{exchange.key_id}", False
        pattern = self._behaviours.arrived(key, streamed=exchange.facts.stream, now_s=self._clock.now_s())
        self._watchdog.add(reply)
        try:
            found = self._classified(exchange, policy, pattern)
            batch = split(exchange, policy.class_policy(found.class_name).inputs_max)
            if batch is None:
                await self._serve_work(exchange, reply, _Course(self._work(exchange, found)), policy)
            else:
                await self._serve_parts(batch, reply, found, policy)
        except asyncio.CancelledError:
            left = not reply.ended
            raise
        finally:
            self._watchdog.discard(reply)
            self._behaviours.ended(key, left=left, now_s=self._clock.now_s())

    async def _serve_work(self, exchange: Exchange, reply: Outlet, course: _Course, policy: Policy) -> None:
        """Carry one work to its outcome."""
        self._request_ids[exchange.request_id] += 1
        if self._tracer is not None:
            course.trace = self._tracer.begin(exchange.rule_headers.get("traceparent"))
        try:
            await self._carry(exchange, reply, course, policy)
        except Refusal as refusal:
            course.reason = refusal.reason
            self._capacity.explain(refusal, course.work)
            reply.fail(refusal)
        except asyncio.CancelledError:
            course.result, course.reason = Result.CANCELLED, reply.cut_reason or "client_gone"
            if course.relay is not None:
                course.output_tokens = course.relay.output_tokens
                if course.relay.answered and not reply.paused:  # SDKs leave at the dialect's end, before the framing's
                    course.result, course.reason = Result.COMPLETED, ""
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
        course = _Course(self._work(exchange, found))
        try:
            self._admit(course, policy, works=min(len(batch), PARTS_AT_ONCE))
        except Refusal as refusal:
            course.reason = refusal.reason
            self._capacity.explain(refusal, course.work)
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
                    work = self._work(part.exchange, self._placed(part.exchange, found, number, policy))
                    part_course = _Course(work, accepted=True)
                    tasks.append(group.create_task(self._serve_work(part.exchange, part, part_course, policy)))
                await asyncio.wait(tasks)
                watch.cancel()
        except* PartFailed:
            pass
        except* TimeoutError:
            message = f"the request's parts took longer than total_s = {self._timeouts.total_s:g} s; send fewer inputs"
            assembly.failed(Refusal(504, message, "timeout_error", "total"), None, "")
        assembly.end()

    def _placed(self, part: Exchange, whole: Classified, number: int, policy: Policy) -> Classified:
        """Class and deadline of a part: the whole's, for its own size; its rank keeps the parts in order."""
        found = placed(
            whole.class_name,
            whole.reason,
            policy,
            prompt_tokens=part.facts.prompt_tokens,
            accepted_s=self._accepted_pool_s(part),
            alone_s=self._alone_s(part),
        )
        return replace(found, rank=found.rank + number * RANK_STEP_S)

    # -- before the queue ------------------------------------------------------------------------------------------

    def _classified(self, exchange: Exchange, policy: Policy, pattern: Pattern | None) -> Classified:
        """The class of a request. Raises Refusal for one that is not there."""
        caller = Caller(exchange.tenant, exchange.key_id, exchange.max_class, exchange.path)
        try:
            found = classify(
                exchange.facts,
                headers=exchange.rule_headers,
                caller=caller,
                policy=policy,
                accepted_s=self._accepted_pool_s(exchange),
                alone_s=self._alone_s(exchange),
                pattern=pattern,
            )
        except UnknownClass as error:
            raise Refusal(400, str(error), reason="unknown_class", param=error.header) from None
        exchange.response_headers.append(("x-headrace-class", found.class_name))
        if found.reason.isascii():  # a rule may name a header that is not
            exchange.response_headers.append(("x-headrace-class-reason", found.reason))
        self._telemetry.add(CLASSIFIED, 1, found.class_name, found.by)
        if found.by in _LEARNED:
            now_s = self._clock.pool_s()
            self._sink(Decision(Action.CLASSIFY, now_s, policy.version, found.class_name, reason=found.reason))
        return found

    def _alone_s(self, exchange: Exchange) -> float | None:
        """What its prompt would take to a first token on an idle engine; None: not known yet."""
        facts = exchange.facts
        return self._dispatcher.alone_s(self._aliases.get(facts.model, facts.model), facts.prompt_tokens)

    def _accepted_pool_s(self, exchange: Exchange) -> float:
        return self._clock.pool_s() - (self._clock.now_s() - exchange.accepted_s)

    def _work(self, exchange: Exchange, found: Classified) -> Work:
        """What the queue will order. Raises Refusal for a stored response that is not known."""
        facts = exchange.facts
        accepted_s, deadline_s = self._accepted_pool_s(exchange), found.deadline_s
        if deadline_s is not None and exchange.read_timeout_s is not None:
            # Who waits for less time than the class promises is served in that time or not at all.
            deadline_s = min(deadline_s, accepted_s + CLIENTS_SHARE * exchange.read_timeout_s)
        pinned = None
        if facts.previous_response_id is not None:
            pinned = self._keeper(facts.previous_response_id)
        return Work(
            id=next(self._ids),
            class_name=found.class_name,
            tenant=exchange.tenant,
            model=self._aliases.get(facts.model, facts.model),
            path=exchange.path,
            accepted_s=accepted_s,
            rank=found.rank if deadline_s is None else min(found.rank, deadline_s),
            prompt_tokens=facts.prompt_tokens,
            max_tokens=facts.max_tokens,
            sequences=facts.sequences,
            deadline_s=deadline_s,
            pinned_engine=pinned,
            prefix="" if deadline_s is not None else _prefix(exchange.body),
        )

    def _keeper(self, response_id: str) -> str:
        engine = self._affinity.engine(response_id)
        if engine is None:
            raise Refusal(
                404,
                f"response {response_id[:80]!r} is not known here: it was never made through this gateway, or is forgotten",
                reason="response_not_found",
                code="response_not_found",
                param="previous_response_id",
            )
        return engine

    def _admit(self, course: _Course, policy: Policy, works: int = 1) -> None:
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
            depth=self._dispatcher.depth(work.class_name),
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

    async def _carry(self, exchange: Exchange, reply: Outlet, course: _Course, policy: Policy) -> None:
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
            end = await self._attempt(exchange, reply, course, grant)
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
                    _tell(reply, fault)
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

    async def _wait(self, exchange: Exchange, course: _Course, policy: Policy) -> Grant | None:
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
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                return await self._owner.wait(work, bounds, refusable=refusable)
        except TooLate as error:
            self._too_late(exchange, course, one, error.infeasible)
            return None
        except QueueFull:
            course.result = Result.SHED
            depth = self._dispatcher.depth(work.class_name)
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
                self._dispatcher.depth(work.class_name),
                bound=bounds[work.class_name],
                served_per_s=self._flow.per_s(work.class_name, self._clock.now_s()),
                draw=self._rng.random(),
            )
            raise refusals.wait_too_long(timer, bound_s, retry_s) from None

    def _too_late(self, exchange: Exchange, course: _Course, one: ClassPolicy, infeasible: Infeasible | None) -> None:
        """A work cannot be in time: make it a smaller one if its class says so, else raise the refusal with a hint."""
        work = course.work
        if one.on_infeasible == "degrade" and not course.degraded:
            course.degraded = True
            course.work = self._degraded(work, one.degrade)
            exchange.response_headers.append(("x-headrace-degraded", "1"))
            return
        course.result = Result.SHED
        if infeasible is None:
            served_per_s = self._flow.per_s(work.class_name, self._clock.now_s())
            wait = wait_s(self._dispatcher.depth(work.class_name), bound=one.max_queue, served_per_s=served_per_s)
            raise refusals.infeasible(work, one, spread_retry_s(wait, draw=self._rng.random()), None)
        predicted_s = self._clock.now_s() - exchange.accepted_s + infeasible.first_token_in_s
        retry_s = spread_retry_s(infeasible.feasible_in_s, draw=self._rng.random())
        raise refusals.infeasible(work, one, retry_s, predicted_s)

    def _degraded(self, work: Work, degrade: Degrade) -> Work:
        """The smaller work: another model where an engine serves it, and a shorter answer."""
        model, most = work.model, work.max_tokens
        if degrade.model is not None and self._roster.serving(degrade.model, work.path):
            model = degrade.model
        if degrade.max_tokens is not None:
            most = degrade.max_tokens if most is None else min(most, degrade.max_tokens)
        return replace(work, id=next(self._ids), model=model, max_tokens=most)

    def _patience(self, exchange: Exchange, max_wait_s: float) -> tuple[float, str]:
        """The smallest of the bounds on waiting, from acceptance, with its name."""
        bounds = [(max_wait_s, "max_wait_s"), (self._timeouts.total_s, "total_s")]
        if not exchange.facts.stream:
            bounds.append((self._timeouts.nonstream_wait_s, "nonstream_wait_s"))
        if exchange.read_timeout_s is not None:
            bounds.append((exchange.read_timeout_s * CLIENTS_SHARE, "the client's own time-out, less a tenth,"))
        return min(bounds)

    async def _attempt(self, exchange: Exchange, reply: Outlet, course: _Course, grant: Grant) -> AttemptEnd:
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
            relay.attach(backend.call(request, relay))
            end = await relay.done
            engine.pulse.ended(relay, blame(end.fault))
        finally:
            engine.pulse.ended(relay, Blame.NEITHER)
            self._watchdog.discard(relay)
            relay.close()
        if course.trace is not None:
            failed = "" if end.fault is None else end.fault.refusal.reason
            course.trace.ended(self._clock.now_s(), engine_ttft_s=end.engine_ttft_s, failed=failed)
        course.engine_ttft_s = end.engine_ttft_s
        course.output_tokens, course.prompt_tokens = end.output_tokens, end.prompt_tokens
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

    # -- stored responses ------------------------------------------------------------------------------------------

    async def _stored(self, exchange: Exchange, reply: Reply) -> None:
        """GET, cancel or DELETE of a response: straight to the engine that keeps it."""
        assert exchange.facts.previous_response_id is not None
        name = self._keeper(exchange.facts.previous_response_id)
        engine = self._roster[name]
        if engine.backend is None or engine.state is EngineState.DOWN:
            raise Refusal(
                503,
                f"engine {name}, which keeps this response, is away; try again",
                "server_error",
                "no_engine",
                retry_after_s=refusals.NO_ENGINE_RETRY_S,
            )
        relay = Relay(
            exchange,
            reply,
            engine=name,
            clock=self._clock,
            timeouts=self._timeouts,
            strip_usage=False,
            on_first_token=_nothing,
        )
        self._watchdog.add(reply)
        self._watchdog.add(relay)
        try:
            request = EngineRequest(exchange.method, exchange.target, exchange.headers, exchange.body)
            relay.attach(engine.backend.call(request, relay))
            end = await relay.done
        finally:
            self._watchdog.discard(relay)
            self._watchdog.discard(reply)
            relay.close()
        if end.fault is not None and not end.committed:
            _tell(reply, end.fault)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _settle(self, exchange: Exchange, reply: Outlet, course: _Course, policy: Policy) -> None:
        """The exchange's one outcome."""
        now_s = self._clock.now_s()
        accepted_s, first_s, work = exchange.accepted_s, reply.first_content_s, course.work
        outcome = Outcome(
            work_id=work.id,
            class_name=work.class_name,
            tenant=work.tenant,
            model=work.model,
            engine="" if course.grant is None else course.grant.engine,
            result=course.result,
            reason=course.reason,
            status=499 if course.result is Result.CANCELLED and not reply.opened else reply.status,
            attempts=course.attempts,
            prompt_tokens=work.prompt_tokens if course.prompt_tokens is None else course.prompt_tokens,
            output_tokens=course.output_tokens,
            total_s=now_s - accepted_s,
            queued_s=None if course.granted_s is None else course.granted_s - accepted_s,
            ttft_s=None if first_s is None else first_s - accepted_s,
            engine_ttft_s=course.engine_ttft_s,
        )
        if course.grant is not None:
            self._owner.finished(work, course.grant, outcome)
        else:
            self._owner.ended(work)
        self._telemetry.observe_outcome(
            outcome,
            sla_met=_sla_met(outcome, work, policy),
            sequences=work.sequences,
            trace_id=_trace_id(exchange, course),
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
                result=outcome.result,
                reason=outcome.reason,
                status=outcome.status,
                engine=outcome.engine,
                attempts=outcome.attempts,
                repeat_key=f"{outcome.result} {outcome.reason} {outcome.engine}",
            )


def _trace_id(exchange: Exchange, course: _Course) -> str:
    """The trace that an operator can find the work in: ours, or the client's where only the client traces."""
    if course.trace is not None:
        return course.trace.trace_id
    parent = read_traceparent(exchange.rule_headers.get("traceparent"))
    return parent.trace_id if parent is not None and parent.sampled else ""


_LEARNED = frozenset({By.LEARNED_LOOP, By.LEARNED_PERSON})
_QUIET = frozenset({Result.COMPLETED, Result.CANCELLED, Result.CLIENT_ERROR})


def _sla_met(outcome: Outcome, work: Work, policy: Policy) -> bool | None:
    """Whether a work met its class's TTFT objective; None where there is none to meet."""
    objective_s = policy.objective_s(work)
    if objective_s is None or outcome.result in {Result.CANCELLED, Result.CLIENT_ERROR}:
        return None
    return outcome.result is Result.COMPLETED and outcome.ttft_s is not None and outcome.ttft_s <= objective_s


def _asks_usage(exchange: Exchange, backend: Backend) -> bool:
    """Whether to ask the engine for the usage event that the client did not ask for."""
    return (
        exchange.facts.stream
        and not exchange.facts.wants_usage
        and exchange.path in _USAGE_PATHS
        and backend.capabilities.include_usage
    )


def _tell(reply: Outlet, fault: Fault) -> None:
    if fault.body is None:
        reply.fail(fault.refusal)
    else:
        reply.relay_error(fault.refusal, fault.body, fault.content_type)


def _prefix(body: bytes) -> str:
    """A short digest of how a long request begins: enough to tell mates, too little to tell a prompt."""
    if len(body) < 2 * PREFIX_BYTES:
        return ""
    return hashlib.blake2s(body[:PREFIX_BYTES], digest_size=4).hexdigest()


def _set_header(exchange: Exchange, name: str, value: str) -> None:
    exchange.response_headers[:] = [pair for pair in exchange.response_headers if pair[0] != name]
    exchange.response_headers.append((name, value))


def _with_request_id(headers: Headers, request_id: str) -> Headers:
    return [*(pair for pair in headers if pair[0] != b"x-request-id"), (b"x-request-id", request_id.encode())]


def _nothing(_engine_ttft_s: float) -> None:
    """A stored response's follow-up teaches nothing about first tokens."""
