"""Putting a finished file in its place."""

import errno
import os
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
