-- The docket of a Redis home. One call of this script is one operation, and so one atomic step. Called by docket.py.
--
-- KEYS[1] is `{prefix}:docket`; the other keys begin with `{prefix}:` too, so that a cluster keeps them on one node and
-- the script may make up their names. ARGV: the operation, then names and values in turn; what is none is left out. The
-- reply begins with a word. Leases are on the server's clock, in ms.
--
--   docket            the last seq that was given
--   d:<id>            hash: the fields of an Item; seq; term and lease_until of its lease
--   dl:<kind>:<tenant>  ids of a tenant's items by seq
--   open              ids of open items by seq
--   due:<kind>        ids by the time when they are to be removed
--   j:<id>            list: the lines of the journal
--   writes            of the index: names of writes by the end of their lease
--
-- A server without memory refuses the first write of a script or none: what gives memory back begins with one that is
-- always granted (ZREM).

local call = redis.call
local SEQ = KEYS[1]
local BASE = SEQ:sub(1, -7)
local OPEN, WRITES = BASE .. 'open', BASE .. 'writes'
local FOR_EVER = '9000000000000000'

local a = {}
for i = 2, #ARGV, 2 do a[ARGV[i]] = ARGV[i + 1] end

local function item_key(id) return BASE .. 'd:' .. id end

local function lines_key(id) return BASE .. 'j:' .. id end

local function listing_key(kind, tenant) return BASE .. 'dl:' .. kind .. ':' .. tenant end

local function due_key(kind) return BASE .. 'due:' .. kind end

local KEY = a.id and item_key(a.id)

local operations = {}

local function server_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function get(field) return call('HGET', KEY, field) end

-- In the order of Item.
local function show(id)
  return call('HMGET', item_key(id), 'kind', 'id', 'tenant', 'text', 'version', 'open', 'due')
end

local function show_all(ids)
  local found = {}
  for _, id in ipairs(ids) do
    local shown = show(id)
    if shown[1] then found[#found + 1] = shown end
  end
  return {'items', found}
end

local function enlist(kind, seq)
  if a.open == '1' then call('ZADD', OPEN, seq, a.id) else call('ZREM', OPEN, a.id) end
  if a.due then
    call('ZADD', due_key(kind), a.due, a.id)
    call('HSET', KEY, 'due', a.due)
  else
    call('ZREM', due_key(kind), a.id)
    call('HDEL', KEY, 'due')
  end
end

function operations.add()
  if a.hold then
    if tonumber(call('ZSCORE', WRITES, a.hold) or 0) <= server_ms() then return {'lapsed'} end
    call('ZADD', WRITES, FOR_EVER, a.hold)
  end
  local seq = tostring(call('INCR', SEQ))
  call('HSET', KEY, 'kind', a.kind, 'id', a.id, 'tenant', a.tenant, 'text', a.text, 'version', '0', 'open', a.open,
    'seq', seq, 'term', '0', 'lease_until', '0')
  call('ZADD', listing_key(a.kind, a.tenant), seq, a.id)
  enlist(a.kind, seq)
  return {'done'}
end

function operations.find() return {'item', get('tenant') == a.tenant and show(a.id)} end

function operations.listing()
  local listing, first = listing_key(a.kind, a.tenant), '+inf'
  if a.after then
    local seq = call('ZSCORE', listing, a.after)
    if not seq then return {'items', {}} end
    first = '(' .. seq
  end
  return show_all(call('ZREVRANGEBYSCORE', listing, first, '-inf', 'LIMIT', 0, a.limit))
end

function operations.change()
  if get('version') ~= a.version or (a.term and get('term') ~= a.term) then return {'changed'} end
  call('HSET', KEY, 'text', a.text, 'open', a.open)
  call('HINCRBY', KEY, 'version', 1)
  enlist(get('kind'), get('seq'))
  return {'done'}
end

function operations.remove()
  local kind, tenant = get('kind'), get('tenant')
  if not kind then return {'changed'} end
  call('ZREM', OPEN, a.id)
  call('ZREM', due_key(kind), a.id)
  call('ZREM', listing_key(kind, tenant), a.id)
  call('UNLINK', KEY, lines_key(a.id))
  -- To the index this is a writer who fell silent long ago: that revokes its write, which counts it off.
  if a.held and call('ZSCORE', WRITES, a.held) then call('ZADD', WRITES, '1', a.held) end
  return {'done'}
end

function operations.due() return show_all(call('ZRANGEBYSCORE', due_key(a.kind), '-inf', a.now, 'LIMIT', 0, a.limit)) end

function operations.open() return {'ids', call('ZRANGE', OPEN, 0, -1)} end

-- The ids stand between zero bytes.
function operations.items()
  local ids = {}
  for id in (a.ids .. '\0'):gmatch('(.-)%z') do ids[#ids + 1] = id end
  return show_all(ids)
end

function operations.take()
  local lease_until, now = get('lease_until'), server_ms()
  if not lease_until or tonumber(lease_until) > now then return {'changed'} end
  call('HSET', KEY, 'lease_until', string.format('%.0f', now + a.lease_ms))
  return {'taken', tostring(call('HINCRBY', KEY, 'term', 1))}
end

function operations.lease()
  if get('term') ~= a.term then return {'changed'} end
  call('HDEL', KEY, 'lease_until')
  call('HSET', KEY, 'lease_until', string.format('%.0f', server_ms() + a.lease_ms))
  return {'done'}
end

-- The lines are the values of '1', '2', ...
function operations.append()
  if get('term') ~= a.term then return {'changed'} end
  for i = 1, tonumber(a.count) do call('RPUSH', lines_key(a.id), a[tostring(i)]) end
  return {'done'}
end

function operations.lines() return {'lines', call('LRANGE', lines_key(a.id), a.start, a.start + a.limit - 1)} end

return operations[ARGV[1]]()
