"""The control plane: it owns a data folder, hears its workers, and does what the planner decides."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import msgspec

from freight.control.apply import CONTROL_SOCKET, Apply
from freight.control.jobrun import JobRun, WorkerRun
from freight.core.job import FINAL, Event, State
from freight.core.messages import PROTOCOL, Order, Orders, Phase, Report
from freight.core.plan import DeviceView, Snapshot, plan
from freight.core.progress import Progress
from freight.errors import OperationError
from freight.launchers.base import Launcher
from freight.store.catalog import Catalog
from freight.store.folder import FolderLock

_TICK_S: Final = 0.25
RUNTIME_PREFIX: Final = "freight-"
# A Unix socket's path may have 107 bytes; a worker's folder and its socket's name come after this one.
_MOST_SOCKET_PATH: Final = 107 - len("/0123456789ab/engine.sock")


class Listener(Protocol):
    """What hears the workers."""

    async def start(self) -> None:
        """Begin to listen."""
        ...

    async def stop(self) -> None:
        """Stop listening, with all answers sent."""
        ...


# Makes a listener on a Unix socket, given what answers a worker's report with its orders, both encoded.
Listen = Callable[[Path, Callable[[bytes], Awaitable[bytes]]], Listener]


class ControlPlane:
    """One control plane on one data folder.

    `writer` is the one thread that writes to the databases; `folder` is for sockets, and goes at the end.
    """

    def __init__(
        self,
        catalog: Catalog,
        launcher: Launcher,
        lock: FolderLock,
        writer: ThreadPoolExecutor,
        listen: Listen,
        folder: Path,
    ) -> None:
        self._launcher = launcher
        self._lock = lock
        self._folder = folder
        self._listener = listen(self._folder / CONTROL_SOCKET, self._exchange)
        self._jobs: dict[str, JobRun] = {}
        self._changed = asyncio.Event()
        # Held while a job's state is looked at and changed.
        self._deciding = asyncio.Lock()
        self._stopping = False
        self._failure: BaseException | None = None
        self._apply = Apply(catalog, launcher, self._folder, writer, self._changed)

    async def start(self) -> None:
        """Begin to listen to workers."""
        await self._listener.start()

    async def run(self, job: JobRun, show: Callable[[Progress], None]) -> None:
        """Run a job to its end; `show` is called with how it stands, several times a second.

        Returns with the job in a final state, or QUEUED after `stop`. Raises what made it impossible to go on,
        with all workers gone and the job QUEUED.
        """
        self._jobs[job.row.id] = job
        try:
            while job.row.state not in FINAL and not self._stopping:
                now = time.monotonic()
                await self._step(now)
                show(job.progress(now))
                if job.row.state in FINAL:
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            await self._apply.end_workers(job)
            if job.row.state not in FINAL:
                await self._apply.happened(job, Event.CONTROL_STOPPED)
        show(job.progress(time.monotonic()))

    def stop(self) -> None:
        """End: workers hand in what they have finished and go; jobs are QUEUED again."""
        self._stopping = True
        for job in self._jobs.values():
            job.dispatcher.give_up()
        self._changed.set()

    def kill(self) -> None:
        """End all processes at once."""
        for job in self._jobs.values():
            for worker in job.workers.values():
                worker.process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def close(self) -> None:
        """Stop listening and clean up. All workers must have ended."""
        await self._listener.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _step(self, now: float) -> None:
        failure = self._failure or self._apply.failure
        if failure is not None:
            raise failure
        if self._lock.is_gone():
            raise OperationError("the state folder was removed during the run; its answers went with it")
        if self._lock.is_lost:
            raise OperationError("another run took the state folder over: this one was not seen to live for a while")
        async with self._deciding:
            for job in self._jobs.values():
                job.tick(now)
                await self._apply.follow(job)
            for action in plan(self._snapshot(now), now):
                await self._apply.do(action, self._jobs[action.job])

    def _snapshot(self, now: float) -> Snapshot:
        held = {w.device: f"worker {w.id}" for job in self._jobs.values() for w in job.workers.values() if w.device}
        devices = [
            DeviceView(device.id, held.get(device.id) or self._apply.stranger(device.id, now))
            for device in self._launcher.devices()
        ]
        return Snapshot(tuple(job.view() for job in self._jobs.values()), tuple(devices))

    async def _exchange(self, encoded: bytes) -> bytes:
        """Take a worker's report and return its orders, both as MessagePack."""
        try:
            report = msgspec.msgpack.decode(encoded, type=Report)
            found = self._find(report.worker)
            if report.protocol != PROTOCOL or found is None:
                return msgspec.msgpack.encode(Orders(PROTOCOL, Order.STOP))
            job, worker = found
            async with worker.exchanging:
                if report.number > worker.last_number:
                    orders = await self._orders(job, worker, report)
                    worker.last_number, worker.last_orders = report.number, msgspec.msgpack.encode(orders)
                return worker.last_orders
        except Exception as error:
            # For the loop to raise: an error's message for the user, or a bug, which must not look like a worker's.
            self._failure = error
            self._changed.set()
            return msgspec.msgpack.encode(Orders(PROTOCOL, Order.STOP))

    async def _orders(self, job: JobRun, worker: WorkerRun, report: Report) -> Orders:
        now = time.monotonic()
        news = worker.phase is not report.phase
        job.note_report(worker, report, now)
        await job.dispatcher.accept(report)
        if job.dispatcher.left == 0:
            self._apply.stop_worker(worker)
        if news or worker.stopping:
            self._changed.set()
        if news:
            async with self._deciding:
                await self._apply.follow(job)
        setup = job.setup(worker.source) if report.number == 1 else None
        # A worker may be lost while its results are being written: nothing may be handed to it any more.
        gone = worker.id not in job.workers
        if gone or self._stopping or worker.stopping or report.phase in (Phase.FAILED, Phase.STOPPED):
            return Orders(PROTOCOL, Order.STOP, setup=setup)
        leases = []
        if job.row.state == State.RUNNING and not job.blocked:
            job.file.check_unchanged()
            leases = await job.dispatcher.lease(worker.id, report.want, len(job.workers))
        return Orders(PROTOCOL, Order.RUN, leases=leases, setup=setup)

    def _find(self, worker: str) -> tuple[JobRun, WorkerRun] | None:
        for job in self._jobs.values():
            if worker in job.workers:
                return job, job.workers[worker]
        return None


def runtime_folder() -> Path:
    """Return a new folder of mode 0700 for sockets, with a short path, on a local file system."""
    for parent in (None, "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX, dir=parent))
        if len(str(folder).encode()) <= _MOST_SOCKET_PATH:
            return folder
        folder.rmdir()
    raise OperationError(
        "the folder for temporary files has too long a path for sockets", "set TMPDIR to a shorter one"
    )
