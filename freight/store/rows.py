"""The rows of the catalog as values."""

from typing import Any

import msgspec

from freight.core.job import FINAL, Event, State, advance


class JobRow(msgspec.Struct, frozen=True):
    """A job as it is on disk. `spec` and `outcome` are the control plane's, as JSON.

    `epoch` goes up with every continuation and retry; errors of epochs below `retried` run again. `name` is None for
    the job of an embedded run; `request_key` is what a client gave so that asking twice makes one job, and
    `request_digest` what it asked for. `user` is whose it is, "" for an embedded run's; `api` is by what it came, ""
    for Freight's own.
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
    user: str = ""
    api: str = ""


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
