-- Makes the candidate leader when nobody is, keeps it when it is, else tells who is.
--
-- A record made where there was none stays marked for one validity, so that a repeat after a lost reply says so too. When
-- its maker did not outlive the mark, it is as good as none: the call may have come late, and the mark was over at once.
--
-- KEYS     the pool's table
-- ARGV     1 candidate, 2 now_ms, 3 valid_for_ms, 4 leader_keep_ms
-- returns  {leader, epoch, expires_ms, 1 when the record is fresh else 0}
-- O(1)
local candidate, now_ms, valid_for_ms, keep_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

local newer = newer_schema()
if newer then return newer end

-- A removal first: see record.lua about memory.
redis.call('HDEL', LEADER, '')

local record = redis.call('HMGET', LEADER, 'leader', 'epoch', 'expires_ms', 'fresh_until_ms')
local leader, epoch, expires_ms = record[1], tonumber(record[2] or '0'), tonumber(record[3] or '0')
local fresh_until_ms = tonumber(record[4] or '0')

if now_ms >= expires_ms then
  local outlived = expires_ms == 0 or expires_ms >= fresh_until_ms + valid_for_ms
  if not record[3] or not outlived then fresh_until_ms = now_ms + valid_for_ms end
  leader, epoch, expires_ms = candidate, math.max(epoch + 1, now_ms), now_ms + valid_for_ms
elseif leader == candidate then
  expires_ms = math.max(expires_ms, now_ms + valid_for_ms)
end
if leader == candidate then
  redis.call('HSET', LEADER, 'leader', leader, 'epoch', digits(epoch), 'expires_ms', digits(expires_ms),
    'fresh_until_ms', digits(fresh_until_ms))
  redis.call('PEXPIRE', LEADER, keep_ms)
end
return {leader, digits(epoch), digits(expires_ms), now_ms < fresh_until_ms and 1 or 0}
