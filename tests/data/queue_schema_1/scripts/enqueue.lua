-- Lets works wait, each within its class's bound.
--
-- KEYS     the pool's table
-- ARGV     1 session, 2 now_ms, 3 settled_keep_ms, 4 the pool's bell, 5 number of classes c,
--          then c times: class, bound; then per work: id, queue, rank, attempt, body, avoid, json
-- returns  per work 1 queued, 2 full, 3 taken; false when the session is not registered
-- O(works * log waiting)
local owner, now_ms, keep_ms, bell, classes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])

if redis.call('HEXISTS', SESSIONS, owner) == 0 then return false end

local room, first = {}, 6 + 2 * classes
for i = 6, first - 1, 2 do
  room[ARGV[i]] = tonumber(ARGV[i + 1]) - tonumber(redis.call('HGET', DEPTHS, ARGV[i]) or '0')
end

-- A work settled by this session is not let in again: its enqueue came late, and nobody waits for it.
local function settled_before(id)
  local score = redis.call('ZSCORE', SETTLED, owner .. '/' .. id)
  return score and tonumber(score) >= (now_ms - keep_ms) * 1000
end

local function enqueue(work)
  local class = string.match(work.queue, '^[^/]*')
  local known = read_work(work.id)
  if known then
    if known.owner == owner then return 1 end
    if known.owner ~= '' then return 3 end
    known.owner = owner
    redis.call('ZADD', OWNED, 0, owned_member(known))
    write_work(known)
    return 1
  end
  if settled_before(work.id) then return 3 end
  if room[class] <= 0 then return 2 end
  redis.call('ZADD', OWNED, 0, owned_member(work))
  wait(work)
  room[class] = room[class] - 1
  return 1
end

local answers = {}
for i = first, #ARGV, 7 do
  answers[#answers + 1] = enqueue({id = ARGV[i], owner = owner, queue = ARGV[i + 1], rank = ARGV[i + 2],
    attempt = ARGV[i + 3], body = ARGV[i + 4], avoid = ARGV[i + 5], further = '', json = ARGV[i + 6]})
end
if next(depth_changes) then
  write_depths()
  redis.call('PUBLISH', bell, '')
end
return answers
