"""Inputs on their way in: streamed to disk with a running hash, whole or not at all."""

import asyncio
import hashlib
import os
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Final, TypeVar

from freight.core.view import Upload
from freight.errors import OperationError, UserError
from freight.store.database import StorageFull, is_full

# An upload that no job was made of is kept for this long.
UPLOAD_KEPT_S: Final = 86_400.0
_PIECE_BYTES: Final = 1 << 20
_T = TypeVar("_T")


class Uploads:
    """The folder of uploads. `threads` does the writing, so that nothing else waits for the disk.

    Once `stopping` is set, uploads break off.
    """

    def __init__(self, folder: Path, threads: Executor, stopping: asyncio.Event) -> None:
        self._folder = folder
        self._threads = threads
        self._stopping = stopping

    async def receive(self, chunks: AsyncIterator[bytes], size: int | None, limit: int) -> Upload:
        """Keep a stream of `size` bytes (None: not known); what breaks off leaves nothing.

        Room is taken before anything is written, where the size is known. Raises UserError for more than `limit`
        bytes, StorageFull when there is no room.
        """
        upload = uuid.uuid4().hex
        aside = self._folder / f"{upload}.part"
        try:
            file = await self._do(_new_file, aside, size, limit)
            try:
                digest = hashlib.sha256()
                count = await self._write(file, chunks, digest.update, limit)
                await self._do(_finish, file, count)
            finally:
                os.close(file)
            sha256 = digest.hexdigest()
            await self._do(aside.rename, self._folder / f"{upload}.{sha256}")
        except OSError as error:
            if is_full(error):
                raise StorageFull(
                    "no space left for the input", "free some space where the service keeps its data"
                ) from error
            raise OperationError(f"the input cannot be kept: {error.strerror}") from error
        finally:
            aside.unlink(missing_ok=True)
        return Upload(id=upload, bytes=count, sha256=sha256)

    async def _write(self, file: int, chunks: AsyncIterator[bytes], seen: Callable[[bytes], None], limit: int) -> int:
        def put(piece: bytes) -> None:
            seen(piece)
            _write_all(file, piece)

        count = 0
        held = bytearray()
        async for chunk in self._until_stopping(chunks):
            held += chunk
            if len(held) >= _PIECE_BYTES:
                count += len(held)
                _check_size(count, limit)
                await self._do(put, bytes(held))
                held.clear()
        count += len(held)
        _check_size(count, limit)
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

    async def _do(self, call: Callable[..., _T], *args: object) -> _T:
        """Call in a thread, and see the call's end even when this is cancelled: it uses an open file."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait((running,))
            raise

    def find(self, upload: str) -> tuple[Path, str]:
        """Return where an upload lies, and its SHA-256; raise UserError when there is none of that id."""
        found = list(self._folder.glob(f"{upload}.*")) if upload.isalnum() else []
        if not found or found[0].suffix == ".part":
            raise UserError(f"there is no upload {upload!r}", "send the input again; one upload makes one job")
        return found[0], found[0].suffix[1:]

    def drop(self, upload: str) -> None:
        """Remove an upload, if it is still there."""
        for path in self._folder.glob(f"{upload}.*") if upload.isalnum() else ():
            path.unlink(missing_ok=True)


def _new_file(path: Path, size: int | None, limit: int) -> int:
    _check_size(size or 0, limit)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if size:
            os.posix_fallocate(file, 0, size)
    except OSError:
        os.close(file)
        raise
    return file


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise UserError(
            f"the input has {size} bytes or more; the limit (limits.file_bytes) is {limit}", "split the file"
        )


def _write_all(file: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(file, view) :]


def _finish(file: int, size: int) -> None:
    os.ftruncate(file, size)
    os.fsync(file)
