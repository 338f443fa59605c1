"""Taking up what an earlier service left: jobs go on, workers that live are adopted, what is left of others ends."""

import logging
import time
from pathlib import Path
from typing import Final

from freight.control.apply import keep_log
from freight.control.context import Context
from freight.control.leftovers import sweep_worker
from freight.control.reading import Reading
from freight.control.shelf import Shelf
from freight.control.uploads import UPLOAD_KEPT_S
from freight.control.workerrun import WorkerRun
from freight.core.job import Event, State
from freight.errors import FreightError
from freight.launchers.base import Launcher
from freight.store.database import STORAGE_ERRORS
from freight.store.rows import JobRow, WorkerRow

log = logging.getLogger("freight.service")

# What is not gone by then goes into quarantine: the service need not wait for it.
_SWEEP_S: Final = 5.0
_GOING: Final = frozenset({State.STARTING, State.RUNNING, State.SUSPENDED, State.CANCELLING})


async def recover(context: Context, shelf: Shelf, reading: Reading, launcher: Launcher) -> None:
    """Bring jobs and workers of an earlier service into this one."""
    jobs = await context.write(context.catalog.jobs)
    await context.plane.apply.quarantine.take_up()
    await context.in_thread(context.folder.tidy, {row.id for row in jobs}, UPLOAD_KEPT_S)
    await context.in_thread(context.folder.tidy_files, await context.write(context.catalog.files.inputs))
    unfinished = {row.id: row for row in await context.write(context.catalog.unfinished)}
    living = {row.id: row for row in await context.write(context.catalog.live_workers)}
    adopted: dict[str, list[WorkerRun]] = {}
    until = time.monotonic() + _SWEEP_S
    for row in living.values():
        worker = _adopted(row, launcher)
        if worker is None:
            await _end(context, row, launcher, until)
            continue
        log.info("worker %s lives on", row.id)
        context.plane.roster.workers[row.id] = worker
        context.plane.apply.watch(worker)
        if row.job in unfinished:
            adopted.setdefault(row.job or "", []).append(worker)
    await context.in_thread(
        context.folder.tidy_logs, {Path(row.log) for row in living.values() if row.id in context.plane.roster.workers}
    )
    for row in unfinished.values():
        if row.state is State.VALIDATING or row.records is None:
            reading.begin(row, again=True)
        else:
            await _take_up(context, shelf, row, adopted.get(row.id, []))


def _adopted(row: WorkerRow, launcher: Launcher) -> WorkerRun | None:
    process = launcher.adopt(row.id, row.process) if row.process else None
    if process is None:
        return None
    return WorkerRun(
        row.id, row.source, tuple(row.devices), Path(row.folder), Path(row.log), process,
        launch=row.launch.get("key", ""), model=row.launch.get("model", ""), started_at=row.started_at,
        attached=False, since=time.monotonic(), loading_since=None, store=row.launch.get("store", ""),
    )  # fmt: skip


async def _take_up(context: Context, shelf: Shelf, row: JobRow, workers: list[WorkerRun]) -> None:
    if row.state is not State.QUEUED and not (workers and row.state in _GOING) and row.state is not State.CANCELLING:
        # It was last seen to run when something of it was last written, which may be long ago.
        at = min(time.time(), max(context.folder.last_sign(row.id), await _last_event(context, row)))
        row = await context.write(context.catalog.happened, row, Event.CONTROL_STOPPED, at)
    await shelf.enqueue(row)
    if not workers:
        return
    waiting = context.plane.roster.waiting[row.id]
    try:
        job = await shelf.open(waiting)
    except (FreightError, *STORAGE_ERRORS) as error:
        waiting.failure = waiting.failure or f"the job's files cannot be read: {error}"
        for worker in workers:
            context.plane.apply.stop_worker(worker)
        return
    del context.plane.roster.waiting[row.id]
    context.plane.roster.open[row.id] = job
    numbers = {stint.worker: stint.number for stint in await context.write(context.catalog.stints, row.id)}
    for worker in workers:
        worker.job, worker.number = job, numbers.get(worker.id, 0)
        job.workers[worker.id] = worker


async def _last_event(context: Context, row: JobRow) -> float:
    events = await context.write(context.catalog.events, row.id)
    return events[-1].at if events else row.created_at


async def _end(context: Context, row: WorkerRow, launcher: Launcher, until: float) -> None:
    """End what is left of a worker that is gone itself, and keep what it wrote. `until` is on the monotonic clock."""
    for left in await context.in_thread(sweep_worker, row, launcher, max(0.0, until - time.monotonic())):
        await context.plane.apply.quarantine.enter(left)
    if row.job is not None:
        stints = await context.write(context.catalog.stints, row.job)
        number = next((stint.number for stint in stints if stint.worker == row.id), 0)
        await context.in_thread(keep_log, context.folder.job(row.job), Path(row.log), number, True)
    await context.write(context.catalog.worker_ended, row.id, "gone when the service began", time.time())
