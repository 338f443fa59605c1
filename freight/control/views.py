"""Jobs and workers in the words of the API."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from freight.control.context import Checking
from freight.control.jobrun import JobRun
from freight.control.shelf import output_of, request_of
from freight.control.waiting import WaitingJob
from freight.control.workerrun import WorkerRun
from freight.core.job import FINAL, Totals, running_s
from freight.core.progress import Progress
from freight.core.view import FailureKind, JobEvent, JobStatus, JobSummary, WorkerStatus
from freight.core.webhook import receiver_of
from freight.store.results import Failure
from freight.store.rows import EventRow, JobRow

# What is said of a job to those whose it is not.
OTHERS_JOB: Final = "another user's job"
InHand = JobRun | WaitingJob | Checking | None
# What of a request is an option of the job, and not said elsewhere.
_OPTIONS = (
    "workers", "gpus", "pool", "timeout_s", "record_timeout_s", "concurrency", "strict", "ignore_record_model",
    "order", "dedupe",
)  # fmt: skip


def when(at: float | None) -> str | None:
    """Return a time of day as RFC 3339 in UTC."""
    return (
        None
        if at is None
        else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def totals_of(row: JobRow, hand: InHand) -> Totals:
    """Return the counts of a job: as they are now, or as they were when it ended."""
    if isinstance(hand, JobRun):
        return hand.dispatcher.totals
    if isinstance(hand, WaitingJob):
        return hand.totals
    known = {key: value for key, value in (row.outcome or {}).items() if key != "outputs"}
    return Totals(**known)


def reason_of(row: JobRow, hand: InHand) -> str:
    """Return why a job is where it is."""
    if isinstance(hand, JobRun):
        return hand.progress(time.monotonic()).reason
    return (isinstance(hand, WaitingJob) and hand.reason) or row.reason


def _summary(row: JobRow, hand: InHand) -> dict[str, Any]:
    row = hand.row if hand is not None else row
    totals = totals_of(row, hand)
    return {
        "id": row.id,
        "name": row.name or "",
        "user": row.user,
        "model": row.model,
        "state": row.state.value,
        "reason": reason_of(row, hand),
        "priority": row.priority,
        "records": row.records,
        "done": totals.done,
        "failed": totals.failed,
        "created_at": when(row.created_at) or "",
        "started_at": when(row.started_at),
        "finished_at": when(row.finished_at),
    }


def summary(row: JobRow, hand: InHand) -> JobSummary:
    """Return a job as lists show it."""
    return JobSummary(**_summary(row, hand))


def status(row: JobRow, hand: InHand, events: Sequence[EventRow], failures: Sequence[Failure]) -> JobStatus:
    """Return all about a job."""
    row = hand.row if hand is not None else row
    request, totals = request_of(row), totals_of(row, hand)
    asked, output = asdict(request), output_of(row)
    workers = hand.workers.values() if isinstance(hand, JobRun) else ()
    return JobStatus(
        **_summary(row, hand),
        file=request.file,
        bytes=row.spec["input"]["bytes"],
        sha256=row.spec["input"]["sha256"],
        options={key: asked[key] for key in _OPTIONS},
        output=str(output) if output else None,
        notify=receiver_of(request.notify) if request.notify else None,
        ran_s=_ran_s(row, hand, events),
        cut=totals.cut,
        input_tokens=totals.input_tokens,
        output_tokens=totals.output_tokens,
        cached_tokens=totals.cached_tokens,
        **_pace(hand.progress(time.monotonic()) if isinstance(hand, JobRun) else None),
        failures=[FailureKind(code=f.code, status=f.status, count=f.count, example=f.example) for f in failures],
        workers=[worker_status(worker, False) for worker in workers],
        events=[JobEvent(at=when(e.at) or "", event=e.event, state=e.state, detail=e.detail) for e in events],
    )


def _ran_s(row: JobRow, hand: InHand, events: Sequence[EventRow]) -> float:
    if isinstance(hand, (JobRun, WaitingJob)):
        return hand.ran_s
    until = row.finished_at if row.state in FINAL and row.finished_at else time.time()
    return running_s([(e.at, e.event, e.state) for e in events], until)


def _pace(progress: Progress | None) -> dict[str, Any]:
    if progress is None:
        return {}
    return {
        "input_rate": progress.input_rate,
        "output_rate": progress.output_rate,
        "record_rate": progress.record_rate,
        "in_flight": progress.in_flight,
        "eta_s": progress.eta_s(),
    }


def others_worker(worker: WorkerRun, is_pinned: bool, is_public: bool) -> WorkerStatus:
    """Return a worker of another user's job: that it is there, and its model where that `is_public`."""
    return WorkerStatus(
        id=worker.id,
        model=worker.model if is_public else "",
        place=worker.place() if worker.devices else "",
        phase="stopping" if worker.stopping else worker.phase.value,
        note="",
        job=OTHERS_JOB,
        number=None,
        in_flight=worker.in_flight,
        started_at=when(worker.started_at) or "",
        devices=list(worker.devices),
        pinned=is_pinned,
    )


def worker_status(worker: WorkerRun, is_pinned: bool) -> WorkerStatus:
    """Return a worker in the words of the API."""
    job, load = worker.job, worker.load
    return WorkerStatus(
        id=worker.id,
        model=worker.model,
        place=worker.place(),
        phase="stopping" if worker.stopping else worker.phase.value,
        note=worker.note,
        job=job.row.name if job is not None else None,
        number=worker.number if job is not None else None,
        in_flight=worker.in_flight,
        started_at=when(worker.started_at) or "",
        devices=list(worker.devices),
        pinned=is_pinned,
        user=job.row.user if job is not None else None,
        running=load.running if load else None,
        waiting=load.waiting if load else None,
        cache_use=load.cache_use if load else None,
    )
