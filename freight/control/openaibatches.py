"""The OpenAI API's batches, each of which is a job: made of a file, shown, listed, cancelled."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol

from freight.control.batchterms import BatchTerms, terms_of
from freight.control.context import Context
from freight.control.finding import Finder
from freight.control.keptfiles import Files
from freight.control.submission import Submission, Terms
from freight.control.uploads import Uploads
from freight.control.views import InHand, totals_of
from freight.core.account import Account
from freight.core.job import FINAL, State
from freight.core.openaibatch import (
    BATCH_FAILED,
    ENDPOINTS,
    MOST_ERRORS,
    MOST_KEY,
    MOST_PAIRS,
    MOST_VALUE,
    PARAMS,
    STATUS,
    Batch,
    BatchError,
    BatchErrors,
    BatchPage,
    BatchRequest,
    batch_id,
    job_of,
    moments,
    page_of,
    request_counts,
    usage,
)
from freight.core.openaifile import EXPIRY_S, OPENAI
from freight.core.view import JobRequest
from freight.errors import NoSuchJob, UserError, WrongState
from freight.parsing import parse_duration
from freight.store.database import STORAGE_ERRORS, Sharing
from freight.store.rows import JobRow

# The pair of the metadata that names a URL to tell of a batch's end.
NOTIFY: Final = "notify"
_MOST_WINDOW: Final = 32
_MOST_WINDOW_S: Final = 1000 * 86_400.0
_NEWEST: Final = (1e12, "")
# What failed batches were refused for does not change, and is in databases of their own.
_REMEMBERED: Final = 200


class Jobs(Protocol):
    """What ends jobs, and tells that there are new ones."""

    async def cancel_job(self, job: str) -> JobRow:
        """Ask for a job's end; return it as it is then."""
        ...

    async def came(self, job: str) -> None:
        """Take note that a job was made."""
        ...


class Batches:
    """Makes, shows and cancels batches. Each user has their own here, admins too."""

    def __init__(
        self,
        context: Context,
        submission: Submission,
        uploads: Uploads,
        files: Files,
        finder: Finder,
        jobs: Jobs,
    ) -> None:
        self._context = context
        self._submission = submission
        self._uploads = uploads
        self._files = files
        self._finder = finder
        self._jobs = jobs
        self._faults = lru_cache(maxsize=_REMEMBERED)(self._read_faults)

    async def create(self, account: Account, request: BatchRequest, key: str | None) -> Batch:
        """Make a batch of a file. What is wrong with the file, or the model it names, fails the batch later on.

        Raises UserError for what is wrong with the request, NoSuchFile, TooMany, or Conflict for a used key.
        """
        terms = _terms(request)
        try:
            upload = await self._files.as_upload(account, request.input_file_id)
        except UserError as error:
            raise error.about("input_file_id") from None
        notify = (request.metadata or {}).get(NOTIFY)
        job = JobRequest(upload=upload.id, file=request.input_file_id, notify=notify)
        try:
            made = await self._submission.submit(account, job, key, Terms(OPENAI, terms.more()))
        except BaseException as error:
            self._uploads.drop(account, upload.id)
            if isinstance(error, UserError) and error.param == NOTIFY:
                error.about("metadata")
            raise
        if made.is_new:
            await self._jobs.came(made.id)
        return await self._shown(await self._finder.get(made.id))

    async def retrieve(self, account: Account, batch: str) -> Batch:
        """Return a batch; raise NoSuchJob where there is none of that id, or it is another user's."""
        return await self._shown(await self._find(account, batch))

    async def page(self, account: Account, limit: int, after: str | None) -> BatchPage:
        """Return up to `limit` of the user's batches, the newest first, after the batch `after`."""
        before = _NEWEST
        if after is not None:
            try:
                last = await self._find(account, after)
            except NoSuchJob as error:
                raise error.about("after") from None
            before = (last.created_at, last.id)
        reader = self._context.reader
        rows = await self._context.look(reader.page_of_api, OPENAI, account.user, tuple(State), limit + 1, before)
        return page_of(await self._all_shown(rows[:limit]), len(rows) > limit)

    async def cancel(self, account: Account, batch: str) -> Batch:
        """Ask for a batch's end; raise WrongState for one that has ended otherwise."""
        row = await self._find(account, batch)
        if row.state in FINAL - {State.CANCELLED}:
            raise WrongState(f"batch {batch} is {STATUS[row.state]} already", "there is nothing left to cancel")
        return await self._shown(await self._jobs.cancel_job(row.id))

    async def _find(self, account: Account, batch: str) -> JobRow:
        job = job_of(batch)
        row = None
        if job is not None:
            try:
                row = await self._finder.get(job)
            except NoSuchJob:
                row = None
        if row is None or row.api != OPENAI or row.user != account.user:
            raise NoSuchJob(f"there is no batch {batch}", "list those that there are: GET /v1/batches")
        return row

    async def _shown(self, row: JobRow) -> Batch:
        return (await self._all_shown([row]))[0]

    async def _all_shown(self, rows: Sequence[JobRow]) -> list[Batch]:
        """Return jobs as batches. Their states are taken first: what led there is on disk then."""
        found = [await self._with_hand(row) for row in rows]
        reached = await self._context.look(self._context.reader.timeline.reached, [row.id for row, _ in found])
        files = await self._files.of_jobs([row for row, _ in found])
        failed = [row for row, _ in found if row.state is State.FAILED]
        errors = await self._context.in_thread(self._errors, failed) if failed else {}
        return [_batch(row, hand, reached[row.id], errors.get(row.id), files[row.id]) for row, hand in found]

    async def _with_hand(self, row: JobRow) -> tuple[JobRow, InHand]:
        hand = self._context.in_hand(row.id)
        if hand is None and row.state not in FINAL:
            return await self._finder.get(row.id), None  # It has ended in between.
        return (row, None) if hand is None else (hand.row, hand)

    def _errors(self, rows: Sequence[JobRow]) -> dict[str, BatchErrors]:
        return {row.id: BatchErrors(data=self._errors_of(row)) for row in rows}

    def _errors_of(self, row: JobRow) -> list[BatchError]:
        """Return why a batch failed: what its file as a whole was refused for, and its bad lines; or what broke."""
        refusal = terms_of(row).refusal
        whole = [] if refusal is None else [BatchError(code=refusal.code, message=refusal.message)]
        try:
            faults = self._faults(row.id) if row.records is None else ()
        except STORAGE_ERRORS:
            faults = ()  # The reason tells of the first.
        return [*whole, *faults][:MOST_ERRORS] or [BatchError(code=BATCH_FAILED, message=row.reason)]

    def _read_faults(self, job: str) -> tuple[BatchError, ...]:
        if not self._context.folder.has_results(job):
            return ()
        results = self._context.folder.open_results(job, Sharing.READER)
        try:
            found = results.faults(MOST_ERRORS)
        finally:
            results.close()
        return tuple(
            BatchError(code=each.code, message=each.message, line=each.line, param=PARAMS.get(each.code))
            for each in found
        )


