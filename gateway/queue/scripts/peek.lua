-- Reads the look-ahead: the first works of every class, shared among its tenants, and all depths.
--
-- Shares are what dealing one work to each tenant in turn would give. Who is dealt first moves with time (along the
-- squares times the golden ratio, so that no regular beat meets the same tenants each time): with more tenants than places all are seen.
--
-- A share is filled with works of ranks from now on: what is due already, and lies before them in masses when a pool has too
-- much to do, gets what is left of it, an eighth at least.
--
-- KEYS     the pool's table
-- ARGV     1 now_ms, 2 default bound, 3 now as a rank, then per class: class, bound
-- returns  {depths, flat: queue, works; look-ahead, flat: id, record}
-- O(tenants * log tenants + look-ahead * log waiting)
local now_ms, default_bound = tonumber(ARGV[1]), tonumber(ARGV[2])
local bounds = {}
local now_rank = ARGV[3]
for i = 4, #ARGV, 2 do bounds[ARGV[i]] = tonumber(ARGV[i + 1]) end

local depths = redis.call('HGETALL', DEPTHS)
local classes, tenants = {}, {}
for i = 1, #depths, 2 do
  local class = string.match(depths[i], '^([^/]*)/')
  if class then
    if not tenants[class] then
      tenants[class] = {}
      classes[#classes + 1] = class
    end
    table.insert(tenants[class], {queue = depths[i], left = tonumber(depths[i + 1]), share = 0})
  end
end
table.sort(classes)

local function rotated(queues)
  table.sort(queues, function(a, b) return a.queue < b.queue end)
  local beat = now_ms % 65536
  local turn = beat * beat * 0.6180339887498949
  local start = math.floor((turn - math.floor(turn)) * #queues)
  local answer = {}
  for i = 1, #queues do answer[i] = queues[(start + i - 1) % #queues + 1] end
  return answer
end

local function deal(queues, places)
  local open = queues
  while places > 0 and #open > 0 do
    local each, still = math.max(1, math.floor(places / #open)), {}
    for _, queue in ipairs(open) do
      local take = math.min(each, queue.left, places)
      queue.share, queue.left, places = queue.share + take, queue.left - take, places - take
      if queue.left > 0 then still[#still + 1] = queue end
    end
    open = still
  end
end

local ahead = {}

local function read(queue, low, high, count)
  local members = redis.call('ZRANGEBYLEX', WAITING, low, high, 'LIMIT', 0, count)
  for from = 1, #members, 1000 do
    local ids = {}
    for i = from, math.min(from + 999, #members) do
      ids[#ids + 1] = string.sub(members[i], #queue.queue + 19)
    end
    for i, record in ipairs(redis.call('HMGET', WORKS, unpack(ids))) do
      if record then
        ahead[#ahead + 1] = ids[i]
        ahead[#ahead + 1] = record
      end
    end
  end
end

local function read_ahead(queue)
  local low, now, high = '[' .. queue.queue .. '/', queue.queue .. '/' .. now_rank, '(' .. queue.queue .. '0'
  if queue.left == 0 then
    read(queue, low, high, queue.share)
    return
  end
  local to_come = redis.call('ZLEXCOUNT', WAITING, '[' .. now, high)
  local later = math.min(to_come, queue.share - math.floor(queue.share / 8))
  local before = math.min(queue.share + queue.left - to_come, queue.share - later)
  if before > 0 then read(queue, low, '(' .. now, before) end
  if queue.share > before then read(queue, '[' .. now, high, queue.share - before) end
end

for _, class in ipairs(classes) do
  local queues = rotated(tenants[class])
  deal(queues, bounds[class] or default_bound)
  for _, queue in ipairs(queues) do
    if queue.share > 0 then read_ahead(queue) end
  end
end
return {depths, ahead}
