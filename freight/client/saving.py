"""A file that appears whole or not at all: written aside in its own folder, put on disk, and only then renamed."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from freight.errors import FreightError, OperationError, UserError, refusing
from freight.store.files import rename_new, sync_folder


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
