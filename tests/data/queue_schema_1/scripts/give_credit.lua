-- Replaces the credits of sessions; those of a session that is over are taken away, those of an unknown one not kept.
--
-- Kept with the (epoch, now_ms) under which they were given, also when there are none, so that a call that arrives late
-- brings nothing back.
--
-- KEYS     the pool's table
-- ARGV     1 epoch, 2 now_ms, 3 leader_keep_ms, then per session: session, credits as JSON
-- returns  1; 0 when the epoch is old
-- O(sessions)
local epoch, now_ms, keep_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]

-- A removal first: see record.lua about memory. Taking credit away must go through.
redis.call('HDEL', CREDITS, '')
if fenced(epoch, keep_ms) then return 0 end

local function given_later(known)
  local known_epoch, given_ms = string.match(known, '^(%d+)\t(%d+)')
  if known_epoch ~= epoch then return tonumber(known_epoch) > tonumber(epoch) end
  return tonumber(given_ms) > now_ms
end

for i = 4, #ARGV, 2 do
  local owner, credits = ARGV[i], ARGV[i + 1]
  local session, known = redis.call('HGET', SESSIONS, owner), redis.call('HGET', CREDITS, owner)
  if session and not (known and given_later(known)) then
    if session_expires_ms(session) <= now_ms then credits = '[]' end
    redis.call('HSET', CREDITS, owner, epoch .. '\t' .. digits(now_ms) .. '\n' .. credits)
  end
end
return 1
