-- Turns waiting works into granted ones, under the epoch of the leader that decided it.
--
-- KEYS     the pool's table
-- ARGV     1 now_ms, 2 leader_keep_ms, 3 prefix of session bells,
--          then per grant: id, engine, epoch, attempt, expires_ms
-- returns  flat, per grant: the owner it was made for and its seq (also by this very claim before), "" and "" when not
-- O(grants * log waiting)
local now_ms, keep_ms, bells = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local highest = tonumber(redis.call('HGET', LEADER, 'epoch') or '0')
local seen = highest
local rung = {}

local function claim(id, engine, epoch, attempt, expires_ms)
  if tonumber(epoch) < highest then return '', '' end
  highest = tonumber(epoch)
  local work = read_work(id)
  if not work then return '', '' end
  if work.state == 'g' then
    if work.epoch ~= epoch or work.attempt ~= attempt or work.engine ~= engine then return '', '' end
    return work.owner, work.seq
  end
  if tonumber(attempt) <= tonumber(work.attempt) then return '', '' end
  if work.owner == '' then return '', '' end
  leave(work)
  work.state, work.epoch, work.engine, work.attempt, work.expires_ms = 'g', epoch, engine, attempt, expires_ms
  work.seq = next_seq(now_ms)
  redis.call('ZADD', GRANTS, 0, grant_member(work))
  write_work(work)
  rung[work.owner] = true
  return work.owner, work.seq
end

local answers = {}
for i = 4, #ARGV, 5 do
  answers[#answers + 1], answers[#answers + 2] = claim(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4])
end
write_depths()
if highest > seen then
  redis.call('HSET', LEADER, 'epoch', digits(highest))
  redis.call('PEXPIRE', LEADER, keep_ms)
end
write_seq(keep_ms)
for owner in pairs(rung) do
  redis.call('PUBLISH', bells .. owner, '')
end
return answers
