"""Fair shares among tenants: what each was served, over its weight, inside one class.

Start-time fair queueing: a work's tag is max(the class's virtual time, its tenant's finish), the smallest tag goes
next, and the virtual time is the tag of the latest grant. A tenant that was idle therefore starts level with the
others instead of spending what it saved up. The prompt is charged at the grant; the output, which costs about twice as
much per token, and the memory that the work held for as long as it ran, when they are known: at the end. A tenant that is not ahead of the virtual time needs no entry;
TENANTS_KEPT bounds the rest.

What an engine's prefix cache has of a prompt costs nothing: as expected at the grant, set right at the end where the answer
says how much it was.
One writer: the pool's dispatcher. Plans read it and work on copies.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.vocabulary import Outcome, Work

OUTPUT_COST = 2.0
"""Cost of one output token in prompt tokens (after VTC, OSDI 2024)."""

MEMORY_COST = 0.02
"""Cost of one token of KV memory held for a second. On an 8B model a card's memory and its time run out together at about
0.07 (24 GB: 41,000 tokens held against 3,000 a second) and 0.02 (80 GB: 420,000 against 9,000)."""

TENANTS_KEPT = 4096
"""(class, tenant) pairs remembered at most."""

GRANTS_KEPT = 256.0


def prompt_cost(work: Work) -> float:
    """What a grant is charged at once, in prompt tokens, > 0: a work without any still takes a place."""
    return 1.0 + work.computed_tokens


def output_cost(outcome: Outcome) -> float:
    """What an answer is charged once it has ended, in prompt tokens: its tokens, and the memory it held meanwhile."""
    ran_s = 0.0 if outcome.queued_s is None else max(0.0, outcome.total_s - outcome.queued_s)
    held_tokens = outcome.prompt_tokens + outcome.output_tokens / 2
    return OUTPUT_COST * outcome.output_tokens + MEMORY_COST * held_tokens * ran_s


class TenantCounters:
    """See the module header. Tags are tokens over weight; only their differences mean anything."""

    __slots__ = ("_finish", "_grants", "_in_flight", "_virtual", "_weight")

    def __init__(self) -> None:
        self._virtual: dict[str, float] = {}
        self._finish: dict[tuple[str, str], float] = {}
        self._weight: dict[str, float] = {}
        self._in_flight: dict[str, int] = {}
        self._grants: dict[str, float] = {}

    def tag(self, class_name: str, tenant: str) -> float:
        """The tenant's place in the class's order: low goes first."""
        virtual = self._virtual.get(class_name, 0.0)
        return max(virtual, self._finish.get((class_name, tenant), virtual))

    def in_flight(self, tenant: str) -> int:
        """Attempts of the tenant granted by this leader and not ended, over all engines and classes."""
        return self._in_flight.get(tenant, 0)

    def grants(self) -> dict[str, float]:
        """Grants of late by class, a copy: all of them halve whenever they add up to GRANTS_KEPT."""
        return dict(self._grants)

    def granted(self, work: Work, weight: float = 1.0) -> None:
        """A work was granted: charge its prompt. weight > 0 is the tenant's, from the policy in force."""
        start = self.tag(work.class_name, work.tenant)
        self._virtual[work.class_name] = start
        self._finish[work.class_name, work.tenant] = start + prompt_cost(work) / weight
        self._weight[work.tenant] = weight
        self._in_flight[work.tenant] = self._in_flight.get(work.tenant, 0) + 1
        self._grants[work.class_name] = self._grants.get(work.class_name, 0.0) + 1.0
        if sum(self._grants.values()) >= GRANTS_KEPT:
            self._grants = {name: count / 2 for name, count in self._grants.items() if count >= 1}
        if len(self._finish) > TENANTS_KEPT:
            self._sweep()

    def on_event(self, work: Work, outcome: Outcome | None) -> None:
        """An attempt ended; `outcome` None when the work goes on elsewhere. Charges output and memory."""
        left = self._in_flight.get(work.tenant, 0) - 1
        if outcome is not None and outcome.output_tokens:
            told = outcome.cached_tokens
            found = work.cached_tokens if told is None else min(told, work.prompt_tokens)
            cost = (output_cost(outcome) + work.cached_tokens - found) / self._weight.get(work.tenant, 1.0)
            self._finish[work.class_name, work.tenant] = self.tag(work.class_name, work.tenant) + cost
        if left > 0:
            self._in_flight[work.tenant] = left
        else:
            self._in_flight.pop(work.tenant, None)

    def snapshot(self) -> Mapping[str, object]:
        """JSON-ready. Works in flight are left out: their ends may be told to nobody while the leader changes."""
        return {
            "virtual": dict(self._virtual),
            "finish": [[class_name, tenant, tag] for (class_name, tenant), tag in self._finish.items()],
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over a predecessor's snapshot; what cannot be read is left out."""
        virtual, finish = state.get("virtual"), state.get("finish")
        if isinstance(virtual, Mapping):
            self._virtual = {str(name): float(tag) for name, tag in virtual.items() if isinstance(tag, int | float)}
        if isinstance(finish, list):
            self._finish = {(str(row[0]), str(row[1])): float(row[2]) for row in finish if _is_row(row)}

    def _sweep(self) -> None:
        """Keep the half that is furthest ahead: the rest is level with the virtual time, or nearly. Amortised O(1)."""
        ahead = {key: tag - self._virtual.get(key[0], 0.0) for key, tag in self._finish.items()}
        kept = sorted((key for key in ahead if ahead[key] > 0), key=lambda key: (-ahead[key], key))[: TENANTS_KEPT // 2]
        self._finish = {key: self._finish[key] for key in kept}
        tenants = {tenant for _, tenant in self._finish} | self._in_flight.keys()
        self._weight = {tenant: weight for tenant, weight in self._weight.items() if tenant in tenants}

    def __repr__(self) -> str:
        return f"<TenantCounters ahead={len(self._finish)} in_flight={sum(self._in_flight.values())}>"


def _is_row(row: object) -> bool:
    return isinstance(row, list | tuple) and len(row) == 3 and isinstance(row[2], int | float)
