-- Whose an item of `jobs` is: what is derived from a cache ends with it. Added to the tables of `schema.sql`, also to
-- those of a home that was made without. Triggers, so that no path can forget it, not even of a process that runs an
-- earlier version on the same home.

ALTER TABLE jobs ADD COLUMN owner TEXT;
ALTER TABLE jobs ADD COLUMN after_s REAL;
CREATE INDEX jobs_of_owner ON jobs (owner) WHERE owner IS NOT NULL;
CREATE INDEX jobs_unowned ON jobs (kind) WHERE owner IS NULL AND kind IN ('source', 'response');

-- 9e15: never.
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
