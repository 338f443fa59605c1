"""The facility's API: batches of files that lie on the service's machine, written back there."""

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from freight.control.below import FileBelow
from freight.control.clusters import check_asked, cluster_jobs, endpoints
from freight.control.context import Context
from freight.control.finding import Finder
from freight.control.outputs import grants_of, output_mode
from freight.control.progressfiles import ProgressFiles
from freight.control.quotas import Quotas
from freight.control.shelf import OUTPUT_ROOT, Shelf, more_of, output_of, progress_of
from freight.control.submission import Made, Submission, Terms
from freight.control.uploads import Uploads
from freight.core.account import Account
from freight.core.facility import (
    CLUSTER,
    FACILITY,
    FRAMEWORK,
    INPUT_FILE,
    OUTPUT_FOLDER,
    STATUSES,
    folder_name,
    shown_time,
    states_with,
)
from freight.core.facilityview import (
    BatchFault,
    BatchMade,
    BatchRequest,
    BatchResult,
    BatchRow,
    ClusterJobs,
    Endpoints,
    FailedResult,
    Metrics,
    NoResult,
)
from freight.core.job import FINAL, State
from freight.core.paging import cursor_of, place_of
from freight.core.view import JobRequest, JobStatus, Upload
from freight.errors import NoSuchJob, UserError, WrongState
from freight.store.outputfolder import remove_empty_below
from freight.store.roots import Root
from freight.store.rows import JobRow

_T = TypeVar("_T")
# Folders of users may lie on disks that are slow, or do not answer.
_THREADS: Final = 4
_NEWEST: Final = (1e12, "")
_FAULTS: Final = {
    State.FAILED: ("batch_failed", "the batch failed"),
    State.TIMED_OUT: ("batch_expired", "the batch's time ran out"),
    State.CANCELLED: ("batch_cancelled", "the batch was cancelled before its input was read"),
}


