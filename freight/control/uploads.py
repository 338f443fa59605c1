"""Inputs on their way in: streamed to disk with a running hash, whole or not at all."""

import asyncio
import errno
import hashlib
import os
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from freight.core.account import Account
from freight.core.view import Upload
from freight.errors import Interrupted, NoSuchUpload, OperationError, TooLarge
from freight.store.database import StorageFull, is_full
from freight.store.files import link_or_copy, sync_folder
from freight.store.roots import copy_out

# An upload that no job was made of is kept for this long.
UPLOAD_KEPT_S: Final = 86_400.0
_PIECE_BYTES: Final = 1 << 20
# Room is taken so far ahead: who says much and sends nothing keeps nobody else from the disk.
_AHEAD_BYTES: Final = 64 << 20
_T = TypeVar("_T")


class Uploads:
    """The folder of uploads. `threads` does the writing, so that nothing else waits for the disk.

    Once `stopping` is set, uploads break off.
    """

    def __init__(self, folder: Path, threads: Executor, stopping: asyncio.Event) -> None:
        self._folder = folder
        self._threads = threads
        self._stopping = stopping

    async def receive(
        self,
        user: str,
        chunks: AsyncIterator[bytes],
        size: int | None,
        limit: int,
        check: Callable[[int], None] = lambda count: None,
    ) -> Upload:
        """Keep a stream of `size` bytes (None: not known) for a user; what breaks off leaves nothing.

        Where the size is known there must be room for it, which is taken as it comes. Raises TooLarge for more than
        `limit` bytes, StorageFull when there is no room, and what `check` raises, called with the bytes that came.
        """
        upload = uuid.uuid4().hex
        kept = f"{upload}-{_tag(user)}"
        aside = self._folder / f"{kept}.part"
        try:
            file = await self._do(_new_file, aside, size, limit)
            try:
                digest = hashlib.sha256()
                count = await self._write(file, chunks, digest.update, size or 0, limit, check)
                await self._do(_finish, file, count)
            finally:
                os.close(file)
            sha256 = digest.hexdigest()
            await self._do(_put, aside, self._folder / f"{kept}.{sha256}")
        except OSError as error:
            raise _not_kept(error) from error
        finally:
            aside.unlink(missing_ok=True)
        return Upload(id=upload, bytes=count, sha256=sha256)

    async def _write(
        self,
        file: int,
        chunks: AsyncIterator[bytes],
        seen: Callable[[bytes], None],
        size: int,
        limit: int,
        check: Callable[[int], None],
    ) -> int:
        def put(piece: bytes) -> None:
            seen(piece)
            _write_all(file, piece)
            _take_room(file, count, size)

        count = 0
        held = bytearray()
        async for chunk in self._until_stopping(chunks):
            held += chunk
            if len(held) >= _PIECE_BYTES:
                count += len(held)
                _check_size(count, limit)
                check(count)
                await self._do(put, bytes(held))
                held.clear()
        count += len(held)
        _check_size(count, limit)
        check(count)
        await self._do(put, bytes(held))
        return count

    async def _until_stopping(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the chunks; raise OperationError once the service is ending, whether or not more come."""
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while True:
                coming = asyncio.ensure_future(anext(chunks, None))
                await asyncio.wait((coming, stopping), return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
                    raise OperationError("the service is ending; nothing was submitted", "submit it again later")
                chunk = coming.result()
                if chunk is None:
                    return
                yield chunk
        finally:
            stopping.cancel()

    async def _do(self, call: Callable[..., _T], *args: object, threads: Executor | None = None) -> _T:
        """Call in a thread, and see the call's end even when this is cancelled: it uses an open file."""
        running = asyncio.get_running_loop().run_in_executor(threads or self._threads, call, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait((running,))
            raise

    async def take_copy(
        self, user: str, source: int, shown: str, limit: int, threads: Executor, check: Callable[[int], None]
    ) -> Upload:
        """Keep a copy of the file open at `source`, as it is now; what breaks off leaves nothing. `threads` make it.

        `shown` is what its user calls it. Raises UserError for more than `limit` bytes, OperationError for a file that
        changes meanwhile, StorageFull when there is no room, and what `check` raises, called with its size before
        anything is written.
        """
        check((await self._do(os.fstat, source, threads=threads)).st_size)
        upload = uuid.uuid4().hex
        kept = f"{upload}-{_tag(user)}"
        aside = self._folder / f"{kept}.part"
        try:
            count, sha256 = await self._do(_copy, source, aside, shown, limit, self._stopping.is_set, threads=threads)
            await self._do(_put, aside, self._folder / f"{kept}.{sha256}")
        except Interrupted as error:
            raise OperationError("the service is ending; nothing was submitted", "submit it again later") from error
        except OSError as error:
            raise _not_kept(error) from error
        finally:
            aside.unlink(missing_ok=True)
        return Upload(id=upload, bytes=count, sha256=sha256)

    async def adopt(self, user: str, path: Path, sha256: str) -> str:
        """Make an upload of a file of the service's own, which takes no further room; return the upload's id.

        Raises FileNotFoundError where the file is gone.
        """
        upload = uuid.uuid4().hex
        await self._do(link_or_copy, path, self._folder / f"{upload}-{_tag(user)}.{sha256}")
        return upload

    def find(self, account: Account, upload: str) -> tuple[Path, str]:
        """Return where an upload lies, and its SHA-256.

        Raises NoSuchUpload when there is none of that id, or it is another user's and the account is no admin's.
        """
        found = [path for path in self._named(account, upload) if path.suffix != ".part"]
        if not found:
            raise NoSuchUpload(f"there is no upload {upload!r}", "send the input again; one upload makes one job")
        return found[0], found[0].suffix[1:]

    def drop(self, account: Account, upload: str) -> None:
        """Remove an upload, if it is still there and the account's to use."""
        for path in self._named(account, upload):
            path.unlink(missing_ok=True)

    def _named(self, account: Account, upload: str) -> list[Path]:
        whose = "*" if account.is_admin() else _tag(account.user)
        return list(self._folder.glob(f"{upload}-{whose}.*")) if upload.isalnum() else []

    def count_of(self, user: str) -> int:
        """Return how many uploads of a user's are here, with those that are under way."""
        return sum(1 for _ in self._folder.glob(f"*-{_tag(user)}.*"))

    def bytes_of(self, user: str) -> int:
        """Return how many bytes of a user's are here, but for what is under way."""
        count = 0
        for path in self._folder.glob(f"*-{_tag(user)}.*"):
            with suppress(FileNotFoundError):  # It may become a job's in this moment.
                found = path.stat()
                # What is a file of the user's, too, counts once.
                count += found.st_size // max(1, found.st_nlink) if path.suffix != ".part" else 0
        return count


def _tag(user: str) -> str:
    """Return what shows in a file's name whose it is."""
    return hashlib.sha256(user.encode()).hexdigest()[:32]


def _not_kept(error: OSError) -> OperationError:
    if is_full(error):
        return StorageFull("no space left for the input", "free some space where the service keeps its data")
    return OperationError(f"the input cannot be kept: {error.strerror}")


def _copy(source: int, path: Path, shown: str, limit: int, stopped: Callable[[], bool]) -> tuple[int, str]:
    """Copy an open file to `path`, on disk when this returns; return its bytes and its SHA-256."""
    target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        count = copy_out(source, target, shown, limit, stopped)
        os.fsync(target)
        digest, done = hashlib.sha256(), 0
        while piece := os.pread(target, _PIECE_BYTES, done):
            digest.update(piece)
            done += len(piece)
            if stopped():
                raise Interrupted("interrupted while copying the input")
        return count, digest.hexdigest()
    finally:
        os.close(target)


def _new_file(path: Path, size: int | None, limit: int) -> int:
    _check_size(size or 0, limit)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        disk = os.fstatvfs(file)
        if (size or 0) > disk.f_bavail * disk.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _take_room(file, 0, size or 0)
    except OSError:
        os.close(file)
        raise
    return file


def _take_room(file: int, count: int, size: int) -> None:
    """Take room for what comes next in a file of `size` bytes, of which `count` have come."""
    end = min(size, (count // _AHEAD_BYTES + 2) * _AHEAD_BYTES)
    if end > count:
        os.posix_fallocate(file, count, end - count)


def _put(aside: Path, path: Path) -> None:
    """Give a finished upload its name, on disk when this returns."""
    aside.rename(path)
    sync_folder(path.parent)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise TooLarge(
            f"the input has {size} bytes or more; the limit (limits.file_bytes) is {limit}", "split the file"
        )


def _write_all(file: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(file, view) :]


def _finish(file: int, size: int) -> None:
    os.ftruncate(file, size)
    os.fsync(file)
