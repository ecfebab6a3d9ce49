-- The bytes of a Redis home: the chunks of one name, and the leases of their readers. One call of this script is one
-- operation, and so one atomic step. Called by blobs.py. KEYS: every key that the operation uses. ARGV: the operation,
-- then its arguments. Times are the server's, in milliseconds.

local call = redis.call

local operations = {}

local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Removes the leases that have ended, and returns the end of the last one left, 0 if there is none. KEYS[1]: the readers.
-- Even if there is nothing to remove, the attempt lets a full server accept a later ZADD: a full shelf stays readable.
local function read_until()
  call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms())
  local last = call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
  return last and tonumber(last) or 0
end

-- Lets a chunk live for this time at least. A chunk that never expires stays as it is.
local function prolong(key, lease_ms)
  local left = call('PTTL', key)
  if left >= 0 and left < lease_ms then call('PEXPIRE', key, lease_ms) end
  return left ~= -2
end

-- KEYS: the readers, then the chunks. ARGV: a reader's token, its lease. Returns whether there is any chunk.
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

-- KEYS: the chunks, some of which may not exist yet. ARGV: the lease of their writer.
function operations.renew()
  for _, key in ipairs(KEYS) do prolong(key, tonumber(ARGV[2])) end
  return 1
end

-- KEYS: the chunks. ARGV: when they expire (Unix time) or '' for never, then the length of each. Returns whether all
-- chunks are whole; if not, nothing is changed. Never shortens the life of a chunk: readers may need it.
function operations.keep()
  for i, key in ipairs(KEYS) do
    if call('EXISTS', key) == 0 or call('STRLEN', key) ~= tonumber(ARGV[i + 2]) then return 0 end
  end
  local now = now_ms()
  for _, key in ipairs(KEYS) do
    local left = call('PTTL', key)
    if ARGV[2] == '' then call('PERSIST', key)
    elseif left >= 0 and now + left < tonumber(ARGV[2]) then call('PEXPIREAT', key, ARGV[2]) end
  end
  return 1
end

-- KEYS: the readers, then the chunks. Returns how many chunks there were. If they are being read, they stay until their
-- readers finish or die.
function operations.remove()
  local ends, found = read_until(), 0
  for i = 2, #KEYS do
    found = found + (ends > 0 and call('PEXPIREAT', KEYS[i], ends) or call('UNLINK', KEYS[i]))
  end
  return found
end

-- KEYS: each chunk, followed by its name in quarantine.
function operations.set_aside()
  for i = 1, #KEYS, 2 do
    if call('EXISTS', KEYS[i]) == 1 then call('RENAME', KEYS[i], KEYS[i + 1]) end
  end
  return 1
end

-- KEYS[1]: the readers.
function operations.readers() return call('ZCOUNT', KEYS[1], '(' .. now_ms(), '+inf') end

return operations[ARGV[1]]()
