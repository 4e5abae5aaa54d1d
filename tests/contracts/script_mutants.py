"""Each check of a Lua script, as the text that does it and what stands there without it, and the contract test that notices.

The simulation shows that the protocol needs a check (`tests/simulation/mutants.py`, on the queue in memory); this table
shows that the scripts have it: without the line they fail the contract that both queues pass.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScriptMutant:
    """script: its file without .lua; check and without: text before and after; noticed_by: a test of the contract."""

    script: str
    check: str
    without: str
    noticed_by: str

    def __str__(self) -> str:
        return f"{self.script}: {self.check}"


MUTANTS = (
    # Leadership
    ScriptMutant(
        "lead", "if now_ms >= expires_ms then", "if true then", "test_one_candidate_leads_until_its_record_expires"
    ),
    ScriptMutant("lead", "math.max(epoch + 1, now_ms)", "now_ms", "test_epochs_grow_with_time_and_never_repeat"),
    ScriptMutant(
        "lead",
        "if not record[3] or not outlived then",
        "if not outlived then",
        "test_a_record_made_where_there_was_none_is_fresh_for_one_validity",
    ),
    ScriptMutant(
        "lead",
        " or not outlived then",
        " then",
        "test_a_record_that_a_late_call_made_after_a_loss_is_fresh_for_who_takes_over",
    ),
    ScriptMutant(
        "lead",
        "expires_ms == 0 or ",
        "",
        "test_who_resigned_on_a_fresh_record_is_followed_without_another_mark",
    ),
    ScriptMutant(
        "lead",
        "math.max(expires_ms, now_ms + valid_for_ms)",
        "now_ms + valid_for_ms",
        "test_a_renewal_that_comes_late_does_not_shorten_leadership",
    ),
    ScriptMutant(
        "lead", "elseif leader == candidate then", "elseif false then", "test_a_leader_keeps_its_epoch_while_it_renews"
    ),
    ScriptMutant("resign", "record[1] == ARGV[1] and ", "", "test_who_resigns_is_followed_at_once"),
    ScriptMutant("resign", " and record[2] == ARGV[2]", "", "test_who_resigns_is_followed_at_once"),
    ScriptMutant(
        "record",
        "return tonumber(epoch) < highest",
        "return false",
        "test_credit_of_an_old_epoch_is_refused_and_a_new_one_fences",
    ),
    ScriptMutant(
        "record",
        "redis.call('HSET', LEADER, 'epoch', epoch)",
        "",
        "test_credit_of_an_old_epoch_is_refused_and_a_new_one_fences",
    ),
    # Sessions
    ScriptMutant(
        "renew",
        "if not known and registered == '1' then return false end",
        "",
        "test_a_swept_session_is_told_at_its_next_renewal_and_registers_anew",
    ),
    ScriptMutant(
        "renew",
        "if renewed_ms <= now_ms then",
        "if true then",
        "test_a_late_renewal_neither_shortens_a_session_nor_brings_its_old_report_back",
    ),
    ScriptMutant(
        "renew",
        "expires_ms = math.max(expires_ms, session_expires_ms(known))",
        "",
        "test_a_renewal_for_less_time_does_not_shorten_a_session",
    ),
    ScriptMutant(
        "renew",
        " and redis.call('EXISTS', WAITING) == 1",
        "",
        "test_a_renewal_may_ring_the_pool_s_bell_if_anything_waits",
    ),
    ScriptMutant(
        "sweep",
        "if session_expires_ms(all[i + 1]) <= now_ms then",
        "if true then",
        "test_a_session_in_its_validity_is_not_swept",
    ),
    ScriptMutant(
        "sweep",
        "for _, owner in ipairs(owners_without_session(alive)) do over[#over + 1] = owner end",
        "",
        "test_works_of_a_session_whose_record_was_lost_are_swept",
    ),
    ScriptMutant("sweep", "redis.call('HDEL', CREDITS, owner)", "", "test_credit_goes_with_its_session"),
    ScriptMutant(
        "sweep",
        "if not work or work.owner ~= owner then return end",
        "if not work then return end",
        "test_a_work_that_was_lost_and_is_another_s_by_now_is_not_swept_with_its_old_session",
    ),
    ScriptMutant(
        "sweep",
        "if work.body == 'b' then",
        "if false then",
        "test_an_expired_session_loses_owner_works_and_gives_blob_works_back",
    ),
    ScriptMutant("sweep", "work.owner = ''", "", "test_an_expired_session_loses_owner_works_and_gives_blob_works_back"),
    ScriptMutant(
        "sweep", "if #members > left then return false end", "", "test_a_session_with_very_many_works_is_swept_whole"
    ),
    # Credit and snapshot
    ScriptMutant(
        "give_credit",
        "if fenced(epoch, keep_ms) then return 0 end",
        "",
        "test_credit_of_an_old_epoch_is_refused_and_a_new_one_fences",
    ),
    ScriptMutant("give_credit", "if session and not", "if not", "test_only_a_live_session_is_given_credit"),
    ScriptMutant(
        "give_credit",
        "if known_epoch ~= epoch then return tonumber(known_epoch) > tonumber(epoch) end",
        "",
        "test_a_new_leader_s_credit_counts_although_its_clock_is_behind",
    ),
    ScriptMutant(
        "give_credit",
        "return tonumber(given_ms) > now_ms",
        "return false",
        "test_no_credit_takes_it_away_and_a_late_call_does_not_bring_it_back",
    ),
    ScriptMutant(
        "give_credit",
        "if session_expires_ms(session) <= now_ms then credits = '[]' end",
        "",
        "test_only_a_live_session_is_given_credit",
    ),
    ScriptMutant(
        "publish",
        "if fenced(epoch, keep_ms) then return 0 end",
        "",
        "test_a_new_leader_s_snapshot_counts_whatever_its_version",
    ),
    ScriptMutant(
        "publish", "known[1] ~= epoch or ", "", "test_an_owner_hears_of_the_highest_epoch_and_of_the_snapshot"
    ),
    ScriptMutant(
        "publish", "tonumber(known[2]) < tonumber(version)", "true", "test_a_snapshot_that_comes_late_changes_nothing"
    ),
    # Works
    ScriptMutant(
        "enqueue",
        "if redis.call('HEXISTS', SESSIONS, owner) == 0 then return false end",
        "",
        "test_a_session_that_is_not_registered_can_enqueue_nothing",
    ),
    ScriptMutant(
        "enqueue", "if known.owner == owner then return 1 end", "", "test_enqueue_answers_the_same_when_repeated"
    ),
    ScriptMutant("enqueue", "if known.owner ~= '' then return 3 end", "", "test_a_work_of_another_session_is_taken"),
    ScriptMutant(
        "enqueue",
        "if settled_before(work.id) then return 3 end",
        "",
        "test_an_enqueue_that_arrives_after_its_settle_is_refused",
    ),
    ScriptMutant("enqueue", "if room[class] <= 0 then return 2 end", "", "test_a_class_holds_no_more_than_its_bound"),
    ScriptMutant("enqueue", "room[class] = room[class] - 1", "", "test_a_class_holds_no_more_than_its_bound"),
    ScriptMutant(
        "claim", "if tonumber(epoch) < highest then return '', '' end", "", "test_a_claim_of_an_old_epoch_is_refused"
    ),
    ScriptMutant(
        "claim", "if highest > seen then", "if false then", "test_the_highest_epoch_that_claimed_fences_lower_ones"
    ),
    ScriptMutant(
        "claim",
        "if not work then return '', '' end",
        "",
        "test_a_claim_tells_whose_it_is_and_where_it_stands_and_a_repeat_the_same",
    ),
    ScriptMutant("claim", "work.epoch ~= epoch or ", "", "test_a_work_is_granted_once"),
    ScriptMutant("claim", " or work.attempt ~= attempt", "", "test_a_work_is_granted_once"),
    ScriptMutant("claim", " or work.engine ~= engine", "", "test_a_work_is_granted_once"),
    ScriptMutant(
        "claim",
        "return work.owner, work.seq\n  end",
        "return '', ''\n  end",
        "test_a_claim_answers_the_same_when_repeated",
    ),
    ScriptMutant(
        "claim",
        "if tonumber(attempt) <= tonumber(work.attempt) then return '', '' end",
        "",
        "test_a_claim_of_an_attempt_that_was_made_is_refused",
    ),
    ScriptMutant(
        "claim",
        "if work.owner == '' then return '', '' end",
        "",
        "test_a_blob_work_without_owner_is_not_claimed",
    ),
    ScriptMutant(
        "record",
        "math.max(last_seq + 1, now_ms * 1024)",
        "now_ms * 1024",
        "test_grants_are_read_past_a_sequence_number_oldest_first",
    ),
    ScriptMutant("requeue", " or work.owner ~= owner", "", "test_a_session_cannot_requeue_a_work_of_another"),
    ScriptMutant(
        "requeue",
        "if work.state == 'w' then\n    if",
        "if false then\n    if",
        "test_a_late_requeue_changes_nothing_of_a_work_that_waits",
    ),
    ScriptMutant(
        "requeue",
        "tonumber(attempt) > tonumber(work.attempt)",
        "true",
        "test_a_late_requeue_changes_nothing_of_a_work_that_waits",
    ),
    ScriptMutant(
        "requeue",
        "      write_work(work)\n",
        "",
        "test_a_requeue_brings_a_waiting_work_that_the_store_has_rewound_up_to_its_attempts",
    ),
    ScriptMutant(
        "requeue",
        "if seq ~= '' and seq ~= work.seq then return 1 end",
        "",
        "test_a_late_repeat_of_requeue_does_not_take_back_a_newer_grant",
    ),
    ScriptMutant(
        "requeue",
        "if tonumber(work.attempt) > tonumber(attempt) + 1 then return 1 end",
        "",
        "test_a_late_requeue_does_not_take_back_a_later_attempt",
    ),
    ScriptMutant(
        "settle", "if work.owner ~= owner then return 3 end", "", "test_a_session_cannot_settle_a_work_of_another"
    ),
    ScriptMutant(
        "settle",
        "remember(memory, math.min(attempt, NEVER_HERE - 1))",
        "",
        "test_settle_answers_the_same_when_repeated",
    ),
    ScriptMutant(
        "settle", "    remember(memory, NEVER_HERE)\n", "", "test_an_enqueue_that_arrives_after_its_settle_is_refused"
    ),
    ScriptMutant(
        "settle",
        "redis.call('ZREMRANGEBYSCORE', SETTLED, '-inf', '(' .. digits((now_ms - keep_ms) * 1000))",
        "",
        "test_a_settle_is_forgotten_in_time",
    ),
    ScriptMutant(
        "settle",
        "tonumber(score) % 1000 == math.min(attempt, NEVER_HERE - 1) and 1 or 2",
        "1",
        "test_settle_answers_the_same_when_repeated",
    ),
    ScriptMutant("take_grants", "after_seq + 1", "0", "test_grants_are_read_past_a_sequence_number_oldest_first"),
    ScriptMutant(
        "take_grants", " and work.state == 'g'", "", "test_a_grant_whose_work_was_lost_and_waits_again_is_not_read"
    ),
)
