-- The bytes of a Redis home: the chunks of one name, and the leases of their readers. blobs.py calls this script. Each
-- call runs one operation, as one atomic step.
--
-- KEYS holds every key that the operation uses; most operations take the readers' key first, then the keys of the
-- chunks. ARGV holds the operation, then its arguments. Times are in milliseconds of the server's clock.

local call = redis.call

local operations = {}

local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Removes the ended leases from KEYS[1], the readers' key. Returns when the last remaining lease ends, 0 without one.
-- A full server may refuse only the first write command of a script, and it never refuses ZREMRANGEBYSCORE. So `lease`
-- can call ZADD afterwards: a full shelf stays readable.
local function read_until()
  call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms())
  local last = call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
  return last and tonumber(last) or 0
end

-- Makes a chunk live for at least `lease_ms` from now. A chunk without expiry stays as it is. Returns whether the chunk
-- exists.
local function prolong(key, lease_ms)
  local left = call('PTTL', key)
  if left >= 0 and left < lease_ms then call('PEXPIRE', key, lease_ms) end
  return left ~= -2
end

-- KEYS: the readers, then the chunks. ARGV: a reader's token, the duration of its lease. Returns 1 if any chunk exists.
function operations.lease()
  read_until()
  local lease_ms, found = tonumber(ARGV[3]), 0
  for i = 2, #KEYS do
    if prolong(KEYS[i], lease_ms) then found = 1 end
  end
  if found == 1 then
    call('ZADD', KEYS[1], now_ms() + lease_ms, ARGV[2])
    call('PEXPIRE', KEYS[1], lease_ms)
  end
  return found
end

-- KEYS: the chunks; some may not exist yet. ARGV: the duration of the writer's lease.
function operations.renew()
  for _, key in ipairs(KEYS) do prolong(key, tonumber(ARGV[2])) end
  return 1
end

-- Stands among the readers of a name that was removed while it was read, until its chunks are gone.
local REMOVED = 'removed'

-- KEYS: the readers, then the chunks. ARGV: their expiry (Unix time) or '' for never, then the length of each chunk.
-- Returns 1 if every chunk has its length. Otherwise, or if the name was removed, returns 0 and changes nothing. It never
-- makes a chunk expire sooner, because a reader may need the chunk.
function operations.keep()
  if call('ZSCORE', KEYS[1], REMOVED) then return 0 end
  for i = 2, #KEYS do
    if call('EXISTS', KEYS[i]) == 0 or call('STRLEN', KEYS[i]) ~= tonumber(ARGV[i + 1]) then return 0 end
  end
  local now = now_ms()
  for i = 2, #KEYS do
    local left = call('PTTL', KEYS[i])
    if ARGV[2] == '' then call('PERSIST', KEYS[i])
    elseif left >= 0 and now + left < tonumber(ARGV[2]) then call('PEXPIREAT', KEYS[i], ARGV[2]) end
  end
  return 1
end

-- KEYS: the readers, then the chunks. Returns how many chunks existed. While a reader has a lease, the chunks are not
-- deleted; they get the end of the last lease as their expiry, and `keep` does not change that.
function operations.remove()
  local ends, found = read_until(), 0
  if ends > 0 then call('ZADD', KEYS[1], ends, REMOVED) end
  for i = 2, #KEYS do
    found = found + (ends > 0 and call('PEXPIREAT', KEYS[i], ends) or call('UNLINK', KEYS[i]))
  end
  return found
end

-- KEYS: each chunk's key, followed by its key in quarantine.
function operations.set_aside()
  for i = 1, #KEYS, 2 do
    if call('EXISTS', KEYS[i]) == 1 then call('RENAME', KEYS[i], KEYS[i + 1]) end
  end
  return 1
end

-- KEYS[1]: the readers. Returns how many leases have not ended.
function operations.readers()
  local now = now_ms()
  local removed = tonumber(call('ZSCORE', KEYS[1], REMOVED) or 0) > now
  return call('ZCOUNT', KEYS[1], '(' .. now, '+inf') - (removed and 1 or 0)
end

return operations[ARGV[1]]()
