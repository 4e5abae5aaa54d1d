-- Gives waiting works a new rank.
--
-- KEYS     the pool's table
-- ARGV     1 epoch of the leader, then per work: id, rank
-- returns  per work 1 rescored, 0 not waiting or an old epoch
-- O(works * log waiting)
local old_epoch = tonumber(ARGV[1]) < tonumber(redis.call('HGET', LEADER, 'epoch') or '0')

-- A removal first: see record.lua about memory.
redis.call('HDEL', WORKS, '')

local function rescore(id, rank)
  local work = not old_epoch and read_work(id)
  if not work or work.state ~= 'w' then return 0 end
  redis.call('ZREM', WAITING, waiting_member(work))
  work.rank = rank
  redis.call('ZADD', WAITING, 0, waiting_member(work))
  write_work(work)
  return 1
end

local answers = {}
for i = 2, #ARGV, 2 do
  answers[#answers + 1] = rescore(ARGV[i], ARGV[i + 1])
end
return answers
