"""The control plane: it owns a data folder, hears its workers, and does what the planner decides."""

import asyncio
import logging
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from freight.control.apply import Apply
from freight.control.jobrun import JobRun
from freight.control.pins import Pin
from freight.control.policy import Policy
from freight.control.roster import Roster
from freight.control.starts import MakePlaces
from freight.control.workerrun import WorkerRun
from freight.core.actions import PinAction
from freight.core.device import Device
from freight.core.job import FINAL, Event, State
from freight.core.messages import PROTOCOL, Order, Orders, Phase, Report
from freight.core.plan import plan
from freight.core.progress import Progress
from freight.core.snapshot import DeviceView, Snapshot
from freight.errors import FreightError, OperationError
from freight.launchers.base import Launcher
from freight.store.catalog import Catalog
from freight.store.database import STORAGE_ERRORS
from freight.store.folder import FolderLock

log = logging.getLogger("freight.plane")
_T = TypeVar("_T")

_TICK_S: Final = 0.25
# An adopted worker that has not reported by then is ended: nobody else may have its records before.
ATTACH_S: Final = 30.0
# An adopted worker that serves no job is waited for this long before anything is planned.
ADOPTED_S: Final = 2.0
# A worker that has been started reports within this, long before its server is up.
FIRST_REPORT_S: Final = 120.0
# And then every second or so. One that is silent for this long stands still: stopped, or stuck in the kernel.
SILENT_S: Final = 120.0


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
    """One control plane on one data folder. `control` is the Unix socket on which it hears its workers.

    `writer` is the one thread that writes to the databases.
    """

    def __init__(
        self,
        catalog: Catalog,
        launcher: Launcher,
        lock: FolderLock,
        writer: ThreadPoolExecutor,
        listen: Listen,
        control: Path,
        make_places: MakePlaces,
        policy: Policy,
    ) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.roster = Roster()
        self._launcher = launcher
        self._lock = lock
        self._policy = policy
        self._listener = listen(control, self._exchange)
        self._changed = asyncio.Event()
        # Held while a job's state is looked at and changed.
        self.deciding = asyncio.Lock()
        self._stopping = False
        self._failure: BaseException | None = None
        self._looked_at = time.monotonic()
        self.apply = Apply(
            catalog, launcher, control, writer, self._changed, self.roster, make_places, policy, self.deciding
        )

    async def start(self) -> None:
        """Begin to listen to workers."""
        await self._listener.start()

    async def warm_up(self, pin: Pin, work: Awaitable[_T]) -> _T:
        """Keep servers up for the job to come while `work` goes on that it waits for; return what that returns."""
        self.roster.pins[pin.name] = pin
        working = asyncio.ensure_future(work)
        working.add_done_callback(lambda _: self.changed())
        try:
            while not working.done() and not self._stopping:
                await self._step(time.monotonic())
                await self._pause()
        finally:
            # Work in a thread goes on whatever happens here.
            await asyncio.gather(working, return_exceptions=True)
        return working.result()

    async def run(self, job: JobRun, show: Callable[[Progress], None]) -> None:
        """Run one job to its end; `show` is called with how it stands, several times a second.

        Returns with the job in a final state, or QUEUED after `stop`. Raises what made it impossible to go on,
        with all workers gone and the job QUEUED.
        """
        self.roster.open[job.row.id] = job
        try:
            while job.row.state not in FINAL and not self._stopping:
                now = time.monotonic()
                await self._step(now)
                # Those that are up for this job serve it from now on.
                self.roster.pins.clear()
                show(job.progress(now))
                if job.row.state not in FINAL:
                    await self._pause()
        finally:
            await self._wind_up()
        show(job.progress(time.monotonic()))

    async def serve(self) -> None:
        """Run jobs as they come until `stop`; raise what made it impossible to go on, with all workers gone."""
        try:
            await self._hear_adopted()
            while not self._stopping:
                await self._step(time.monotonic())
                await self._pause()
        finally:
            await self._wind_up()

    async def _hear_adopted(self) -> None:
        """Wait a moment for the adopted workers that serve no job: a job of their model is to join them."""
        until = time.monotonic() + ADOPTED_S
        while not self._stopping and time.monotonic() < until:
            if all(worker.attached for worker in self.roster.warm()):
                return
            await self._pause()

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                await self._changed.wait()
        self._changed.clear()

    async def _wind_up(self) -> None:
        self.stop()
        await self.apply.end_workers()
        async with self.deciding:
            for job in self.roster.open.values():
                if job.row.state not in FINAL:
                    await self.apply.happened(job, Event.CONTROL_STOPPED)

    def changed(self) -> None:
        """Look at the jobs again soon."""
        self._changed.set()

    def stop(self) -> None:
        """End: workers hand in what they have finished and go; jobs are QUEUED again."""
        self._stopping = True
        for job in self.roster.open.values():
            job.dispatcher.give_up()
        self._changed.set()

    def kill(self) -> None:
        """End all processes at once."""
        for worker in self.roster.workers.values():
            worker.process.kill()

    async def close(self) -> None:
        """Stop listening. All workers must have ended."""
        await self._listener.stop()

    async def _step(self, now: float) -> None:
        self._check_going(now)
        await self.apply.starts.look_around(now)
        async with self.deciding:
            for job in list(self.roster.open.values()):
                job.tick(now)
                await self.apply.follow(job)
            for action in plan(self._snapshot(now), now):
                if isinstance(action, PinAction):
                    await self.apply.do_for_pins(action)
                else:
                    await self.apply.do(action)
            for job in list(self.roster.open.values()):
                if job.row.state in FINAL and job.finishing is None and self._policy.ended is not None:
                    del self.roster.open[job.row.id]
                    await self._policy.ended(job)
                    self._changed.set()

    def _check_going(self, now: float) -> None:
        """Raise what makes it impossible to go on, and end adopted workers that stay silent."""
        failure = self._failure or self.apply.failure
        if not self._policy.shared:
            failure = failure or next((job.failure for job in self.roster.open.values() if job.failure), None)
        if failure is not None:
            raise failure
        if self._lock.is_gone():
            raise OperationError("the state folder was removed during the run; its answers went with it")
        if self._lock.is_lost:
            raise OperationError("another run took the state folder over: this one was not seen to live for a while")
        # Where this process itself stood still, its workers were not silent for that.
        passed_s, self._looked_at = min(now - self._looked_at, 2 * _TICK_S), now
        for worker in self.roster.workers.values():
            # One whose report is being taken, which a full disk may hold up, waits for us.
            worker.silent_s = 0.0 if worker.exchanging.locked() else worker.silent_s + passed_s
            since = now - worker.since
            if not worker.attached and since > ATTACH_S:
                self.apply.stop_worker(worker, grace_s=0.0)
            elif worker.attached and not worker.last_number and since > FIRST_REPORT_S and not worker.is_leaving():
                # Not told to stop: this is a start that failed, and counts.
                worker.note = f"the worker did not report within {FIRST_REPORT_S:g} s"
                self.apply.expect_end(worker, grace_s=0.0)
            elif worker.attached and worker.last_number and worker.silent_s > SILENT_S:
                worker.note = f"the worker has not reported for {SILENT_S:g} s"
                self.apply.expect_end(worker, grace_s=0.0)

    def _snapshot(self, now: float) -> Snapshot:
        pins = [pin.view(now) for pin in self.roster.pins.values()]
        unnoticed = {
            job.row.id
            for job in self.roster.waiting.values()
            if job.row.state is State.QUEUED and job.row.id not in self.apply.starts.noticed
        }
        jobs = [job for job in self.roster.in_turn() if job.row.id not in unnoticed]
        return Snapshot(
            tuple(job.view() for job in jobs),
            tuple(self._device_view(device, now) for device in self._launcher.devices()),
            tuple(worker.warm_view() for worker in self.roster.warm()),
            self._policy.keep_warm_s,
            tuple(pin for pin in pins if pin is not None),
            self.apply.starts.pacing(self._policy.most_loads),
        )

    def _device_view(self, device: Device, now: float) -> DeviceView:
        held_by = self.apply.quarantine.held_by(device.id) or self.apply.starts.stranger(device.id, now)
        return DeviceView(device.id, held_by, device.is_gpu(), device.label())

    async def _exchange(self, encoded: bytes) -> bytes:
        """Take a worker's report and return its orders, both as MessagePack."""
        try:
            report = msgspec.msgpack.decode(encoded, type=Report)
        except (msgspec.DecodeError, RecursionError) as error:
            # Of a worker of another version, or from somebody else.
            log.warning("a report that cannot be read: %s", type(error).__name__)
            return self._encoded(Orders(PROTOCOL, Order.STOP))
        worker = self.roster.workers.get(report.worker)
        if worker is not None:
            worker.silent_s = 0.0
        try:
            if report.protocol != PROTOCOL or worker is None:
                return self._encoded(Orders(PROTOCOL, Order.STOP))
            async with worker.exchanging:
                if report.plane not in ("", self.id):
                    return self._encoded(Orders(PROTOCOL, Order.ATTACH))
                if report.number > worker.last_number:
                    orders = await self._orders(worker, report)
                    worker.last_number, worker.last_orders = report.number, self._encoded(orders)
                return worker.last_orders
        except Exception as error:
            # For the loop to raise: an error's message for the user, or a bug, which must not look like a worker's.
            self._fail(worker, error)
            return self._encoded(Orders(PROTOCOL, Order.STOP))

    def _encoded(self, orders: Orders) -> bytes:
        return msgspec.msgpack.encode(msgspec.structs.replace(orders, plane=self.id))

    def _fail(self, worker: WorkerRun | None, error: Exception) -> None:
        if not isinstance(error, (FreightError, *STORAGE_ERRORS)):
            # Without the error's own words, which may quote a record.
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("a bug in an exchange: %s\n%s", type(error).__name__, frames)
        if worker is not None and worker.job is not None:
            worker.job.failure = worker.job.failure or error
            self.apply.stop_worker(worker)
        else:
            self._failure = error
        self._changed.set()

    async def _orders(self, worker: WorkerRun, report: Report) -> Orders:
        job = worker.job
        news = worker.phase is not report.phase or not worker.attached
        if job is not None and report.job == job.row.id:
            await self._take(job, worker, report)
        else:
            worker.note_report(report)
            # What an earlier control plane let go of while it held something yet: the job is done with.
            is_lost = report.phase is not Phase.IDLE and not self.roster.is_pinned(worker)
            if job is None and is_lost:
                self.apply.stop_worker(worker)
        if report.phase in (Phase.FAILED, Phase.STOPPED):
            self.apply.expect_end(worker)
        worker.attached = True
        await self.apply.loaded(worker)
        if news or worker.is_leaving():
            self._changed.set()
        if news and job is not None:
            async with self.deciding:
                await self.apply.follow(job)
        # A worker may be lost while its results are being written: nothing may be handed to it any more.
        gone = worker.id not in self.roster.workers
        if gone or self._stopping or worker.stopping or report.phase in (Phase.FAILED, Phase.STOPPED):
            return Orders(PROTOCOL, Order.STOP)
        return await self._onward(worker, report)

    async def _take(self, job: JobRun, worker: WorkerRun, report: Report) -> None:
        """Take over what a report says about the job that its worker serves."""
        if not worker.attached:
            job.dispatcher.adopt(worker.id, [*report.held, *report.returned])
        job.note_report(worker, report, time.monotonic())
        await job.dispatcher.accept(report)
        if job.dispatcher.left == 0:
            self.apply.let_go(worker)
        if report.phase is Phase.IDLE:
            await self.apply.worker_left(job, worker)

    async def _onward(self, worker: WorkerRun, report: Report) -> Orders:
        """Return the orders of a worker that is to go on."""
        job = worker.job
        if job is None:
            setup = worker.setup if report.number == 1 else None
            return Orders(PROTOCOL, Order.RUN, setup=setup)
        if report.job != job.row.id:
            return Orders(PROTOCOL, Order.RUN, setup=job.setup(worker.source))
        if worker.release is not None:
            return Orders(PROTOCOL, Order.RELEASE)
        leases = []
        if job.row.state == State.RUNNING and not job.blocked and all(w.attached for w in job.workers.values()):
            job.file.check_unchanged()
            leases = await job.dispatcher.lease(worker.id, report.want, len(job.workers))
        return Orders(PROTOCOL, Order.RUN, leases=leases)
