"""The files of the OpenAI API: inputs that are kept until somebody deletes them, and what batches have to give."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from freight.control.context import Context
from freight.control.finding import Finder
from freight.control.output import Only
from freight.control.quotas import Quotas
from freight.control.streams import Rendering, ResultStream, Streams
from freight.control.uploads import Uploads
from freight.core.account import Account
from freight.core.openaifile import (
    BATCH,
    RANDOM_BYTES,
    FileList,
    FileObject,
    Part,
    error_tail,
    input_id,
    job_of,
    made_at,
)
from freight.core.view import Upload
from freight.errors import FreightError, NoSuchFile, NoSuchJob, OperationError, TooMany, UserError, WrongState
from freight.store.database import STORAGE_ERRORS, StorageFull, is_full
from freight.store.files import sync_folder
from freight.store.filetable import FileRow
from freight.store.rows import JobRow

log = logging.getLogger("freight.service")

_NEWEST: Final = (1e12, "~")
_OLDEST: Final = (-1.0, "")
_PIECE_BYTES: Final = 1 << 18
MOST_FILES: Final = 10_000
_SHOWN: Final = {
    Part.OUTPUT: Rendering(Only.OK),
    Part.ERROR: Rendering(Only.FAILED, "openai", error_tail),
}


@dataclass(frozen=True, slots=True)
class NewFile:
    """What its sender says of a file: its name, for showing, and after how many seconds it expires (None: never)."""

    filename: str
    expires_s: int | None = None


class Files:
    """Keeps files, shows them, gives them out and forgets them. Each is there for its user alone, admin or not."""

    def __init__(
        self,
        context: Context,
        uploads: Uploads,
        quotas: Quotas,
        finder: Finder,
        streams: Streams,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._context = context
        self._uploads = uploads
        self._quotas = quotas
        self._finder = finder
        self._streams = streams
        self._now = now
        self._keeping: set[asyncio.Task[FileRow]] = set()

    async def receive(
        self, account: Account, chunks: AsyncIterator[bytes], size: int, about: Callable[[], NewFile]
    ) -> FileObject:
        """Keep a file of at least `size` bytes that is being sent; what breaks off leaves nothing.

        `about` is called once all chunks have come. Raises what `chunks` raises, TooLarge, TooMany and StorageFull.
        """
        limit = self._context.settings()["limits.file_bytes"]
        await self._check_count(account)
        async with self._quotas.room(account, size) as check:
            upload = await self._uploads.receive(account.user, chunks, size, limit, check)
            # To its end even when the sender goes away: half of it would be a file that nobody knows.
            keeping = asyncio.create_task(self._keep(account, upload, about()))
            self._keeping.add(keeping)
            keeping.add_done_callback(self._keeping.discard)
            row = await asyncio.shield(keeping)
        return _object(row, upload.bytes)

    async def _check_count(self, account: Account) -> None:
        """Raise TooMany where a user has as many files as anybody may have: each is looked at to know their bytes."""
        count = 0 if account.is_local else await self._context.look(self._context.reader.files.count_of, account.user)
        if count >= MOST_FILES:
            raise TooMany(f"you have {count} files; the limit is {MOST_FILES}", "delete some that you do not need")

    async def _keep(self, account: Account, upload: Upload, about: NewFile) -> FileRow:
        at_ms = int(self._now() * 1000)
        made = at_ms / 1000
        expires_at = None if about.expires_s is None else made + about.expires_s
        row = FileRow(
            input_id(at_ms, secrets.token_bytes(RANDOM_BYTES)), account.user, about.filename, upload.bytes,
            upload.sha256, BATCH, made, expires_at,
        )  # fmt: skip
        path = self._path(row.id)
        try:
            received, _ = self._uploads.find(account, upload.id)
            await self._context.in_thread(_move, received, path)
            await self._context.write(self._context.catalog.files.add, row)
        except (FreightError, OSError) as error:
            self._uploads.drop(account, upload.id)
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise _not_kept(error) from error
            raise
        return row

    def _path(self, file: str) -> Path:
        return self._context.folder.files / file

    async def find(self, account: Account, file: str) -> FileRow:
        """Return a file; raise NoSuchFile where there is none of that id, or it is another user's."""
        row = await self._context.look(self._context.reader.files.get, account.user, file, self._now())
        if row is None:
            raise no_file(file)
        return row

    async def show(self, account: Account, file: str) -> FileObject:
        """Return a file as the API shows it."""
        return await self._shown(await self.find(account, file))

    async def page(
        self, account: Account, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> FileList:
        """Return up to `limit` files that come after the file `after`, which may be one that was deleted since."""
        begin = (_NEWEST if newest_first else _OLDEST) if after is None else await self._place(account, after)
        rows = await self._context.look(
            self._context.reader.files.page, account.user, self._now(), limit + 1, begin, purpose, newest_first
        )
        shown = [await self._shown(row) for row in rows[:limit]]
        first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
        return FileList(data=shown, has_more=len(rows) > limit, first_id=first, last_id=last)

    async def _place(self, account: Account, file: str) -> tuple[float, str]:
        """Return where a file stands, or stood, in a list."""
        at = made_at(file)
        if at is None and (job := job_of(file)) is not None:
            with suppress(KeyError):
                row = await self._context.look(self._context.reader.get, job)
                at = row.finished_at if row.user == account.user else None
        if at is None:
            raise no_file(file, "after")
        return at, file

    async def _shown(self, row: FileRow) -> FileObject:
        return _object(row, await self._size(row))

    async def _size(self, row: FileRow) -> int:
        """Return how many bytes a file has. Those of a batch's are counted once, and kept; 0 if they cannot be read."""
        if row.size is not None:
            return row.size
        try:
            stream = await self._results(row)
            stream.close()
            size = stream.size or 0
            await self._context.write(self._context.catalog.files.counted, row, size)
        except (FreightError, *STORAGE_ERRORS) as error:
            log.warning("file %s cannot be measured: %s", row.id, error)
            return 0
        return size

    async def content(self, account: Account, file: str) -> "ResultStream | InputStream":
        """Return what is in a file, in pieces; it must be closed."""
        row = await self.find(account, file)
        if row.job is not None:
            return await self._results(row)
        try:
            return await self._context.in_thread(_opened, row, self._path(row.id))
        except FileNotFoundError:
            raise no_file(file) from None  # It was deleted in this moment.

    async def _results(self, row: FileRow) -> ResultStream:
        """Return what is in a batch's output or error file; raise NoSuchFile where it goes on in this moment."""
        try:
            return await self._streams.rendered(await self._finder.get(row.job or ""), _SHOWN[Part(row.part or "")])
        except (NoSuchJob, WrongState):
            raise no_file(row.id) from None

    async def delete(self, account: Account, file: str) -> None:
        """Forget a file. Batches that were made of it go on, and a batch's results stay where they are."""
        row = await self.find(account, file)
        if not await self._forget(row):
            raise no_file(file)

    async def _forget(self, row: FileRow, until: float | None = None) -> bool:
        was_there = await self._context.write(self._context.catalog.files.delete, row.id, until)
        if row.job is None and (was_there or until is None):
            await self._context.in_thread(_unlink, self._path(row.id))
        return was_there

    async def forget_expired(self) -> None:
        """Forget the files whose time is over."""
        now = self._now()
        for row in await self._context.look(self._context.reader.files.expired, now):
            # An output that is offered anew meanwhile has its time before it.
            if await self._forget(row, now):
                log.info("file %s: its time is over", row.id)

    async def as_upload(self, account: Account, file: str) -> Upload:
        """Make an upload of a file, of which a job can be made, as often as wanted; it takes no further room."""
        row = await self.find(account, file)
        if row.job is not None or row.sha256 is None:
            raise UserError(
                f"the file {file} is for {row.purpose}", "a batch is made of a file that was sent for batch"
            )
        try:
            upload = await self._uploads.adopt(account.user, self._path(row.id), row.sha256)
        except FileNotFoundError:
            raise no_file(file) from None
        return Upload(id=upload, bytes=row.size or 0, sha256=row.sha256)

    async def of_job(self, row: JobRow) -> tuple[str | None, str | None]:
        """Return the ids of a job's output and error file; None for one that it has not, or that was deleted."""
        return (await self.of_jobs([row])).get(row.id, (None, None))

    async def of_jobs(self, rows: Sequence[JobRow]) -> dict[str, tuple[str | None, str | None]]:
        """Return for each job the ids of its output and error file."""
        jobs = [row.id for row in rows]
        found = await self._context.look(self._context.reader.files.of_jobs, jobs, self._now())
        ids = {(file.job, file.part): file.id for file in found}
        return {job: (ids.get((job, Part.OUTPUT)), ids.get((job, Part.ERROR))) for job in jobs}


@dataclass(frozen=True, slots=True)
class InputStream:
    """An input in pieces: all of them, or with `part` some of its bytes. `etag` names these bytes and no others."""

    size: int
    etag: str
    pieces: Iterator[bytes]
    part: Callable[[range], Iterator[bytes]]
    close: Callable[[], None]


def _opened(row: FileRow, path: Path) -> InputStream:
    file = path.open("rb")

    def part(wanted: range) -> Iterator[bytes]:
        file.seek(wanted.start)
        left = len(wanted)
        while left and (piece := file.read(min(left, _PIECE_BYTES))):
            left -= len(piece)
            yield piece

    size = row.size or 0
    return InputStream(size, f'"{row.sha256}"', part(range(size)), part, file.close)


def no_file(file: str, param: str = "id") -> NoSuchFile:
    """Return what is said of a file that is not there for who asks."""
    return NoSuchFile(f"there is no file {file[:100]!r}", "see your files: GET /v1/files").about(param)


def _object(row: FileRow, size: int) -> FileObject:
    return FileObject(
        id=row.id,
        bytes=size,
        created_at=int(row.created_at),
        filename=row.filename,
        purpose="batch" if row.job is None else "batch_output",
        expires_at=None if row.expires_at is None else int(row.expires_at),
    )


def _not_kept(error: OSError) -> OperationError:
    if is_full(error):
        return StorageFull("no space left for the file", "free some space where the service keeps its data")
    return OperationError(f"the file cannot be kept: {error.strerror}", "see freight doctor")


def _move(received: Path, path: Path) -> None:
    received.rename(path)
    sync_folder(path.parent)
    sync_folder(received.parent)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
