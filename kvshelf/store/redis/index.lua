-- The index of a Redis home. index.py calls this script. Each call runs one operation, as one atomic step.
--
-- Arguments. KEYS[1] is `{prefix}:home`. ARGV holds the operation, then the caller's incarnation of the home, then
-- names and values in turn; a value of None is left out together with its name. All keys begin with `{prefix}:`, so a
-- cluster keeps them on one node, and the script may build their names from KEYS[1].
--
-- Reply. It begins with a word. Numbers are sent as text, because Redis truncates Lua numbers to integers.
--
-- Keys, after `{prefix}:`. "<ids> by <field>" is a sorted set whose scores are that field.
--
--   home             hash: format, key, incarnation, blobs (where they lie); seq, the last one given out; clock, the clock of eviction
--   c:<id>           hash: the fields of an Entry except `text`
--   m:<id>           string: the manifest as JSON
--   stored           ready and corrupt ids by seq
--   l:<digest>       ready ids by seq, in listings: one per tenant, and one per document, model, policy, name, label and
--                    beginning of ids of a tenant
--   expiry           stored ids by expires_at
--   eviction         ready ids that are not pinned and whose blob is no base, by priority
--   pins             ready ids that are pinned, by the end of the pin, +inf if it has none; those of older versions are
--                    missing until they change
--   ended            ids of tombstones by ended_at
--   places           hash: stored id -> "<bytes> <digests of its listings> <bases> <tenant>". `drop` uses this record to
--                    take the id out of the other keys. It is not in c:<id>, because the server may expire that key first
--   r:<name>         set: stored ids that have a name as a base; bases are written "<name>:<bytes>,<name>:<bytes>"
--   k:<id>           set: ids of the cache's children. One whose c:<id> is gone goes when the set is walked
--   jo:<id>          set: ids of the items of jobs.lua that are derived from the cache; they are j:<item> and due:<kind>
--   spliced          ready ids that have bases, by their number
--   u, u:<tenant>    hash, of the home and of a tenant: caches and bytes of its ready entries; pinned_caches and
--                    pinned_bytes of those in pins; held_caches and held_bytes of its writes that are not revoked
--   changes:<tenant> ids of a tenant by the number of their last change, uses aside; it expires KEEP_CHANGES_MS after the
--                    last one. home has `changed`, the last number given out
--   writes           names of writes by the end of their lease, in ms of the server's clock; 0 if revoked or replaced,
--                    KEPT if replaced and still a base
--   w:<id>           hash: name of a write of this cache -> "<nbytes> <1 or 0: whether it becomes a cache> <tenant>"
--
-- Full memory. A server whose memory is full may refuse the first write command of a script, and never a later one. It
-- never refuses ZREM, HDEL and DEL. So an operation that makes a cache visible begins with a write that can be refused,
-- and an operation that frees memory begins with ZREM, HDEL or DEL.

local call = redis.call
local HOME = KEYS[1]
local BASE = HOME:sub(1, -5)
local STORED, EXPIRY, EVICTION, ENDED = BASE .. 'stored', BASE .. 'expiry', BASE .. 'eviction', BASE .. 'ended'
local PLACES, WRITES, USAGE = BASE .. 'places', BASE .. 'writes', BASE .. 'u'
local SPLICED, PINS = BASE .. 'spliced', BASE .. 'pins'
local KEPT = '9100000000000000'
local KEEP_CHANGES_MS = 86400000
local GRACE_S = 86400 -- after its end, as in jobs.lua: a sweep removes a cache before, and believes no clock that jumped

local a = {}
for i = 3, #ARGV, 2 do a[ARGV[i]] = ARGV[i + 1] end

local operations = {}

-- Numbers, time, keys

local function whole(number) return string.format('%.0f', number + 0) end -- + 0 turns -0 into 0: Redis rejects "-0"

local function exact(number) return string.format('%.17g', number) end

local function server_us()
  local time = call('TIME')
  return time[1] * 1e6 + time[2]
end

local function server_ms() return math.floor(server_us() / 1e3) end

local function entry_key(id) return BASE .. 'c:' .. id end

local function manifest_key(id) return BASE .. 'm:' .. id end

local function listing_key(digest) return BASE .. 'l:' .. digest end

