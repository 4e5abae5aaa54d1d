-- Reads what binds a new leader: all granted works and all credits; changes nothing.
--
-- KEYS     the pool's table
-- ARGV     none
-- returns  {flat: id, record; flat: session, credits as they were given}
-- O(grants + sessions)
local members, granted = redis.call('ZRANGE', GRANTS, 0, -1), {}
for from = 1, #members, 1000 do
  local ids = {}
  for i = from, math.min(from + 999, #members) do
    ids[#ids + 1] = string.match(members[i], '^[^/]*/%d+/%d+/(.*)$')
  end
  for i, record in ipairs(redis.call('HMGET', WORKS, unpack(ids))) do
    if record then
      granted[#granted + 1] = ids[i]
      granted[#granted + 1] = record
    end
  end
end
return {granted, redis.call('HGETALL', CREDITS)}
