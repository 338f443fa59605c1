"""The folder beside the output in which an embedded run keeps its state."""

import hashlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from freight.control.inputs import keep_stream
from freight.control.output import Written
from freight.errors import OperationError, UserError
from freight.launchers.base import Launcher
from freight.store.catalog import Catalog, JobRow
from freight.store.folder import FolderLock
from freight.store.results import Results

# In a job's spec: what its input is known by.
INPUT_KEY: Final = "input (SHA-256)"
CATALOG: Final = "catalog.db"
RESULTS: Final = "results.db"
_OWN_FILES: Final = ("owner", CATALOG)
# The prefix of folders for sockets, which a killed run leaves behind.
RUNTIME_PREFIX: Final = "freight-"


class StateFolder:
    """OUT.freight: made at the first run, owned by one run at a time. `shown` is its name in the user's words."""

    def __init__(self, output: Path, shown_output: str) -> None:
        self.path = output.with_name(output.name + ".freight")
        self.shown = f"{shown_output}.freight"
        self.is_new = False
        self._lock: FolderLock | None = None
        self._catalog: Catalog | None = None

    def claim(self, wait: Callable[[float], None] = time.sleep) -> None:
        """Make the folder or accept the one that is there, and own it.

        Raises UserError for a folder that is not Freight's, OperationError where another run owns it.
        """
        try:
            self.path.mkdir(mode=0o700)
            self.is_new = True
        except FileExistsError:
            self._check_own()
        except OSError as error:
            raise UserError(
                f"cannot make the state folder {self.shown}: {error.strerror}", "choose another folder for -o"
            ) from error
        self._lock = FolderLock(self.path)
        try:
            self._lock.take(f"the state folder {self.shown}", wait)
        except OSError as error:
            raise OperationError(f"cannot write to the state folder {self.shown}: {error.strerror}") from error

    def _check_own(self) -> None:
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
        """The folder's catalog, opened at first use."""
        if self._catalog is None:
            self._catalog = Catalog(self.path / CATALOG, self.lock.locking)
        return self._catalog

    def close(self) -> None:
        """Let the folder go. One that this run made and that came to hold no job goes away again."""
        holds_job = self._catalog is not None and self.job() is not None
        kept = self._kept_input() if holds_job else None
        for path in self.path.glob("input*"):
            if path != kept:
                path.unlink(missing_ok=True)
        if self._catalog is not None:
            self._catalog.close()
        if self.is_new and not holds_job:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()

    def keep_stream(self, source: int, stopped: Callable[[], bool]) -> Path:
        """Keep a stream's bytes; an empty stream means those that the folder's job was begun with."""
        arrived = self.path / "input.new"
        keep_stream(source, arrived, stopped)
        before = self._kept_input()
        if before is not None and not arrived.stat().st_size:
            arrived.unlink()
            return before
        with arrived.open("rb") as file:
            kept = self._input_path(hashlib.file_digest(file, "sha256").hexdigest())
        return arrived.replace(kept)

    def _input_path(self, sha256: str) -> Path:
        return self.path / f"input-{sha256[:16]}.jsonl"

    def _kept_input(self) -> Path | None:
        """Return the kept bytes that the folder's job was begun with."""
        row = self.job()
        kept = self._input_path(row.spec[INPUT_KEY]) if row else None
        return kept if kept and kept.exists() else None

    def sweep(self, launcher: Launcher) -> None:
        """End and remove what an earlier run that was killed left behind."""
        for worker in self.catalog.live_workers():
            launcher.sweep(worker.id)
            runtime = Path(worker.folder).parent
            if runtime.name.startswith(RUNTIME_PREFIX):
                shutil.rmtree(runtime, ignore_errors=True)
            self.catalog.worker_ended(worker.id, "swept after its control plane had ended", time.time())
        jobs = {row.id for row in self.catalog.jobs()}
        for entry in self.path.iterdir():
            # A run that was killed during intake left a folder and no job.
            if entry.is_dir() and entry.name not in jobs:
                shutil.rmtree(entry, ignore_errors=True)

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
        return (self.path / job / RESULTS).exists()

    def open_results(self, job: str) -> Results:
        """Open a job's results, made if need be."""
        return Results(self.job_folder(job) / RESULTS, self.lock.locking)

    def drop_results(self, job: str) -> None:
        """Remove a job's results, which are all in the output."""
        for path in self.job_folder(job).glob(RESULTS + "*"):
            path.unlink()

    def forget(self, row: JobRow) -> None:
        """Remove a job and all that is kept of it."""
        self.catalog.delete(row.id)
        shutil.rmtree(self.path / row.id, ignore_errors=True)


def written(row: JobRow) -> Written | None:
    """Return what a job wrote to its output; None when it wrote nothing yet."""
    return None if row.outcome is None else Written(**row.outcome["output"])
