-- Reads all sessions and what was told past a sequence number; forgets what was told up to it.
--
-- KEYS     the pool's table
-- ARGV     1 after_seq
-- returns  {flat: session, its record; "<session>/<seq>" and events, by seq}
-- O(sessions + told)
redis.call('ZREMRANGEBYSCORE', TOLD, '-inf', ARGV[1])
return {redis.call('HGETALL', SESSIONS), redis.call('ZRANGE', TOLD, 0, -1)}
