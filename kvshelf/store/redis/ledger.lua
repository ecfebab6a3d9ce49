-- The ledger of a Redis home. One call of this script is one operation, and so one atomic step. Called by ledger.py.
--
-- KEYS[1] is `{prefix}:requests`; the other keys begin with `{prefix}:` too, so that a cluster keeps them on one node and
-- the script may make up their names. ARGV: the operation, then names and values in turn; what is none is left out. The
-- reply begins with a word. Times are the server's.
--
--   r:<id>     hash: the fields of a RequestRecord
--   b:<id>     the body, until the request has ended
--   a:<token>  a body on its way to `open`, for a minute. It is no argument, because a script copies its arguments
--              several times, and the server does nothing else meanwhile
--   requests   ids of unfinished requests by created_at
--   ended      ids of the others by updated_at; the server drops their hashes `keep_ended_s` after that
--
-- A server without memory refuses the first write of a script or none: what ends or renews a request begins with one that
-- is always granted (DEL, HDEL), so that work that is done is not lost for it.

local call = redis.call
local REQUESTS = KEYS[1]
local BASE = REQUESTS:sub(1, -9)
local ENDED = BASE .. 'ended'

local a = {}
for i = 2, #ARGV, 2 do a[ARGV[i]] = ARGV[i + 1] end

local function record_key(id) return BASE .. 'r:' .. id end

local function body_key(id) return BASE .. 'b:' .. id end

local KEY = a.id and record_key(a.id)

local operations = {}

local function now_s()
  local time = call('TIME')
  return time[1] + time[2] / 1e6
end

local function exact(number) return string.format('%.17g', number) end

local function get(field) return call('HGET', KEY, field) end

-- In the order of FIELDS in ledger.py.
local function show(key)
  return call('HMGET', key, 'id', 'tenant', 'state', 'attempts', 'attempts_before', 'worker', 'lease_until', 'cache_ids',
    'error_code', 'error_message', 'error_param', 'error_details', 'created_at', 'updated_at')
end

local function set_error(code, message, param, details)
  call('HDEL', KEY, 'error_code', 'error_message', 'error_param', 'error_details')
  if code then call('HSET', KEY, 'error_code', code, 'error_message', message) end
  if param then call('HSET', KEY, 'error_param', param) end
  if details then call('HSET', KEY, 'error_details', details) end
end

-- What keeps an attempt from going on, or nil.
local function refusal()
  local state, attempts = get('state'), get('attempts')
  if not state then return {'unknown'} end
  if state ~= 'running' or attempts ~= a.attempt then return {'stale', state, attempts} end
end

local function end_request(state)
  local now = now_s()
  call('DEL', body_key(a.id))
  call('HDEL', KEY, 'worker', 'lease_until')
  call('HSET', KEY, 'state', state, 'updated_at', exact(now))
  call('ZREM', REQUESTS, a.id)
  call('ZADD', ENDED, exact(now), a.id)
  call('PEXPIREAT', KEY, string.format('%.0f', math.ceil((now + a.keep_ended_s) * 1000)))
end

local function take_body()
  call('RENAME', BASE .. 'a:' .. a.token, body_key(a.id))
  call('PERSIST', body_key(a.id))
end

local function queue_anew(now)
  take_body()
  call('HSET', KEY, 'state', 'queued', 'attempts_before', get('attempts'), 'cache_ids', '[]', 'updated_at', now)
  call('HDEL', KEY, 'worker')
  set_error(nil)
  call('PERSIST', KEY)
  call('ZREM', ENDED, a.id)
  call('ZADD', REQUESTS, get('created_at'), a.id)
end

function operations.open()
  local now = exact(now_s())
  local tenant, state = get('tenant'), get('state')
  if not tenant then
    take_body()
    call('HSET', KEY, 'id', a.id, 'tenant', a.tenant, 'state', 'queued', 'attempts', '0', 'attempts_before', '0',
      'cache_ids', '[]', 'created_at', now, 'updated_at', now)
    call('ZADD', REQUESTS, now, a.id)
    call('ZREM', ENDED, a.id)
  elseif tenant ~= a.tenant then
    call('UNLINK', BASE .. 'a:' .. a.token)
    return {'taken'}
  elseif state == 'failed' or (state == 'done' and a.again == '1') then
    queue_anew(now)
  end
  call('UNLINK', BASE .. 'a:' .. a.token)
  return {'opened', show(KEY)}
end

function operations.start()
  local state, now = get('state'), now_s()
  if not state then return {'unknown'} end
  if state == 'done' or state == 'failed' then return {'ended', state} end
  local lease_until = tonumber(get('lease_until') or 0)
  if state == 'running' and lease_until > now then return {'at_work', get('worker'), exact(lease_until - now)} end
  call('HSET', KEY, 'state', 'running', 'worker', a.worker, 'lease_until', exact(now + a.lease_s),
    'updated_at', exact(now))
  return {'started', tostring(call('HINCRBY', KEY, 'attempts', 1))}
end

function operations.renew()
  local refused, now = refusal(), now_s()
  if refused then return refused end
  call('HDEL', KEY, 'lease_until')
  call('HSET', KEY, 'lease_until', exact(now + a.lease_s), 'updated_at', exact(now))
  return {'done'}
end

function operations.finish()
  local refused = refusal()
  if refused then return refused end
  end_request('done')
  call('HSET', KEY, 'cache_ids', a.cache_ids)
  set_error(nil)
  return {'done'}
end

function operations.fail()
  local refused = refusal()
  if refused then return refused end
  if a.final == '1' then
    end_request('failed')
  else
    call('HDEL', KEY, 'worker', 'lease_until')
    call('HSET', KEY, 'state', 'queued', 'updated_at', exact(now_s()))
  end
  set_error(a.code, a.message, a.param, a.details)
  if a.counted == '0' then call('HINCRBY', KEY, 'attempts_before', 1) end
  return {'done'}
end

function operations.get() return {'record', show(KEY)} end

function operations.unfinished() return {'ids', call('ZRANGE', REQUESTS, 0, -1)} end

-- The ids stand between zero bytes.
function operations.records()
  local found = {}
  for id in (a.ids .. '\0'):gmatch('(.-)%z') do found[#found + 1] = show(record_key(id)) end
  return {'records', found}
end

function operations.forget()
  local ids = call('ZRANGEBYSCORE', ENDED, '-inf', '(' .. a.before, 'LIMIT', 0, a.limit)
  for _, id in ipairs(ids) do
    call('ZREM', ENDED, id)
    call('DEL', record_key(id))
  end
  return {'forgotten', tostring(#ids)}
end

return operations[ARGV[1]]()
