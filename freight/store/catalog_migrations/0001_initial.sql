CREATE TABLE job (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL CHECK (state IN (
        'VALIDATING', 'QUEUED', 'STARTING', 'RUNNING', 'FINALIZING', 'COMPLETED',
        'FAILED', 'CANCELLING', 'CANCELLED', 'TIMED_OUT', 'SUSPENDED'
    )),
    reason TEXT NOT NULL DEFAULT '',
    epoch INTEGER NOT NULL DEFAULT 0 CHECK (epoch >= 0),
    retried INTEGER NOT NULL DEFAULT 0 CHECK (retried BETWEEN 0 AND epoch),
    created_at REAL NOT NULL,
    spec TEXT NOT NULL CHECK (json_valid(spec)),
    records INTEGER CHECK (records >= 0),
    outcome TEXT CHECK (outcome IS NULL OR json_valid(outcome))
) STRICT;

CREATE TABLE event (
    job TEXT NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    number INTEGER NOT NULL CHECK (number >= 1),
    at REAL NOT NULL,
    event TEXT NOT NULL,
    state TEXT NOT NULL,
    detail TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (job, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE worker (
    id TEXT PRIMARY KEY,
    job TEXT NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    source TEXT NOT NULL,
    folder TEXT NOT NULL,
    started_at REAL NOT NULL,
    ended_at REAL,
    detail TEXT NOT NULL DEFAULT ''
) STRICT;

CREATE INDEX live_worker ON worker (job) WHERE ended_at IS NULL;
