-- What the scripts share: the names of the pool's keys, a work's record, depths, sequence numbers. Prepended to each.
--
-- KEYS   the pool's whole table, in the order of gateway/queue/keys.py
--
-- A record is one line of tab-separated fields and, after a newline, the work as JSON, which no script reads:
--   state (w waiting, g granted), owner (a session; "" for a blob work that nobody runs), attempt, body (o owner, b blob),
--   queue (class/tenant), rank, for a granted work epoch, engine, expires_ms, seq, and the engines to avoid (e,e,...).
-- Further fields of a newer release are kept as they are, in whichever state the work goes on.
-- Times and epochs stay text where possible: Lua prints a large number as 1.8e+12.
--
-- Memory: a full server refuses the first write of a script when that write could grow memory, and none after it. Enqueue
-- therefore begins with such a write (it is to be refused whole), and all that ends or keeps alive what was accepted
-- begins with a removal (it must go through).
local SESSIONS, LEADER, WORKS, WAITING, DEPTHS, OWNED, GRANTS, SETTLED, SWEPT, CREDITS, SNAPSHOT, TOLD, POOL_SCHEMA = unpack(KEYS)
local SCHEMA = 1

local function digits(number)
  return string.format('%.0f', number)
end

local function read_work(id)
  local text = redis.call('HGET', WORKS, id)
  if not text then return nil end
  local work = {id = id}
  work.state, work.owner, work.attempt, work.body, work.queue, work.rank,
    work.epoch, work.engine, work.expires_ms, work.seq, work.avoid, work.further, work.json = string.match(text,
    '^(%a)\t([^\t]*)\t(%d+)\t(%a)\t([^\t]*)\t(%x+)\t(%d*)\t([^\t]*)\t(%d*)\t(%d*)\t([^\t\n]*)([^\n]*)\n(.*)$')
  return work
end

local function write_work(work)
  redis.call('HSET', WORKS, work.id, table.concat({work.state, work.owner, work.attempt, work.body, work.queue,
    work.rank, work.epoch, work.engine, work.expires_ms, work.seq, work.avoid}, '\t') .. work.further .. '\n' .. work.json)
end

local function session_expires_ms(record)
  return tonumber(string.match(record, '^%d+\t(%d+)'))
end

-- What to answer when the pool has moved on to a schema that this release does not speak; nil when it has not.
local function newer_schema()
  local schema = tonumber(redis.call('GET', POOL_SCHEMA) or '1')
  return schema > SCHEMA and redis.error_reply('NEWERSCHEMA ' .. schema) or nil
end

-- True when a higher leader epoch was seen; else this one is the highest from now on.
local function fenced(epoch, keep_ms)
  local highest = tonumber(redis.call('HGET', LEADER, 'epoch') or '0')
  if tonumber(epoch) > highest then
    redis.call('HSET', LEADER, 'epoch', epoch)
    redis.call('PEXPIRE', LEADER, keep_ms)
  end
  return tonumber(epoch) < highest
end

local function owned_member(work)
  return work.owner .. '/' .. work.id
end

local function waiting_member(work)
  return work.queue .. '/' .. work.rank .. '/' .. work.id
end

local function grant_member(work)
  return work.owner .. '/' .. string.format('%016.0f', tonumber(work.seq)) .. '/' .. work.id
end

-- Depths change once per script, not once per work.
local depth_changes = {}

local function change_depth(work, by)
  local class = string.match(work.queue, '^[^/]*')
  depth_changes[class] = (depth_changes[class] or 0) + by
  depth_changes[work.queue] = (depth_changes[work.queue] or 0) + by
end

local function write_depths()
  for queue, by in pairs(depth_changes) do
    if by ~= 0 and redis.call('HINCRBY', DEPTHS, queue, by) <= 0 then
      redis.call('HDEL', DEPTHS, queue)
    end
  end
end

-- Takes a work out of where its state has it; the record itself is the caller's.
local function leave(work)
  if work.state == 'w' then
    redis.call('ZREM', WAITING, waiting_member(work))
    change_depth(work, -1)
  else
    redis.call('ZREM', GRANTS, grant_member(work))
  end
end

-- Lets a work wait at the rank that its record has.
local function wait(work)
  work.state, work.epoch, work.engine, work.expires_ms, work.seq = 'w', '', '', '', ''
  redis.call('ZADD', WAITING, 0, waiting_member(work))
  change_depth(work, 1)
  write_work(work)
end

-- Sequence numbers grow with time, so that they go on growing when the store forgot the last one.
local last_seq = nil

local function next_seq(now_ms)
  if not last_seq then
    last_seq = tonumber(redis.call('HGET', LEADER, 'seq') or '0')
  end
  last_seq = math.max(last_seq + 1, now_ms * 1024)
  return digits(last_seq)
end

local function write_seq(keep_ms)
  if last_seq then
    redis.call('HSET', LEADER, 'seq', digits(last_seq))
    redis.call('PEXPIRE', LEADER, keep_ms)
  end
end

