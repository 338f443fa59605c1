"""Records with equal bodies, of which one runs for all: `--dedupe`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import numpy
from numpy.typing import NDArray

from freight.core.answer import Line, twin_line
from freight.core.messages import SLICE_BYTES
from freight.core.record import custom_id_of

# What is put on disk in one transaction at most, in lines and in bytes of them: other jobs' results wait as long.
PART_LINES: Final = 4096
PART_BYTES: Final = SLICE_BYTES
# So many lines of the input are read at once, and no more bytes of them than a slice has.
_BULK: Final = 256
_Read = Callable[[Sequence[int]], list[bytes]]


def count_twins(firsts: NDArray[numpy.uint32], left: NDArray[numpy.bool_]) -> int:
    """Return how many of the records that are `left` to do will get the lines of another one."""
    kinds = firsts[left[: len(firsts)]]
    return len(kinds) - len(numpy.unique(kinds))


class Twins:
    """Which records get the lines of another one, the first with the same body, instead of running themselves."""

    def __init__(self, firsts: NDArray[numpy.uint32], left: NDArray[numpy.bool_]) -> None:
        """Look at the records that are `left` to do; `firsts` is as in an index, empty where all are to run."""
        records = numpy.flatnonzero(left[: len(firsts)])
        kinds = firsts[records]
        placed = numpy.argsort(kinds, kind="stable")
        records, kinds = records[placed], kinds[placed]
        begins = numpy.flatnonzero(numpy.append(True, kinds[1:] != kinds[:-1])[: len(kinds)])
        runners = numpy.repeat(records[begins], numpy.diff(begins, append=len(kinds)))
        follow = records != runners
        # Beside each other, by runner and then by index: four bytes each.
        order = numpy.argsort(runners[follow], kind="stable")
        self._runners = runners[follow][order].astype(numpy.uint32)
        self.followers = records[follow][order].astype(numpy.uint32)

    def of(self, runner: int) -> NDArray[numpy.uint32]:
        """Return the records that get the line of this one, too."""
        if not len(self._runners):
            return self.followers
        # Of the array's own type: for another, the whole of it would be converted at each call.
        begin, end = numpy.searchsorted(self._runners, numpy.array((runner, runner + 1), numpy.uint32)).tolist()
        return self.followers[begin:end]

    def parts(self, lines: list[Line], lengths: NDArray[numpy.uint32], read: _Read) -> Iterator[Iterable[Line]]:
        """Yield the lines with those of their twins, in parts that are small enough for one transaction each.

        A part makes its lines as they are asked for, any number of times. `read` returns lines of the input, whose
        `lengths` are known.
        """
        if not len(self.followers):
            yield lines
            return
        part, size = _Part(lengths, read), 0
        for line in lines:
            for index in chain((line.index,), map(int, self.of(line.index))):
                if index == line.index:
                    part.own.append(line)
                else:
                    part.twins.append((line, index))
                size += len(line.tail)
                if len(part) == PART_LINES or size >= PART_BYTES:
                    yield part
                    part, size = _Part(lengths, read), 0
        if len(part):
            yield part


@dataclass(frozen=True, slots=True)
class _Part:
    lengths: NDArray[numpy.uint32]
    read: _Read
    own: list[Line] = field(default_factory=list[Line])
    # What was answered, and the record that gets the same.
    twins: list[tuple[Line, int]] = field(default_factory=list[tuple[Line, int]])

    def __len__(self) -> int:
        return len(self.own) + len(self.twins)

    def __iter__(self) -> Iterator[Line]:
        yield from self.own
        for some in self._slices():
            sources = self.read([index for _, index in some])
            for (line, index), source in zip(some, sources, strict=True):
                yield twin_line(line, index, custom_id_of(source))

    def _slices(self) -> Iterator[list[tuple[Line, int]]]:
        some: list[tuple[Line, int]] = []
        size = 0
        for line, index in self.twins:
            length = int(self.lengths[index])
            if some and (len(some) == _BULK or size + length > SLICE_BYTES):
                yield some
                some, size = [], 0
            some.append((line, index))
            size += length
        if some:
            yield some
