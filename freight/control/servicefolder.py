"""The service's data folder: what lies where in it, and that one service at a time owns it."""

import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from freight.control.sockets import CONTROL_SOCKET
from freight.errors import OperationError, UserError
from freight.store.catalog import Catalog
from freight.store.database import Sharing, StorageFull, is_full
from freight.store.folder import FolderLock, Locking
from freight.store.results import RESULTS_DB, Results

API_SOCKET: Final = "api.sock"
_ELSEWHERE: Final = "set FREIGHT_DATA to a folder on a local disk that you may write to"


class ServiceFolder:
    """The data folder of one service."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = path / "run"
        self.api_socket = self.run / API_SOCKET
        self.control_socket = self.run / CONTROL_SOCKET
        self.catalog = path / "catalog.db"
        self.uploads = path / "uploads"
        # Output of workers that live; it goes to their jobs when they leave them.
        self.workers = path / "workers"
        self.batch = path / "batch"
        # Contents of files of the OpenAI API.
        self.files = path / "files"
        self._lock: FolderLock | None = None

    @property
    def lock(self) -> FolderLock:
        """The lock on the folder, once claimed."""
        assert self._lock is not None
        return self._lock

    def claim(self) -> None:
        """Make the folder or accept the one that is there, and own it.

        Raises UserError for one on a network file system, OperationError where it cannot be written to or has an
        owner.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = FolderLock(self.path)
            if lock.locking is not Locking.LOCAL:
                raise UserError(
                    f"the data folder {self.path} is on a network file system, where a service's databases "
                    "would not be safe",
                    _ELSEWHERE,
                )
            lock.take(
                f"the data folder {self.path}", self._never, "use the service that runs there, or end it: freight stop"
            )
            self._lock = lock
            for folder in (self.run, self.uploads, self.workers, self.batch, self.files):
                folder.mkdir(mode=0o700, exist_ok=True)
                _check_private(folder)
        except OSError as error:
            self.release()
            if is_full(error):
                raise StorageFull(f"no space left in the data folder {self.path}", "free some space") from error
            raise OperationError(
                f"cannot write to the data folder {self.path}: {error.strerror}", _ELSEWHERE
            ) from error

    def _never(self, seconds: float) -> None:
        raise UserError(f"files in the data folder {self.path} cannot be locked", _ELSEWHERE)

    def release(self) -> None:
        """Let the folder go."""
        if self._lock is not None:
            self._lock.release()

    def open_catalog(self, sharing: Sharing) -> Catalog:
        """Open the catalog, to write or to read beside whoever writes."""
        try:
            return Catalog(self.catalog, Locking.LOCAL, sharing)
        except StorageFull:
            raise
        except OperationError as error:
            hint = (
                error.hint if error.hint and "--fresh" not in error.hint else f"restore it from a copy, or {_ELSEWHERE}"
            )
            raise OperationError(error.message, hint) from error

    def job(self, job: str) -> Path:
        """Return the folder of a job."""
        return self.batch / job

    def input(self, job: str) -> Path:
        """Return the path of a job's input."""
        return self.batch / job / "input.jsonl"

    def index(self, job: str) -> Path:
        """Return the path of a job's index."""
        return self.batch / job / "index.npz"

    def open_results(self, job: str, sharing: Sharing) -> Results:
        """Open a job's results; they are made if need be by whoever writes them."""
        return Results(self.batch / job / RESULTS_DB, Locking.LOCAL, sharing)

    def has_results(self, job: str) -> bool:
        """Return whether there are results of a job."""
        return (self.batch / job / RESULTS_DB).exists()

    def forget(self, job: str) -> None:
        """Remove all that is kept of a job."""
        shutil.rmtree(self.batch / job, ignore_errors=True)

    def tidy(self, jobs: set[str], old_s: float) -> None:
        """Remove what no job owns: folders of none of `jobs`, uploads that broke off or that nobody used in `old_s`."""
        for entry in self.batch.iterdir():
            if entry.name not in jobs:
                shutil.rmtree(entry, ignore_errors=True)
        self.tidy_uploads(old_s, broken=True)

    def tidy_files(self, known: set[str]) -> None:
        """Remove the contents of files that are none of the `known` ones."""
        for entry in self.files.iterdir():
            if entry.name not in known:
                entry.unlink(missing_ok=True)

    def tidy_logs(self, living: set[Path]) -> None:
        """Remove the output of workers that live no more, which is that of no job."""
        for entry in self.workers.iterdir():
            if entry not in living:
                entry.unlink(missing_ok=True)

    def tidy_uploads(self, old_s: float, broken: bool = False) -> None:
        """Remove uploads that nobody used in `old_s`, and with `broken` those that broke off."""
        for entry in self.uploads.iterdir():
            with suppress(FileNotFoundError):  # It may become a job's in this moment.
                found = entry.stat()
                # One that is a file, too, is as old as that file, and may have come in this moment.
                is_old = found.st_mtime < time.time() - old_s and found.st_nlink == 1
                if is_old or (broken and (entry.suffix == ".part" or found.st_nlink > 1)):
                    entry.unlink()

    def last_sign(self, job: str) -> float:
        """Return when something of a job was last written, in seconds of the clock of day; 0 when nothing was."""
        times = [path.stat().st_mtime for path in self.job(job).glob(f"{RESULTS_DB}*")]
        return max(times, default=0.0)


def _check_private(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise OperationError(f"{folder} belongs to another user", _ELSEWHERE)
    if stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)
