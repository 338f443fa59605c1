"""The only code that performs what the planner decided: the intent on disk first, then the effect, then the outcome."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from freight.control.ending import Ending, HasRow
from freight.control.jobrun import JobRun
from freight.control.policy import Policy
from freight.control.quarantine import Quarantine
from freight.control.roster import Roster
from freight.control.starts import MakePlaces, Starts
from freight.control.waiting import WaitingJob
from freight.control.workerrun import WorkerRun
from freight.core.actions import (
    Cancelled,
    Fail,
    Finalize,
    JobAction,
    Join,
    PinAction,
    PinWaits,
    StartPinned,
    StartWorker,
    StopWarm,
    StopWorkers,
    Suspend,
    TimeOut,
    Unsuspend,
    Wait,
)
from freight.core.answer import BATCH_CANCELLED, BATCH_EXPIRED, BATCH_FAILED
from freight.core.job import Event, Note, State
from freight.core.messages import Phase
from freight.errors import FreightError
from freight.launchers.base import Launcher
from freight.store.catalog import Catalog
from freight.store.database import STORAGE_ERRORS, StorageFull
from freight.store.rows import JobRow

# A worker that was told to end and has not by then is killed.
STOP_GRACE_S: Final = 45.0
_T = TypeVar("_T")


class Apply:
    """Performs actions on one control plane's jobs, workers and devices.

    `is_shared`: what breaks one job ends that one alone. `deciding` is held by who calls `do`.
    """

    def __init__(
        self,
        catalog: Catalog,
        launcher: Launcher,
        control: Path,
        writer: ThreadPoolExecutor,
        changed: asyncio.Event,
        roster: Roster,
        make_places: MakePlaces,
        policy: Policy,
        deciding: asyncio.Lock,
    ) -> None:
        self._catalog = catalog
        self._writer = writer
        self._changed = changed
        self._roster = roster
        self._policy = policy
        self._watching: set[asyncio.Task[None]] = set()
        self._ending = Ending(catalog, writer, changed, deciding, policy.shared)
        self._failure: Exception | None = None
        self.quarantine = Quarantine(catalog, launcher, self._write, changed, policy.quarantine_retry_s)
        self.starts = Starts(
            catalog, launcher, control, self._write, changed, roster, make_places, policy.shared, self.watch
        )

    async def do(self, action: JobAction) -> None:
        """Perform one action on a job, which is opened first where it has waited for its turn."""
        if isinstance(action, Wait):
            self._note_reason(action)
            return
        job = self._roster.open.get(action.job) or await self._open(action)
        if job is None or job.finishing is not None:
            return
        match action:
            case StartWorker():
                await self.starts.start(job, action)
            case Join():
                await self._join(job, action.worker)
            case StopWorkers():
                for worker in job.workers.values():
                    self.let_go(worker)
            case Suspend(reason=reason):
                await self.happened(job, Event.BLOCKED, reason)
            case Unsuspend():
                await self.happened(job, Event.UNBLOCKED)
            case Finalize():
                await self.happened(job, Event.LAST_RECORD_DONE)
                await self._ending.end(job, Event.OUTPUT_WRITTEN, BATCH_FAILED, "")
            case Fail(reason=reason):
                exhausted = job.row.state == State.SUSPENDED and job.failure is None
                event = Event.STARTS_EXHAUSTED if exhausted else Event.BROKE
                await self._ending.end(job, event, BATCH_FAILED, reason)
            case TimeOut():
                reason = job.overtime() or "the job's time ran out"
                await self._ending.end(job, Event.TIME_RAN_OUT, BATCH_EXPIRED, reason)
            case Cancelled():
                await self._ending.end(job, Event.WORKERS_GONE, BATCH_CANCELLED, "")

    def _note_reason(self, action: Wait) -> None:
        if action.job in self._roster.open:
            self._roster.open[action.job].wait_reason = action.reason
        elif action.job in self._roster.waiting:
            self._roster.waiting[action.job].reason = action.reason

    async def _open(self, action: JobAction) -> JobRun | None:
        """Open a job whose turn has come; one that cannot be opened is left to fail."""
        waiting = self._roster.waiting.get(action.job)
        if waiting is None:
            return None  # An earlier action of the same plan ended it.
        try:
            if waiting.failure:
                await self._end_unopened(waiting, action)
                return None
            job = await waiting.open(waiting)
        except StorageFull as error:
            waiting.reason = error.message
            return None
        except (FreightError, *STORAGE_ERRORS) as error:
            waiting.failure = f"the job's files cannot be read: {error}"
            return None
        del self._roster.waiting[action.job]
        self._roster.open[action.job] = job
        return job

    async def _end_unopened(self, waiting: WaitingJob, action: JobAction) -> None:
        """End a job that cannot be opened, as far as its state allows that."""
        match action:
            case Cancelled():
                event = Event.WORKERS_GONE
            case TimeOut():
                event = Event.TIME_RAN_OUT
            case _:
                event = Event.BROKE
        await self._write(self._catalog.happened, waiting.row, event, time.time(), waiting.failure)
        del self._roster.waiting[waiting.row.id]

    @property
    def failure(self) -> Exception | None:
        """What broke the watch over a worker, or the end of a job."""
        return self._failure or self._ending.failure

    async def happened(self, job: HasRow, event: Event, detail: str = "", must_keep: bool = False) -> JobRow:
        """Record an event of a job, as Ending.happened does."""
        return await self._ending.happened(job, event, detail, must_keep)

    async def _write(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, call, *args)

    async def follow(self, job: JobRun) -> None:
        """Move a job by what its workers have come to."""
        live = [worker for worker in job.workers.values() if not worker.is_leaving()]
        if job.row.state == State.QUEUED and live:
            await self.happened(job, Event.WORKER_GRANTED)
        if job.row.state == State.STARTING and any(worker.phase is Phase.READY for worker in live):
            await self.happened(job, Event.WORKER_READY)
        if job.row.state in (State.STARTING, State.RUNNING) and not job.workers and job.dispatcher.left:
            await self.happened(job, Event.WORKERS_LOST)
        if live:
            job.wait_reason = ""

    async def _join(self, job: JobRun, chosen: str) -> None:
        """Let a warm worker serve a job; its next report is answered with what that is."""
        worker = self._roster.workers.get(chosen)
        if worker is None or worker.stopping or worker.job is not None:
            return  # It has ended meanwhile.
        if worker.phase is Phase.IDLE and self._policy.shared:
            with suppress(OSError):
                os.truncate(worker.log, 0)  # What its server said while it was idle is of no job.
        # Before it is written down, so that whatever becomes of the worker meanwhile is seen to by its job.
        worker.job, job.workers[worker.id] = job, worker
        try:
            worker.number = await self._write(self._catalog.worker_joins, worker.id, job.row.id, time.time())
        except StorageFull as error:
            worker.job = None
            job.workers.pop(worker.id, None)
            # It may have been given records meanwhile.
            job.dispatcher.lost(worker.id)
            self.stop_worker(worker)
            job.found_full(time.monotonic(), error.message)
        self._changed.set()

    async def loaded(self, worker: WorkerRun) -> None:
        """Note in a job's timeline that its worker's server has come up, if it has just now."""
        took_s = worker.end_loading()
        if took_s is None:
            return
        self._roster.pin_is_up(worker)
        if worker.job is None or not worker.devices:
            return
        with suppress(StorageFull):
            detail = f"worker {worker.number} in {took_s:.1f} s"
            await self._write(self._catalog.noted, worker.job.row.id, Note.LOADED, time.time(), detail)

    async def worker_left(self, job: JobRun, worker: WorkerRun) -> None:
        """Take note that a worker has handed in all that it had of its job, and keeps its server up."""
        job.dispatcher.lost(worker.id)
        with suppress(StorageFull):
            await self._write(self._catalog.worker_leaves, worker.id, time.time())
        await asyncio.to_thread(keep_log, job.folder, worker.log, worker.number, False)
        # Only now, and in one step, so that its place is never without a holder: another job may have it.
        job.workers.pop(worker.id, None)
        worker.end_release()
        worker.job = None
        worker.since = time.monotonic()
        self._changed.set()

    def watch(self, worker: WorkerRun) -> None:
        """Wait for a worker's end, prove that all of it is gone, and give back what it held."""
        task = asyncio.create_task(self._watch(worker))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _watch(self, worker: WorkerRun) -> None:
        try:
            await self._see_off(worker)
        except Exception as error:
            self._failure = error
        self._changed.set()

    async def _see_off(self, worker: WorkerRun) -> None:
        status = await worker.process.ended()
        self._note_end(worker, status)
        for left in await worker.process.clear(self._policy.release_timeout_s):
            await self.quarantine.enter(left)
        del self._roster.workers[worker.id]
        job = worker.job
        if job is not None:
            job.workers.pop(worker.id, None)
            if self._policy.shared:
                await asyncio.to_thread(keep_log, job.folder, worker.log, worker.number, True)
        elif self._policy.shared:
            # What it wrote since its last job is of no job.
            worker.log.unlink(missing_ok=True)
        shutil.rmtree(worker.folder, ignore_errors=True)
        with suppress(StorageFull):  # The next control plane on this folder finds out for itself.
            await self._write(self._catalog.worker_ended, worker.id, worker.note, time.time())

    def _note_end(self, worker: WorkerRun, status: int | None) -> None:
        """Give back what a worker had whose process has ended, and count an end that nobody asked for.

        Its devices stay with it until they are as before.
        """
        if worker.deadline is not None:
            worker.deadline.cancel()
        was_leaving = worker.is_leaving()
        worker.end_release()
        worker.stopping = True
        if worker.job is not None:
            worker.job.dispatcher.lost(worker.id)
        if was_leaving:
            return
        words = _last_words(worker, status)
        if worker.job is not None:
            worker.job.start_failed(worker.places(), words, worker.hopeless, time.monotonic())
        else:
            self._roster.pin_failed(worker, words)
        self._changed.set()

    def let_go(self, worker: WorkerRun) -> None:
        """Have a worker leave its job: it stays for another where that is worth it, else it ends."""
        if worker.is_leaving():
            return
        if worker.phase is Phase.READY and self._is_wanted(worker):
            worker.begin_release(asyncio.get_running_loop().call_later(STOP_GRACE_S, worker.process.kill))
        else:
            self.stop_worker(worker)

    def _is_wanted(self, worker: WorkerRun) -> bool:
        """Return whether a worker should live on without its job."""
        queue = [*self._roster.waiting.values(), *self._roster.open.values()]
        return (
            self._policy.keep_warm_s > 0
            or self._roster.is_pinned(worker)
            or any(
                job.launch == worker.launch and job is not worker.job and job.row.state == State.QUEUED for job in queue
            )
        )

    async def do_for_pins(self, action: PinAction) -> None:
        """Perform an action on workers that serve no job."""
        match action:
            case StopWarm(worker=worker):
                self._stop_warm(worker)
            case StartPinned():
                pin = self._roster.pins.get(action.model)
                if pin is not None:
                    await self.starts.start_pinned(pin, action, self._policy.limits)
            case PinWaits(model=model, reason=reason):
                if model in self._roster.pins:
                    self._roster.pins[model].reason = reason

    def _stop_warm(self, chosen: str) -> None:
        """End a worker that serves no job, unless it does by now."""
        worker = self._roster.workers.get(chosen)
        if worker is not None and worker.job is None:
            self.stop_worker(worker)

    def stop_worker(self, worker: WorkerRun, grace_s: float = STOP_GRACE_S) -> None:
        """Tell a worker to end; one that does not is killed after a grace."""
        if not worker.stopping:
            worker.stopping = True
            self.expect_end(worker, grace_s)

    def expect_end(self, worker: WorkerRun, grace_s: float = STOP_GRACE_S) -> None:
        """Kill a worker that has not ended by itself after a grace."""
        if worker.deadline is None:
            worker.deadline = asyncio.get_running_loop().call_later(grace_s, worker.process.kill)

    async def end_workers(self) -> None:
        """Stop all workers and wait until nothing of them is left."""
        for worker in self._roster.workers.values():
            self.stop_worker(worker)
        while self._watching:
            await asyncio.gather(*self._watching)
        self.quarantine.stop()
        await self._ending.join()


def keep_log(folder: Path, log: Path, number: int, is_last: bool) -> None:
    """Keep what a worker wrote during a job in the job's folder; a worker that lives on writes to an empty log then."""
    kept = log_of(folder, number)
    with suppress(OSError):
        try:
            kept.parent.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "ab") as target, log.open("rb") as source:
                shutil.copyfileobj(source, target)
        finally:
            # Also where there was no room for it: it is no other job's. All who write to a log append to it.
            os.truncate(log, 0)
        if is_last:
            log.unlink()


def log_of(folder: Path, number: int) -> Path:
    """Return where the output of a job's worker is kept, by its number among the job's workers."""
    return folder / "workers" / f"{number}.log"


def _last_words(worker: WorkerRun, status: int | None) -> str:
    how = "ended by itself" if status is None else f"ended with status {status}"
    why = worker.note or f"the worker process {how}"
    return "\n".join([why, *(f"  | {line}" for line in worker.log_tail)])
