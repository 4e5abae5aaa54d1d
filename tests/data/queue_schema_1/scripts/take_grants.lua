-- Reads a session's grants past a sequence number; changes nothing.
--
-- KEYS     the pool's table
-- ARGV     1 session, 2 after_seq
-- returns  flat, per grant: seq, id, engine, epoch, attempt, expires_ms
-- O(log grants + answers)
local owner, after_seq = ARGV[1], tonumber(ARGV[2])
local from = '[' .. owner .. '/' .. string.format('%016.0f', after_seq + 1) .. '/'
local answers = {}
for _, member in ipairs(redis.call('ZRANGEBYLEX', GRANTS, from, '(' .. owner .. '0')) do
  local work = read_work(string.sub(member, #owner + 19))
  if work and work.state == 'g' then
    for _, field in ipairs({work.seq, work.id, work.engine, work.epoch, work.attempt, work.expires_ms}) do
      answers[#answers + 1] = field
    end
  end
end
return answers
