"""Folders for output below a granted root: made with care, and written to by descriptor alone."""

import errno
import hashlib
import os
import stat
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from freight.errors import FreightError, NotAllowed, OperationError
from freight.store.beneath import Astray, Rules, Why, below, walk
from freight.store.files import rename_new_at
from freight.store.roots import Root, account_name, explaining, opened_root

# Group members read; nobody else does.
FILE_MODE: Final = 0o640
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class OutputFolder:
    """An open folder; files go into it whatever its name leads to by now. Its files take its group, and `mode`."""

    def __init__(self, path: Path, fd: int, mode: int) -> None:
        """Take over `fd`, an O_PATH descriptor. `path` is for showing."""
        self.path = path
        self._fd = fd
        self._mode = mode

    def close(self) -> None:
        """Let the folder go."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create(self, name: str) -> int:
        """Return a descriptor of a new, empty file, for reading and writing.

        Raises OperationError where something is called so already, and NotAllowed where it cannot be made.
        """
        with self._explained(name):
            return self._create(name)

    def begin(self, name: str, writer: str = "") -> "Draft":
        """Return a file to write to, which is nothing until it is put at `name`.

        Each writer has one at a time for each name. Raises NotAllowed and OperationError, as `create`.
        """
        aside = f".{hashlib.sha256(os.fsencode(f'{name}/{writer}')).hexdigest()[:16]}.partial"
        with self._explained(name):
            # One that was killed may have left it.
            with suppress(FileNotFoundError):
                os.unlink(aside, dir_fd=self._fd)
            return Draft(self, self._create(aside), aside, name)

    @contextmanager
    def replacing(self, name: str) -> Generator[int]:
        """Give a descriptor to write to; at the end of the block that is `name`, at once, whole and on disk.

        A block that raises leaves what was there. One writer at a time for each name. Errors as in `create`.
        """
        draft = self.begin(name)
        try:
            yield draft.fd
            draft.put()
        finally:
            draft.drop()

    def look(self, name: str) -> int | None:
        """Return a descriptor for reading the regular file at `name`; None where there is none that can be read."""
        try:
            fd = os.open(name, _LOOK, dir_fd=self._fd)
        except OSError:
            return None
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        return None

    def has(self, name: str) -> bool:
        """Return whether anything is called so."""
        with self._explained(name):
            try:
                os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
        return True

    def check(self) -> None:
        """Raise what `create` raises where files cannot be made."""
        name = f".{uuid.uuid4().hex}.partial"
        os.close(self.create(name))
        with self._explained(name):
            os.unlink(name, dir_fd=self._fd)

    def put(self, aside: str, name: str, *, replace: bool) -> None:
        """Give a file of the folder another name; raise OperationError where that is taken and `replace` is not set."""
        with self._explained(name):
            if replace:
                os.rename(aside, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            else:
                rename_new_at(self._fd, aside, name)
            self._sync()

    def remove(self, name: str) -> None:
        """Remove a file, if that can be."""
        with suppress(OSError):
            os.unlink(name, dir_fd=self._fd)

    def replace(self, name: str, content: bytes) -> None:
        """Put a file with `content` at `name`, at once, whole and on disk. Errors as in `create`."""
        with self.replacing(name) as fd, self._explained(name), os.fdopen(fd, "wb", closefd=False) as file:
            file.write(content)

    @contextmanager
    def _explained(self, name: str) -> Generator[None]:
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} names no file in a folder")
        path = self.path / name
        with explaining(path, Root(self.path)):
            try:
                yield
            except FileExistsError as error:
                raise OperationError(f"there is something at {path} already", "take it away") from error

    def _create(self, name: str) -> int:
        fd = os.open(name, _NEW, 0o600, dir_fd=self._fd)
        try:
            _hand_over(fd, os.fstat(self._fd).st_gid, self._mode)
        except BaseException:
            os.close(fd)
            os.unlink(name, dir_fd=self._fd)
            raise
        return fd

    def _sync(self) -> None:
        # A folder that may be written to and not read: the file is there all the same.
        with suppress(PermissionError):
            folder = os.open(".", _FOLDER, dir_fd=self._fd)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


class Draft:
    """A file that is being written, aside, in an open folder."""

    def __init__(self, folder: OutputFolder, fd: int, aside: str, name: str) -> None:
        """Take over `fd`, which the file is written by."""
        self.fd = fd
        self._folder = folder
        self._aside = aside
        self._name = name

    def put(self, *, replace: bool = True) -> None:
        """Put what was written at its name, at once, whole and on disk.

        Raises OperationError where something stands there that may not be replaced: then nothing has changed.
        """
        with explaining(self._folder.path / self._name, Root(self._folder.path)):
            os.fsync(self.fd)
        self._folder.put(self._aside, self._name, replace=replace)
        self._aside = ""

    def drop(self) -> None:
        """Let go of it; what was not put in place is gone."""
        if self._aside:
            self._folder.remove(self._aside)
        os.close(self.fd)


def make_output_below(root: Root, folder: Path, mode: int = FILE_MODE) -> OutputFolder:
    """Return the folder `folder` below `root`, open for output; what is not there is made.

    What is made takes the group of the folder above, and `mode`: files as it is, folders with the right to enter for
    whoever may read. Links are followed as long as they stay below the root. Raises NotAllowed for what
    leads out or may not be written, UserError for what is no folder, OperationError for what the system cannot do now.
    """

    def makes(here: int, name: str) -> None:
        _make_folder(here, name, _folder_mode(mode))

    with opened_root(root) as top, explaining(folder, root):
        names = below(str(root.path), str(folder))
        if names is None or ".." in names:
            raise Astray(Why.LEAVES)
        fd = walk(top, str(root.path), names, Rules(makes=makes))
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return OutputFolder(folder, fd, mode | 0o600)


def remove_empty_below(root: Root, folder: Path) -> None:
    """Remove the folder `folder` below `root`, where it is empty and that can be."""
    with suppress(OSError, Astray, FreightError), opened_root(root) as top:
        names = below(str(root.path), str(folder))
        if names:
            above = walk(top, str(root.path), names[:-1], Rules())
            try:
                os.rmdir(names[-1], dir_fd=above)
            finally:
                os.close(above)


def _folder_mode(mode: int) -> int:
    return mode | 0o700 | (mode & 0o044) >> 2


def _make_folder(here: int, name: str, mode: int) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=here)
    except FileExistsError:
        return  # Somebody was faster. The walk looks at what it is.
    fd = os.open(name, _FOLDER, dir_fd=here)
    try:
        made = os.fstat(fd)
        # Another may lie there by now: what holds anything, or is not ours, is left as it is.
        if made.st_uid == os.geteuid() and not os.listdir(fd):  # noqa: PTH208
            _hand_over(fd, os.fstat(here).st_gid, mode | made.st_mode & stat.S_ISGID)
    except BaseException:
        with suppress(OSError):
            os.rmdir(name, dir_fd=here)
        raise
    finally:
        os.close(fd)


def _hand_over(fd: int, group: int, mode: int) -> None:
    """Give a new file or folder its group and mode; raise NotAllowed where Freight's account may not give it."""
    if os.fstat(fd).st_gid != group:
        try:
            os.fchown(fd, -1, group)
        except PermissionError as error:
            raise NotAllowed(
                f"the account that runs Freight, {account_name()}, may not give files to the folder's group, {group}",
                "set the setgid bit of the folder (chmod g+s), or take the account into the group",
            ) from error
    # After the group, a change of which may take bits away.
    os.fchmod(fd, mode)
