-- Files of the OpenAI API: inputs, whose contents lie in the data folder, and what batches that have ended have to
-- give, whose contents are their jobs' results.
CREATE TABLE file (
    id TEXT PRIMARY KEY,
    user TEXT NOT NULL CHECK (user <> ''),
    filename TEXT NOT NULL CHECK (length(filename) BETWEEN 1 AND 255),
    -- Those of an output are counted when somebody asks.
    bytes INTEGER CHECK (bytes >= 0),
    sha256 TEXT CHECK (length(sha256) = 64),
    purpose TEXT NOT NULL CHECK (purpose IN ('batch', 'batch_output')),
    created_at REAL NOT NULL,
    expires_at REAL CHECK (expires_at > created_at),
    job TEXT REFERENCES job (id) ON DELETE CASCADE,
    part TEXT CHECK (part IN ('output', 'error')),
    UNIQUE (job, part),
    CHECK ((purpose = 'batch_output') = (job IS NOT NULL)),
    CHECK ((job IS NULL) = (part IS NULL)),
    CHECK (job IS NOT NULL OR (bytes IS NOT NULL AND sha256 IS NOT NULL))
) STRICT;

CREATE INDEX file_of_user ON file (user, created_at, id);
CREATE INDEX file_expiry ON file (expires_at) WHERE expires_at IS NOT NULL;
