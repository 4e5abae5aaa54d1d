-- Lets granted works wait again at their old rank.
--
-- Only the attempt and what to avoid change: the rest is as it was enqueued, also what this release does not know of it.
-- A repeat finds the work waiting, or granted anew with a higher attempt or another sequence number: it changes nothing.
-- A work that waits with fewer attempts than given was rewound by a store that lost its last writes: it is brought up to them.
--
-- KEYS     the pool's table
-- ARGV     1 session, 2 the pool's bell, then per work: id, attempt, seq of the grant given back ("" any), avoid
-- returns  per work 1 waiting (also since before), 0 not this session's
-- O(works * log waiting)
local owner, bell = ARGV[1], ARGV[2]

-- A removal first: see record.lua about memory.
redis.call('HDEL', WORKS, '')

local function requeue(id, attempt, seq, avoid)
  local work = read_work(id)
  if not work or work.owner ~= owner then return 0 end
  if work.state == 'w' then
    if tonumber(attempt) > tonumber(work.attempt) then
      work.attempt, work.avoid = attempt, avoid
      write_work(work)
    end
    return 1
  end
  if seq ~= '' and seq ~= work.seq then return 1 end
  if tonumber(work.attempt) > tonumber(attempt) + 1 then return 1 end
  leave(work)
  work.attempt, work.avoid = attempt, avoid
  wait(work)
  return 1
end

local answers = {}
for i = 3, #ARGV, 4 do
  answers[#answers + 1] = requeue(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
end
if next(depth_changes) then
  write_depths()
  redis.call('PUBLISH', bell, '')
end
return answers
