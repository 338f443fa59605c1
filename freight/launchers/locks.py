"""Host-wide holds on devices: one lock file a device, whatever the data folder and whoever the user.

The open lock is handed down to the worker and its model server, so that the kernel itself lets the
device go when the last of them has ended.
"""

import fcntl
import os
import pwd
import stat
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
    fd = _open(folder / f"freight-{device.replace('/', '_').replace(':', '-')}.lock")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).split(b"\n")[0]
        os.close(fd)
        return _holder(int(pid) if pid.isdigit() else 0)
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd


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


def _holder(pid: int) -> Holder:
    try:
        user = pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (OSError, KeyError):
        return Holder(pid, "a run that is ending")
    command = " ".join(Path(word).name if number == 0 else word for number, word in enumerate(words)).strip()
    return Holder(pid, f"user {user}: {command[:120]}")
