"""The service: many jobs on one data folder, asked for and about through the API."""

import asyncio
import logging
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from freight import __version__
from freight.config import Config
from freight.control.accounts import Accounts, own_user
from freight.control.checks import policy_of
from freight.control.context import Context
from freight.control.facility import Facility
from freight.control.finding import Finder, unfinished
from freight.control.jobrun import JobRun
from freight.control.keptfiles import Files
from freight.control.machine import Machine
from freight.control.openaibatches import Batches
from freight.control.openaimodels import Models
from freight.control.outputs import check_granted
from freight.control.plane import ControlPlane, Listen
from freight.control.quotas import Quotas
from freight.control.reading import Reading
from freight.control.recovery import recover
from freight.control.rights import check_groups
from freight.control.servicefolder import ServiceFolder
from freight.control.shelf import OUTPUT_ROOT, Shelf, more_of, output_of, request_of
from freight.control.sockets import make_private, runtime_folder
from freight.control.streams import Streams
from freight.control.submission import Submission
from freight.control.uploads import UPLOAD_KEPT_S, Uploads
from freight.control.webhooks import Webhooks, webhook_settings
from freight.core.account import Account
from freight.core.job import FINAL, Event, State
from freight.core.record import INTAKE_CODES
from freight.core.view import API_VERSION, JobRequest, JobStatus, ServerInfo, Submitted, Upload
from freight.errors import FreightError, NoSuchJob, WrongState
from freight.launchers.devices import find_devices
from freight.launchers.local import LocalLauncher
from freight.launchers.locks import lock_folder
from freight.store.database import STORAGE_ERRORS, Sharing
from freight.store.rows import JobRow

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
        self.accounts = Accounts(self._context, own_user())
        self._retention_s: float | None = config["retention"]
        self._shelf = Shelf(self._context)
        self._uploads = Uploads(folder.uploads, self._context.threads, self._context.stopping)
        self._quotas = Quotas(self._context, self._uploads)
        self._reading = Reading(self._context, self._shelf)
        self._webhooks = Webhooks(catalog.outbox, self._context.write, lambda: webhook_settings(settings()))
        self._submission = Submission(self._context, self._reading, self._uploads, self._quotas, self._webhooks)
        self.finder = Finder(self._context)
        self.streams = Streams(self._context, self.finder)
        self.files = Files(self._context, self._uploads, self._quotas, self.finder, self.streams)
        self.batches = Batches(self._context, self._submission, self._uploads, self.files, self.finder, self)
        self.models = Models(self._context, time.time())
        self.facility = Facility(
            self._context, self._submission, self._uploads, self._quotas, self.finder, self._shelf, self.came
        )
        self.machine = Machine(self._context, self._launcher)

    def _places(self, job: JobRun | None, worker: str) -> tuple[Path, Path]:
        # Each has a folder for sockets of its own: it may outlive this process, and the next finds it in the catalog.
        folder = runtime_folder()
        make_private(self._context.folder.workers)
        return folder, self._context.folder.workers / f"{worker}.log"

    async def start(self) -> None:
        """Take up what an earlier service left, and begin to hear workers."""
        await self._context.write(self._context.catalog.adopt, self.accounts.owner.user)
        await self.accounts.load()
        await self.machine.take_up_pins()
        await recover(self._context, self._shelf, self._reading, self._launcher)
        await self._context.plane.start()

    async def run(self) -> None:
        """Run jobs until `stop`; raise what made it impossible to go on."""
        sweeping = asyncio.create_task(self._sweep())
        telling = asyncio.create_task(self._webhooks.run(self._context.stopping))
        telling.add_done_callback(self._told)
        showing = asyncio.create_task(self.facility.progress.run())
        try:
            await self._context.plane.serve()
        finally:
            self._context.stopping.set()
            sweeping.cancel()
            showing.cancel()
            await asyncio.gather(sweeping, showing, telling, return_exceptions=True)
            await self._reading.join()

    def _told(self, telling: asyncio.Task[None]) -> None:
        """Say what ended the webhooks, other than the service's end: jobs go on, and the next service sends them."""
        if not telling.cancelled() and (error := telling.exception()) is not None:
            # Without the error's own words, which may quote a URL.
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("a bug: webhooks wait until the service starts anew: %s\n%s", type(error).__name__, frames)

    def stop(self) -> None:
        """End: workers hand in what they have finished and go, and jobs go back to the queue."""
        self._context.stopping.set()
        self._context.plane.stop()

    def kill(self) -> None:
        """End all processes at once."""
        self._context.plane.kill()

    async def close(self) -> None:
        """Close the databases. All that uses them must have ended."""
        await self.accounts.join()
        await asyncio.to_thread(self.facility.close)
        await self._context.plane.close()
        for job in self._context.plane.roster.open.values():
            await self._shelf.close(job)
        for threads in (self._context.scanners, self._context.threads, self._context.looker, self._context.writer):
            threads.shutdown()
        self._context.reader.close()
        self._context.catalog.close()

    def info(self, account: Account) -> ServerInfo:
        """Return what this service is; its process and folder are for admins."""
        if not account.is_admin():
            return ServerInfo(version=__version__, api_version=API_VERSION)
        return ServerInfo(
            version=__version__,
            api_version=API_VERSION,
            pid=os.getpid(),
            data_folder=str(self._context.folder.path),
        )

    async def receive(self, account: Account, chunks: AsyncIterator[bytes], size: int | None) -> Upload:
        """Keep an input that is being sent."""
        limit = self._context.settings()["limits.file_bytes"]
        async with self._quotas.room(account, size) as check:
            return await self._uploads.receive(account.user, chunks, size, limit, check)

    def drop_upload(self, account: Account, upload: str) -> None:
        """Remove an upload that no job will be made of; raise NoSuchUpload where it is not there, or another user's."""
        path, _ = self._uploads.find(account, upload)
        path.unlink(missing_ok=True)

    async def submit(self, account: Account, request: JobRequest, key: str | None) -> Submitted:
        """Make a job of an upload."""
        made = await self._submission.submit(account, request, key)
        if made.is_new:
            await self.came(made.id)
        job = await self.finder.status_of(await self.finder.get(made.id))
        return Submitted(job=job, notes=list(made.notes), is_new=made.is_new)

    async def came(self, job: str) -> None:
        """Take note that a job was made."""
        await self.machine.renew_pins()
        row = await self.finder.get(job)
        records = "its input is being read" if row.records is None else f"{row.records} records"
        log.info("job %s (%s): %s", row.name, row.id, records)

    async def cancel(self, account: Account, name: str) -> JobStatus:
        """Ask for a job's end; what is done is kept. A job that is being cancelled, or was, stays as it is."""
        row = await self.cancel_job((await self.finder.find(account, name)).id)
        return await self.finder.status_of(row)

    async def cancel_job(self, job: str) -> JobRow:
        """Ask for the end of the job of an id, whoever's it is; return it as it is then."""
        async with self._context.plane.deciding:
            row = await self.finder.get(job)
            if row.state in FINAL - {State.CANCELLED}:
                raise WrongState(f"job {row.name} is {row.state} already", f"see freight batch results {row.name}")
            hand = self._context.in_hand(row.id)
            if hand is not None and row.state != State.CANCELLING:
                await self._context.plane.apply.happened(hand, Event.CANCEL_ASKED)
        self._context.plane.changed()
        return await self.finder.get(job)

    async def resume(self, account: Account, name: str) -> JobStatus:
        """Go on with a job that was cancelled, failed or ran out of time: only unfinished records run."""
        spec = await self._renewed(account, name)
        async with self._context.plane.deciding:
            row = await self.finder.find(account, name)
            if row.state is State.COMPLETED:
                hint = f"run those again that failed: freight batch retry {row.name}"
                raise WrongState(f"job {row.name} is complete; nothing of it is left to run", hint)
            await self._again(account, row, spec, Event.CONTINUED, "resumed")
        return await self.finder.status_of(await self.finder.get(row.id))

    async def retry(self, account: Account, name: str) -> JobStatus:
        """Run again a job's records that ended in an error, but for those that intake refused."""
        spec = await self._renewed(account, name)
        async with self._context.plane.deciding:
            row = await self.finder.find(account, name)
            if row.state is State.COMPLETED:
                failures = await self._context.in_thread(self.finder.failures, row)
                if all(failure.code in INTAKE_CODES for failure in failures):
                    raise _nothing_to_retry(row, bool(failures))
            await self._again(account, row, spec, Event.RETRIED, "retried")
        return await self.finder.status_of(await self.finder.get(row.id))

    async def _renewed(self, account: Account, name: str) -> dict[str, Any]:
        """Return a job's spec for going on; raise NotAllowed where its results may not go any more where they went."""
        row = await self.finder.find(account, name)
        output = output_of(row)
        if output is not None and OUTPUT_ROOT in more_of(row):
            await self._context.in_thread(check_granted, account, output.parent, self._context.settings())
        return await self._submission.renewed(account, row)

    async def _again(self, account: Account, row: JobRow, spec: dict[str, Any], event: Event, verb: str) -> None:
        if row.state not in FINAL:
            raise unfinished(row, f"it can be {verb} once it has ended")
        if row.records is None:
            raise WrongState(
                f"the input of job {row.name} was refused: {row.reason}", "correct the input and submit it anew"
            )
        check_groups(account, row.model, self._context.settings(), request_of(row).pool)
        await self._quotas.check_active(account)
        await self._context.write(self._context.catalog.set_spec, row.id, spec)
        row = msgspec.structs.replace(row, spec=spec)
        after = await self._context.write(self._context.catalog.happened, row, event, time.time())
        await self._shelf.enqueue(after)

    async def delete(self, account: Account, name: str) -> None:
        """Forget a job that has ended, with its input, its results here and its workers' output."""
        await self._delete((await self.finder.find(account, name)).id)

    async def _delete(self, job: str) -> None:
        async with self._context.plane.deciding:
            row = await self.finder.get(job)
            if row.state not in FINAL:
                raise unfinished(row, f"cancel it first: freight batch cancel {row.name}")
            await self._context.write(self._context.catalog.delete, row.id)
        await self._context.in_thread(self._context.folder.forget, row.id)

    async def _ended(self, job: JobRun) -> None:
        log.info("job %s (%s): %s", job.row.name, job.row.id, job.row.state)
        await self._shelf.close(job)

    async def _sweep(self) -> None:
        """Now and then remove finished jobs that are older than the settings want, uploads that nobody used, and files
        whose time is over; and have pins follow the settings.
        """
        while True:
            try:
                await self.machine.renew_pins()
                await self._context.in_thread(self._context.folder.tidy_uploads, UPLOAD_KEPT_S)
                await self.files.forget_expired()
                if self._retention_s is not None:
                    await self._forget_old(time.time() - self._retention_s)
            except (FreightError, *STORAGE_ERRORS, OSError) as error:
                log.warning("clearing up did not succeed, and is tried again: %s", error)
            await asyncio.sleep(min(_SWEEP_S, self._retention_s or _SWEEP_S))

    async def _forget_old(self, until: float) -> None:
        for job in await self._context.look(self._context.reader.finished_before, until):
            # It may have been resumed meanwhile.
            with suppress(NoSuchJob, WrongState):
                await self._delete(job)
                log.info("job %s: its time of retention is over", job)


def _nothing_to_retry(row: JobRow, has_failures: bool) -> WrongState:
    if not has_failures:
        return WrongState(f"no record of job {row.name} failed", f"see freight batch results {row.name}")
    return WrongState(
        f"no record of job {row.name} failed in a way that another try could mend",
        "records that intake refused must be corrected and submitted anew",
    )
