"""The jobs of a control plane, their events and their workers."""

from pathlib import Path
from typing import Any, Final

import msgspec

from freight.core.job import Event, State, advance
from freight.store.database import Database, open_database, transaction
from freight.store.folder import Locking

_ADD: Final = "INSERT INTO job (id, state, created_at, spec, records, outcome) VALUES (?, ?, ?, ?, ?, ?)"
_GET: Final = "SELECT id, state, reason, epoch, retried, created_at, spec, records, outcome FROM job WHERE id = ?"
_ALL: Final = (
    "SELECT id, state, reason, epoch, retried, created_at, spec, records, outcome FROM job ORDER BY created_at, id"
)
_MOVE: Final = "UPDATE job SET state = ?, reason = ?, epoch = ?, retried = ? WHERE id = ?"
_OUTCOME: Final = "UPDATE job SET outcome = ? WHERE id = ?"
_DELETE: Final = "DELETE FROM job WHERE id = ?"
_EVENT: Final = """
INSERT INTO event (job, number, at, event, state, detail)
SELECT ?1, coalesce(max(number), 0) + 1, ?2, ?3, ?4, ?5 FROM event WHERE job = ?1
"""
_EVENTS: Final = "SELECT at, event, state, detail FROM event WHERE job = ? ORDER BY number"
_WORKER: Final = "INSERT INTO worker (id, job, source, folder, started_at) VALUES (?, ?, ?, ?, ?)"
_WORKER_END: Final = "UPDATE worker SET ended_at = ?, detail = ? WHERE id = ?"
_WORKERS: Final = "SELECT id, folder FROM worker WHERE ended_at IS NULL ORDER BY started_at"


class JobRow(msgspec.Struct, frozen=True):
    """A job as it is on disk. `spec` and `outcome` are the control plane's, as JSON.

    `epoch` goes up with every continuation and retry; errors of epochs below `retried` run again.
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


def moved(row: JobRow, event: Event, detail: str = "") -> JobRow:
    """Return the job after an event; raise IllegalTransition where its state does not allow it."""
    epoch = row.epoch + (event in (Event.RETRIED, Event.CONTINUED))
    retried = epoch if event is Event.RETRIED else row.retried
    return msgspec.structs.replace(row, state=advance(row.state, event), reason=detail, epoch=epoch, retried=retried)


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker that was started and has not been seen to end, and its folder."""

    id: str
    folder: str


class EventRow(msgspec.Struct, frozen=True):
    """Something that happened to a job, and the state it led to."""

    at: float
    event: str
    state: str
    detail: str


class Catalog:
    """What the control plane knows of its jobs. Not for several threads at once."""

    def __init__(self, path: Path, locking: Locking) -> None:
        self._connection: Database = open_database(path, "catalog_migrations", locking)

    def close(self) -> None:
        """Close the database; what was committed is on disk."""
        self._connection.close()

    def is_damaged(self) -> bool:
        """Return whether any part of the database cannot be trusted; SQLite raises for some of these itself."""
        return self._connection.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",)

    def add(self, job: str, spec: dict[str, Any], records: int, outcome: dict[str, Any] | None, now: float) -> JobRow:
        """Add a job of so many records in its first state; `outcome` is what is known before it has one."""
        with transaction(self._connection):
            self._connection.execute(_ADD, (job, State.VALIDATING, now, _json(spec), records, _json(outcome)))
        return self.get(job)

    def get(self, job: str) -> JobRow:
        """Return a job; raise KeyError when there is none of that id."""
        row = self._connection.execute(_GET, (job,)).fetchone()
        if row is None:
            raise KeyError(job)
        return _job(row)

    def jobs(self) -> list[JobRow]:
        """Return all jobs, the oldest first."""
        return [_job(row) for row in self._connection.execute(_ALL)]

    def delete(self, job: str) -> None:
        """Forget a job, its events and its workers."""
        with transaction(self._connection):
            self._connection.execute(_DELETE, (job,))

    def happened(self, row: JobRow, event: Event, now: float, detail: str = "") -> JobRow:
        """Record an event of a job and return the job after it; one that its state does not allow changes nothing."""
        after = moved(row, event, detail)
        with transaction(self._connection):
            self._connection.execute(_MOVE, (after.state, detail, after.epoch, after.retried, row.id))
            self._connection.execute(_EVENT, (row.id, now, event, after.state, detail))
        return after

    def events(self, job: str) -> list[EventRow]:
        """Return what happened to a job, in order."""
        return [EventRow(*row) for row in self._connection.execute(_EVENTS, (job,))]

    def set_outcome(self, job: str, outcome: dict[str, Any] | None) -> None:
        """Note what came of a job; None takes it back."""
        with transaction(self._connection):
            self._connection.execute(_OUTCOME, (_json(outcome), job))

    def worker_starts(self, worker: str, job: str, source: str, folder: str, now: float) -> None:
        """Note the intent to start a worker, before it starts."""
        with transaction(self._connection):
            self._connection.execute(_WORKER, (worker, job, source, folder, now))

    def worker_ended(self, worker: str, detail: str, now: float) -> None:
        """Note that a worker and all its processes are gone."""
        with transaction(self._connection):
            self._connection.execute(_WORKER_END, (now, detail, worker))

    def live_workers(self) -> list[WorkerRow]:
        """Return the workers that have not been seen to end: after a crash, what may still run."""
        return [WorkerRow(*row) for row in self._connection.execute(_WORKERS)]


def _json(value: dict[str, Any] | None) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def _job(row: tuple[Any, ...]) -> JobRow:
    job, state, reason, epoch, retried, created_at, spec, records, outcome = row
    return JobRow(
        job, State(state), reason, epoch, retried, created_at, msgspec.json.decode(spec), records,
        None if outcome is None else msgspec.json.decode(outcome),
    )  # fmt: skip
