"""A data folder: which file system it is on, and that one process at a time owns it."""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Final

import msgspec

from freight.errors import OperationError
from freight.store.filesystem import is_network
from freight.store.processes import ProcessId, this_process

# An owner elsewhere that has not shown itself for this long is taken for dead.
OWNER_STALE_S: Final = 60.0
OWNER_BEAT_S: Final = 10.0
_WAIT: Final = "wait for it to end, or stop it; then run the same command again"
_NO_FLOCK: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class Locking(Enum):
    """How a folder is kept to one process, by what its file system can do."""

    LOCAL = auto()
    NETWORK = auto()
    OWNER_FILE = auto()


class Owner(msgspec.Struct):
    """Who owns a folder: a process, and a count that it raises to show that it lives."""

    process: ProcessId
    beat: int = 0


class FolderLock:
    """One process's hold on a folder, by flock, or by an owner file with a heartbeat where flock is refused.

    `is_lost`: another process took the folder over, having seen no sign of this one for OWNER_STALE_S.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "owner"
        self._fd: int | None = None
        self._is_owner = False
        self._owner = Owner(this_process())
        self._beating: threading.Thread | None = None
        self._released = threading.Event()
        self.is_lost = False
        self.locking = Locking.NETWORK if is_network(folder) else Locking.LOCAL

    def take(self, what: str, wait: Callable[[float], None] = time.sleep, hint: str = _WAIT) -> None:
        """Own the folder from now on; raise OperationError naming the owner, with `hint`, when it has one.

        `what` is the folder in the user's words. Where flock is refused this watches a silent owner on
        another host for OWNER_STALE_S before it takes over.
        """
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise _taken(what, self._read(), hint) from None
        except OSError as error:
            os.close(fd)
            if error.errno not in _NO_FLOCK:
                raise OperationError(f"cannot lock {what}: {error.strerror}") from error
            self._take_over(what, wait, hint)
            return
        self._fd = fd
        self._is_owner = True
        self._write()

    def beat(self) -> None:
        """Show that the owner lives; where somebody else has taken over, `is_lost` says so from then on."""
        now = self._read()
        if now is None or now.process != self._owner.process:
            self.is_lost = True
            return
        self._owner.beat += 1
        self._write()

    def _keep_beating(self) -> None:
        while not self._released.wait(OWNER_BEAT_S) and not self.is_lost:
            with suppress(OSError):  # A full disk: the next beat may fit.
                self.beat()

    def is_gone(self) -> bool:
        """Return whether the folder was removed, or another put in its place, under its owner."""
        if self._fd is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._fd), self._path.stat())
        except OSError:
            return True

    def release(self) -> None:
        """Let the folder go."""
        self._released.set()
        if self._beating is not None:
            self._beating.join()
        if self.locking is Locking.OWNER_FILE and self._is_owner and not self.is_lost:
            self._path.unlink(missing_ok=True)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _take_over(self, what: str, wait: Callable[[float], None], hint: str) -> None:
        self.locking = Locking.OWNER_FILE
        before = self._read()
        if before is not None and _lives(before, self._read, wait):
            raise _taken(what, before, hint)
        self._write()
        # Two that start at once both write: the last rename wins, and the other sees it.
        wait(0.2)
        now = self._read()
        if now is None or now.process != self._owner.process:
            raise _taken(what, now, hint)
        self._is_owner = True
        # A thread, so that the owner is seen to live whatever else it is busy with.
        self._beating = threading.Thread(target=self._keep_beating, name="freight-owner", daemon=True)
        self._beating.start()

    def _read(self) -> Owner | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Owner)
        except (OSError, msgspec.DecodeError):
            return None

    def _write(self) -> None:
        if self._fd is not None:
            os.pwrite(self._fd, msgspec.json.encode(self._owner).ljust(256) + b"\n", 0)
            return
        aside = self._path.with_name(f"owner.{os.getpid()}")
        aside.write_bytes(msgspec.json.encode(self._owner))
        aside.rename(self._path)


def _lives(owner: Owner, read: Callable[[], Owner | None], wait: Callable[[float], None]) -> bool:
    """Return whether an owner lives: its process, on this host; on another, its count within OWNER_STALE_S."""
    if owner.process.is_local():
        return owner.process.is_running()
    for _ in range(int(OWNER_STALE_S)):
        wait(1.0)
        now = read()
        if now is None:
            return False
        if now != owner:
            return True
    return False


def _taken(what: str, owner: Owner | None, hint: str) -> OperationError:
    by = f"process {owner.process.pid} on {owner.process.host}" if owner else "another process"
    return OperationError(f"{what} is in use by {by}", hint)
