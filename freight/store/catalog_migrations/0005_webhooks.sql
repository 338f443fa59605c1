-- What receivers are still to be told of jobs' ends. What was delivered or given up is not here any more.
CREATE TABLE webhook (
    id TEXT PRIMARY KEY,
    job TEXT NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    url TEXT NOT NULL,
    receiver TEXT NOT NULL,
    event TEXT NOT NULL CHECK (event IN ('batch.completed', 'batch.failed', 'batch.cancelled', 'batch.expired')),
    body TEXT NOT NULL CHECK (json_valid(body)),
    attempts INTEGER NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    next_at REAL NOT NULL,
    created_at REAL NOT NULL
) STRICT;

CREATE INDEX webhook_due ON webhook (next_at, id);
CREATE INDEX webhook_job ON webhook (job, created_at);