def _terms(request: BatchRequest) -> BatchTerms:
    """Return what a batch's job keeps of a request; raise UserError for what Freight cannot do."""
    for field in ("input_file_id", "endpoint", "completion_window"):
        _check_text(field, getattr(request, field))
    if request.endpoint not in ENDPOINTS:
        raise UserError(
            f"there is no endpoint {request.endpoint[:100]!r} for batches", f"endpoints: {', '.join(ENDPOINTS)}"
        ).about("endpoint")
    expiry = request.output_expires_after
    if expiry is not None and not EXPIRY_S[0] <= expiry.seconds <= EXPIRY_S[1]:
        raise UserError(
            f"the output cannot expire after {expiry.seconds} s", f"give it {EXPIRY_S[0]} to {EXPIRY_S[1]} s"
        ).about("output_expires_after")
    if request.metadata is not None:
        _check_metadata(request.metadata)
    return BatchTerms(
        endpoint=request.endpoint,
        input_file_id=request.input_file_id,
        completion_window=request.completion_window,
        window_s=_window_s(request.completion_window),
        metadata=request.metadata,
        output_expires_after=expiry.seconds if expiry is not None else None,
    )


def _check_text(field: str, text: str) -> None:
    """Raise UserError for half of a character, which JSON may have and nothing here can keep."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{field} is not valid Unicode", "correct the request").about(field) from None


def _window_s(window: str) -> float:
    """Return a completion window in seconds; raise UserError for what is none."""
    try:
        seconds = parse_duration(window) if len(window) <= _MOST_WINDOW else 0.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MOST_WINDOW_S:
        raise UserError(
            f"the completion window {window[:_MOST_WINDOW]!r} is none", 'use "24h", or another duration up to 1000d'
        ).about("completion_window")
    return seconds


def _check_metadata(pairs: dict[str, str]) -> None:
    if len(pairs) > MOST_PAIRS:
        raise UserError(f"the metadata has {len(pairs)} pairs", f"give up to {MOST_PAIRS}").about("metadata")
    for key, value in pairs.items():
        _check_text("metadata", key + value)
        if len(key) > MOST_KEY:
            words = f"a key of the metadata has {len(key)} characters"
            raise UserError(words, f"give it up to {MOST_KEY}").about("metadata")
        if len(value) > MOST_VALUE:
            words = f"the metadata's {key!r} has {len(value)} characters"
            raise UserError(words, f"give it up to {MOST_VALUE}").about("metadata")


def _batch(
    row: JobRow,
    hand: InHand,
    reached: dict[State, float],
    errors: BatchErrors | None,
    files: tuple[str | None, str | None],
) -> Batch:
    terms, totals, at = terms_of(row), totals_of(row, hand), moments(reached)
    output, error = files if row.state in FINAL else (None, None)
    return Batch(
        id=batch_id(row.id),
        endpoint=terms.endpoint,
        model=row.model or None,
        errors=errors,
        input_file_id=terms.input_file_id,
        completion_window=terms.completion_window,
        status=STATUS[row.state],
        output_file_id=output,
        error_file_id=error,
        created_at=int(row.created_at),
        expires_at=int(row.created_at + terms.window_s),
        request_counts=request_counts(row.records, totals),
        usage=usage(totals),
        metadata=terms.metadata,
        in_progress_at=at.get("in_progress"),
        finalizing_at=at.get("finalizing"),
        completed_at=at.get("completed"),
        failed_at=at.get("failed"),
        expired_at=at.get("expired"),
        cancelling_at=at.get("cancelling"),
        cancelled_at=at.get("cancelled"),
    )
