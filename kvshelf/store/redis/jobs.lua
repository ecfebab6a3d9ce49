-- The job table of a Redis home. jobs.py calls this script. Each call runs one operation, as one atomic step.
--
-- Arguments. KEYS[1] is `{prefix}:jobs`. ARGV holds the operation, then names and values in turn; a value of None is
-- left out together with its name. All keys begin with `{prefix}:`, so a cluster keeps them on one node, and the script
-- may build their names from KEYS[1]. The reply begins with a word. Times are seconds of the server's clock.
--
-- Keys, after `{prefix}:`. "<ids> by <field>" is a sorted set whose scores are that field.
--
--   jobs                string: the last seq given out
--   j:<id>              hash: the fields of an Item; seq
--   jt:<kind>:<tenant>  ids of a tenant's items by seq
--   open:<kind>         ids of open items by seq
--   ot:<kind>:<tenant>  ids of a tenant's open items by seq
--   due:<kind>          ids by `due`, the time to forget the item
--   jl:<id>             list: the lines of the item's journal
--   jo:<owner>          set: ids of the items of a cache, or of the result files of a batch; a key of the index, too
--   writes              a key of the index: names of writes by the end of their lease
--   c:<id>              a key of the index: an Entry, here of an owner
--
-- Full memory. A server whose memory is full may refuse the first write command of a script, and never a later one. It
-- never refuses ZREM and HDEL. So an operation that frees memory, ends a lease or renews one begins with ZREM or HDEL:
-- a full server loses no finished work.

local call = redis.call
local SEQ = KEYS[1]
local BASE = SEQ:sub(1, -5)
local WRITES = BASE .. 'writes'
local FOREVER = '9000000000000000'
local DAY_S = 86400

local a = {}
for i = 2, #ARGV, 2 do a[ARGV[i]] = ARGV[i + 1] end

local function item_key(id) return BASE .. 'j:' .. id end

local function lines_key(id) return BASE .. 'jl:' .. id end

local function listing_key(kind, tenant) return BASE .. 'jt:' .. kind .. ':' .. tenant end

local function owned_key(owner) return BASE .. 'jo:' .. owner end

local function open_key(kind) return BASE .. 'open:' .. kind end

local function open_of_key(kind, tenant) return BASE .. 'ot:' .. kind .. ':' .. tenant end

local function due_key(kind) return BASE .. 'due:' .. kind end

local KEY = a.id and item_key(a.id)

local operations = {}

local function whole(number) return string.format('%.0f', number) end

local function exact(number) return string.format('%.17g', number) end

local time = call('TIME')
local NOW = time[1] + time[2] / 1e6

local function get(field) return call('HGET', KEY, field) end

-- Returns the fields in the order of `_FIELDS` in jobs.py.
local function show(id)
  return call('HMGET', item_key(id), 'kind', 'id', 'tenant', 'text', 'version', 'open', 'due', 'held', 'owner',
    'after_s', 'term', 'holder', 'lease_until', 'created_at', 'updated_at')
end

