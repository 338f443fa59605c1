-- Lists of jobs by model, and of all names, are read in their order.
CREATE INDEX job_of_model ON job (model, created_at, id);
DROP INDEX job_by_name;
CREATE INDEX job_by_name ON job (name, user) WHERE name IS NOT NULL;
