-- Takes from sessions that are over what they still own: blob works wait again, owner works are removed.
--
-- With no session named: all whose validity has passed, and owners that have no session at all (the store lost part of
-- its keys). What was swept is logged under sequence numbers until the leader's next sweep says that it has read it, so
-- that a lost reply loses no name. At most `budget` works a call, so that one dead process does not stop the server.
--
-- KEYS     the pool's table
-- ARGV     1 now_ms (0: unknown, with a session named), 2 the session that ends, "" for all expired,
--          3 after_seq, "" to hear only of this call's, 4 budget in works, 5 leader_keep_ms, 6 swept_keep_ms, 7 the bell
-- returns  {1 when more is left else 0, seq of the last entry (0: none), entries as "<kind>/<session>/<id>"}; kinds: r requeued, g owner gone,
--          s session swept, e session ended by itself
-- O(sessions + works swept * log waiting)
local now_ms, ended, after_seq, left = tonumber(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])
local leader_keep_ms, swept_keep_ms, bell = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]

local entries = {}
local seq_base_ms = now_ms

-- A removal first: see record.lua about memory. It is also how the leader says what it has read.
redis.call('ZREMRANGEBYSCORE', SWEPT, '-inf', after_seq == '' and '(0' or after_seq)

local function log(kind, owner, id)
  local entry = kind .. '/' .. owner .. '/' .. id
  redis.call('ZADD', SWEPT, next_seq(seq_base_ms), entry)
  entries[#entries + 1] = entry
end

local function sweep_work(owner, id)
  redis.call('ZREM', OWNED, owner .. '/' .. id)
  local work = read_work(id)
  if not work or work.owner ~= owner then return end
  leave(work)
  if work.body == 'b' then
    work.owner = ''
    wait(work)
    log('r', owner, id)
  else
    redis.call('HDEL', WORKS, id)
    log('g', owner, id)
  end
end

-- True when nothing is left.
local function sweep(owner)
  redis.call('HDEL', SESSIONS, owner)
  redis.call('HDEL', CREDITS, owner)
  local members = redis.call('ZRANGEBYLEX', OWNED, '[' .. owner .. '/', '(' .. owner .. '0', 'LIMIT', 0, left + 1)
  for i = 1, math.min(left, #members) do sweep_work(owner, string.sub(members[i], #owner + 2)) end
  if #members > left then return false end
  left = left - #members
  log(ended ~= '' and 'e' or 's', owner, '')
  return true
end

local function expired_sessions()
  local answer, alive = {}, {}
  local all = redis.call('HGETALL', SESSIONS)
  for i = 1, #all, 2 do
    if session_expires_ms(all[i + 1]) <= now_ms then
      answer[#answer + 1] = all[i]
    else
      alive[all[i]] = true
    end
  end
  table.sort(answer)
  return answer, alive
end

local function owners_without_session(alive)
  local answer, from = {}, '-'
  local function add(owner)
    if not alive[owner] then
      alive[owner] = true
      answer[#answer + 1] = owner
    end
  end
  local credited = redis.call('HKEYS', CREDITS)
  table.sort(credited)
  for _, owner in ipairs(credited) do add(owner) end
  while true do
    local member = redis.call('ZRANGEBYLEX', OWNED, from, '+', 'LIMIT', 0, 1)[1]
    if not member then return answer end
    local owner = string.match(member, '^[^/]*/%d+')
    add(owner)
    from = '[' .. owner .. '0'
  end
end

local over, more = {}, 0
if ended ~= '' then
  local known = redis.call('HGET', SESSIONS, ended)
  seq_base_ms = known and session_expires_ms(known) or 0
  local owns = redis.call('ZRANGEBYLEX', OWNED, '[' .. ended .. '/', '(' .. ended .. '0', 'LIMIT', 0, 1)
  if known or #owns > 0 then over = {ended} end
else
  local alive
  over, alive = expired_sessions()
  for _, owner in ipairs(over) do alive[owner] = true end
  for _, owner in ipairs(owners_without_session(alive)) do over[#over + 1] = owner end
end
for _, owner in ipairs(over) do
  if not sweep(owner) then
    more = 1
    break
  end
end

write_depths()
write_seq(leader_keep_ms)
if #entries > 0 then
  redis.call('PEXPIRE', SWEPT, swept_keep_ms)
  redis.call('PUBLISH', bell, '')
end
if ended ~= '' then
  entries = {}
  for _, entry in ipairs(redis.call('ZRANGE', SWEPT, 0, -1)) do
    if string.sub(entry, 3, #ended + 3) == ended .. '/' then entries[#entries + 1] = entry end
  end
elseif after_seq ~= '' then
  entries = redis.call('ZRANGE', SWEPT, 0, -1)
end
local highest = '0'
if #entries > 0 then highest = digits(tonumber(redis.call('ZSCORE', SWEPT, entries[#entries]))) end
return {more, highest, entries}
