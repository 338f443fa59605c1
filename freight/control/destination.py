"""Where a job's results file goes: what any place must do, and a path of the owner's."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from freight.control.output import Written, mark_of, put_in_place, write_aside
from freight.core.job import State, Totals

Lines = Iterator[tuple[int, bytes]]
Mark = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Standing:
    """How a job stood at a time of the monotonic clock. `records` is None while its input is read."""

    state: State
    records: int | None
    totals: Totals
    at: float

    def is_as(self, other: "Standing | None") -> bool:
        """Return whether a job stood just so at another time."""
        return other is not None and replace(self, at=0.0) == replace(other, at=0.0)


class Writing(Protocol):
    """A results file that is being written: nothing of it is in its place before `put`."""

    def write(self, job: str, lines: Lines, records: int) -> Written:
        """Write it aside, on disk when this returns. Raises StorageFull, and OperationError where it cannot be."""
        ...

    def mark(self, outcome: dict[str, Any] | None) -> Mark | None:
        """Return the mark in a job's outcome by which what stands in its place is known for the job's."""
        ...

    def put(self, replace: bool) -> None:
        """Put it in its place; raise OperationError where something stands there that may not be replaced."""
        ...

    def drop(self) -> None:
        """Let go of it, and remove what was not put in its place."""
        ...


class Destination(Protocol):
    """Where a job's results file goes. For threads."""

    def begin(self) -> Writing:
        """Return the file to write; raise FreightError where there can be none."""
        ...

    def tell(self, job: str, standing: Standing) -> bool:
        """Have whoever waits there see how the job stands; return False where that did not succeed."""
        ...

    def tells_otherwise(self, state: State) -> bool:
        """Return whether what was told there last is not that the job is in `state`."""
        ...


@dataclass(frozen=True, slots=True)
class FileAt:
    """A path of the owner's. The file is written at `aside` first, on the same file system."""

    path: Path
    aside: Path

    def begin(self) -> "Writing":
        """Return the file to write."""
        return _AtPath(self)

    def tell(self, job: str, standing: Standing) -> bool:
        """Nobody waits there."""
        return True

    def tells_otherwise(self, state: State) -> bool:
        """Nothing was told."""
        return False


@dataclass(frozen=True, slots=True)
class _AtPath:
    place: FileAt

    def write(self, job: str, lines: Lines, records: int) -> Written:
        return write_aside(self.place.aside, job, lines, records)

    def mark(self, outcome: dict[str, Any] | None) -> Mark | None:
        return mark_of(outcome, self.place.path)

    def put(self, replace: bool) -> None:
        put_in_place(self.place.aside, self.place.path, replace)

    def drop(self) -> None:
        # Where the folder itself is gone, nothing of it is left.
        with suppress(OSError):
            self.place.aside.unlink(missing_ok=True)
