-- Jobs belong to users. "" is nobody: an embedded run has no users, and a service gives earlier jobs to its own.
ALTER TABLE job ADD COLUMN user TEXT NOT NULL DEFAULT '';
DROP INDEX job_name;
DROP INDEX job_request_key;
CREATE UNIQUE INDEX job_name ON job (user, name) WHERE name IS NOT NULL;
CREATE UNIQUE INDEX job_request_key ON job (user, request_key) WHERE request_key IS NOT NULL;
CREATE INDEX job_by_name ON job (name) WHERE name IS NOT NULL;
CREATE INDEX job_of_user ON job (user, created_at, id);

-- The API that a job came by, where it is not Freight's own: it alone shows the job in its way.
ALTER TABLE job ADD COLUMN api TEXT NOT NULL DEFAULT '' CHECK (api IN ('', 'openai', 'facility'));
CREATE INDEX job_of_api ON job (api, user, created_at, id) WHERE api <> '';


-- What shows who asks. Of the token itself there is only its SHA-256.
CREATE TABLE token (
    id TEXT PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE CHECK (length(digest) = 32),
    user TEXT NOT NULL CHECK (user <> ''),
    role TEXT NOT NULL CHECK (role IN ('admin', 'user')),
    label TEXT NOT NULL DEFAULT '',
    created_at REAL NOT NULL,
    expires_at REAL CHECK (expires_at IS NULL OR expires_at > created_at),
    revoked_at REAL,
    used_on TEXT,
    groups TEXT NOT NULL DEFAULT '[]' CHECK (json_type(groups) = 'array')
) STRICT;
