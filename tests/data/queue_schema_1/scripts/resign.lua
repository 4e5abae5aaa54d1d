-- Ends a leadership at once; its epoch is kept, so that the next one is higher.
--
-- KEYS     the pool's table
-- ARGV     1 leader, 2 epoch
-- returns  1
-- O(1)
local record = redis.call('HMGET', LEADER, 'leader', 'epoch')
if record[1] == ARGV[1] and record[2] == ARGV[2] then
  redis.call('HDEL', LEADER, 'leader')
  redis.call('HSET', LEADER, 'expires_ms', '0')
end
return 1