local function cache_of(name) return 'kvs_' .. name:sub(1, 40) end -- see new_name in blobs.py

local function write_key(name) return BASE .. 'w:' .. cache_of(name) end

local function refs_key(name) return BASE .. 'r:' .. name end

local function children_key(id) return BASE .. 'k:' .. id end

local function bases_of(text) return text:gmatch('([^:,]+):%d+') end

local function words(text) return text:gmatch('[^,]+') end

local function read(key)
  local flat = call('HGETALL', key)
  if #flat == 0 then return nil end
  local found = {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

-- Counting

-- Adds to the usage of the home and of a tenant. `kind` is '' for ready entries, 'pinned_' for those that are pinned,
-- 'held_' for writes.
local function count(tenant, caches, bytes, kind)
  for _, key in ipairs({USAGE, USAGE .. ':' .. tenant}) do
    call('HINCRBY', key, kind .. 'caches', whole(caches))
    call('HINCRBY', key, kind .. 'bytes', whole(bytes))
    local left = false
    for _, number in ipairs(call('HVALS', key)) do left = left or number ~= '0' end
    if not left then call('DEL', key) end
  end
end

-- Returns the bytes, the digests of the listings, the bases and the tenant of a stored id. A corrupt id has no listings
-- ('') and is not counted.
local function place(id)
  local record = call('HGET', PLACES, id)
  if record then return record:match('^(%d+) (%S*) (%S*) (.*)$') end
end

local function is_base(name) return call('EXISTS', refs_key(name)) == 1 end

-- The server does not expire an entry that has children or whose blob is a base: a sweep ends it, and knows.
local function expire_entry(id, at)
  if call('EXISTS', children_key(id)) == 1 or is_base(call('HGET', entry_key(id), 'name') or '') then
    call('PERSIST', entry_key(id))
  else
    call('PEXPIREAT', entry_key(id), whole(math.ceil((at + a.keep_ended_s) * 1000)))
  end
end

local function rank(entry)
  if entry.state == 'ready' and entry.pinned == '0' and not is_base(entry.name) then
    call('ZADD', EVICTION, entry.priority, entry.id)
  end
end

-- Takes a stored id out of every key except c:<id> and m:<id>.
local function drop(id)
  call('ZREM', STORED, id)
  call('ZREM', EXPIRY, id)
  call('ZREM', EVICTION, id)
  call('ZREM', SPLICED, id)
  local pinned = call('ZREM', PINS, id) == 1
  local bytes, listings, bases, tenant = place(id)
  if not bytes then return end
  for name in bases_of(bases) do call('SREM', refs_key(name), id) end
  for digest in words(listings) do call('ZREM', listing_key(digest), id) end
  if listings ~= '' then count(tenant, -1, -bytes, '') end
  if pinned then count(tenant, -1, -bytes, 'pinned_') end
  call('HDEL', PLACES, id)
end

-- The manifest expires before the entry, so an entry exists as long as its manifest can be read.
local function keep_until(id, expires_at)
  if expires_at then
    call('PEXPIREAT', manifest_key(id), whole(math.ceil((expires_at + GRACE_S) * 1000)))
    expire_entry(id, expires_at)
  else
    call('PERSIST', manifest_key(id))
    call('PERSIST', entry_key(id))
  end
end

-- Puts an entry into every key that must list it: the reverse of `drop`.
local function enlist(id, listings)
  local entry = read(entry_key(id))
  local bytes = '0'
  call('ZADD', STORED, entry.seq, id)
  if entry.expires_at then call('ZADD', EXPIRY, entry.expires_at, id) end
  if entry.state == 'ready' then
    bytes = entry.nbytes
    for digest in words(listings) do call('ZADD', listing_key(digest), entry.seq, id) end
    rank(entry)
    count(entry.tenant, 1, bytes, '')
    if entry.pinned == '1' then
      call('ZADD', PINS, entry.pinned_until or '+inf', id)
      count(entry.tenant, 1, bytes, 'pinned_')
    end
  end
  local bases, number = entry.bases or '', 0
  for name in bases_of(bases) do
    call('SADD', refs_key(name), id)
    if call('HGET', entry_key(cache_of(name)), 'name') == name then -- else it is kept
      call('PERSIST', entry_key(cache_of(name)))
      call('ZREM', EVICTION, cache_of(name))
    end
    number = number + 1
  end
  if number > 0 and entry.state == 'ready' then call('ZADD', SPLICED, number, id) end
  call('HSET', PLACES, id, bytes .. ' ' .. listings .. ' ' .. bases .. ' ' .. entry.tenant)
  keep_until(id, entry.expires_at)
end

-- As kvshelf.store.eviction.priority.
local function priority(uses, cost_s, nbytes)
  local clock = tonumber(call('HGET', HOME, 'clock') or 0)
  return exact(clock + uses * cost_s / (nbytes / 1e6))
end

-- Entries

-- Returns the entry's fields as a JSON object of strings, and its manifest; false if there is no entry. If the manifest
-- is gone, server_s (the server's time) lets the caller tell an expired entry from a damaged one.
local function show(id)
  local entry = read(entry_key(id))
  if not entry then return false end
  local text = call('GET', manifest_key(id))
  if not text then entry.server_s = exact(server_us() / 1e6) end
  return {cjson.encode(entry), text}
end

local function show_all(ids)
  local found = {}
  for _, id in ipairs(ids) do
    local shown = show(id)
    if shown then found[#found + 1] = shown end
  end
  return found
end

local function is_stored(entry) return entry.state == 'ready' or entry.state == 'corrupt' end

local function is_expired(expires_at, now) return expires_at and tonumber(expires_at) <= tonumber(now) end

local function is_live(entry, now)
  return entry.state == 'ready' and not is_expired(entry.expires_at, now)
    and call('EXISTS', manifest_key(entry.id)) == 1
end

-- The new number is greater than every earlier one, even if the server lost its last writes in a restart.
local function next_of(field)
  local number = whole(math.max(tonumber(call('HGET', HOME, field) or 0) + 1, server_us()))
  call('HSET', HOME, field, number)
  return number
end

-- Numbers are of the clock, so the oldest changes go by them.
local function note_change(id, tenant)
  local key, number = BASE .. 'changes:' .. tenant, next_of('changed')
  call('ZADD', key, number, id)
  call('ZREMRANGEBYSCORE', key, '-inf', whole(number - KEEP_CHANGES_MS * 1000))
  call('PEXPIRE', key, KEEP_CHANGES_MS)
end

-- Writes

local function leased(name)
  local lease_until = call('ZSCORE', WRITES, name)
  return lease_until and tonumber(lease_until) > server_ms()
end

local function lease(name) call('ZADD', WRITES, whole(server_ms() + a.lease_ms), name) end

local function is_held(name) return tonumber(call('ZSCORE', WRITES, name) or 0) > 0 end

local function is_kept(name) return tonumber(call('ZSCORE', WRITES, name) or 0) == tonumber(KEPT) end

local function write_record(write)
  return table.concat({write.nbytes, write.of_cache, write.tenant}, ' ')
end

-- Returns nbytes, of_cache and tenant.
local function parse_write(record) return record:match('^(%d+) ([01]) (.*)$') end

local function release(record)
  local nbytes, of_cache, tenant = parse_write(record)
  count(tenant, -of_cache, -nbytes, 'held_')
end

local function end_write(name)
  local record = call('HGET', write_key(name), name)
  if not record then return end
  local held = is_held(name)
  call('ZREM', WRITES, name)
  call('HDEL', write_key(name), name)
  if held then release(record) end
end

local function revoke(name)
  local record = call('HGET', write_key(name), name)
  call('ZREM', WRITES, name) -- first, because a full server might refuse ZADD as the first write
  if not record then return end
  call('ZADD', WRITES, 0, name)
  release(record)
end

-- Ends references that an entry had. A kept name that is no base any more is to be removed; an entry whose blob is none
-- may be evicted again.
local function let_go(bases)
  for name in bases_of(bases or '') do
    if not is_base(name) then
      local entry = read(entry_key(cache_of(name)))
      if is_kept(name) then
        revoke(name)
      elseif entry and entry.name == name then
        rank(entry)
      end
    end
  end
end

-- Registers the name of a blob that an entry no longer uses as a revoked write, so that a sweep removes its bytes; one
-- that is a base is kept. The entry's own references were taken away by `drop`, and those it has now were added.
local function retire(name, nbytes, tenant, bases)
  local kept = is_base(name)
  local record = write_record({nbytes = nbytes, of_cache = kept and '0' or '1', tenant = tenant})
  call('HSET', write_key(name), name, record)
  call('ZADD', WRITES, kept and KEPT or 0, name)
  if kept then count(tenant, 0, nbytes, 'held_') end
  let_go(bases)
end

-- The second part of the reply is name, record, name, record, ...
local function list_writes(first, last)
  local found = {}
  for _, name in ipairs(call('ZRANGEBYSCORE', WRITES, first, last, 'LIMIT', a.offset, a.limit)) do
    found[#found + 1] = name
    found[#found + 1] = call('HGET', write_key(name), name) or ''
  end
  return {'writes', found}
end

-- Returns the caches and bytes that a new blob of the same cache id will replace: those of the ready entry and of the
-- writes in progress.
local function replaced_by(name, of_cache)
  local caches, bytes = 0, 0
  if of_cache == '0' then return caches, bytes end
  local ready_bytes, listings = place(cache_of(name))
  if ready_bytes and listings ~= '' then caches, bytes = 1, tonumber(ready_bytes) end
  for other, record in pairs(read(write_key(name)) or {}) do
    local nbytes, counted = parse_write(record)
    if is_held(other) and not is_kept(other) then caches, bytes = caches + counted, bytes + nbytes end
  end
  return caches, bytes
end

-- Returns the caches and bytes in use under a usage key, without the given ones.
local function taken_without(key, caches, bytes)
  local usage = read(key) or {}
  return (usage.caches or 0) + (usage.held_caches or 0) - caches, (usage.bytes or 0) + (usage.held_bytes or 0) - bytes
end

function operations.begin()
  local size = a.nbytes
  local own_caches, own_bytes = replaced_by(a.name, a.of_cache)
  local caches, bytes = taken_without(USAGE .. ':' .. a.tenant, own_caches, own_bytes)
  local after = caches + a.of_cache
  if a.max_caches and after > caches and after > tonumber(a.max_caches) then return {'max_caches', whole(caches)} end
  if a.max_bytes and bytes + size > tonumber(a.max_bytes) then return {'max_bytes', whole(bytes)} end
  local _, all_bytes = taken_without(USAGE, own_caches, own_bytes)
  if a.budget_bytes and all_bytes + size > tonumber(a.budget_bytes) then return {'budget_bytes', whole(all_bytes)} end
  if call('HSETNX', write_key(a.name), a.name, write_record(a)) == 1 then
    count(a.tenant, a.of_cache, size, 'held_')
  elseif not leased(a.name) then
    return {'lapsed'}
  end
  lease(a.name)
  return {'begun'}
end

function operations.renew()
  if not leased(a.name) then return {'lapsed'} end
  lease(a.name)
  return {'renewed'}
end

function operations.abandon()
  end_write(a.name)
  return {'abandoned'}
end

function operations.abandoned()
  local lapsed = call('ZRANGEBYSCORE', WRITES, '(0', whole(server_ms()), 'LIMIT', 0, a.limit)
  for _, name in ipairs(lapsed) do revoke(name) end
  return list_writes(0, 0)
end

function operations.held() return list_writes('(0', '+inf') end

function operations.kept() return list_writes(KEPT, KEPT) end

-- Whether a cache or one of its ancestors was deleted.
local function is_disowned(id)
  local seen = {}
  while id and not seen[id] do
    seen[id] = true
    local found = call('HMGET', entry_key(id), 'state', 'parent_id')
    if found[1] == 'deleted' then return true end
    id = found[2]
  end
  return false
end

local function has_bases(bases, tenant)
  for name in bases_of(bases or '') do
    local found = call('HMGET', entry_key(cache_of(name)), 'name', 'tenant')
    local stored = found[1] == name and found[2] == tenant
    if not stored and is_kept(name) then
      local _, _, owner = parse_write(call('HGET', write_key(name), name))
      stored = owner == tenant
    end
    if not stored then return false end
  end
  return true
end

local function children_of(id)
  local ids = call('SMEMBERS', children_key(id))
  local found = {}
  for _, child in ipairs(ids) do
    if call('EXISTS', entry_key(child)) == 1 then found[#found + 1] = child else call('SREM', children_key(id), child) end
  end
  return found
end

-- Whether a cache has descendants that are stored. Below one of those it need not look.
local function has_descendants(id)
  local left, seen = {id}, {}
  while #left > 0 do
    for _, child in ipairs(children_of(table.remove(left))) do
      local state = call('HGET', entry_key(child), 'state')
      if state == 'ready' or state == 'corrupt' then return true end
      if not seen[child] then left[#left + 1] = child end
      seen[child] = true
    end
  end
  return false
end

local function leave(id, parent)
  if parent then call('SREM', children_key(parent), id) end
end

-- What is derived from a cache is due when the cache ends; `own` in jobs.lua does it for what comes later.
local function end_owned(id, state, at)
  for _, item in ipairs(call('SMEMBERS', BASE .. 'jo:' .. id)) do
    local key = BASE .. 'j:' .. item
    local kind, due, after = unpack(call('HMGET', key, 'kind', 'due', 'after_s'))
    if state == 'deleted' then after = 0 end
    if kind and after and not (due and tonumber(due) < at + after) then
      call('HSET', key, 'due', exact(at + after))
      call('ZADD', BASE .. 'due:' .. kind, exact(at + after), item)
    end
  end
end

-- The budget of promises that a pin of a.id on so many bytes would exceed, and the bytes that count already.
local function promises_exceeded(tenant, nbytes)
  local own = call('ZSCORE', PINS, a.id) and place(a.id) or 0
  for _, limit in ipairs({'tenant_promised_bytes', 'promised_bytes'}) do
    local key = limit == 'promised_bytes' and USAGE or USAGE .. ':' .. tenant
    local taken = tonumber(call('HGET', key, 'pinned_bytes') or 0) - own
    if a[limit] and taken + nbytes > tonumber(a[limit]) then return {limit, whole(taken)} end
  end
end

function operations.publish()
  local old = read(entry_key(a.id))
  if old and old.name == a.name then return {'published', false} end -- a repeated call
  if not leased(a.name) then return {'lapsed'} end
  local shown = old and is_stored(old) and show(a.id) or false
  if old and old.name ~= a.over and is_live(old, a.now) then return {'kept', shown} end
  if is_disowned(a.parent_id) then return {'disowned'} end
  if not has_bases(a.bases, a.tenant) then return {'baseless'} end
  local exceeded = a.pinned == '1' and promises_exceeded(a.tenant, a.nbytes)
  if exceeded then return exceeded end
  call('SET', manifest_key(a.id), a.text)
  if old and is_stored(old) and is_expired(old.expires_at, a.now) then end_owned(a.id, 'expired', old.expires_at) end
  drop(a.id)
  call('ZREM', ENDED, a.id)
  call('DEL', entry_key(a.id))
  if old then leave(a.id, old.parent_id) end
  call('HSET', entry_key(a.id), 'seq', next_of('seq'), 'id', a.id, 'tenant', a.tenant, 'state', 'ready', 'version', '0',
    'name', a.name, 'nbytes', a.nbytes, 'uses', '0', 'cost_s', a.cost_s, 'priority', priority(1, a.cost_s, a.nbytes),
    'pinned', a.pinned)
  if a.expires_at then call('HSET', entry_key(a.id), 'expires_at', a.expires_at) end
  if a.pinned_until then call('HSET', entry_key(a.id), 'pinned_until', a.pinned_until) end
  if a.bases then call('HSET', entry_key(a.id), 'bases', a.bases) end
  if a.parent_id then
    call('HSET', entry_key(a.id), 'parent_id', a.parent_id)
    call('SADD', children_key(a.parent_id), a.id)
    call('PERSIST', entry_key(a.parent_id))
  end
  enlist(a.id, a.listings)
  if old and is_stored(old) then retire(old.name, old.nbytes, old.tenant, old.bases) end
  end_write(a.name)
  note_change(a.id, a.tenant)
  return {'published', shown}
end

-- Reading

function operations.find()
  local tenant = call('HGET', entry_key(a.id), 'tenant')
  return {'found', tenant == a.tenant and show(a.id)}
end

local function is_in_all(id, listings)
  for _, key in ipairs(listings) do
    if not call('ZSCORE', key, id) then return false end
  end
  return true
end

-- Walks the smallest of the listings, from high seq to low, with at most `steps` look-ups. The second part of the reply
-- is the seq to continue from, or false at the end of the listing.
function operations.listing()
  local wanted = {}
  for digest in words(a.listings) do wanted[#wanted + 1] = listing_key(digest) end
  table.sort(wanted, function(one, other) return call('ZCARD', one) < call('ZCARD', other) end)
  local smallest, batch, limit = table.remove(wanted, 1), math.ceil(a.steps / (#wanted + 1)), tonumber(a.limit)
  local walked = call('ZREVRANGEBYSCORE', smallest, a.before, '-inf', 'WITHSCORES', 'LIMIT', 0, batch)
  local found, seq = {}, false
  for i = 1, #walked, 2 do
    if #found == limit then break end
    local id = walked[i]
    seq = walked[i + 1]
    if is_in_all(id, wanted) and not is_expired(call('HGET', entry_key(id), 'expires_at'), a.now) then
      local shown = show(id)
      if shown and shown[2] then found[#found + 1] = shown end
    end
  end
  local ended = #walked < 2 * batch and seq == (walked[#walked] or false)
  return {'listing', not ended and seq, found}
end

function operations.stored()
  local walked = call('ZRANGEBYSCORE', STORED, '(' .. a.after, '+inf', 'WITHSCORES', 'LIMIT', 0, a.limit)
  local ids = {}
  for i = 1, #walked, 2 do ids[#ids + 1] = walked[i] end
  return {'walked', walked[#walked] or false, show_all(ids)}
end

function operations.knows()
  local known = call('HGET', entry_key(cache_of(a.name)), 'name') == a.name
    or call('HEXISTS', write_key(a.name), a.name) == 1
  return {'known', known and '1' or '0'}
end

function operations.is_base() return {'known', is_base(a.name) and '1' or '0'} end

function operations.changes()
  if not a.after then return {'changes', call('HGET', HOME, 'changed') or '0', {}} end
  local key = BASE .. 'changes:' .. a.tenant
  local walked = call('ZRANGEBYSCORE', key, '(' .. a.after, '+inf', 'WITHSCORES', 'LIMIT', 0, a.limit)
  local ids = {}
  for i = 1, #walked, 2 do ids[#ids + 1] = walked[i] end
  return {'changes', walked[#walked] or a.after, show_all(ids)}
end

function operations.children() return {'entries', show_all(children_of(a.id))} end

-- Changing

-- Replaces an entry's manifest and, if there is a write, its blob. a.name, a.nbytes, a.bases: the entry's afterwards.
-- a.gone_*: those that the entry loses. a.write: the name of the write, which makes a corrupt entry ready.
function operations.swap()
  local entry = read(entry_key(a.id))
  if a.write then
    -- A repeated call: the first one succeeded, and its answer was lost.
    if entry and entry.name == a.write then return {'done'} end
    if not leased(a.write) then return {'lapsed'} end
  end
  local unchanged = entry and entry.name == a.entry_name and entry.version == a.version
    and (entry.state == 'ready' or a.write and entry.state == 'corrupt')
  if not unchanged or call('EXISTS', manifest_key(a.id)) == 0 then return {'changed'} end
  if a.write and not has_bases(a.bases, entry.tenant) then return {'baseless'} end
  local exceeded = a.pinned == '1' and entry.pinned == '0' and promises_exceeded(entry.tenant, a.nbytes)
  if exceeded then return exceeded end
  call('SET', manifest_key(a.id), a.text)
  drop(a.id)
  call('HDEL', entry_key(a.id), 'problem', 'expires_at', 'pinned_until', 'bases')
  call('HSET', entry_key(a.id), 'state', 'ready', 'version', whole(entry.version + 1), 'pinned', a.pinned,
    'name', a.name, 'nbytes', a.nbytes)
  if a.expires_at then call('HSET', entry_key(a.id), 'expires_at', a.expires_at) end
  if a.pinned_until then call('HSET', entry_key(a.id), 'pinned_until', a.pinned_until) end
  if a.bases then call('HSET', entry_key(a.id), 'bases', a.bases) end
  enlist(a.id, a.listings)
  if a.gone_name then retire(a.gone_name, a.gone_nbytes, entry.tenant, a.gone_bases) end
  if a.write then end_write(a.write) end
  note_change(a.id, entry.tenant)
  return {'done'}
end

function operations.touch()
  local entry = read(entry_key(a.id))
  if entry and entry.tenant == a.tenant and entry.state == 'ready' then
    local uses = entry.uses + 1
    local lifted = priority(uses + 1, entry.cost_s, entry.nbytes)
    call('ZREM', EVICTION, a.id)
    call('HSET', entry_key(a.id), 'uses', whole(uses), 'last_used_at', a.now, 'priority', lifted)
    entry.priority = lifted
    rank(entry)
    return {'touched', entry.expires_at and show(a.id) or false}
  end
  return {'touched', false}
end

function operations.mark_corrupt()
  local entry = read(entry_key(a.id))
  if not entry or entry.state ~= 'ready' or entry.name ~= a.entry_name then return {'changed'} end
  drop(a.id)
  call('HSET', entry_key(a.id), 'state', 'corrupt', 'problem', a.problem)
  enlist(a.id, '')
  note_change(a.id, entry.tenant)
  return {'done'}
end

local function may_bury(entry)
  if a.state == 'deleted' then return entry.state ~= 'deleted' and entry.version == a.version end
  if a.state == 'evicted' then return entry.state == 'ready' and entry.pinned == '0' and not is_base(entry.name) end
  return is_stored(entry) and is_expired(entry.expires_at, a.now)
end

function operations.bury()
  local entry = read(entry_key(a.id))
  if not entry or entry.seq ~= a.seq or not may_bury(entry) then return {'changed'} end
  if a.state == 'deleted' and has_descendants(a.id) then return {'changed'} end
  drop(a.id)
  call('DEL', manifest_key(a.id), entry_key(a.id))
  if is_stored(entry) then retire(entry.name, entry.nbytes, entry.tenant, entry.bases) end
  end_owned(a.id, a.state, a.now)
  call('HSET', entry_key(a.id), 'seq', entry.seq, 'id', a.id, 'tenant', entry.tenant, 'state', a.state,
    'version', entry.version, 'ended_at', a.now)
  if entry.parent_id then call('HSET', entry_key(a.id), 'parent_id', entry.parent_id) end
  expire_entry(a.id, a.now)
  call('ZADD', ENDED, a.now, a.id)
  local clock = tonumber(call('HGET', HOME, 'clock') or 0)
  if a.state == 'evicted' and tonumber(entry.priority) > clock then call('HSET', HOME, 'clock', entry.priority) end
  note_change(a.id, entry.tenant)
  return {'done'}
end

function operations.expired()
  local ids = call('ZRANGEBYSCORE', EXPIRY, '-inf', a.now, 'LIMIT', 0, a.limit)
  for _, id in ipairs(ids) do
    if call('EXISTS', entry_key(id)) == 0 then -- the server expired the entry before any sweep
      local _, _, bases = place(id)
      local expired_at = call('ZSCORE', EXPIRY, id)
      drop(id)
      end_owned(id, 'expired', expired_at)
      let_go(bases)
    end
  end
  return {'entries', show_all(ids)}
end

function operations.unpromised()
  return {'entries', show_all(call('ZRANGEBYSCORE', PINS, '-inf', a.now, 'LIMIT', 0, a.limit))}
end

function operations.victims() return {'entries', show_all(call('ZRANGE', EVICTION, 0, a.limit - 1))} end

function operations.spliced()
  return {'entries', show_all(call('ZRANGEBYSCORE', SPLICED, a.least, '+inf', 'LIMIT', 0, a.limit))}
end

-- The second part of the reply is how many tombstones were looked at: those with children stay.
function operations.forget()
  local ids = call('ZRANGEBYSCORE', ENDED, '-inf', '(' .. a.before, 'LIMIT', a.offset, a.limit)
  local forgotten = 0
  for _, id in ipairs(ids) do
    if #children_of(id) == 0 then
      call('ZREM', ENDED, id)
      leave(id, call('HGET', entry_key(id), 'parent_id'))
      call('DEL', entry_key(id))
      forgotten = forgotten + 1
    end
  end
  return {'forgotten', whole(forgotten), whole(#ids)}
end

-- The home itself

function operations.open()
  if call('EXISTS', HOME) == 0 then
    call('HSET', HOME, 'format', a.format, 'key', a.key, 'incarnation', a.incarnation, 'blobs', a.blobs)
  end
  return {'home', call('HMGET', HOME, 'format', 'key', 'incarnation', 'blobs')}
end

-- The audit, for problems(): compares each stored entry with every key that must list it.

local function is_ranked(entry)
  local rank = call('ZSCORE', EVICTION, entry.id)
  if entry.pinned == '1' or is_base(entry.name) then return not rank end
  return rank and tonumber(rank) == tonumber(entry.priority)
end

local function misplaced(id, seq)
  local entry = read(entry_key(id))
  local bytes, listings, bases = place(id)
  if not bytes then return 'has no place' end
  if not entry then return nil end -- expired on the server; a sweep will drop the id
  if bases ~= (entry.bases or '') then return 'has other bases than its place says' end
  for name in bases_of(bases) do
    if call('SISMEMBER', refs_key(name), id) == 0 then return 'is no reference to its base ' .. name end
    if call('HGET', entry_key(cache_of(name)), 'name') ~= name and not is_kept(name) then
      return 'has a base that is no blob of a cache and is not kept: ' .. name
    end
  end
  if entry.seq ~= seq then return 'is kept under another seq' end
  local expires_at = call('ZSCORE', EXPIRY, id) or 0
  if tonumber(expires_at) ~= tonumber(entry.expires_at or 0) then return 'expires at another time' end
  if entry.state == 'corrupt' then return listings ~= '' and 'is corrupt and listed' or nil end
  if entry.state ~= 'ready' then return 'has ended and is kept' end
  if tonumber(bytes) ~= tonumber(entry.nbytes) then return 'is counted with other bytes' end
  for digest in words(listings) do
    if call('ZSCORE', listing_key(digest), id) ~= seq then return 'is missing in a listing' end
  end
  if not is_ranked(entry) then return 'has the wrong rank for eviction' end
  local gone = call('EXISTS', manifest_key(id)) == 0 and not is_expired(entry.expires_at, server_us() / 1e6)
  return gone and 'has lost its manifest' or nil
end

function operations.audit()
  local walked = call('ZRANGEBYSCORE', STORED, '(' .. a.after, '+inf', 'WITHSCORES', 'LIMIT', 0, a.limit)
  local found = {}
  for i = 1, #walked, 2 do
    local id, seq = walked[i], walked[i + 1]
    local bytes, listings, bases, tenant = place(id)
    local name = call('HGET', entry_key(id), 'name') or ''
    found[#found + 1] = {id, misplaced(id, seq) or '', listings or '', bytes or '0', tenant or '',
      call('ZSCORE', EXPIRY, id) and '1' or '0', call('ZSCORE', EVICTION, id) and '1' or '0',
      call('ZSCORE', PINS, id) and '1' or '0', bases or '',
      is_base(name) and name or ''}
  end
  return {'walked', walked[#walked] or false, found}
end

local sizes = {zset = 'ZCARD', set = 'SCARD', hash = 'HLEN', none = 'EXISTS'}

-- Returns the size of each key in a.keys, or the value of one field of a hash, written '<field>@<key>'. Zero bytes
-- separate the keys.
function operations.counts()
  local found = {}
  for key in (a.keys .. '\0'):gmatch('(.-)%z') do
    local field, hash = key:match('^(%l+_?%l*)@(.*)$')
    if field then
      found[#found + 1] = call('HGET', BASE .. hash, field) or '0'
    else
      found[#found + 1] = whole(call(sizes[call('TYPE', BASE .. key).ok], BASE .. key))
    end
  end
  return {'counts', found}
end

if ARGV[1] ~= 'open' and call('HGET', HOME, 'incarnation') ~= ARGV[2] then return {'lost'} end
return operations[ARGV[1]]()
