-- Creates or extends a session and replaces its sums.
--
-- KEYS     the pool's table
-- ARGV     1 session, 2 now_ms, 3 valid_for_ms, 4 "1" when the caller knows that the session was registered, 5 report
-- returns  1; 0 when a registered session is not here any more (swept, or the store forgot it)
-- O(1)
local owner, now_ms, valid_for_ms, registered, report = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]

-- A removal first: see record.lua about memory. A session must not end because memory is full.
redis.call('HDEL', SESSIONS, '')

local known = redis.call('HGET', SESSIONS, owner)
if not known and registered == '1' then return 0 end
local expires_ms = now_ms + valid_for_ms
if known then
  local renewed_ms, until_ms = string.match(known, '^(%d+)\t(%d+)\n')
  if tonumber(renewed_ms) > now_ms then return 1 end
  expires_ms = math.max(expires_ms, tonumber(until_ms))
end
redis.call('HSET', SESSIONS, owner, digits(now_ms) .. '\t' .. digits(expires_ms) .. '\n' .. report)
return 1