class Facility:
    """Takes batches in, and tells how they stand."""

    def __init__(
        self,
        context: Context,
        submission: Submission,
        uploads: Uploads,
        quotas: Quotas,
        finder: Finder,
        shelf: Shelf,
        came: Callable[[str], Awaitable[None]],
    ) -> None:
        """`came` is told of each job that is made."""
        self._context = context
        self._submission = submission
        self._uploads = uploads
        self._quotas = quotas
        self._finder = finder
        self._came = came
        self._threads = ThreadPoolExecutor(_THREADS, "freight-paths")
        self._telling = ThreadPoolExecutor(_THREADS, "freight-progress")
        self.progress = ProgressFiles(context, shelf, self._telling)

    def close(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown()
        self._telling.shutdown()

    async def submit(
        self, account: Account, cluster: str, framework: str, request: BatchRequest, key: str | None = None
    ) -> BatchMade:
        """Make a batch of a file on this machine, which is copied; with the `key` of an earlier request, return that.

        Raises UserError, Unknown, NotAllowed and TooMany for what is refused: then there is no batch, and no folder
        of one.
        """
        config = self._context.settings()
        check_asked(account, cluster, framework, request.model, config)
        if key is None:
            # It is checked again later on; a large file need not be copied for that.
            await self._quotas.check_active(account)
        grants = grants_of(config)
        source = await self._in_thread(grants.open_input, account, request.input_file)
        try:
            size = (await self._in_thread(os.fstat, source)).st_size
            if not size:
                raise UserError(f"the input file {request.input_file} is empty", "write one JSON object on each line")
            # It asks who the user is here, which may be another machine that knows.
            root, folder = await self._in_thread(grants.output_root, account, request.output_folder_path)
            more = {
                CLUSTER: cluster,
                FRAMEWORK: framework,
                INPUT_FILE: request.input_file,
                OUTPUT_FOLDER: str(folder),
                OUTPUT_ROOT: str(root.path),
            }
            made = await self._place(account, request, more, (source, size), key)
        finally:
            await self._in_thread(os.close, source)
        row = await self._finder.get(made.id)
        if made.is_new:
            self.progress.add(row)
            await self._came(made.id)
        return BatchMade(
            batch_id=row.id,
            input_file=request.input_file,
            output_folder_path=more[OUTPUT_FOLDER],
            task_ids=[row.id],
            status=STATUSES[row.state],
        )

    async def _place(
        self, account: Account, request: BatchRequest, more: dict[str, Any], source: tuple[int, int], key: str | None
    ) -> Made:
        """Make the batch's folder, so that what cannot be written is refused now, and then the batch."""
        batch, root = str(uuid.uuid4()), Root(Path(more[OUTPUT_ROOT]))
        folder = Path(more[OUTPUT_FOLDER]) / folder_name(request.input_file, request.model, batch)
        made: Made | None = None
        try:
            place = FileBelow(root.path, folder, "results", mode=output_mode(self._context.settings()))
            await self._in_thread(place.check)
            made = await self._enter(account, request, Terms(FACILITY, more, batch), source, key)
            return made
        finally:
            if made is None or made.id != batch:
                await self._in_thread(remove_empty_below, root, folder)

    async def _enter(
        self, account: Account, request: BatchRequest, terms: Terms, source: tuple[int, int], key: str | None
    ) -> Made:
        upload = await self._copied(account, request, source)
        name = request.input_file.rpartition("/")[2]
        job = JobRequest(upload=upload.id, file=name, model=request.model, pool=terms.more[CLUSTER])
        try:
            return await self._submission.submit(account, job, key, terms)
        except BaseException:
            self._uploads.drop(account, upload.id)
            raise

    async def _copied(self, account: Account, request: BatchRequest, source: tuple[int, int]) -> Upload:
        """Return a copy of the file open at `source`, of so many bytes."""
        limit = self._context.settings()["limits.file_bytes"]
        file, size = source
        async with self._quotas.room(account, size) as check:
            return await self._uploads.take_copy(account.user, file, request.input_file, limit, self._threads, check)

    async def page(
        self, account: Account, status: str | None, limit: int, after: str | None
    ) -> tuple[list[BatchRow], str | None]:
        """Return up to `limit` of the user's batches, the newest first, and where the next page begins.

        That is None at the end. Raises UserError for a status that there is not.
        """
        states = tuple(State) if status is None else states_with(status)
        if not states:
            shown = ", ".join(dict.fromkeys(STATUSES.values()))
            raise UserError(f"there is no status {status!a}", f"one of {shown}")
        before = _NEWEST if after is None else place_of(after)
        rows = await self._context.look(
            self._context.reader.page_of_api, FACILITY, account.user, states, limit + 1, before
        )
        last = rows[limit - 1] if len(rows) > limit else None
        return [_row(row) for row in rows[:limit]], cursor_of((last.created_at, last.id)) if last else None

    async def find(self, account: Account, batch: str) -> JobRow:
        """Return a batch; raise NoSuchJob where there is none of that id, or it is another user's."""
        try:
            row = await self._finder.get(batch) if batch.isascii() else None
        except NoSuchJob:
            row = None
        if row is None or row.api != FACILITY or not account.may_see(row.user):
            raise NoSuchJob(f"there is no batch {ascii(batch)[1:-1]}", "batches: GET /resource_server/v1/batches")
        return row

    async def result(self, account: Account, batch: str) -> BatchResult | NoResult:
        """Return what became of a batch that has ended; raise WrongState for another."""
        row = await self.find(account, batch)
        if row.state not in FINAL:
            how = "being cancelled" if row.state is State.CANCELLING else STATUSES[row.state]
            raise WrongState(f"the batch is {how}: there is no result yet", "ask again later")
        fault = None
        if row.state is not State.COMPLETED:
            code, words = _FAULTS[row.state]
            fault = BatchFault(code=code, message=row.reason or words)
        results, progress = output_of(row), progress_of(row)
        if fault is not None and (not (row.outcome or {}).get("outputs") or results is None):
            return NoResult(error=fault)
        metrics = _metrics(await self._finder.status_of(row))
        if fault is None or row.state is State.CANCELLED:
            return BatchResult(results_file=str(results), progress_file=str(progress), metrics=metrics)
        return FailedResult(results_file=str(results), progress_file=str(progress), metrics=metrics, error=fault)

    def endpoints(self, account: Account) -> Endpoints:
        """Return the clusters, their frameworks, and the models there that the user may run."""
        return endpoints(account, self._context.settings())

    async def jobs(self, account: Account, cluster: str) -> ClusterJobs:
        """Return what runs and waits on a cluster: of others' jobs no more than the registered models."""
        return await cluster_jobs(account, cluster, self._context)

    async def _in_thread(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


def _row(row: JobRow) -> BatchRow:
    more = more_of(row)
    return BatchRow(
        batch_id=row.id,
        cluster=more[CLUSTER],
        created_at=shown_time(row.created_at),
        framework=more[FRAMEWORK],
        input_file=more[INPUT_FILE],
        status=STATUSES[row.state],
    )


def _metrics(job: JobStatus) -> Metrics:
    tokens = job.input_tokens + job.output_tokens
    return Metrics(
        response_time=job.ran_s,
        throughput_tokens_per_second=tokens / job.ran_s if job.ran_s > 0 else 0.0,
        total_tokens=tokens,
        num_responses=job.done - job.failed,
        lines_processed=job.done,
    )
