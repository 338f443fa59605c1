"""The results file: written aside, whole, in input order, and only then put in its place."""

import hashlib
import os
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from freight.core.answer import error_line
from freight.errors import OperationError
from freight.store.database import StorageFull, is_full
from freight.store.files import rename_new, sync_folder
from freight.store.results import Results

_BUFFER: Final = 1 << 20
# Where the results file is written before it is put in its place, in the job's folder.
ASIDE: Final = "output.partial"


class Written(msgspec.Struct, frozen=True):
    """A results file that Freight wrote: by this it is known again."""

    size: int
    sha256: str

    def matches(self, path: Path) -> bool:
        """Return whether the file at `path` is the one that was written."""
        try:
            return path.stat().st_size == self.size and _sha256(path) == self.sha256
        except OSError:
            return False


def is_ours(outcome: dict[str, Any] | None, output: Path) -> bool:
    """Return whether the file at `output` is one that the job wrote, or was about to put there when it ended."""
    return mark_of(outcome, output) is not None


def mark_of(outcome: dict[str, Any] | None, output: Path) -> dict[str, Any] | None:
    """Return the mark in a job's outcome by which the file at `output` is known for the job's; None for another."""
    marks: list[dict[str, Any]] = (outcome or {}).get("outputs", [])
    return next((mark for mark in marks if Written(**mark).matches(output)), None)


class Only(StrEnum):
    """Which lines are wanted: answers, or records that failed or were not reached."""

    OK = "ok"
    FAILED = "failed"


Missing = Callable[[int], tuple[bytes | None, str, str]]


def rows(
    results: Results,
    records: int,
    missing: Missing | None,
    only: Only | None = None,
    begin: int = 0,
    version: int | None = None,
) -> Iterator[tuple[int, bytes]]:
    """Yield (index, rest of the line) for every record from `begin` on, or `only` those wanted, in order.

    `missing` gives the custom_id's token, a code and a message for a record without a result; None leaves those out.
    Raises OperationError where the results are not at `version` any more.
    """
    fill = missing if only is not Only.OK else None
    expected = begin
    for page in results.pages(begin, records, version):
        for index, tail, failed in page:
            if fill is not None:
                yield from _gap(expected, index, fill)
            if only is None or (only is Only.FAILED) == bool(failed):
                yield index, tail
            expected = index + 1
    if fill is not None:
        yield from _gap(expected, records, fill)


def _gap(start: int, end: int, missing: Missing) -> Iterator[tuple[int, bytes]]:
    for index in range(start, end):
        yield index, missing_tail(index, missing)


def missing_tail(index: int, missing: Missing) -> bytes:
    """Return the rest of the line of a record without a result."""
    return error_line(index, *missing(index)).tail


def write_aside(path: Path, job: str, lines: Iterator[tuple[int, bytes]], records: int) -> Written:
    """Write the results file to `path`, on disk when this returns; raise StorageFull when there is no room."""
    try:
        # A new file, always: what is left from an earlier run may be the output itself, by a second link.
        path.unlink(missing_ok=True)
        with path.open("wb", buffering=_BUFFER) as file:
            return write_lines(file, job, lines, records)
    except OSError as error:
        if is_full(error):
            path.unlink(missing_ok=True)
        raise not_written(error, path) from error


def not_written(error: OSError, path: Path) -> OperationError:
    """Return what the system said of writing a results file as an error of ours: StorageFull where there is no room."""
    if is_full(error):
        return StorageFull(f"no space left for the results file {path.parent}")
    return OperationError(
        f"cannot write {path}: {error.strerror}; all answers are kept", "see that its folder can be written to"
    )


def write_lines(file: BinaryIO, job: str, lines: Iterator[tuple[int, bytes]], records: int) -> Written:
    """Write a results file, on disk when this returns."""
    digest = hashlib.sha256()
    count = 0  # Of lines written.
    for line in whole_lines(job, lines):
        count += 1
        digest.update(line)
        file.write(line)
    file.flush()
    os.fsync(file.fileno())
    assert count == records, f"{count} lines for {records} records"
    return Written(file.tell(), digest.hexdigest())


def whole_lines(job: str, lines: Iterator[tuple[int, bytes]]) -> Iterator[bytes]:
    """Yield the lines of a results file, each with its line end."""
    prefix = _prefix(job)
    for index, tail in lines:
        yield prefix % index + tail + b"\n"


def around_bytes(job: str) -> int:
    """Return how many bytes a line has beside its index and its rest."""
    return len(_prefix(job)) - len(b"%d") + len(b"\n")


def _prefix(job: str) -> bytes:
    return b'{"id":"' + job.encode() + b'-%d",'


def put_in_place(aside: Path, output: Path, replace: bool) -> None:
    """Rename `aside` to `output`; where something stands there that may not be replaced, refuse and change nothing."""
    try:
        if replace:
            aside.replace(output)
        else:
            rename_new(aside, output)
        sync_folder(output.parent)
    except FileExistsError:
        raise OperationError(
            f"{output} came into being during the run and is not Freight's; all answers are kept",
            "move it away, or use --force to replace it, and run the same command again",
        ) from None
    except OSError as error:
        raise OperationError(
            f"cannot write {output}: {error.strerror}; all answers are kept",
            "run the same command again once it can be",
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
