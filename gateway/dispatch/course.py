"""What became of one work: kept while it is carried, and told once, as its `Outcome`."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.dispatch.relay import AttemptEnd, Relay
from gateway.dispatch.reply import Outlet
from gateway.exchange import Exchange
from gateway.observe.tracing import Trace, read_traceparent
from policies.schema import Policy
from policies.vocabulary import Grant, Outcome, Result, Work


@dataclass(slots=True)
class Course:
    """What became of one work so far.

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
    cached_tokens: int | None = None
    output_tokens: int = 0
    engine_ttft_s: float | None = None
    relay: Relay | None = None
    degraded: bool = False
    preempted: int = 0
    trace: Trace | None = None

    def tried(self, end: AttemptEnd) -> None:
        """An attempt has ended so."""
        self.engine_ttft_s = end.engine_ttft_s
        self.output_tokens, self.prompt_tokens = end.output_tokens, end.prompt_tokens
        self.cached_tokens = end.cached_tokens

    def cancelled(self, reply: Outlet) -> None:
        """The client left, or its reply was cut."""
        self.result, self.reason = Result.CANCELLED, reply.cut_reason or "client_gone"
        if self.relay is not None:
            self.output_tokens = self.relay.output_tokens
            if self.relay.answered and not reply.paused:  # SDKs leave at the dialect's end, before the framing's
                self.result, self.reason = Result.COMPLETED, ""

    def outcome(self, exchange: Exchange, reply: Outlet, now_s: float) -> Outcome:
        """The work's one outcome, once nothing more happens to it."""
        accepted_s, first_s, work = exchange.accepted_s, reply.first_content_s, self.work
        return Outcome(
            work_id=work.id,
            class_name=work.class_name,
            tenant=work.tenant,
            model=work.model,
            engine="" if self.grant is None else self.grant.engine,
            result=self.result,
            reason=self.reason,
            status=499 if self.result is Result.CANCELLED and not reply.opened else reply.status,
            attempts=self.attempts,
            prompt_tokens=work.prompt_tokens if self.prompt_tokens is None else self.prompt_tokens,
            output_tokens=self.output_tokens,
            total_s=now_s - accepted_s,
            queued_s=None if self.granted_s is None else self.granted_s - accepted_s,
            ttft_s=None if first_s is None else first_s - accepted_s,
            engine_ttft_s=self.engine_ttft_s,
            cached_tokens=self.cached_tokens,
        )

    def trace_id(self, exchange: Exchange) -> str:
        """The trace that an operator can find the work in: ours, or the client's where only the client traces."""
        if self.trace is not None:
            return self.trace.trace_id
        parent = read_traceparent(exchange.rule_headers.get("traceparent"))
        return parent.trace_id if parent is not None and parent.sampled else ""


def sla_met(outcome: Outcome, work: Work, policy: Policy) -> bool | None:
    """Whether a work met its class's TTFT objective; None where there is none to meet."""
    objective_s = policy.objective_s(work)
    if objective_s is None or outcome.result in {Result.CANCELLED, Result.CLIENT_ERROR}:
        return None
    return outcome.result is Result.COMPLETED and outcome.ttft_s is not None and outcome.ttft_s <= objective_s


def deadline_met(outcome: Outcome, work: Work, policy: Policy) -> bool | None:
    """Whether a work ended within its class's `deadline_s`; None where there is none to meet."""
    one = policy.class_policy(work.class_name)
    gone = outcome.result in {Result.CANCELLED, Result.CLIENT_ERROR}
    if one.deadline_s is None or one.has_ttft_objective or gone:
        return None
    return outcome.result is Result.COMPLETED and outcome.total_s <= one.deadline_s
