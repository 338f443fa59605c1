"""The folder beside the output in which an embedded run keeps its state."""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from freight.control.continuation import Standing
from freight.control.inputs import keep_stream
from freight.control.keptindex import drop_index
from freight.control.output import is_ours
from freight.control.sockets import RUNTIME_PREFIX
from freight.core.job import State
from freight.errors import OperationError, UserError, refusing
from freight.launchers.base import Launcher, Remains
from freight.store.catalog import Catalog
from freight.store.database import STORAGE_ERRORS, StorageFull
from freight.store.folder import FolderLock
from freight.store.results import RESULTS_DB, Results
from freight.store.rows import JobRow

# In a job's spec: what makes two runs the same, and in that, what its input is known by.
SAME: Final = "same"
INPUT_KEY: Final = "input (SHA-256)"
CATALOG: Final = "catalog.db"
ARRIVED: Final = "input.new"
_OWN_FILES: Final = ("owner", CATALOG)
# Says which folder has the sockets of the run; a killed run leaves both behind.
RUNTIME_NOTE: Final = "runtime"
_START_OVER: Final = "restore the folder, or start over with --fresh"


class StateFolder:
    """OUT.freight: made at the first run, owned by one run at a time. `shown` is its name in the user's words."""

    def __init__(self, output: Path, shown_output: str) -> None:
        self.path = output.with_name(output.name + ".freight")
        self.shown = f"{shown_output}.freight"
        self._is_new = False
        self._is_owned = False
        self._lock: FolderLock | None = None
        self._catalog: Catalog | None = None

    def claim(self, wait: Callable[[float], None] = time.sleep) -> None:
        """Make the folder or accept the one that is there, and own it.

        Raises UserError for a folder that is not Freight's, OperationError where another run owns it.
        """
        try:
            self.path.mkdir(mode=0o700)
            is_new = True
        except FileExistsError:
            self._check_own()
            is_new = False
        except OSError as error:
            raise UserError(
                f"cannot make the state folder {self.shown}: {error.strerror}", "choose another folder for -o"
            ) from error
        self._lock = FolderLock(self.path)
        try:
            self._lock.take(f"the state folder {self.shown}", wait)
        except OSError as error:
            raise OperationError(
                f"cannot write to the state folder {self.shown}: {error.strerror}", "choose another output"
            ) from error
        self._is_owned, self._is_new = True, is_new

    def _check_own(self) -> None:
        with refusing(f"cannot look into the state folder {self.shown}", "choose another output"):
            if self.path.is_dir():
                names = [entry.name for entry in self.path.iterdir()]
                if not names or any(name in names for name in _OWN_FILES):
                    return
        raise UserError(
            f"{self.shown} exists and is not a Freight state folder", "move it away, or choose another output"
        )

    @property
    def lock(self) -> FolderLock:
        """The lock on the folder, once claimed."""
        assert self._lock is not None
        return self._lock

    @property
    def catalog(self) -> Catalog:
        """The folder's catalog, once opened."""
        assert self._catalog is not None
        return self._catalog

    def open(self, fresh: bool) -> None:
        """Open the catalog; where it cannot be read, or is gone and results are not, `fresh` clears the folder.

        Without `fresh` that raises OperationError and changes nothing.
        """
        path = self.path / CATALOG
        try:
            # A catalog has its tables before there are results: an empty one was emptied.
            is_there = path.exists() and path.stat().st_size > 0
            if not is_there and any(self.path.glob(f"*/{RESULTS_DB}")):
                raise OperationError(f"the state folder {self.shown} has results and no catalog", _START_OVER)
            catalog = Catalog(path, self.lock.locking)
            self._check(catalog)
        except STORAGE_ERRORS as error:
            if not fresh:
                raise
            self._clear()
            if isinstance(error, StorageFull):
                raise
            catalog = Catalog(path, self.lock.locking)
        self._catalog = catalog

    def _check(self, catalog: Catalog) -> None:
        try:
            if not catalog.is_damaged():
                return
        except STORAGE_ERRORS:
            catalog.close()
            raise
        catalog.close()
        raise OperationError(f"the catalog of the state folder {self.shown} is damaged", _START_OVER)

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.startswith(CATALOG):
                entry.unlink()

    def close(self) -> None:
        """Let the folder go. One that this run made and that came to hold no job goes away again."""
        if self._is_owned and self._catalog is not None:
            self._tidy(self._catalog)
        elif self._is_owned and self._is_new:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._is_owned:
            self.lock.release()

    def _tidy(self, catalog: Catalog) -> None:
        try:
            row = self.job()
        except STORAGE_ERRORS:
            return  # Whoever runs next finds the damage and says so; until then everything stays.
        finally:
            catalog.close()
        if row is None and self._is_new:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        kept = self._input_path(row.spec[SAME][INPUT_KEY]) if row else None
        for path in (*self.path.glob("input-*.jsonl"), self.path / ARRIVED):
            if path != kept:
                path.unlink(missing_ok=True)

    def keep_stream(self, source: int, stopped: Callable[[], bool]) -> Path:
        """Keep a stream's bytes; an empty stream means those that the folder's job was begun with."""
        arrived = self.path / ARRIVED
        keep_stream(source, arrived, stopped)
        row = self.job()
        before = self._input_path(row.spec[SAME][INPUT_KEY]) if row else None
        if before is not None and before.exists() and not arrived.stat().st_size:
            arrived.unlink()
            return before
        with arrived.open("rb") as file:
            kept = self._input_path(hashlib.file_digest(file, "sha256").hexdigest())
        return arrived.replace(kept)

    def _input_path(self, sha256: str) -> Path:
        return self.path / f"input-{sha256[:16]}.jsonl"

    def sweep(self, launcher: Launcher, within_s: float) -> list[Remains]:
        """End and remove what an earlier run that was killed left behind.

        Returns its devices that are not as before after `within_s`.
        """
        until = time.monotonic() + within_s
        remains: list[Remains] = []
        for worker in self.catalog.live_workers():
            remains += launcher.sweep(worker.id, worker.process, max(0.0, until - time.monotonic()))
            self.catalog.worker_ended(worker.id, "swept after its control plane had ended", time.time())
        note = self.path / RUNTIME_NOTE
        if note.exists():
            runtime = Path(note.read_text(encoding="utf-8"))
            if runtime.name.startswith(RUNTIME_PREFIX):
                shutil.rmtree(runtime, ignore_errors=True)
            note.unlink()
        jobs = {row.id for row in self.catalog.jobs()}
        for entry in self.path.iterdir():
            # A run that was killed during intake left a folder and no job.
            if entry.is_dir() and entry.name not in jobs:
                shutil.rmtree(entry, ignore_errors=True)
        return remains

    def note_runtime(self, folder: Path) -> None:
        """Note the folder for sockets, before anything is in it, for whoever sweeps after this run."""
        note = os.open(self.path / RUNTIME_NOTE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(note, "w", encoding="utf-8") as file:
            file.write(str(folder))

    def job(self) -> JobRow | None:
        """Return the folder's one job; None when it has none yet."""
        rows = self.catalog.jobs()
        return rows[-1] if rows else None

    def job_folder(self, job: str) -> Path:
        """Return the folder of a job, made if need be."""
        folder = self.path / job
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def has_results(self, job: str) -> bool:
        """Return whether a job's results are still here."""
        return (self.path / job / RESULTS_DB).exists()

    def open_results(self, job: str) -> Results:
        """Open a job's results, made if need be."""
        return Results(self.job_folder(job) / RESULTS_DB, self.lock.locking)

    def drop_results(self, job: str) -> None:
        """Remove results and index of a job whose answers are all in the output, and whose catalog entry says so."""
        if self.catalog.get(job).state is not State.COMPLETED:
            return
        for path in self.job_folder(job).glob(RESULTS_DB + "*"):
            path.unlink()
        drop_index(self.job_folder(job))

    def forget(self, row: JobRow) -> None:
        """Remove a job and all that is kept of it."""
        self.catalog.delete(row.id)
        shutil.rmtree(self.path / row.id, ignore_errors=True)


def standing(row: JobRow | None, output: Path) -> Standing:
    """Return what stands at the output, seen from the folder's job."""
    if not os.path.lexists(output):
        return Standing.NOTHING
    return Standing.OURS if row is not None and is_ours(row.outcome, output) else Standing.OTHER
