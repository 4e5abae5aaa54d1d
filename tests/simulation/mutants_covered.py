"""Checks that can be taken out without harm in the simulation, since another stands behind them, and which that is.

Most of these are a store's own, or say the same at the other end of a call: for them the contract of the queue shows each
by itself (`tests/contracts/script_mutants.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation.mutation import Mutant

STORE = "gateway.queue.memory_queue:MemoryQueue."
PRESENCE = "gateway.control.presence:Presence."
CREDIT = "gateway.dispatch.credit:CreditBook."
STEWARD = "gateway.dispatch.steward:"
DISPATCHER = "gateway.dispatch.dispatcher:Dispatcher."
OWNER = "gateway.dispatch.owner:Owner."


@dataclass(frozen=True, slots=True)
class Covered:
    """mutant: with the scene that comes nearest to it; why: what stands behind its check."""

    mutant: Mutant
    why: str

    def __str__(self) -> str:
        return self.mutant.name


COVERED = (
    Covered(
        Mutant(
            "a session that is over is told of as alive",
            STORE + "hear",
            "present.expires_ms > now_ms",
            "True",
            None,
            0,
            "stopped_owner",
        ),
        "It is swept with its leader's next beat; until then its silence says the same.",
    ),
    Covered(
        Mutant(
            "credit is written for sessions that are over",
            STORE + "give_credit",
            "dict(places) if present.expires_ms > now_ms else {}",
            "dict(places)",
            None,
            0,
            "stopped_owner",
        ),
        "It is heard of only with a renewal, which makes the session valid again.",
    ),
    Covered(
        Mutant(
            "expired credit is told of",
            STORE + "renew_session",
            "given.unexpired(now_ms)",
            "dict(given.credits)",
            None,
            0,
            "credit_unheard",
        ),
        "Its holder judges by its own clock; 'credit never runs out' is without that.",
    ),
    Covered(
        Mutant(
            "a repeated enqueue lets a work wait twice",
            STORE + "_enqueue",
            "held is not None",
            "held is not None and held.grant is None",
            None,
            0,
            "late_enqueue",
        ),
        "An owner starts a work once, and a leader counts what it granted until that is reported.",
    ),
    Covered(
        Mutant(
            "anybody settles anybody's work",
            STORE + "_settle",
            "held.owner != owner",
            "False",
            None,
            0,
            "stopped_owner",
        ),
        "Only its own process knows a work's id; the contract has two processes that do.",
    ),
    Covered(
        Mutant(
            "anybody gives anybody's grant back",
            STORE + "_requeue",
            "held is None or held.owner != owner",
            "held is None",
            None,
            0,
            "expired_grant",
        ),
        "Only its own process knows a work's id; the contract has two processes that do.",
    ),
    Covered(
        Mutant(
            "a grant given back late takes the next one away",
            STORE + "_requeue",
            " or (seq is not None and seq != held.seq)",
            "",
            None,
            0,
            "expired_grant",
        ),
        "The work is granted a second time, and its owner starts it once: a place is held in vain, none is taken twice.",
    ),
    Covered(
        Mutant(
            "a requeue that comes late takes a later attempt back",
            STORE + "_requeue",
            " or held.work.attempt > work.attempt + 1",
            "",
            None,
            0,
            "expired_grant",
        ),
        "Only a call for the grant that is held is taken in: its number says so.",
    ),
    Covered(
        Mutant(
            "a claim is repeated for another engine",
            STORE + "_claim",
            "same == (grant.epoch, grant.attempt, grant.engine)",
            "same[:2] == (grant.epoch, grant.attempt)",
            None,
            0,
            "claims_unheard",
        ),
        "A leader repeats a claim as it was.",
    ),
    Covered(
        Mutant(
            "an attempt that was over is claimed again",
            STORE + "_claim",
            "grant.attempt <= held.work.attempt or ",
            "",
            None,
            0,
            "claims_late",
        ),
        "The owner refuses a grant of another attempt than its next.",
    ),
    Covered(
        Mutant(
            "a leader that was cut off does not wait",
            PRESENCE + "_lead",
            "RETURN_S if lapsed else ",
            "",
            None,
            0,
            "store_away",
        ),
        "What a process that was cut off runs on with is beside the window (docs/decisions/0013); this keeps it small.",
    ),
    Covered(
        Mutant(
            "a leader that waits sweeps already", PRESENCE + "_lead", "not self.leads", "False", None, 0, "store_away"
        ),
        "What a process that was cut off runs on with is beside the window (docs/decisions/0013); this keeps it small.",
    ),
    Covered(
        Mutant(
            "the store is told a time that it never told",
            PRESENCE + "_renew_session",
            "self._clock.error_s == math.inf",
            "False",
            None,
            0,
            "late_lead",
        ),
        "Nothing renews before the first beat, and a beat asks for the time first.",
    ),
    Covered(
        Mutant(
            "credit lasts until its leader takes it back", CREDIT + "renewed", " - apart_s", "", None, 0, "clocks_apart"
        ),
        "A leader counts credit until its holder reports after its end, by the holder's own clock.",
    ),
    Covered(
        Mutant(
            "a lost session is taken for a live one",
            PRESENCE + "_renew_session",
            "self._on_registered()",
            "pass",
            None,
            0,
            "stopped_owner",
        ),
        "What waits is written again because the session's number is another; totals and numbers of grants go on from where they were.",
    ),
    Covered(
        Mutant(
            "totals of a lost session are kept",
            CREDIT + "lost",
            "self.started.clear()",
            "pass",
            None,
            0,
            "renewal_lost_after_flush",
        ),
        "What is allowed is counted from the totals that are reported, wherever they began.",
    ),
    Covered(
        Mutant(
            "an owner forgets the epochs that it has seen",
            CREDIT + "renewed",
            "max(self.epoch, renewed.epoch)",
            "renewed.epoch",
            None,
            0,
            "flushes",
        ),
        "Renewals are answered one at a time; only a flush lowers the epoch, and it takes the old grants with it.",
    ),
    Covered(
        Mutant(
            "what was reported unheard is kept",
            CREDIT + "share",
            "self._kept.get(place, 0)",
            "self._reported.get(place, 0)",
            None,
            0,
            "credit_unheard",
        ),
        "What is reported grows only by grants, and those the leader counts itself.",
    ),
    Covered(
        Mutant(
            "credit is counted once the store has answered",
            STEWARD + "Steward.give",
            "self._count(session, other, now_s)",
            "pass",
            None,
            0,
            "credit_unheard",
        ),
        "Rounds and duties take turns, and each begins by counting.",
    ),
    Covered(
        Mutant(
            "credit that may not have been told is not told again",
            STEWARD + "Steward.give",
            " or not other.told",
            "",
            None,
            0,
            "late_credit",
        ),
        "Its holder has less then than is counted for it.",
    ),
    Covered(
        Mutant(
            "what was granted to a lost session is free",
            STEWARD + "Steward._lose",
            "other.report = replace(other.report, in_flight=in_flight)",
            "pass",
            None,
            0,
            "left_grants",
        ),
        "What a process that was cut off runs on with is beside the window (docs/decisions/0013); this keeps it small.",
    ),
    Covered(
        Mutant(
            "what was granted to a lost session shrinks at once",
            STEWARD + "Steward._lose",
            "other.whole_s = now_s + SESSION_VALID_S",
            "pass",
            None,
            0,
            "left_grants",
        ),
        "What a process that was cut off runs on with is beside the window (docs/decisions/0013); this keeps it small.",
    ),
    Covered(
        Mutant(
            "what a lost session had shrinks at once",
            STEWARD + "Steward._most",
            "silent_s > SESSION_VALID_S and ",
            "",
            None,
            0,
            "flushes",
        ),
        "It is whole only where its keys were lost, and then a leader waits before it decides.",
    ),
    Covered(
        Mutant(
            "an engine is believed about what may start yet",
            STEWARD + "Steward._seen",
            "max(since_s, other.whole_s)",
            "0.0",
            None,
            0,
            "silent_with_credit",
        ),
        "A class with an objective keeps its share anyway, and another has no credit.",
    ),
    Covered(
        Mutant(
            "a grant is looked for before its owner has reported",
            STEWARD + "Steward._reported_since",
            "other.report.renewed_ms / 1000 > pool_s",
            "True",
            None,
            0,
            "expired_grant",
        ),
        "What was granted stands in the store until it is settled, but for a flush, after which a leader waits.",
    ),
    Covered(
        Mutant(
            "an owner takes grants of leaders that were replaced",
            DISPATCHER + "honours",
            "and grant.epoch >= max(self._credit.epoch, self._presence.epoch)",
            "",
            None,
            0,
            "untaken_grants",
        ),
        "The pair: a leader takes up no grant to itself that it does not count.",
    ),
    Covered(
        Mutant(
            "a claim that may have been made is decided anew",
            DISPATCHER + "_round",
            " if (work.id, work.attempt + 1) not in self._uncertain",
            "",
            None,
            0,
            "claims_unheard",
        ),
        "A leader grants a work that it counts where it counts it.",
    ),
    Covered(
        Mutant(
            "a leader delivers its own grants unlooked at",
            DISPATCHER + "_claim",
            "self.honours(grant) and ",
            "",
            None,
            0,
            "stopped_leader_claims",
        ),
        "What a leader claimed a successor counts; and a process that was stopped may use what it was looking at.",
    ),
    Covered(
        Mutant(
            "a leader takes its own grants that it does not count",
            OWNER + "_take_grants",
            "(held or not self._presence.leads) and ",
            "",
            None,
            0,
            "untaken_grants",
        ),
        "The pair: an owner takes no grants of leaders that were replaced.",
    ),
    Covered(
        Mutant(
            "a leader uses a share",
            DISPATCHER + "_on_share",
            " and not self._presence.leads",
            "",
            None,
            0,
            "leader_without_renewals",
        ),
        "It keeps no more than ran here when it last gave anything away, and counts what it starts.",
    ),
    Covered(
        Mutant(
            "a grant is given back whichever it is by now",
            OWNER + "_give_back",
            "[seq for _, (_, seq) in refused]",
            "None",
            None,
            0,
            "expired_grant",
        ),
        "The same, at the other end of the call.",
    ),
    Covered(
        Mutant(
            "a grant of another attempt is taken",
            OWNER + "granted",
            "waiter.work.attempt + 1 != grant.attempt",
            "False",
            None,
            0,
            "claims_late",
        ),
        "The store refuses to claim an attempt that was over.",
    ),
    Covered(
        Mutant(
            "a work that started is started again",
            OWNER + "granted",
            "waiter is None or waiter.granted.done()",
            "waiter is None",
            None,
            0,
            "claims_late",
        ),
        "A work waits no more as soon as the loop has turned.",
    ),
    Covered(
        Mutant(
            "a new session goes on from the old one's grants",
            OWNER + "registered",
            "self._grants_seen = 0",
            "pass",
            None,
            0,
            "flushes",
        ),
        "Grants are numbered by the pool's clock, over sessions, leaders and flushes.",
    ),
    Covered(
        Mutant(
            "a new session gives the old one's grants back",
            OWNER + "registered",
            "self._refused.clear()",
            "pass",
            None,
            0,
            "stopped_owner",
        ),
        "The store takes a grant back only by its number, from the session that has it.",
    ),
    Covered(
        Mutant(
            "a granted work is claimed again",
            STORE + "_claim",
            "return _claimed(held) if same == (grant.epoch, grant.attempt, grant.engine) else None",
            "self._wait(held)",
            None,
            0,
            "stopped_owner",
        ),
        "A leader claims only what it sees waiting. That a store refuses the rest its contract shows (a work is granted once).",
    ),
    Covered(
        Mutant(
            "credit goes to another before it has run out",
            "policies.credit:allot",
            "min(wanted, held + free)",
            "wanted",
            None,
            0,
            "in_step",
        ),
        "Half of the room is not handed out, and takes what two processes hold at once. `tests/policies/test_credit.py` shows it alone.",
    ),
    Covered(
        Mutant(
            "a floor in use is taken away",
            "gateway.dispatch.others:Other.renewed",
            " or floor < before.share",
            "",
            None,
            0,
            "floor_used_late",
        ),
        "Its holder's reports say that it goes by it, and it counts for as long as they do.",
    ),
)
