"""Putting a finished file in its place."""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

# File systems without hard links.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})


def rename_new(aside: Path, target: Path) -> None:
    """Rename without ever replacing: by a hard link, which fails where the name is taken.

    Raises FileExistsError where something stands at `target`.
    """
    try:
        os.link(aside, target)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(target) from None
        aside.rename(target)
        return
    aside.unlink()


def rename_new_at(folder: int, aside: str, name: str) -> None:
    """Rename a file of an open folder without ever replacing; raise FileExistsError where something is called so."""
    try:
        os.link(aside, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            raise FileExistsError(name) from None
        os.rename(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
        return
    os.unlink(aside, dir_fd=folder)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, which must be new; where the file system cannot, or not again, copy the file.

    Raises FileNotFoundError where there is no such file.
    """
    try:
        os.link(source, target)
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with source.open("rb") as found, os.fdopen(os.open(target, flags, 0o600), "wb") as copy:
            shutil.copyfileobj(found, copy)
            copy.flush()
            os.fsync(copy.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on disk."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # A folder that may be written to and not read: the file is there all the same.
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
