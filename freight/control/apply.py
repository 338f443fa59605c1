"""The only code that performs what the planner decided: the intent on disk first, then the effect, then the outcome."""

import asyncio
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from freight.control.jobrun import JobRun, WorkerRun
from freight.control.output import ASIDE, mark_of, put_in_place, rows, write_aside
from freight.core.answer import BATCH_EXPIRED, BATCH_FAILED
from freight.core.device import Device
from freight.core.job import Event, State
from freight.core.messages import Phase
from freight.core.plan import Action, Fail, Finalize, StartWorker, StopWorkers, Suspend, TimeOut, Unsuspend, Wait
from freight.core.record import custom_id_of
from freight.errors import LauncherError
from freight.launchers.base import Launcher, WorkerPlace
from freight.store.catalog import Catalog, moved
from freight.store.database import StorageFull

# A worker that was told to end and has not by then is killed.
STOP_GRACE_S: Final = 45.0
# In the control plane's folder for sockets.
CONTROL_SOCKET: Final = "control.sock"
# A device that somebody else holds is tried again this often.
_STRANGER_S: Final = 1.0
_T = TypeVar("_T")


class Apply:
    """Performs actions on one control plane's jobs.

    `failure` is what broke the watch over a worker.
    """

    def __init__(
        self, catalog: Catalog, launcher: Launcher, folder: Path, writer: ThreadPoolExecutor, changed: asyncio.Event
    ) -> None:
        self._catalog = catalog
        self._launcher = launcher
        self._folder = folder
        self._writer = writer
        self._changed = changed
        self._watching: set[asyncio.Task[None]] = set()
        self._strangers: dict[str, tuple[str, float]] = {}
        self.failure: Exception | None = None

    async def do(self, action: Action, job: JobRun) -> None:
        """Perform one action."""
        match action:
            case StartWorker():
                await self._start_worker(job, action)
            case StopWorkers():
                self.stop_workers(job)
            case Suspend(reason=reason):
                await self.happened(job, Event.BLOCKED, reason)
            case Unsuspend():
                await self.happened(job, Event.UNBLOCKED)
            case Finalize():
                await self._finalize(job)
            case Fail(reason=reason):
                await self._end_short(job, Event.STARTS_EXHAUSTED, BATCH_FAILED, reason)
            case TimeOut():
                reason = f"the job's time ran out (--timeout {job.options.timeout_s:g} s)"
                await self._end_short(job, Event.TIME_RAN_OUT, BATCH_EXPIRED, reason)
            case Wait(reason=reason):
                job.wait_reason = reason

    def stranger(self, device: str, now: float) -> str:
        """Return who held a device when it was last tried, not long ago; "" when it may be tried again."""
        who, at = self._strangers.get(device, ("", now))
        return who if now - at < _STRANGER_S else ""

    async def happened(self, job: JobRun, event: Event, detail: str = "") -> None:
        """Record an event of a job. A full disk does not keep a job from changing its state: the file catches up."""
        try:
            job.row = await self._write(self._catalog.happened, job.row, event, time.time(), detail)
        except StorageFull:
            job.row = moved(job.row, event, detail)

    async def _write(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, call, *args)

    async def follow(self, job: JobRun) -> None:
        """Move a job by what its workers have come to."""
        live = [worker for worker in job.workers.values() if not worker.stopping]
        if job.row.state == State.QUEUED and live:
            await self.happened(job, Event.WORKER_GRANTED)
        if job.row.state == State.STARTING and any(worker.phase is Phase.READY for worker in live):
            await self.happened(job, Event.WORKER_READY)
        if job.row.state in (State.STARTING, State.RUNNING) and not job.workers and job.dispatcher.left:
            await self.happened(job, Event.WORKERS_LOST)
        if live:
            job.wait_reason = ""

    async def _start_worker(self, job: JobRun, action: StartWorker) -> None:
        device = self._device(action.device)
        if device is not None:
            holder = self._launcher.take(device)
            if holder is not None:
                self._strangers[device.id] = (f"process {holder.pid} ({holder.what})", time.monotonic())
                return
        worker = uuid.uuid4().hex[:12]
        folder = self._folder / worker
        log = job.folder / "workers" / f"{worker}.log"
        try:
            await self._write(self._catalog.worker_starts, worker, job.row.id, action.source, str(folder), time.time())
        except StorageFull as error:
            if device is not None:
                self._launcher.release(device)
            job.found_full(time.monotonic(), error.message)
            return
        place = WorkerPlace(worker, self._folder / CONTROL_SOCKET, folder, log, device)
        try:
            _make_folders(folder, log.parent)
            process = self._launcher.start(place)
        except LauncherError as error:
            job.start_failed(action.device or action.source, error.message, not error.transient, time.monotonic())
            await self._write(self._catalog.worker_ended, worker, error.message, time.time())
            return
        run = WorkerRun(worker, action.source, action.device, folder, log, process)
        job.workers[worker] = run
        task = asyncio.create_task(self._watch(job, run))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
        self._changed.set()

    def _device(self, wanted: str | None) -> Device | None:
        return next((device for device in self._launcher.devices() if device.id == wanted), None)

    async def _watch(self, job: JobRun, worker: WorkerRun) -> None:
        """Wait for a worker's end, prove that all of it is gone, and give back what it held."""
        try:
            await self._see_off(job, worker)
        except Exception as error:
            self.failure = error
        self._changed.set()

    async def _see_off(self, job: JobRun, worker: WorkerRun) -> None:
        status = await worker.process.ended()
        await worker.process.clear()
        del job.workers[worker.id]
        job.dispatcher.lost(worker.id)
        shutil.rmtree(worker.folder, ignore_errors=True)
        if not worker.stopping:
            words = _last_words(worker, status)
            job.start_failed(worker.place(), words, worker.hopeless, time.monotonic())
        with suppress(StorageFull):  # The next control plane on this folder finds out for itself.
            await self._write(self._catalog.worker_ended, worker.id, worker.note, time.time())

    def stop_workers(self, job: JobRun) -> None:
        """Tell all workers of a job to end."""
        for worker in job.workers.values():
            self.stop_worker(worker)

    def stop_worker(self, worker: WorkerRun) -> None:
        """Tell a worker to end; one that does not is killed after a grace."""
        if not worker.stopping:
            worker.stopping = True
            asyncio.get_running_loop().call_later(STOP_GRACE_S, worker.process.kill)

    async def end_workers(self, job: JobRun) -> None:
        """Stop all workers of a job and wait until nothing of them is left."""
        self.stop_workers(job)
        while self._watching:
            await asyncio.gather(*self._watching)

    async def _finalize(self, job: JobRun) -> None:
        await self.happened(job, Event.LAST_RECORD_DONE)
        try:
            await self._write(self._put_output, job, BATCH_FAILED, "")
        except StorageFull as error:
            job.found_full(time.monotonic(), "no space left for the results file")
            await self.happened(job, Event.BLOCKED, error.message)
        else:
            await self.happened(job, Event.OUTPUT_WRITTEN)

    async def _end_short(self, job: JobRun, event: Event, code: str, reason: str) -> None:
        """End a job without all its answers. Where there are any, its output says so for every other record."""
        if job.waits_for_room(time.monotonic()):
            return
        if await self._write(job.results.has_answers):
            try:
                await self._write(self._put_output, job, code, reason)
            except StorageFull as error:
                job.found_full(time.monotonic(), error.message)
                job.wait_reason = error.message
                return
        await self.happened(job, event, reason)

    def _put_output(self, job: JobRun, code: str, reason: str) -> None:
        def missing(index: int) -> tuple[bytes | None, str, str]:
            return custom_id_of(job.dispatcher.read_lines([index])[0]), code, reason

        job.file.check_unchanged()
        aside = job.folder / ASIDE
        lines = rows(job.results, job.index.records, missing)
        written = write_aside(aside, job.row.id, lines, job.index.records)
        before = mark_of(job.row.outcome, job.output)
        # The intent first: after a crash in between, what stands at the output is known for ours, old or new.
        outcome = job.outcome(written, before)
        self._catalog.set_outcome(job.row.id, outcome)
        put_in_place(aside, job.output, job.force or before is not None)
        job.row = msgspec.structs.replace(job.row, outcome=outcome)


def _last_words(worker: WorkerRun, status: int) -> str:
    why = worker.note or f"the worker process ended with status {status}"
    return "\n".join([why, *(f"  | {line}" for line in worker.log_tail)])


def _make_folders(*folders: Path) -> None:
    try:
        for folder in folders:
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise LauncherError(f"cannot make a worker's folder: {error.strerror}", transient=True) from error
