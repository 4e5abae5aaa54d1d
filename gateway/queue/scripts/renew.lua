-- Creates or extends a session, replaces its report, and answers what its process must know.
--
-- KEYS     the pool's table
-- ARGV     1 session, 2 now_ms, 3 valid_for_ms, 4 "1" when the caller knows that the session was registered, 5 report,
--          6 the pool's bell, "" when it is not to ring, 7 events as JSON, "" for none, 8 told_kept, 9 told_keep_ms,
--          10 leader_keep_ms
-- returns  {the session's credits as they were given or "", highest leader epoch, version of the snapshot};
--          false when a registered session is not here any more (swept, or the store forgot it)
-- O(1), and O(log told) with events
local owner, now_ms, valid_for_ms, registered, report = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
local bell, events = ARGV[6], ARGV[7]

local newer = newer_schema()
if newer then return newer end

-- A removal first: see record.lua about memory. A session must not end because memory is full.
redis.call('HDEL', SESSIONS, '')

local known = redis.call('HGET', SESSIONS, owner)
if not known and registered == '1' then return false end
local renewed_ms, expires_ms = 0, now_ms + valid_for_ms
if known then
  renewed_ms = tonumber(string.match(known, '^(%d+)'))
  expires_ms = math.max(expires_ms, session_expires_ms(known))
end
if renewed_ms <= now_ms then
  redis.call('HSET', SESSIONS, owner, digits(now_ms) .. '\t' .. digits(expires_ms) .. '\n' .. report)
end
if events ~= '' then
  local seq = next_seq(now_ms)
  redis.call('ZADD', TOLD, seq, owner .. '/' .. seq .. '\n' .. events)
  redis.call('ZREMRANGEBYRANK', TOLD, 0, -tonumber(ARGV[8]) - 1)
  redis.call('PEXPIRE', TOLD, ARGV[9])
  write_seq(ARGV[10])
end
if bell ~= '' and redis.call('EXISTS', WAITING) == 1 then redis.call('PUBLISH', bell, '') end
return {redis.call('HGET', CREDITS, owner) or '', redis.call('HGET', LEADER, 'epoch') or '0',
  redis.call('HGET', SNAPSHOT, 'version') or '0'}