local function show_all(ids)
  local found = {}
  for _, id in ipairs(ids) do
    local shown = show(id)
    if shown[2] then found[#found + 1] = shown end
  end
  return {'items', found}
end

-- Whether the write of the bytes that the item will hold still has its lease.
local function may_hold() return not a.held or tonumber(call('ZSCORE', WRITES, a.held) or 0) > NOW * 1000 end

-- Ends the lease on bytes that no item holds any more. The index then revokes the write, as it revokes every write
-- whose lease has ended.
local function let_go(name)
  if name and call('ZSCORE', WRITES, name) then call('ZADD', WRITES, '1', name) end
end

local function set(field, value)
  if value then call('HSET', KEY, field, value) else call('HDEL', KEY, field) end
end

-- Usually a sweep removes an ended item and its places in the listings at the time `due`. Without a sweep, the server
-- expires the item a day later. An item that holds bytes never expires on the server: only a sweep removes the bytes.
local function keep()
  local ends = a.due and a.open == '0' and not a.held
  for _, key in ipairs({KEY, lines_key(a.id)}) do
    if ends then call('PEXPIREAT', key, whole((a.due + DAY_S) * 1000)) else call('PERSIST', key) end
  end
end

-- Notes whose the item is, and that it is due if that cache has ended; as `end_owned` in index.lua.
local function own()
  local before = get('owner')
  if before and before ~= a.owner then call('SREM', owned_key(before), a.id) end
  set('owner', a.owner)
  set('after_s', a.after_s)
  if not a.owner then return end
  call('SADD', owned_key(a.owner), a.id)
  local state, ended_at = unpack(call('HMGET', BASE .. 'c:' .. a.owner, 'state', 'ended_at'))
  if not ended_at then return end
  local after = state == 'deleted' and 0 or a.after_s
  local due = after and ended_at + after
  if due and not (a.due and tonumber(a.due) < due) then a.due = exact(due) end
end

local function write(kind, seq)
  local held = get('held')
  own()
  if a.held then call('ZADD', WRITES, FOREVER, a.held) end
  if held ~= a.held then let_go(held) end
  set('due', a.due)
  set('held', a.held)
  call('HSET', KEY, 'text', a.text, 'open', a.open, 'updated_at', exact(NOW))
  for _, key in ipairs({open_key(kind), open_of_key(kind, get('tenant'))}) do
    if a.open == '1' then call('ZADD', key, seq, a.id) else call('ZREM', key, a.id) end
  end
  if a.due then call('ZADD', due_key(kind), a.due, a.id) else call('ZREM', due_key(kind), a.id) end
  keep()
end

local function remove(id)
  local kind, tenant, held, owner = unpack(call('HMGET', item_key(id), 'kind', 'tenant', 'held', 'owner'))
  if not kind then return 0 end
  call('ZREM', open_key(kind), id)
  call('ZREM', open_of_key(kind, tenant), id)
  call('ZREM', due_key(kind), id)
  call('ZREM', listing_key(kind, tenant), id)
  call('UNLINK', item_key(id), lines_key(id))
  if owner then
    call('SREM', owned_key(owner), id)
    -- A journal has the text of the result files that were written from it.
    if kind == 'file' and call('HGET', item_key(owner), 'open') == '0' then call('UNLINK', lines_key(owner)) end
  end
  let_go(held)
  return 1
end

function operations.add()
  if call('EXISTS', KEY) == 1 then return {'none'} end
  if not may_hold() then return {'too_slow'} end
  if a.most_open and call('ZCARD', open_of_key(a.kind, a.tenant)) >= tonumber(a.most_open) then return {'too_many'} end
  local seq = tostring(call('INCR', SEQ))
  call('HSET', KEY, 'kind', a.kind, 'id', a.id, 'tenant', a.tenant, 'version', '0', 'seq', seq, 'term', '0',
    'holder', '', 'lease_until', '0', 'created_at', exact(NOW))
  call('ZADD', listing_key(a.kind, a.tenant), seq, a.id)
  write(a.kind, seq)
  return {'item', show(a.id)}
end

function operations.find()
  local tenant = get('tenant')
  if not tenant or (a.tenant and tenant ~= a.tenant) then return {'none'} end
  return {'item', show(a.id)}
end

function operations.owned() return show_all(call('SMEMBERS', owned_key(a.owner))) end

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
  if get('version') ~= a.version or (a.term and get('term') ~= a.term) then return {'none'} end
  if a.held ~= (get('held') or nil) and not may_hold() then return {'too_slow'} end
  if a.release == '1' then
    call('HDEL', KEY, 'lease_until')
    call('HSET', KEY, 'lease_until', '0')
  end
  if a.open == '0' then call('ZREM', open_key(get('kind')), a.id) end
  call('HINCRBY', KEY, 'version', 1)
  write(get('kind'), get('seq'))
  return {'item', show(a.id)}
end

function operations.remove() return {'removed', tostring(remove(a.id))} end

function operations.forget()
  local ids = call('ZRANGEBYSCORE', due_key(a.kind), '-inf', a.now, 'LIMIT', 0, a.limit)
  local count = 0
  for _, id in ipairs(ids) do
    call('ZREM', due_key(a.kind), id)
    count = count + remove(id)
  end
  return {'forgotten', tostring(count), tostring(#ids)}
end

function operations.open() return {'ids', call('ZRANGE', open_key(a.kind), 0, a.last)} end

function operations.due() return {'ids', call('ZRANGEBYSCORE', due_key(a.kind), '-inf', a.now)} end

-- a.ids: the ids, separated by zero bytes.
function operations.items()
  local ids = {}
  for id in (a.ids .. '\0'):gmatch('(.-)%z') do ids[#ids + 1] = id end
  return show_all(ids)
end

function operations.take()
  if get('open') ~= '1' or tonumber(get('lease_until')) > NOW then return {'none'} end
  call('HSET', KEY, 'holder', a.holder, 'lease_until', exact(NOW + a.lease_s), 'updated_at', exact(NOW))
  return {'taken', tostring(call('HINCRBY', KEY, 'term', 1))}
end

function operations.lease()
  if get('term') ~= a.term or get('lease_until') == '0' then return {'none'} end
  call('HDEL', KEY, 'lease_until')
  call('HSET', KEY, 'lease_until', a.lease_s == '0' and '0' or exact(NOW + a.lease_s), 'updated_at', exact(NOW))
  return {'leased'}
end

-- a['1'], a['2'], ...: the lines.
function operations.append()
  if get('term') ~= a.term then return {'none'} end
  for i = 1, tonumber(a.count) do call('RPUSH', lines_key(a.id), a[tostring(i)]) end
  return {'appended'}
end

function operations.lines() return {'lines', call('LRANGE', lines_key(a.id), a.start, a.start + a.limit - 1)} end

function operations.erase_lines()
  local size = call('LLEN', lines_key(a.id))
  for number in a.numbers:gmatch('%d+') do
    if tonumber(number) < size then call('LSET', lines_key(a.id), number, '') end
  end
  return {'erased'}
end

return operations[ARGV[1]]()
