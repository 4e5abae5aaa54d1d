"""Follow-ups of a stored response: GET, cancel or DELETE, straight to the engine that keeps it, since it decodes nothing."""

from __future__ import annotations

from backends.base import EngineRequest
from gateway.clock import Clock
from gateway.control.roster import Roster
from gateway.dispatch import refusals
from gateway.dispatch.affinity import Affinity
from gateway.dispatch.relay import Relay
from gateway.dispatch.reply import Reply
from gateway.dispatch.watchdog import Watchdog
from gateway.errors import Refusal
from gateway.exchange import Exchange
from gateway.settings import Timeouts
from policies.vocabulary import EngineState


class FollowUps:
    """See the module header. One per process."""

    def __init__(
        self, affinity: Affinity, *, roster: Roster, watchdog: Watchdog, clock: Clock, timeouts: Timeouts
    ) -> None:
        self._affinity = affinity
        self._roster = roster
        self._watchdog = watchdog
        self._clock = clock
        self._timeouts = timeouts

    async def serve(self, exchange: Exchange, reply: Reply) -> None:
        """Relay one. Raises Refusal where the response, or its engine, is not there."""
        assert exchange.facts.previous_response_id is not None
        name = self._affinity.keeper(exchange.facts.previous_response_id)
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
            reply.relay_error(end.fault.refusal, end.fault.body, end.fault.content_type)


def _nothing(_engine_ttft_s: float) -> None:
    """A stored response's follow-up teaches nothing about first tokens."""
