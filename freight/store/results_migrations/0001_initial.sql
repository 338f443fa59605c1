CREATE TABLE result (
    idx INTEGER PRIMARY KEY CHECK (idx >= 0),
    epoch INTEGER NOT NULL CHECK (epoch >= 0),
    code TEXT,
    status INTEGER NOT NULL DEFAULT 0,
    message TEXT NOT NULL DEFAULT '',
    input_tokens INTEGER NOT NULL DEFAULT 0 CHECK (input_tokens >= 0),
    output_tokens INTEGER NOT NULL DEFAULT 0 CHECK (output_tokens >= 0),
    cached_tokens INTEGER NOT NULL DEFAULT 0 CHECK (cached_tokens >= 0),
    cut INTEGER NOT NULL DEFAULT 0 CHECK (cut IN (0, 1)),
    tail BLOB NOT NULL
) STRICT;

CREATE INDEX failed_result ON result (code, status) WHERE code IS NOT NULL;

CREATE TABLE suspect (
    idx INTEGER PRIMARY KEY CHECK (idx >= 0),
    deaths INTEGER NOT NULL CHECK (deaths BETWEEN 1 AND 3)
) STRICT;
