"""Where the lines of a results file begin, so that a part of it is given without reading what is before."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from freight.control.output import Missing, Only, around_bytes, missing_tail, rows, whole_lines
from freight.errors import OperationError
from freight.store.results import Results

# So many records are measured at once, and looked through to find where in them a part begins.
BLOCK: Final = 4096
# Makes another line's rest of the rest of a line.
Render = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Source:
    """What the lines of a results file are made of: all, or `only` those wanted, as `render` shows them."""

    job: str
    records: int
    results: Results
    missing: Missing | None
    only: Only | None
    render: Render | None = None

    def rests(self, begin: int = 0, end: int | None = None, version: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (index, rest of the line) from record `begin` to `end` (None: the last), as `rows` does."""
        records = self.records if end is None else end
        for index, tail in rows(self.results, records, self.missing, self.only, begin, version):
            yield index, tail if self.render is None else self.render(tail)

    def fill(self) -> Missing | None:
        """Return what makes the lines of records without a result, None where there are none of them."""
        return self.missing if self.only is not Only.OK else None


@dataclass(frozen=True, slots=True)
class Layout:
    """How many bytes a results file has, and where in it each block of records begins."""

    size: int
    starts: tuple[int, ...]


def measured(source: Source) -> Layout:
    """Return the layout of a results file. What is in its lines is read only where it must be rendered."""
    blocks = [_block_bytes(source, begin) for begin in range(0, source.records, BLOCK)]
    ends = list(accumulate(blocks, initial=0))
    return Layout(ends[-1], tuple(ends[:-1]))


def part_of(source: Source, layout: Layout, part: range, version: int) -> Iterator[bytes]:
    """Yield the bytes of a part of a results file, in pieces that are lines but for the first and the last.

    Raises OperationError when the results are not at `version`, or not as they were measured.
    """
    left = len(part)
    if not left:
        return
    begin, skip = _place(source, layout, part.start)
    for line in whole_lines(source.job, source.rests(begin, version=version)):
        piece = line[skip : skip + left]
        skip = 0
        left -= len(piece)
        yield piece
        if not left:
            return
    raise OperationError(f"the results of job {source.job} are shorter than they were measured to be")


def _place(source: Source, layout: Layout, offset: int) -> tuple[int, int]:
    """Return in the line of which record a byte is, and how many bytes of that line are before it."""
    block = bisect_right(layout.starts, offset) - 1
    at = layout.starts[block]
    for index, size in _sizes(source, block * BLOCK):
        if offset < at + size:
            return index, offset - at
        at += size
    raise OperationError(f"the results of job {source.job} are shorter than they were measured to be")


def _block_bytes(source: Source, begin: int) -> int:
    if source.render is None:
        failed = None if source.only is None else source.only is Only.FAILED
        end = min(begin + BLOCK, source.records)
        there, count, size = source.results.measure(begin, end, failed)
        if source.fill() is None or there == end - begin:
            return size + count * around_bytes(source.job)
    return sum(size for _, size in _sizes(source, begin))


def _sizes(source: Source, begin: int) -> Iterator[tuple[int, int]]:
    """Yield (index, bytes of the line) of each line of the block that begins with a record."""
    end = min(begin + BLOCK, source.records)
    around = around_bytes(source.job)
    rendered = ((index, len(tail)) for index, tail in source.rests(begin, end))
    for index, size in _lengths(source, begin, end) if source.render is None else rendered:
        yield index, around + len(str(index)) + size


def _lengths(source: Source, begin: int, end: int) -> Iterator[tuple[int, int]]:
    fill, expected = source.fill(), begin
    for index, size, failed in source.results.lengths(begin, end):
        if fill is not None:
            yield from _gap(expected, index, fill)
        if source.only is None or (source.only is Only.FAILED) == bool(failed):
            yield index, size
        expected = index + 1
    if fill is not None:
        yield from _gap(expected, end, fill)


def _gap(begin: int, end: int, missing: Missing) -> Iterator[tuple[int, int]]:
    for index in range(begin, end):
        yield index, len(missing_tail(index, missing))
