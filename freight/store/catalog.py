"""The jobs of a control plane, their events and their workers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from freight.core.job import FINAL, Event, Note, State, advance
from freight.store.database import Database, Sharing, open_database, transaction
from freight.store.folder import Locking

_COLUMNS: Final = (
    "id, state, reason, epoch, retried, created_at, spec, records, outcome, "
    "name, model, priority, request_key, request_digest, started_at, finished_at"
)
_ADD: Final = """
INSERT INTO job (id, state, created_at, spec, records, outcome, name, model, priority, request_key, request_digest)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_GET: Final = f"SELECT {_COLUMNS} FROM job WHERE id = ?"
_NAMED: Final = f"SELECT {_COLUMNS} FROM job WHERE name = ?"
_KEYED: Final = f"SELECT {_COLUMNS} FROM job WHERE request_key = ?"
# An id's characters sort below '~', so that this is a range of the primary key.
_PREFIXED: Final = f"SELECT {_COLUMNS} FROM job WHERE id >= ?1 AND id < ?1 || '~' LIMIT 2"
_ALL: Final = f"SELECT {_COLUMNS} FROM job ORDER BY created_at, id"
_UNFINISHED: Final = (
    f"SELECT {_COLUMNS} FROM job WHERE state NOT IN ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMED_OUT') "
    "ORDER BY created_at, id"
)
_PAGE: Final = (
    f"SELECT {_COLUMNS} FROM job WHERE (created_at, id) < (?, ?) AND state IN (SELECT value FROM json_each(?)) "
    "ORDER BY created_at DESC, id DESC LIMIT ?"
)
_NAMES: Final = "SELECT name FROM job WHERE name IS NOT NULL ORDER BY name"
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


class JobRow(msgspec.Struct, frozen=True):
    """A job as it is on disk. `spec` and `outcome` are the control plane's, as JSON.

    `epoch` goes up with every continuation and retry; errors of epochs below `retried` run again. `name` is None for
    the job of an embedded run; `request_key` is what a client gave so that asking twice makes one job, and
    `request_digest` what it asked for.
    """

    id: str
    state: State
    reason: str
    epoch: int
    retried: int
    created_at: float
    spec: dict[str, Any]
    records: int | None
    outcome: dict[str, Any] | None
    name: str | None = None
    model: str = ""
    priority: int = 0
    request_key: str | None = None
    request_digest: str | None = None
    started_at: float | None = None
    finished_at: float | None = None


def moved(row: JobRow, event: Event, detail: str = "", now: float | None = None) -> JobRow:
    """Return the job after an event; raise IllegalTransition where its state does not allow it."""
    state = advance(row.state, event)
    epoch = row.epoch + (event in (Event.RETRIED, Event.CONTINUED))
    return msgspec.structs.replace(
        row,
        state=state,
        reason=detail,
        epoch=epoch,
        retried=epoch if event is Event.RETRIED else row.retried,
        started_at=now if state is State.STARTING and row.started_at is None else row.started_at,
        finished_at=now if state in FINAL else None,
    )


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker that was started and has not been seen to end.

    `launch` says what its server is, `process` is what it can be adopted by, None before that was known.
    """

    id: str
    job: str | None
    source: str
    folder: str
    devices: list[str]
    log: str
    launch: dict[str, Any]
    process: dict[str, Any] | None
    started_at: float


class EventRow(msgspec.Struct, frozen=True):
    """Something that happened to a job, and the state it led to."""

    at: float
    event: str
    state: str
    detail: str


class QuarantineRow(msgspec.Struct, frozen=True):
    """A device on which something was left: since when (seconds of the clock of day), what, and by which process.

    `hold` is the launcher's, to look again.
    """

    device: str
    since: float
    words: str
    pid: int | None
    hold: dict[str, Any]


class StintRow(msgspec.Struct, frozen=True):
    """A worker's time with one job. `log` is where the worker writes while it serves the job."""

    number: int
    worker: str
    began_at: float
    ended_at: float | None
    log: str


class Catalog:
    """What the control plane knows of its jobs. Not for several threads at once."""

    def __init__(self, path: Path, locking: Locking, sharing: Sharing = Sharing.ALONE) -> None:
        self._connection: Database = open_database(path, "catalog_migrations", locking, sharing)

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
    ) -> JobRow:
        """Add a job of so many records in its first state; `outcome` is what is known before it has one."""
        with transaction(self._connection):
            self._connection.execute(
                _ADD,
                (
                    job, State.VALIDATING, now, _json(spec), records, _json(outcome), name, model, priority,
                    request_key, request_digest,
                ),
            )  # fmt: skip
        return self.get(job)

    def get(self, job: str) -> JobRow:
        """Return a job; raise KeyError when there is none of that id."""
        row = self._one(_GET, job)
        if row is None:
            raise KeyError(job)
        return row

    def named(self, name: str) -> JobRow | None:
        """Return the job of a name, None when there is none."""
        return self._one(_NAMED, name)

    def requested(self, key: str) -> JobRow | None:
        """Return the job that was asked for with an idempotency key, None when there is none."""
        return self._one(_KEYED, key)

    def starting_with(self, prefix: str) -> list[JobRow]:
        """Return the jobs whose id begins so, two at most."""
        return [_job(row) for row in self._connection.execute(_PREFIXED, (prefix,))]

    def _one(self, statement: str, binding: str) -> JobRow | None:
        row = self._connection.execute(statement, (binding,)).fetchone()
        return None if row is None else _job(row)

    def jobs(self) -> list[JobRow]:
        """Return all jobs, the oldest first."""
        return [_job(row) for row in self._connection.execute(_ALL)]

    def unfinished(self) -> list[JobRow]:
        """Return the jobs that are in no final state, the oldest first."""
        return [_job(row) for row in self._connection.execute(_UNFINISHED)]

    def page(self, states: Sequence[State], limit: int, before: tuple[float, str]) -> list[JobRow]:
        """Return up to `limit` jobs in one of the states, the newest first, older than (created_at, id) `before`."""
        named = msgspec.json.encode(states).decode()
        return [_job(row) for row in self._connection.execute(_PAGE, (*before, named, limit))]

    def names(self) -> list[str]:
        """Return the names of all jobs."""
        return [name for (name,) in self._connection.execute(_NAMES)]

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
        return after

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
