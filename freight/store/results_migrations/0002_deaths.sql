-- Which deaths of model servers were charged: a report that comes again after a crash charges none twice.
CREATE TABLE death (
    worker TEXT NOT NULL,
    number INTEGER NOT NULL CHECK (number >= 1),
    PRIMARY KEY (worker, number)
) STRICT, WITHOUT ROWID;
