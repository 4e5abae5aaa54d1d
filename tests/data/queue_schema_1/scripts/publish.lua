-- Replaces the pool's snapshot; one that arrives after a newer one of the same leader changes nothing.
--
-- KEYS     the pool's table
-- ARGV     1 epoch, 2 leader_keep_ms, 3 version, 4 content
-- returns  1; 0 when the epoch is old
-- O(size of the content)
local epoch, keep_ms, version, content = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

-- A removal first: see record.lua about memory. Followers must go on hearing of their engines.
redis.call('HDEL', SNAPSHOT, '')
if fenced(epoch, keep_ms) then return 0 end

local known = redis.call('HMGET', SNAPSHOT, 'epoch', 'version')
if known[1] ~= epoch or tonumber(known[2]) < tonumber(version) then
  redis.call('DEL', SNAPSHOT)
  redis.call('HSET', SNAPSHOT, 'epoch', epoch, 'version', version, 'content', content)
end
redis.call('PEXPIRE', SNAPSHOT, keep_ms)
return 1
