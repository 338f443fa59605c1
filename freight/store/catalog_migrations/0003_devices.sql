-- A worker may take several devices.
ALTER TABLE worker ADD COLUMN devices TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(devices));
UPDATE worker SET devices = json_array(device) WHERE device IS NOT NULL;
ALTER TABLE worker DROP COLUMN device;
-- What a worker is adopted by is more than its process.
UPDATE worker SET process = json_object('process', json(process)) WHERE process IS NOT NULL;

-- Devices on which something of a worker was left: not given to anybody until they are as before.
CREATE TABLE quarantine (
    device TEXT PRIMARY KEY,
    since REAL NOT NULL,
    words TEXT NOT NULL,
    pid INTEGER,
    hold TEXT NOT NULL CHECK (json_valid(hold))
) STRICT;

-- Models of which so many workers are to be up always.
CREATE TABLE pin (
    model TEXT PRIMARY KEY,
    workers INTEGER NOT NULL CHECK (workers >= 1)
) STRICT;
