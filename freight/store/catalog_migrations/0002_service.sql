-- A service's jobs have names; an embedded run's one job has none.
ALTER TABLE job ADD COLUMN name TEXT CHECK (name IS NULL OR length(name) BETWEEN 1 AND 64);
ALTER TABLE job ADD COLUMN model TEXT NOT NULL DEFAULT '';
ALTER TABLE job ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
ALTER TABLE job ADD COLUMN request_key TEXT;
ALTER TABLE job ADD COLUMN request_digest TEXT CHECK ((request_key IS NULL) = (request_digest IS NULL));
ALTER TABLE job ADD COLUMN started_at REAL;
ALTER TABLE job ADD COLUMN finished_at REAL;

CREATE UNIQUE INDEX job_name ON job (name) WHERE name IS NOT NULL;
CREATE UNIQUE INDEX job_request_key ON job (request_key) WHERE request_key IS NOT NULL;
CREATE INDEX job_age ON job (created_at, id);
CREATE INDEX unfinished_job ON job (created_at, id)
    WHERE state NOT IN ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMED_OUT');

-- A worker may outlive its job: it stays warm for the next one of its model.
CREATE TABLE new_worker (
    id TEXT PRIMARY KEY,
    job TEXT REFERENCES job (id) ON DELETE SET NULL,
    source TEXT NOT NULL,
    folder TEXT NOT NULL,
    device TEXT,
    log TEXT NOT NULL DEFAULT '',
    launch TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(launch)),
    process TEXT CHECK (process IS NULL OR json_valid(process)),
    started_at REAL NOT NULL,
    ended_at REAL,
    detail TEXT NOT NULL DEFAULT ''
) STRICT;

INSERT INTO new_worker (id, job, source, folder, started_at, ended_at, detail)
    SELECT id, job, source, folder, started_at, ended_at, detail FROM worker;
DROP TABLE worker;
ALTER TABLE new_worker RENAME TO worker;
CREATE INDEX live_worker ON worker (started_at) WHERE ended_at IS NULL;

-- The time that a worker serves one job; `number` counts a job's workers from 1.
CREATE TABLE stint (
    job TEXT NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    number INTEGER NOT NULL CHECK (number >= 1),
    worker TEXT NOT NULL,
    began_at REAL NOT NULL,
    ended_at REAL CHECK (ended_at IS NULL OR ended_at >= began_at),
    PRIMARY KEY (job, number)
) STRICT, WITHOUT ROWID;
