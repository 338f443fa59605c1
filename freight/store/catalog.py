"""The jobs of a control plane, their events and their workers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from freight.core.job import FINAL, Event, Note, State
from freight.core.openaifile import OPENAI, parts_of
from freight.core.webhook import letter_of
from freight.store.database import Database, Sharing, open_database, transaction
from freight.store.filetable import FileTable
from freight.store.folder import Locking
from freight.store.jobfilter import JobFilter
from freight.store.outbox import Outbox
from freight.store.rows import EventRow, JobRow, QuarantineRow, StintRow, WorkerRow, moved
from freight.store.timeline import Timeline
from freight.store.tokens import TokenTable

_COLUMNS: Final = (
    "id, state, reason, epoch, retried, created_at, spec, records, outcome, "
    "name, model, priority, request_key, request_digest, started_at, finished_at, user, api"
)
_ADD: Final = """
INSERT INTO job
    (id, state, created_at, spec, records, outcome, name, model, priority, request_key, request_digest, user,
     api)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_GET: Final = f"SELECT {_COLUMNS} FROM job WHERE id = ?"
_NAMED: Final = f"SELECT {_COLUMNS} FROM job WHERE user = ? AND name = ?"
_ALL_NAMED: Final = f"SELECT {_COLUMNS} FROM job WHERE name = ? ORDER BY user LIMIT 10"
_KEYED: Final = f"SELECT {_COLUMNS} FROM job WHERE user = ? AND request_key = ?"
# An id's characters sort below '~', so that this is a range of the primary key.
_PREFIXED: Final = f"SELECT {_COLUMNS} FROM job WHERE id >= ?1 AND id < ?1 || '~' AND (?2 IS NULL OR user = ?2) LIMIT 2"
_ALL: Final = f"SELECT {_COLUMNS} FROM job ORDER BY created_at, id"
_UNFINISHED: Final = (
    f"SELECT {_COLUMNS} FROM job WHERE state NOT IN ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMED_OUT') "
    "ORDER BY created_at, id"
)
_PAGE: Final = (
    f"SELECT {_COLUMNS} FROM job WHERE (created_at, id) < (?, ?) AND {{}} ORDER BY created_at DESC, id DESC LIMIT ?"
)
_PAGE_OF_API: Final = (
    f"SELECT {_COLUMNS} FROM job WHERE api = ? AND user = ? AND (created_at, id) < (?, ?) AND api <> '' "
    "AND state IN (SELECT value FROM json_each(?)) ORDER BY created_at DESC, id DESC LIMIT ?"
)
_LAST_ENDED_OF_API: Final = (
    f"SELECT {_COLUMNS} FROM job WHERE api = ? AND finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT ?"
)
_NAMES: Final = (
    "SELECT user, name FROM job WHERE name IS NOT NULL AND (name, user) > (?, ?) ORDER BY name, user LIMIT ?"
)
_NAMES_OF: Final = "SELECT user, name FROM job WHERE user = ? AND name IS NOT NULL AND name > ? ORDER BY name LIMIT ?"
_ALL_NAMES_OF: Final = "SELECT name FROM job WHERE user = ? AND name IS NOT NULL ORDER BY name"
_IDS_OF: Final = "SELECT id FROM job WHERE user = ?"
_ACTIVE: Final = (
    "SELECT count(*) FROM job WHERE user = ? AND state NOT IN ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMED_OUT')"
)
_ADOPT: Final = "UPDATE job SET user = ? WHERE user = ''"
_OLD: Final = "SELECT id FROM job WHERE finished_at < ? ORDER BY finished_at"
_MOVE: Final = (
    "UPDATE job SET state = ?, reason = ?, epoch = ?, retried = ?, started_at = ?, finished_at = ? WHERE id = ?"
)
_OUTCOME: Final = "UPDATE job SET outcome = ? WHERE id = ?"
_RECORDS: Final = "UPDATE job SET records = ?, outcome = ? WHERE id = ?"
_SPEC: Final = "UPDATE job SET spec = ? WHERE id = ?"
_DELETE: Final = "DELETE FROM job WHERE id = ?"
_EVENT: Final = """
INSERT INTO event (job, number, at, event, state, detail)
SELECT ?1, coalesce(max(number), 0) + 1, ?2, ?3, ?4, ?5 FROM event WHERE job = ?1
"""
_NOTE: Final = """
INSERT INTO event (job, number, at, event, state, detail)
SELECT ?1, coalesce(max(number), 0) + 1, ?2, ?3, (SELECT state FROM job WHERE id = ?1), ?4 FROM event WHERE job = ?1
"""
_EVENTS: Final = "SELECT at, event, state, detail FROM event WHERE job = ? ORDER BY number"
_WORKER: Final = (
    "INSERT INTO worker (id, job, source, folder, devices, log, launch, started_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_WORKER_RUNS: Final = "UPDATE worker SET process = ? WHERE id = ?"
_WORKER_JOB: Final = "UPDATE worker SET job = ? WHERE id = ?"
_WORKER_END: Final = "UPDATE worker SET ended_at = ?, detail = ?, job = NULL WHERE id = ?"
_WORKERS: Final = (
    "SELECT id, job, source, folder, devices, log, launch, process, started_at "
    "FROM worker WHERE ended_at IS NULL ORDER BY started_at"
)
_WORKER_FORGET: Final = "DELETE FROM worker WHERE ended_at IS NOT NULL AND id NOT IN (SELECT worker FROM stint)"
_STINT: Final = """
INSERT INTO stint (job, number, worker, began_at)
SELECT ?1, coalesce(max(number), 0) + 1, ?2, ?3 FROM stint WHERE job = ?1
RETURNING number
"""
_STINT_END: Final = "UPDATE stint SET ended_at = max(began_at, ?) WHERE worker = ? AND ended_at IS NULL"
_STINTS: Final = """
SELECT stint.number, stint.worker, stint.began_at, stint.ended_at, coalesce(worker.log, '')
FROM stint LEFT JOIN worker ON worker.id = stint.worker WHERE stint.job = ? ORDER BY stint.number
"""
_QUARANTINE: Final = "INSERT OR REPLACE INTO quarantine (device, since, words, pid, hold) VALUES (?, ?, ?, ?, ?)"
_QUARANTINED: Final = "SELECT device, since, words, pid, hold FROM quarantine ORDER BY device"
_QUARANTINE_END: Final = "DELETE FROM quarantine WHERE device = ?"
_PIN: Final = "INSERT OR REPLACE INTO pin (model, workers) VALUES (?, ?)"
_PINS: Final = "SELECT model, workers FROM pin ORDER BY model"
_UNPIN: Final = "DELETE FROM pin WHERE model = ?"


class Catalog:
    """What the control plane knows of its jobs. Not for several threads at once."""

    def __init__(self, path: Path, locking: Locking, sharing: Sharing = Sharing.ALONE) -> None:
        self._connection: Database = open_database(path, "catalog_migrations", locking, sharing)
        self.tokens = TokenTable(self._connection)
        self.files = FileTable(self._connection)
        self.outbox = Outbox(self._connection)
        self.timeline = Timeline(self._connection)

    def close(self) -> None:
        """Close the database; what was committed is on disk."""
        self._connection.close()

    def is_damaged(self) -> bool:
        """Return whether any part of the database cannot be trusted; SQLite raises for some of these itself."""
        return self._connection.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",)

    def add(
        self,
        job: str,
        spec: dict[str, Any],
        records: int | None,
        outcome: dict[str, Any] | None,
        now: float,
        *,
        name: str | None = None,
        model: str = "",
        priority: int = 0,
        request_key: str | None = None,
        request_digest: str | None = None,
        user: str = "",
        api: str = "",
    ) -> JobRow:
        """Add a job of so many records in its first state; `outcome` is what is known before it has one."""
        with transaction(self._connection):
            self._connection.execute(
                _ADD,
                (
                    job, State.VALIDATING, now, _json(spec), records, _json(outcome), name, model, priority,
                    request_key, request_digest, user, api,
                ),
            )  # fmt: skip
        return self.get(job)

    def get(self, job: str) -> JobRow:
        """Return a job; raise KeyError when there is none of that id."""
        row = self._one(_GET, job)
        if row is None:
            raise KeyError(job)
        return row

    def named(self, user: str, name: str) -> JobRow | None:
        """Return a user's job of a name, None when there is none."""
        return self._one(_NAMED, user, name)

    def all_named(self, name: str) -> list[JobRow]:
        """Return the jobs of a name, of whichever user; ten at most."""
        return [_job(row) for row in self._connection.execute(_ALL_NAMED, (name,))]

    def requested(self, user: str, key: str) -> JobRow | None:
        """Return the job that a user asked for with an idempotency key, None when there is none."""
        return self._one(_KEYED, user, key)

    def starting_with(self, prefix: str, user: str | None) -> list[JobRow]:
        """Return the jobs of a user, or with None of all, whose id begins so; two at most."""
        return [_job(row) for row in self._connection.execute(_PREFIXED, (prefix, user))]

    def _one(self, statement: str, *bindings: str) -> JobRow | None:
        row = self._connection.execute(statement, bindings).fetchone()
        return None if row is None else _job(row)

    def jobs(self) -> list[JobRow]:
        """Return all jobs, the oldest first."""
        return [_job(row) for row in self._connection.execute(_ALL)]

    def unfinished(self) -> list[JobRow]:
        """Return the jobs that are in no final state, the oldest first."""
        return [_job(row) for row in self._connection.execute(_UNFINISHED)]

    def page(self, wanted: JobFilter, limit: int, before: tuple[float, str]) -> list[JobRow]:
        """Return up to `limit` jobs that are wanted, the newest first, older than (created_at, id) `before`."""
        condition, bindings = wanted.clauses()
        rows = self._connection.execute(_PAGE.format(condition), (*before, *bindings, limit))
        return [_job(row) for row in rows]

    def page_of_api(
        self, api: str, user: str, states: Sequence[State], limit: int, before: tuple[float, str]
    ) -> list[JobRow]:
        """Return up to `limit` jobs of a user that came by an API and are in one of the states, as `page` does."""
        named = msgspec.json.encode(states).decode()
        return [_job(row) for row in self._connection.execute(_PAGE_OF_API, (api, user, *before, named, limit))]

    def last_ended(self, api: str, limit: int) -> list[JobRow]:
        """Return up to `limit` jobs that came by an API and have ended, the last to do so first."""
        return [_job(row) for row in self._connection.execute(_LAST_ENDED_OF_API, (api, limit))]

    def names(self, user: str | None, limit: int, after: tuple[str, str]) -> list[tuple[str, str]]:
        """Return (name, user) of up to `limit` jobs of a user, or with None of all, that have a name.

        In order, those after (name, user) `after`.
        """
        if user is None:
            return [(name, whose) for whose, name in self._connection.execute(_NAMES, (*after, limit))]
        return [(name, whose) for whose, name in self._connection.execute(_NAMES_OF, (user, after[0], limit))]

    def names_of(self, user: str) -> list[str]:
        """Return the names of a user's jobs."""
        return [name for (name,) in self._connection.execute(_ALL_NAMES_OF, (user,))]

    def ids_of(self, user: str) -> list[str]:
        """Return the ids of a user's jobs."""
        return [job for (job,) in self._connection.execute(_IDS_OF, (user,))]

    def active(self, user: str) -> int:
        """Return how many jobs of a user are in no final state."""
        row = self._connection.execute(_ACTIVE, (user,)).fetchone()
        return row[0] if row else 0

    def adopt(self, user: str) -> None:
        """Give the jobs that nobody has to a user."""
        with transaction(self._connection):
            self._connection.execute(_ADOPT, (user,))

    def finished_before(self, at: float) -> list[str]:
        """Return the ids of the jobs that ended before `at`."""
        return [job for (job,) in self._connection.execute(_OLD, (at,))]

    def delete(self, job: str) -> None:
        """Forget a job and its events, and workers that have ended and served no other."""
        with transaction(self._connection):
            self._connection.execute(_DELETE, (job,))
            self._connection.execute(_WORKER_FORGET)

    def happened(self, row: JobRow, event: Event, now: float, detail: str = "") -> JobRow:
        """Record an event of a job and return the job after it; one that its state does not allow changes nothing."""
        after = moved(row, event, detail, now)
        with transaction(self._connection):
            self._connection.execute(
                _MOVE,
                (after.state, detail, after.epoch, after.retried, after.started_at, after.finished_at, row.id),
            )
            self._connection.execute(_EVENT, (row.id, now, event, after.state, detail))
            self.files.withdraw(row.id)
            if after.state in FINAL:
                self._at_end(after, now)
        return after

    def _at_end(self, row: JobRow, now: float) -> None:
        """Add what follows from a job's end to the transaction in which it ends."""
        url = row.spec.get("request", {}).get("notify")
        letter = letter_of(row.id, row.epoch, row.state, url, now, row.api) if url else None
        if letter is not None:
            self.outbox.put(letter)
        if row.api == OPENAI:
            kept_s = row.spec.get("more", {}).get("output_expires_after")
            self.files.offer(row.id, row.user, parts_of(row.records, row.outcome), now, kept_s)

    def events(self, job: str) -> list[EventRow]:
        """Return what happened to a job, in order."""
        return [EventRow(*row) for row in self._connection.execute(_EVENTS, (job,))]

    def set_outcome(self, job: str, outcome: dict[str, Any] | None) -> None:
        """Note what came of a job; None takes it back."""
        with transaction(self._connection):
            self._connection.execute(_OUTCOME, (_json(outcome), job))

    def set_spec(self, job: str, spec: dict[str, Any]) -> None:
        """Change what is kept of a job's request."""
        with transaction(self._connection):
            self._connection.execute(_SPEC, (_json(spec), job))

    def set_records(self, job: str, records: int, outcome: dict[str, Any] | None) -> None:
        """Note how many records a job has, once its input was read, and what is known of their results."""
        with transaction(self._connection):
            self._connection.execute(_RECORDS, (records, _json(outcome), job))

    def worker_starts(
        self,
        worker: str,
        job: str | None,
        source: str,
        folder: str,
        now: float,
        devices: Sequence[str] = (),
        log: str = "",
        launch: dict[str, Any] | None = None,
    ) -> int:
        """Note the intent to start a worker, before it starts; return its number among the job's, 0 without a job."""
        with transaction(self._connection):
            encoded = msgspec.json.encode(list(devices)).decode()
            values = (worker, job, source, folder, encoded, log, _json(launch or {}), now)
            self._connection.execute(_WORKER, values)
            if job is None:
                return 0
            number = self._begin_stint(job, worker, now)
            if devices:
                self._note(job, Note.LOADING, now, f"worker {number} on {', '.join(devices)}")
            return number

    def noted(self, job: str, note: Note, now: float, detail: str) -> None:
        """Add a note to a job's timeline."""
        with transaction(self._connection):
            self._note(job, note, now, detail)

    def _note(self, job: str, note: Note, now: float, detail: str) -> None:
        self._connection.execute(_NOTE, (job, now, note, detail))

    def worker_runs(self, worker: str, process: dict[str, Any]) -> None:
        """Note what a worker can be adopted by."""
        with transaction(self._connection):
            self._connection.execute(_WORKER_RUNS, (_json(process), worker))

    def worker_joins(self, worker: str, job: str, now: float) -> int:
        """Note that a warm worker serves a job from now on; return its number among the job's."""
        with transaction(self._connection):
            self._connection.execute(_WORKER_JOB, (job, worker))
            return self._begin_stint(job, worker, now)

    def _begin_stint(self, job: str, worker: str, now: float) -> int:
        row = self._connection.execute(_STINT, (job, worker, now)).fetchone()
        assert row is not None
        return row[0]

    def worker_leaves(self, worker: str, now: float) -> None:
        """Note that a worker serves no job any more, and lives on."""
        with transaction(self._connection):
            self._connection.execute(_WORKER_JOB, (None, worker))
            self._connection.execute(_STINT_END, (now, worker))

    def worker_ended(self, worker: str, detail: str, now: float) -> None:
        """Note that a worker and all its processes are gone."""
        with transaction(self._connection):
            self._connection.execute(_WORKER_END, (now, detail, worker))
            self._connection.execute(_STINT_END, (now, worker))

    def live_workers(self) -> list[WorkerRow]:
        """Return the workers that have not been seen to end: after a crash, what may still run."""
        return [_worker(row) for row in self._connection.execute(_WORKERS)]

    def stints(self, job: str) -> list[StintRow]:
        """Return the workers that a job has had, in the order in which they came."""
        return [StintRow(*row) for row in self._connection.execute(_STINTS, (job,))]

    def quarantine(self, row: QuarantineRow) -> None:
        """Note that something is left on a device, or what is now."""
        with transaction(self._connection):
            values = (row.device, row.since, row.words, row.pid, _json(row.hold))
            self._connection.execute(_QUARANTINE, values)

    def quarantined(self) -> list[QuarantineRow]:
        """Return the devices on which something is left."""
        rows = self._connection.execute(_QUARANTINED)
        return [QuarantineRow(device, since, words, pid, _decoded(hold)) for device, since, words, pid, hold in rows]

    def end_quarantine(self, device: str) -> None:
        """Note that a device may be used again."""
        with transaction(self._connection):
            self._connection.execute(_QUARANTINE_END, (device,))

    def pin(self, model: str, workers: int) -> None:
        """Note that so many workers of a model are to be up always."""
        with transaction(self._connection):
            self._connection.execute(_PIN, (model, workers))

    def unpin(self, model: str) -> None:
        """Note that a model need not be up."""
        with transaction(self._connection):
            self._connection.execute(_UNPIN, (model,))

    def pins(self) -> dict[str, int]:
        """Return the pinned models, and how many workers of each are to be up."""
        return {model: workers for model, workers in self._connection.execute(_PINS)}


def _json(value: dict[str, Any] | None) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def _decoded(text: str | None) -> Any:
    return None if text is None else msgspec.json.decode(text)


def _job(row: tuple[Any, ...]) -> JobRow:
    job, state, reason, epoch, retried, created_at, spec, records, outcome, *rest = row
    return JobRow(
        job, State(state), reason, epoch, retried, created_at, _decoded(spec), records, _decoded(outcome), *rest
    )


def _worker(row: tuple[Any, ...]) -> WorkerRow:
    worker, job, source, folder, devices, log, launch, process, started_at = row
    return WorkerRow(
        worker, job, source, folder, _decoded(devices), log, _decoded(launch), _decoded(process), started_at
    )
