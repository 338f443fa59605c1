"""A file that appears whole or not at all: written aside in its own folder, put on disk, and only then renamed."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from freight.errors import FreightError, OperationError, UserError, refusing
from freight.store.files import rename_new, sync_folder

# A transfer that breaks is tried again so often, with nothing of it coming; the pauses add up to six seconds.
TRIES: Final = 5
FIRST_PAUSE_S: Final = 0.2


def writable_path(path: str | os.PathLike[str], force: bool) -> Path:
    """Return where a file is to be written, links followed; raise UserError where that could never be.

    Without `force` what stands there already is in the way.
    """
    shown = os.fspath(path)
    with refusing(f"cannot write {shown!r}", "choose another name"):
        target = Path(os.path.realpath(shown))
        if not shown or shown.endswith("/") or target.is_dir():
            raise UserError(f"{shown or repr(shown)} is a folder", "name a file")
        if os.path.lexists(target):
            if not target.is_file():
                raise UserError(f"{shown} is not a regular file", "name one, or print the results")
            if not force:
                raise _in_the_way(shown)
        folder = target.parent
        if not folder.is_dir():
            raise UserError(f"the folder of {shown} does not exist", f"make it first: mkdir -p {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"cannot write to the folder of {shown}", "choose another folder")
        return target


def _in_the_way(shown: str) -> UserError:
    return UserError(f"{shown} exists already and was left as it is", "choose another name, or replace it with --force")


class Going:
    """How a transfer that broke goes on: where it was, as long as what is sent is the same, and a few times.

    A transfer of which `tries` attempts in a row brought nothing is given up, and so is one that never began.
    """

    def __init__(self, tries: int = TRIES) -> None:
        self._tries = tries
        self._failures = 0
        self._broke: FreightError | None = None
        self._etag: str | None = None
        self._got = 0

    def headers(self) -> dict[str, str]:
        """Return the headers that ask for what is missing."""
        return {"Range": f"bytes={self._got}-", "If-Range": self._etag} if self._etag and self._got else {}

    def begins(self, etag: str | None, is_rest: bool) -> bool:
        """Note what is sent; return whether it begins anew: what came before is of no use then."""
        self._etag = etag
        if is_rest:
            return False
        is_again = self._got > 0
        self._got = 0
        return is_again

    def came(self, count: int) -> None:
        """Note that so many bytes came."""
        self._got += count
        self._failures = 0
        self._broke = None

    def pause(self, error: FreightError) -> float:
        """Return the seconds to wait before the next attempt; raise the error that broke it when it is given up."""
        self._failures += 1
        self._broke = self._broke or error
        if self._etag is None or self._failures > self._tries:
            raise self._broke
        return FIRST_PAUSE_S * 2 ** (self._failures - 1)


class Saving:
    """The file while it is written. Leaving the block without an error puts it in its place."""

    def __init__(self, path: str | os.PathLike[str], force: bool) -> None:
        self._shown = os.fspath(path)
        self._target = writable_path(path, force)
        self._force = force
        self._aside = self._target.with_name(f".freight-{secrets.token_hex(8)}.partial")
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        with refusing(f"cannot write {self._shown}", "choose another name"):
            fd = os.open(self._aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._file = os.fdopen(fd, "wb")
        return self

    def write(self, chunk: bytes) -> None:
        """Add some bytes; raise OperationError when they do not fit."""
        assert self._file is not None
        try:
            self._file.write(chunk)
        except OSError as error:
            raise self._failed(error) from error

    def restart(self) -> None:
        """Forget what was written so far."""
        assert self._file is not None
        try:
            self._file.seek(0)
            self._file.truncate()
        except OSError as error:
            raise self._failed(error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        except OSError as problem:
            raise self._failed(problem) from problem
        finally:
            self._drop()

    def _finish(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._force:
            self._aside.replace(self._target)
        else:
            try:
                rename_new(self._aside, self._target)
            except FileExistsError:
                raise _in_the_way(self._shown) from None
        sync_folder(self._target.parent)

    def _drop(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # What it held back did not fit; that was said.
                self._file.close()
        self._aside.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> FreightError:
        return OperationError(
            f"cannot write {self._shown}: {error.strerror or error}; nothing was written",
            "make room, or choose another",
        )
