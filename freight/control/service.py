"""The service: many jobs on one data folder, asked for and about through the API."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from freight import __version__
from freight.config import Config
from freight.control.checks import policy_of
from freight.control.context import Context
from freight.control.finding import Finder, unfinished
from freight.control.jobrun import JobRun
from freight.control.machine import Machine
from freight.control.plane import ControlPlane, Listen
from freight.control.recovery import recover
from freight.control.servicefolder import ServiceFolder
from freight.control.shelf import Shelf
from freight.control.sockets import make_private, runtime_folder
from freight.control.streams import Streams
from freight.control.submission import Submission
from freight.control.uploads import UPLOAD_KEPT_S, Uploads
from freight.core.job import FINAL, Event, State
from freight.core.record import INTAKE_CODES
from freight.core.view import API_VERSION, JobRequest, JobStatus, ServerInfo, Submitted, Upload
from freight.errors import FreightError, NoSuchJob, WrongState
from freight.launchers.devices import find_devices
from freight.launchers.local import LocalLauncher
from freight.launchers.locks import lock_folder
from freight.store.catalog import JobRow
from freight.store.database import STORAGE_ERRORS, Sharing

log = logging.getLogger("freight.service")

_READERS: Final = 8
# Reading an input keeps a processor busy.
_SCANNERS: Final = 2
_SWEEP_S: Final = 60.0


class Service:
    """One service, from owning its folder to letting it go."""

    def __init__(self, folder: ServiceFolder, settings: Callable[[], Config], listen: Listen) -> None:
        """Open the folder, which must be claimed; raise FreightError where its contents or the settings forbid that."""
        config = settings()
        pool = config.local_pool()
        looks = find_devices(pool.devices, os.environ)
        catalog = folder.open_catalog(Sharing.WRITER)
        writer = ThreadPoolExecutor(1, "freight-writer")
        self._launcher = LocalLauncher(looks, lock_folder(), outlive=True)
        policy = replace(policy_of(config), keep_warm_s=pool.keep_warm_s, shared=True, ended=self._ended)
        plane = ControlPlane(
            catalog, self._launcher, folder.lock, writer, listen, folder.control_socket, self._places, policy
        )
        self._context = Context(
            folder=folder,
            catalog=catalog,
            reader=folder.open_catalog(Sharing.READER),
            writer=writer,
            looker=ThreadPoolExecutor(1, "freight-looker"),
            threads=ThreadPoolExecutor(_READERS, "freight-reader"),
            scanners=ThreadPoolExecutor(_SCANNERS, "freight-scanner"),
            plane=plane,
            settings=settings,
            devices=looks.devices(),
            limits=policy.limits,
        )
        self._retention_s: float | None = config["retention"]
        self._shelf = Shelf(self._context)
        self._uploads = Uploads(folder.uploads, self._context.threads, self._context.stopping)
        self._submission = Submission(self._context, self._shelf, self._uploads)
        self.finder = Finder(self._context)
        self.streams = Streams(self._context, self.finder)
        self.machine = Machine(self._context, self._launcher)

    def _places(self, job: JobRun | None, worker: str) -> tuple[Path, Path]:
        # Each has a folder for sockets of its own: it may outlive this process, and the next finds it in the catalog.
        folder = runtime_folder()
        make_private(self._context.folder.workers)
        return folder, self._context.folder.workers / f"{worker}.log"

    async def start(self) -> None:
        """Take up what an earlier service left, and begin to hear workers."""
        await self.machine.take_up_pins()
        await recover(self._context, self._shelf, self._submission, self._launcher)
        await self._context.plane.start()

    async def run(self) -> None:
        """Run jobs until `stop`; raise what made it impossible to go on."""
        sweeping = asyncio.create_task(self._sweep())
        try:
            await self._context.plane.serve()
        finally:
            self._context.stopping.set()
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
            await self._submission.join()

    def stop(self) -> None:
        """End: workers hand in what they have finished and go, and jobs go back to the queue."""
        self._context.stopping.set()
        self._context.plane.stop()

    def kill(self) -> None:
        """End all processes at once."""
        self._context.plane.kill()

    async def close(self) -> None:
        """Close the databases. All that uses them must have ended."""
        await self._context.plane.close()
        for job in self._context.plane.roster.open.values():
            await self._shelf.close(job)
        for threads in (self._context.scanners, self._context.threads, self._context.looker, self._context.writer):
            threads.shutdown()
        self._context.reader.close()
        self._context.catalog.close()

    def info(self) -> ServerInfo:
        """Return what this service is."""
        return ServerInfo(
            version=__version__,
            api_version=API_VERSION,
            pid=os.getpid(),
            data_folder=str(self._context.folder.path),
        )

    async def receive(self, chunks: AsyncIterator[bytes], size: int | None) -> Upload:
        """Keep an input that is being sent."""
        return await self._uploads.receive(chunks, size, self._context.settings()["limits.file_bytes"])

    def drop_upload(self, upload: str) -> None:
        """Remove an upload that no job will be made of."""
        self._uploads.drop(upload)

    async def submit(self, request: JobRequest, key: str | None) -> Submitted:
        """Make a job of an upload."""
        made = await self._submission.submit(request, key)
        if made.is_new:
            await self.machine.renew_pins()
        job = await self.finder.status(made.id)
        if made.is_new:
            log.info("job %s (%s): %s records", job.name, job.id, job.records)
        return Submitted(job=job, notes=list(made.notes), is_new=made.is_new)

    async def cancel(self, name: str) -> JobStatus:
        """Ask for a job's end; what is done is kept. A job that is being cancelled, or was, stays as it is."""
        async with self._context.plane.deciding:
            row = await self.finder.find(name)
            if row.state in FINAL - {State.CANCELLED}:
                raise WrongState(f"job {row.name} is {row.state} already", f"see freight batch results {row.name}")
            hand = self._context.in_hand(row.id)
            if hand is not None and row.state != State.CANCELLING:
                await self._context.plane.apply.happened(hand, Event.CANCEL_ASKED)
        self._context.plane.changed()
        return await self.finder.status(row.id)

    async def resume(self, name: str) -> JobStatus:
        """Go on with a job that was cancelled, failed or ran out of time: only unfinished records run."""
        spec = await self._submission.renewed(await self.finder.find(name))
        async with self._context.plane.deciding:
            row = await self.finder.find(name)
            if row.state is State.COMPLETED:
                hint = f"run those again that failed: freight batch retry {row.name}"
                raise WrongState(f"job {row.name} is complete; nothing of it is left to run", hint)
            await self._again(row, spec, Event.CONTINUED, "resumed")
        return await self.finder.status(row.id)

    async def retry(self, name: str) -> JobStatus:
        """Run again a job's records that ended in an error, but for those that intake refused."""
        spec = await self._submission.renewed(await self.finder.find(name))
        async with self._context.plane.deciding:
            row = await self.finder.find(name)
            if row.state is State.COMPLETED:
                failures = await self._context.in_thread(self.finder.failures, row)
                if all(failure.code in INTAKE_CODES for failure in failures):
                    raise WrongState(
                        f"no record of job {row.name} failed in a way that another try could mend",
                        "records that intake refused must be corrected and submitted anew",
                    )
            await self._again(row, spec, Event.RETRIED, "retried")
        return await self.finder.status(row.id)

    async def _again(self, row: JobRow, spec: dict[str, Any], event: Event, verb: str) -> None:
        if row.state not in FINAL:
            raise unfinished(row, f"it can be {verb} once it has ended")
        if row.records is None:
            raise WrongState(
                f"the input of job {row.name} was refused: {row.reason}", "correct the input and submit it anew"
            )
        await self._context.write(self._context.catalog.set_spec, row.id, spec)
        row = msgspec.structs.replace(row, spec=spec)
        after = await self._context.write(self._context.catalog.happened, row, event, time.time())
        await self._shelf.enqueue(after)

    async def delete(self, name: str) -> None:
        """Forget a job that has ended, with its input, its results here and its workers' output."""
        async with self._context.plane.deciding:
            row = await self.finder.find(name)
            if row.state not in FINAL:
                raise unfinished(row, f"cancel it first: freight batch cancel {row.name}")
            await self._context.write(self._context.catalog.delete, row.id)
        await self._context.in_thread(self._context.folder.forget, row.id)

    async def _ended(self, job: JobRun) -> None:
        log.info("job %s (%s): %s", job.row.name, job.row.id, job.row.state)
        await self._shelf.close(job)

    async def _sweep(self) -> None:
        """Now and then remove finished jobs that are older than the settings want, and uploads that nobody used; and
        have pins follow the settings.
        """
        while True:
            try:
                await self.machine.renew_pins()
                await self._context.in_thread(self._context.folder.tidy_uploads, UPLOAD_KEPT_S)
                if self._retention_s is not None:
                    await self._forget_old(time.time() - self._retention_s)
            except (FreightError, *STORAGE_ERRORS, OSError) as error:
                log.warning("clearing up did not succeed, and is tried again: %s", error)
            await asyncio.sleep(min(_SWEEP_S, self._retention_s or _SWEEP_S))

    async def _forget_old(self, until: float) -> None:
        for job in await self._context.look(self._context.reader.finished_before, until):
            # It may have been resumed meanwhile.
            with suppress(NoSuchJob, WrongState):
                await self.delete(job)
                log.info("job %s: its time of retention is over", job)
