-- The tables of a disk home.

CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;

-- One row per id that ever was, until its tombstone is swept. `seq` orders listings: it never repeats and never
-- changes. state: ready | corrupt | expired | evicted | deleted; the last three are tombstones without a manifest and
-- without files. bases: JSON, [[name, nbytes], ...]; `refs` has the same, to be found by name.
CREATE TABLE caches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    state TEXT NOT NULL,
    version INTEGER NOT NULL DEFAULT 0,
    name TEXT,
    nbytes INTEGER NOT NULL,
    document_id TEXT NOT NULL,
    model TEXT NOT NULL,
    policy TEXT NOT NULL,
    expires_at REAL,
    last_used_at REAL,
    uses INTEGER NOT NULL DEFAULT 0,
    cost_s REAL NOT NULL DEFAULT 0.001,
    priority REAL NOT NULL DEFAULT 0,
    pinned INTEGER NOT NULL DEFAULT 0,
    ended_at REAL,
    problem TEXT,
    bases TEXT NOT NULL DEFAULT '[]',
    parent_id TEXT,
    manifest TEXT
) STRICT;
-- By tenant first: otherwise a look-up would take longer where the id is another tenant's (by 0.3 us).
CREATE UNIQUE INDEX caches_by_tenant_and_id ON caches (tenant, id);
CREATE INDEX caches_of_tenant ON caches (tenant, state, seq);
CREATE INDEX caches_of_document ON caches (document_id, tenant, seq);
CREATE INDEX caches_by_name ON caches (tenant, json_extract(manifest, '$.name'), seq);
CREATE INDEX tombstones ON caches (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX caches_by_expiry ON caches (expires_at) WHERE state IN ('ready', 'corrupt') AND expires_at IS NOT NULL;
CREATE INDEX caches_by_priority ON caches (priority) WHERE state = 'ready' AND pinned = 0;
-- What is pinned, for the budgets of promises, and the promises that end.
CREATE INDEX caches_by_pin ON caches (tenant, nbytes) WHERE state = 'ready' AND pinned = 1;
CREATE INDEX caches_by_promise ON caches (json_extract(manifest, '$.guaranteed_until'))
    WHERE state = 'ready' AND pinned = 1;

CREATE INDEX caches_of_parent ON caches (parent_id, tenant, seq) WHERE parent_id IS NOT NULL;
CREATE INDEX caches_by_bases ON caches (json_array_length(bases)) WHERE state = 'ready' AND bases != '[]';

-- Which entries have a name as a base.
CREATE TABLE refs (
    name TEXT NOT NULL,
    seq INTEGER NOT NULL REFERENCES caches (seq) ON DELETE CASCADE,
    PRIMARY KEY (name, seq)
) STRICT, WITHOUT ROWID;
CREATE INDEX refs_of_cache ON refs (seq);

CREATE TABLE labels (
    seq INTEGER NOT NULL REFERENCES caches (seq) ON DELETE CASCADE,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (seq, name)
) STRICT, WITHOUT ROWID;
-- By tenant first: otherwise the time of a search would tell how often other tenants use a label.
CREATE INDEX labels_by_value ON labels (tenant, name, value, seq);

-- Writes in progress, bytes that jobs hold, and bytes that are to be removed. A writer that is silent until lease_until
-- can publish nothing any more; 0: it was revoked, or its bytes gave way to others. of_cache: its bytes become the blob of
-- a cache. kept: its bytes gave way, but are a base of other entries.
CREATE TABLE writes (
    name TEXT PRIMARY KEY,
    id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    nbytes INTEGER NOT NULL,
    of_cache INTEGER NOT NULL,
    lease_until REAL NOT NULL,
    kept INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX writes_of_tenant ON writes (tenant);
CREATE INDEX writes_of_cache ON writes (id);

-- Readers of bytes that lie in object storage (kvshelf.store.leases).
CREATE TABLE readers (
    name TEXT NOT NULL,
    token TEXT NOT NULL,
    lease_until REAL NOT NULL,
    PRIMARY KEY (name, token)
) STRICT, WITHOUT ROWID;
CREATE INDEX readers_by_end ON readers (lease_until);

-- Counted by the database itself, so that a quota costs one row to check and no path can forget to count.
CREATE TABLE usage (tenant TEXT PRIMARY KEY, caches INTEGER NOT NULL, bytes INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TRIGGER usage_of_new AFTER INSERT ON caches WHEN new.state = 'ready' BEGIN
    INSERT INTO usage VALUES (new.tenant, 1, new.nbytes)
    ON CONFLICT DO UPDATE SET caches = caches + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER usage_of_old AFTER DELETE ON caches WHEN old.state = 'ready' BEGIN
    UPDATE usage SET caches = caches - 1, bytes = bytes - old.nbytes WHERE tenant = old.tenant;
END;
CREATE TRIGGER usage_of_changed AFTER UPDATE OF state, nbytes ON caches BEGIN
    UPDATE usage SET
        caches = caches + (new.state = 'ready') - (old.state = 'ready'),
        bytes = bytes + (new.state = 'ready') * new.nbytes - (old.state = 'ready') * old.nbytes
    WHERE tenant = new.tenant;
END;

-- In which order the entries of tenants changed last, uses aside. The database records them itself, so that no path can
-- forget to.
CREATE TABLE changes (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    seq INTEGER NOT NULL UNIQUE
) STRICT;
CREATE INDEX changes_of_tenant ON changes (tenant, number);
CREATE TRIGGER change_of_new AFTER INSERT ON caches BEGIN
    INSERT OR REPLACE INTO changes (tenant, seq) VALUES (new.tenant, new.seq);
END;
CREATE TRIGGER change_of_changed AFTER UPDATE OF state, version, name ON caches BEGIN
    INSERT OR REPLACE INTO changes (tenant, seq) VALUES (new.tenant, new.seq);
END;
CREATE TRIGGER change_of_old AFTER DELETE ON caches BEGIN
    DELETE FROM changes WHERE seq = old.seq;
END;

-- Files, batches, requests and sources: the fields of kvshelf.store.table.Item. `seq` orders listings.
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    text TEXT NOT NULL,
    version INTEGER NOT NULL DEFAULT 0,
    open INTEGER NOT NULL,
    due REAL,
    held TEXT,
    term INTEGER NOT NULL DEFAULT 0,
    holder TEXT NOT NULL DEFAULT '',
    lease_until REAL NOT NULL DEFAULT 0,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    owner TEXT,
    after_s REAL
) STRICT;
CREATE UNIQUE INDEX jobs_by_tenant_and_id ON jobs (tenant, id);  -- as for caches
CREATE INDEX jobs_of_tenant ON jobs (kind, tenant, seq);
CREATE INDEX jobs_open ON jobs (kind, seq) WHERE open = 1;
CREATE INDEX jobs_due ON jobs (kind, due) WHERE due IS NOT NULL;
CREATE INDEX jobs_of_owner ON jobs (owner) WHERE owner IS NOT NULL;
CREATE TABLE journals (
    item TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    line BLOB NOT NULL,
    PRIMARY KEY (item, number)
) STRICT, WITHOUT ROWID;

-- What is derived from a cache ends with it. Triggers, so that no path can forget it. 9e15: never.
CREATE TRIGGER owner_ended AFTER UPDATE OF ended_at ON caches WHEN new.ended_at IS NOT NULL BEGIN
    UPDATE jobs SET due = nullif(
        min(coalesce(due, 9e15), new.ended_at + iif(new.state = 'deleted', 0, coalesce(after_s, 9e15))), 9e15
    ) WHERE owner = new.id AND tenant = new.tenant;
END;
CREATE TRIGGER owner_has_ended_before AFTER INSERT ON jobs WHEN new.owner IS NOT NULL BEGIN
    UPDATE jobs SET due = nullif(min(coalesce(jobs.due, 9e15), ended_at + iif(state = 'deleted', 0, coalesce(after_s, 9e15))), 9e15)
    FROM caches WHERE jobs.seq = new.seq AND caches.id = new.owner AND caches.tenant = new.tenant AND ended_at IS NOT NULL;
END;
CREATE TRIGGER owner_has_ended_meanwhile AFTER UPDATE OF text ON jobs WHEN new.owner IS NOT NULL BEGIN
    UPDATE jobs SET due = nullif(min(coalesce(jobs.due, 9e15), ended_at + iif(state = 'deleted', 0, coalesce(after_s, 9e15))), 9e15)
    FROM caches WHERE jobs.seq = new.seq AND caches.id = new.owner AND caches.tenant = new.tenant AND ended_at IS NOT NULL;
END;

-- A journal has the text of the result files that were written from it.
CREATE TRIGGER results_removed AFTER DELETE ON jobs WHEN old.kind = 'file' AND old.owner IS NOT NULL BEGIN
    DELETE FROM journals WHERE item = (SELECT id FROM jobs WHERE id = old.owner AND open = 0);
END;
