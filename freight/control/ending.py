"""What happens to jobs, on disk, and how they end: their counts, their results file, their last event."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec

from freight.control.destination import Destination, Standing, Writing
from freight.control.jobrun import JobRun
from freight.control.output import Written, rows
from freight.core.job import Event, advance
from freight.core.record import custom_id_of
from freight.errors import FreightError, Interrupted
from freight.store.catalog import Catalog
from freight.store.database import STORAGE_ERRORS, Sharing, StorageFull
from freight.store.folder import Locking
from freight.store.results import RESULTS_DB, Results
from freight.store.rows import JobRow, moved

_T = TypeVar("_T")


class HasRow(Protocol):
    """A job in memory, in whatever shape."""

    row: JobRow


class Ending:
    """Records what happens to jobs, and ends them.

    `deciding` is held by who calls. `is_shared`: there are other jobs, which must not wait for this one's results file.
    `failure` is what broke that.
    """

    def __init__(
        self,
        catalog: Catalog,
        writer: ThreadPoolExecutor,
        changed: asyncio.Event,
        deciding: asyncio.Lock,
        is_shared: bool,
    ) -> None:
        self._catalog = catalog
        self._writer = writer
        self._changed = changed
        self._deciding = deciding
        self._is_shared = is_shared
        self._finishing: set[asyncio.Task[None]] = set()
        self.failure: Exception | None = None

    async def join(self) -> None:
        """Wait until no results file is being written."""
        await asyncio.gather(*self._finishing)

    async def happened(self, job: HasRow, event: Event, detail: str = "", must_keep: bool = False) -> JobRow:
        """Record an event of a job. A full disk does not keep a job from changing its state: the file catches up.

        With `must_keep` it does: raises StorageFull, and nothing has happened.
        """
        now = time.time()
        try:
            job.row = await self._write(self._catalog.happened, job.row, event, now, detail)
        except StorageFull:
            if must_keep:
                raise
            job.row = moved(job.row, event, detail, now)
        return job.row

    async def _write(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, call, *args)

    async def end(self, job: JobRun, event: Event, code: str, reason: str) -> None:
        """End a job by an event. `code` and `reason` go into the line of each record that was not reached.

        A service's results file is written by a task of its own, so that no other job waits for that.
        """
        if job.waits_for_room(time.monotonic()):
            return
        try:
            if self._is_shared:
                await self._write(self._note_counts, job)
                if job.output is not None:
                    job.finishing = asyncio.create_task(self._finish(job, job.output, event, code, reason))
                    self._finishing.add(job.finishing)
                    job.finishing.add_done_callback(self._finishing.discard)
                    return
            elif job.output is not None:
                await self._write(self._put_output, job, job.output, code, reason)
            await self.happened(job, event, reason, must_keep=self._is_shared)
        except StorageFull as error:
            await self._no_room(job, event, error)

    async def _no_room(self, job: JobRun, event: Event, error: StorageFull) -> None:
        """A job cannot end for want of room: it is tried again later."""
        job.found_full(time.monotonic(), error.message)
        job.wait_reason = error.message
        if event is Event.OUTPUT_WRITTEN:
            await self.happened(job, Event.BLOCKED, error.message)

    def _note_counts(self, job: JobRun) -> None:
        outcome = {**(job.row.outcome or {"outputs": []}), **job.counts()}
        self._catalog.set_outcome(job.row.id, outcome)
        job.row = msgspec.structs.replace(job.row, outcome=outcome)

    async def _finish(self, job: JobRun, output: Destination, event: Event, code: str, reason: str) -> None:
        """Write a service's results file aside, and with it in its place let the job end."""
        writing, state = None, job.row.state
        try:
            writing = await asyncio.to_thread(output.begin)
            written = await asyncio.to_thread(self._write_apart, job, writing, code, reason)
            before = await asyncio.to_thread(writing.mark, job.row.outcome)
            async with self._deciding:
                # Unless it was cancelled meanwhile: the planner sees to that then.
                if job.row.state is not state:
                    return
                # The intent first, as in `_put_output`.
                outcome = job.outcome(written, before)
                await self._write(self._catalog.set_outcome, job.row.id, outcome)
                job.row = msgspec.structs.replace(job.row, outcome=outcome)
                ended = Standing(advance(state, event), job.index.records, job.dispatcher.totals, time.monotonic())
            # Nobody waits for this: the folder may lie on a disk that does not answer.
            await asyncio.to_thread(writing.put, job.force or before is not None)
            await asyncio.to_thread(output.tell, job.row.id, ended)
            async with self._deciding:
                if job.row.state is state:
                    await self.happened(job, event, reason, must_keep=True)
        except Interrupted:
            pass  # At the next start it is written anew.
        except StorageFull as error:
            async with self._deciding:
                if job.row.state is state:
                    await self._no_room(job, event, error)
        except (FreightError, *STORAGE_ERRORS, OSError) as error:
            async with self._deciding:
                if job.row.state is state:
                    await self._end_without_file(job, event, reason, error)
        except Exception as error:
            self.failure = error
        finally:
            if writing is not None:
                with suppress(OSError):  # On a disk that fails, something of it may be left.
                    await asyncio.to_thread(writing.drop)
            job.finishing = None
            self._changed.set()

    async def _end_without_file(self, job: JobRun, event: Event, reason: str, error: Exception) -> None:
        """End a job whose results file cannot be had; its results stay with the service."""
        if event is Event.OUTPUT_WRITTEN:
            job.failure = error
            return
        if str(error) not in reason:
            reason = f"{reason}; {error}" if reason else str(error)
        try:
            await self.happened(job, event, reason, must_keep=True)
        except StorageFull as full:
            await self._no_room(job, event, full)

    def _write_apart(self, job: JobRun, writing: Writing, code: str, reason: str) -> Written:
        """Write the results file by a connection of its own. For threads."""
        results = Results(job.folder / RESULTS_DB, Locking.LOCAL, Sharing.READER)
        try:
            return self._write_file(job, results, writing, code, reason)
        finally:
            results.close()

    def _write_file(self, job: JobRun, results: Results, writing: Writing, code: str, reason: str) -> Written:
        def missing(index: int) -> tuple[bytes | None, str, str]:
            return custom_id_of(job.dispatcher.read_lines([index])[0]), code, reason

        def lines() -> Iterator[tuple[int, bytes]]:
            for line in rows(results, job.index.records, missing):
                if self._is_shared and job.dispatcher.is_given_up():
                    raise Interrupted("the service is ending")
                yield line

        job.file.check_unchanged()
        return writing.write(job.row.id, lines(), job.index.records)

    def _put_output(self, job: JobRun, output: Destination, code: str, reason: str) -> None:
        """Write a run's results file and put it in place, where all is done or there is an answer in it."""
        if job.dispatcher.left and not job.results.has_answers():
            return
        writing = output.begin()
        written = self._write_file(job, job.results, writing, code, reason)
        before = writing.mark(job.row.outcome)
        # The intent first: after a crash in between, what stands at the output is known for ours, old or new.
        outcome = job.outcome(written, before)
        self._catalog.set_outcome(job.row.id, outcome)
        writing.put(job.force or before is not None)
        job.row = msgspec.structs.replace(job.row, outcome=outcome)
