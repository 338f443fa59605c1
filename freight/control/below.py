"""A results file in a folder below a root that is granted to its user, and a progress file beside it."""

import hashlib
import logging
import os
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from freight.control.destination import Lines, Mark, Standing, Writing
from freight.control.output import Written, not_written, write_lines
from freight.core.facility import STATUSES, progress
from freight.core.job import State
from freight.errors import FreightError, OperationError
from freight.store.database import StorageFull, is_full
from freight.store.outputfolder import FILE_MODE, Draft, OutputFolder, make_output_below
from freight.store.roots import Root, open_below

log = logging.getLogger("freight.service")

_MOST_PROGRESS = 65_536


class FileBelow:
    """A file in a folder below a granted root, found anew each time and never by way of a link that leads out.

    With `progress` a file of that name beside it tells how the job stands; then the folder is the job's own, and
    whatever is called as its files are is replaced. Else others may write there at the same time: `writer` tells them
    apart.
    """

    def __init__(
        self, root: Path, folder: Path, name: str, progress: str = "", mode: int = FILE_MODE, writer: str = ""
    ) -> None:
        self._writer = writer
        self.folder = folder
        self.name = name
        self._root = Root(root)
        self._progress = progress
        self._mode = mode
        # Of two who tell at a time, the one with the later news is the last.
        self._telling = threading.Lock()
        self._told: Standing | None = None

    def begin(self) -> Writing:
        """Return the file to write."""
        folder = self.open()
        try:
            with explaining_full(self.folder):
                return _Below(folder, folder.begin(self.name, self._writer), self.name, bool(self._progress))
        except BaseException:
            folder.close()
            raise

    def open(self) -> OutputFolder:
        """Return the folder, which is made where it is not there; raise FreightError where that cannot be."""
        with explaining_full(self.folder):
            return make_output_below(self._root, self.folder, self._mode)

    def check(self) -> None:
        """Raise FreightError where the file could not be written now."""
        with self.open() as folder, explaining_full(self.folder):
            folder.check()

    def is_taken(self) -> bool:
        """Return whether something is called as the file would be."""
        with self.open() as folder:
            return folder.has(self.name)

    def tell(self, job: str, standing: Standing) -> bool:
        """Write the progress file, if there is to be one."""
        if not self._progress:
            return True
        with self._telling:
            if self._told is not None and (standing.at < self._told.at or standing.is_as(self._told)):
                return True
            said = progress(job, standing.state, standing.records, standing.totals)
            said["updated_at"] = datetime.now(UTC).isoformat()
            try:
                with self.open() as folder:
                    folder.replace(self._progress, msgspec.json.format(msgspec.json.encode(said), indent=2) + b"\n")
            except FreightError as error:
                log.info("job %s: its progress file cannot be written: %s", job, error.message)
                return False
            self._told = standing
        return True

    def tells_otherwise(self, state: State) -> bool:
        """Return whether there is a progress file that does not say that the job is in `state`."""
        try:
            found = open_below(self._root, self.folder / self._progress)
            with os.fdopen(found, "rb") as file:
                said = msgspec.json.decode(file.read(_MOST_PROGRESS), type=dict[str, Any])
        except (FreightError, OSError, ValueError):
            return False  # Whoever took it away or wrote there does not want it.
        return said.get("status") != STATUSES[state]


class _Below:
    def __init__(self, folder: OutputFolder, draft: Draft, name: str, is_own: bool) -> None:
        self._folder = folder
        self._draft = draft
        self._name = name
        # The folder is the job's own: what is there is replaced.
        self._is_own = is_own

    def write(self, job: str, lines: Lines, records: int) -> Written:
        try:
            with os.fdopen(self._draft.fd, "wb", buffering=1 << 20, closefd=False) as file:
                return write_lines(file, job, lines, records)
        except OSError as error:
            raise not_written(error, self._folder.path / self._name) from error

    def mark(self, outcome: dict[str, Any] | None) -> Mark | None:
        marks: list[Mark] = (outcome or {}).get("outputs", [])
        there = None if self._is_own or not marks else self._folder.look(self._name)
        if there is None:
            return None
        try:
            with os.fdopen(there, "rb") as file:
                return _known(marks, os.fstat(there).st_size, file)
        except OSError:
            return None  # What cannot be read is not known.

    def put(self, replace: bool) -> None:
        with explaining_full(self._folder.path):
            self._draft.put(replace=replace or self._is_own)

    def drop(self) -> None:
        self._draft.drop()
        self._folder.close()


def _known(marks: Iterable[Mark], size: int, file: Any) -> Mark | None:
    likely = [mark for mark in marks if mark["size"] == size]
    if not likely:
        return None
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return next((mark for mark in likely if mark["sha256"] == sha256), None)


@contextmanager
def explaining_full(folder: Path) -> Generator[None]:
    """Turn what a full disk has raised in the block into StorageFull: the job waits then for room."""
    try:
        yield
    except StorageFull:
        raise
    except OperationError as error:
        if isinstance(error.__cause__, OSError) and is_full(error.__cause__):
            raise StorageFull(f"no space left for the results in {folder}") from error
        raise
