-- Removes works in whatever state they are, and remembers that it did.
--
-- A settle of a work that is not here is remembered too: its enqueue may still be on the way (the caller was cancelled,
-- the reply was lost) and must then be refused.
--
-- KEYS     the pool's table
-- ARGV     1 session, 2 now_ms, 3 settled_keep_ms, 4 the pool's bell, then per work: id, attempt
-- returns  per work 1 done, 2 gone, 3 fenced
-- O(works * log waiting)
local owner, now_ms, keep_ms, bell = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local NEVER_HERE = 999

-- A removal first: see record.lua about memory.
redis.call('ZREMRANGEBYSCORE', SETTLED, '-inf', '(' .. digits((now_ms - keep_ms) * 1000))

local remembered, removed = false, false

local function remember(memory, attempt)
  redis.call('ZADD', SETTLED, digits(now_ms * 1000 + attempt), memory)
  remembered = true
end

local function settle(id, attempt)
  local memory = owner .. '/' .. id
  local work = read_work(id)
  if work then
    if work.owner ~= owner then return 3 end
    leave(work)
    redis.call('ZREM', OWNED, owned_member(work))
    redis.call('HDEL', WORKS, id)
    removed = true
    remember(memory, math.min(attempt, NEVER_HERE - 1))
    return 1
  end
  local score = redis.call('ZSCORE', SETTLED, memory)
  if not score then
    remember(memory, NEVER_HERE)
    return 2
  end
  return tonumber(score) % 1000 == math.min(attempt, NEVER_HERE - 1) and 1 or 2
end

local answers = {}
for i = 5, #ARGV, 2 do
  answers[#answers + 1] = settle(ARGV[i], tonumber(ARGV[i + 1]))
end
if remembered then redis.call('PEXPIRE', SETTLED, 2 * keep_ms) end
write_depths()
if removed then redis.call('PUBLISH', bell, '') end
return answers
