-- In which order the entries of tenants changed last, uses aside. Made where it is missing, also in a home of an older
-- version: nobody asks for changes before the beginning. The database records them itself, so that no path, and no older
-- version beside this one, can forget to.
CREATE TABLE IF NOT EXISTS changes (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    seq INTEGER NOT NULL UNIQUE
) STRICT;
CREATE INDEX IF NOT EXISTS changes_of_tenant ON changes (tenant, number);
CREATE TRIGGER IF NOT EXISTS change_of_new AFTER INSERT ON caches BEGIN
    INSERT OR REPLACE INTO changes (tenant, seq) VALUES (new.tenant, new.seq);
END;
CREATE TRIGGER IF NOT EXISTS change_of_changed AFTER UPDATE OF state, version, name ON caches BEGIN
    INSERT OR REPLACE INTO changes (tenant, seq) VALUES (new.tenant, new.seq);
END;
CREATE TRIGGER IF NOT EXISTS change_of_old AFTER DELETE ON caches BEGIN
    DELETE FROM changes WHERE seq = old.seq;
END;
-- What is pinned, for the budgets of promises, and the promises that end.
CREATE INDEX IF NOT EXISTS caches_by_pin ON caches (tenant, nbytes) WHERE state = 'ready' AND pinned = 1;
CREATE INDEX IF NOT EXISTS caches_by_promise ON caches (json_extract(manifest, '$.guaranteed_until'))
    WHERE state = 'ready' AND pinned = 1;
