"""The records of a job that nobody has had yet, in the order of dispatch, and whose turn they are."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy
from numpy.typing import NDArray

from freight.control.intake import Index

_ANYBODY: Final = ""


@dataclass(slots=True)
class _Stretch:
    """Places in the order, from `begin` up to `end`."""

    begin: int
    end: int

    def size(self) -> int:
        return self.end - self.begin


class Stretches:
    """An order cut into stretches, one a worker, so that each has its own part of the prefixes in its engine's cache.

    A worker whose stretch is done takes one that nobody has, or else the second half of the fullest. Where the records
    share no prefixes (the index has no order) there is one stretch for all: the file, from its beginning.
    """

    def __init__(self, index: Index, wanted: NDArray[numpy.bool_]) -> None:
        """Take the records that are `wanted`, a truth value for each of the job's."""
        self._shared: NDArray[numpy.uint16] | None = None
        if len(index.order):
            kept = numpy.flatnonzero(wanted[index.order])
            self._records: NDArray[numpy.uint32] = index.order[kept]
            self._shared = _least_between(index.shared, kept)
        else:
            self._records = numpy.flatnonzero(wanted).astype(numpy.uint32)
        self._stretches: dict[str, _Stretch] = {}
        self._free = [_Stretch(0, len(self._records))]
        self._left_out: set[int] = set()
        # Views: looked at one by one, arrays are slow.
        self._record_at, self._length_of = self._records.data, index.lengths.data
        self.left = len(self._records)
        self.bytes_left = int(index.lengths[self._records].sum(dtype=numpy.int64))

    def next_of(self, worker: str) -> int | None:
        """Return the record whose turn it is for a worker; None after the last. It stays until `pop`."""
        while stretch := self._stretch_of(worker):
            record = self._record_at[stretch.begin]
            if record not in self._left_out:
                return record
            self.pop(worker)
        return None

    def leave_out(self, records: Iterable[int]) -> None:
        """Hand these out to nobody: somebody has them."""
        self._left_out.update(records)

    def pop(self, worker: str) -> None:
        """Take out the record that `next_of` returns."""
        stretch = self._stretch_of(worker)
        assert stretch is not None
        self.left -= 1
        self.bytes_left -= self._length_of[self._record_at[stretch.begin]]
        stretch.begin += 1

    def release(self, worker: str) -> None:
        """Leave a worker's stretch to the others."""
        stretch = self._stretches.pop(worker, None)
        if stretch is not None and stretch.size():
            self._free.append(stretch)

    def _stretch_of(self, worker: str) -> _Stretch | None:
        """Return a worker's stretch, another one where its own is done; None where nothing is left."""
        owner = _ANYBODY if self._shared is None else worker
        stretch = self._stretches.get(owner)
        if stretch is None or not stretch.size():
            if not self.left:
                return None
            stretch = self._stretches[owner] = self._take_free() or self._steal()
        return stretch

    def _take_free(self) -> _Stretch | None:
        if not self._free:
            return None
        self._free.sort(key=_Stretch.size)
        return self._free.pop()

    def _steal(self) -> _Stretch:
        fullest = max(self._stretches.values(), key=_Stretch.size)
        cut = self._cut(fullest)
        taken = _Stretch(cut, fullest.end)
        fullest.end = cut
        return taken

    def _cut(self, stretch: _Stretch) -> int:
        """Return where a stretch is best cut: about in the middle, between records that share the least."""
        size = stretch.size()
        if size < 2 or self._shared is None:
            return stretch.begin
        middle = stretch.begin + size // 2
        first, last = stretch.begin + max(1, size // 4), max(middle, stretch.begin + size * 3 // 4)
        near = self._shared[first : last + 1]
        cuts = first + numpy.flatnonzero(near == near.min())
        return int(cuts[numpy.abs(cuts - middle).argmin()])


def _least_between(shared: NDArray[numpy.uint16], kept: NDArray[numpy.int64]) -> NDArray[numpy.uint16]:
    """Return what each kept record shares with the kept one before it: the least of all that is between them."""
    if not len(kept):
        return shared[:0]
    begins = numpy.append(0, kept[:-1] + 1)
    return numpy.minimum.reduceat(shared[: int(kept[-1]) + 1], begins)
