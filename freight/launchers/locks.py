"""Host-wide holds on devices: one lock file a device, whatever the data folder and whoever the user.

The open lock is handed down to the worker and its model server, so that the kernel itself lets the
device go when the last of them has ended.
"""

import fcntl
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from freight.core.device import Holder
from freight.errors import OperationError

# The first that every user may write to. Each user must find the same one.
_FOLDERS: Final = (Path("/run/lock"), Path("/dev/shm"), Path("/tmp"))
_SHARED: Final = stat.S_ISVTX | stat.S_IWOTH


def lock_folder() -> Path:
    """Return the host's folder for lock files."""
    for folder in _FOLDERS:
        if folder.is_dir() and folder.stat().st_mode & _SHARED == _SHARED:
            return folder
    raise OperationError(f"none of {', '.join(map(str, _FOLDERS))} can be written to by every user of this machine")


def lock_device(device: str, folder: Path) -> int | Holder:
    """Return an open descriptor that holds `device`, or who holds it already."""
    path = _path(device, folder)
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).split(b"\n")[0]
        os.close(fd)
        return _holder(path, int(pid) if pid.isdigit() else 0)
    with suppress(OSError):  # A full disk: the lock holds all the same, and is found by who has it open.
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd


def break_lock(device: str, folder: Path, holder: Holder) -> None:
    """Make `device` free although a process that nobody wants any more still has its lock.

    Raises OperationError where the lock's file cannot be replaced.
    """
    path = _path(device, folder)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OperationError(
            f"{device} is still held by {holder}, and its lock {path} cannot be removed: {error.strerror}",
            "end that process",
        ) from error


def _path(device: str, folder: Path) -> Path:
    return folder / f"freight-{device.replace('/', '_').replace(':', '-')}.lock"


def _open(path: Path) -> int:
    # A file of another user's in a shared folder may not be opened with O_CREAT, so this asks for it last.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise OperationError(f"cannot open the device lock {path}: {error.strerror}") from error
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.open(path, flags)
    os.fchmod(fd, 0o666)
    return fd


def _holder(path: Path, pid: int) -> Holder:
    """Return who has the lock: its taker, or where that is gone, whichever process still has the file open."""
    for candidate in (pid, *_openers(path)):
        with suppress(OSError, KeyError):
            user = pwd.getpwuid(Path(f"/proc/{candidate}").stat().st_uid).pw_name
            words = Path(f"/proc/{candidate}/cmdline").read_bytes().decode(errors="replace").split("\0")
            command = " ".join(Path(word).name if number == 0 else word for number, word in enumerate(words)).strip()
            if command:
                return Holder(candidate, f"user {user}: {command[:120]}")
    return Holder(pid, "a run that is ending")


def _openers(path: Path) -> Iterator[int]:
    """Yield the processes, of those that this user may look at, that have the file open."""
    real = os.path.realpath(path)
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError), os.scandir(f"/proc/{entry.name}/fd") as open_files:
                if any(os.readlink(file) == real for file in open_files):  # noqa: PTH115
                    yield int(entry.name)
