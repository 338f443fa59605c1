"""The order in which a job's records are dispatched: those that share a prompt prefix are neighbours.

Engines keep what they computed of a prefix for as long as there is room. Only the text is looked at, and of that only
as much as it takes to tell the records apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy
from numpy.typing import NDArray

# What an engine caches as one piece: 16 tokens, of about four bytes each. To share less is to share nothing.
BLOCK_BYTES: Final = 64
# To share less than this part of all that the records have of their own is not worth another order than the file's.
_LEAST_GAIN: Final = 0.01
# As few records as this are with the engine all at once, in whatever order.
FEW_RECORDS: Final = 8
# Two texts that are equal for so long count as equal.
MOST_TEXT: Final = 1 << 20
# Bytes of text in memory at once, and of one text.
_BUDGET: Final = 1 << 22
_LONGEST_PIECE: Final = 1 << 16
# Ties of more records than this are split by columns of eight bytes or by one text of theirs, others by sorting pieces.
_LARGE: Final = 4096
_BATCH: Final = 1024
# What a large tie's texts are like is learnt from so many of them; their places, as parts of the whole, have no period.
_SAMPLE: Final = 64
_SPREAD: Final = 0.6180339887498949
_WORD: Final = 8

_Indices = NDArray[numpy.int64]
# Reads, of each of these records, the text from a place on, up to so many bytes; fewer where the text ends.
Read = Callable[[_Indices, _Indices, int], list[bytes]]


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of a job's records, in arrays of one element a record: heads and what follows them, the rest.

    `heads` are numbers that compare as the heads do, `head_bytes` their lengths; None where no record has a head.
    `lengths` are those of the rests, which `read` reads, and all of which begin with the same `common` bytes.
    Texts hold no zero bytes.
    """

    lengths: NDArray[numpy.uint32]
    read: Read
    heads: NDArray[numpy.uint32] | None = None
    head_bytes: NDArray[numpy.uint32] | None = None
    common: int = 0


class Order(NamedTuple):
    """Records in the order of their dispatch, and how many blocks each shares with the one before it, beyond those
    that all records share. Both are empty where the order of the file is as good.
    """

    records: NDArray[numpy.uint32]
    shared: NDArray[numpy.uint16]


NO_ORDER: Final = Order(numpy.empty(0, numpy.uint32), numpy.empty(0, numpy.uint16))


def dispatch_order(records: _Indices, texts: Texts, budgets: NDArray[numpy.uint32]) -> Order:
    """Return the order for `records`, ascending indices; `budgets` are the most tokens of each record's answer.

    Where hardly anything is shared, or all records are with the engine at once, it is that of the file.
    """
    if len(records) <= FEW_RECORDS:
        return NO_ORDER
    ordered, shared = sort_texts(records, texts)
    order = arrange(ordered, shared, budgets)
    own = int(texts.lengths[records].sum(dtype=numpy.int64)) - len(records) * int(shared[1:].min())
    if texts.head_bytes is not None:
        own += int(texts.head_bytes[records].sum(dtype=numpy.int64))
    gain = int(order.shared.sum(dtype=numpy.int64)) * BLOCK_BYTES
    return order if gain >= _LEAST_GAIN * own else NO_ORDER


def sort_texts(records: _Indices, texts: Texts) -> tuple[NDArray[numpy.uint32], NDArray[numpy.uint32]]:
    """Return `records` (ascending) by text and then by index, and the bytes that each shares with the one before it."""
    sorting = _Sorting(records, texts)
    runs = sorting.by_heads()
    while len(runs.begins):
        runs = sorting.split(runs)
    return sorting.order, sorting.shared


def arrange(ordered: NDArray[numpy.uint32], shared: NDArray[numpy.uint32], budgets: NDArray[numpy.uint32]) -> Order:
    """Return sorted records as they are best dispatched, given the bytes that each shares with the one before it.

    What shares a block or more stays together; such groups come as the first of each stands in the file. Of records
    that share just as much with each other, those whose answers may be longest come first.
    """
    if len(ordered) < 2:
        return NO_ORDER
    blocks = numpy.minimum((shared - shared[1:].min()) // BLOCK_BYTES, 0xFFFF).astype(numpy.uint16)
    blocks[0] = 0
    if not blocks.any():
        return NO_ORDER
    groups = numpy.flatnonzero(blocks == 0)
    firsts = numpy.minimum.reduceat(ordered, groups)
    sizes = numpy.diff(groups, append=len(ordered))
    first = numpy.repeat(firsts, sizes)
    # A record's nearest: as much as it shares with any other. Where neighbours are each other's nearest, any order of
    # them shares the same.
    nearest = numpy.maximum(blocks, numpy.append(blocks[1:], numpy.uint16(0)))
    begins = numpy.ones(len(blocks), numpy.bool_)
    begins[1:] = (blocks[1:] == 0) | (blocks[1:] != nearest[1:]) | (blocks[1:] != nearest[:-1])
    among = numpy.cumsum(begins, dtype=numpy.uint32)
    longest_first = numpy.iinfo(numpy.uint32).max - budgets[ordered]
    by_group = blocks[numpy.argsort(first, kind="stable")]
    return Order(ordered[numpy.lexsort((ordered, longest_first, among, first))], by_group)


class _Runs(NamedTuple):
    """Stretches of the order whose texts are equal in their first `depths` bytes."""

    begins: _Indices
    ends: _Indices
    depths: _Indices

    def some(self, which: NDArray[numpy.bool_] | slice) -> "_Runs":
        return _Runs(self.begins[which], self.ends[which], self.depths[which])


class _Pivot(NamedTuple):
    """What texts are compared with: first in `near` bytes, then those that are equal so far in all of `text`."""

    text: bytes
    near: int


class _Sorting:
    """Sorts records by their texts, the largest ties first split by what is cheap to read. Always stable."""

    def __init__(self, records: _Indices, texts: Texts) -> None:
        self._texts = texts
        self.order = records.astype(numpy.uint32)
        self.shared = numpy.zeros(len(records), numpy.uint32)

    def by_heads(self) -> _Runs:
        """Sort by heads; return what those leave tied."""
        texts, count = self._texts, len(self.order)
        begins = numpy.zeros(1, numpy.int64)
        if texts.heads is not None:
            heads = texts.heads[self.order]
            placed = numpy.argsort(heads, kind="stable")
            self.order, heads = self.order[placed], heads[placed]
            begins = numpy.flatnonzero(numpy.append(True, heads[1:] != heads[:-1]))
        runs = _Runs(begins, numpy.append(begins[1:], count), numpy.full(len(begins), texts.common))
        return runs.some(runs.ends - runs.begins > 1)

    def split(self, runs: _Runs) -> _Runs:
        """Read further into tied texts; return what is tied still."""
        sizes = runs.ends - runs.begins
        large = sizes > _LARGE
        found = [self._split_large(*run) for run in zip(*map(numpy.ndarray.tolist, runs.some(large)), strict=True)]
        small = runs.some(~large)
        # Whole runs, few enough that long pieces of their texts fit.
        batches = numpy.cumsum(sizes[~large]) // _BATCH
        edges = numpy.flatnonzero(numpy.diff(batches, prepend=-1, append=-1)) if len(batches) else batches
        found += [self._split_small(small.some(slice(a, b))) for a, b in pairwise(edges.tolist())]
        return _Runs(*map(numpy.concatenate, zip(*found, strict=True)))

    def _split_small(self, runs: _Runs) -> _Runs:
        sizes = runs.ends - runs.begins
        total = int(sizes.sum())
        firsts = numpy.cumsum(sizes) - sizes
        places = numpy.repeat(runs.begins - firsts, sizes) + numpy.arange(total)
        depths = numpy.repeat(runs.depths, sizes)
        records = self.order[places].astype(numpy.int64)
        length = self._piece(records, depths, _BUDGET // total)
        pieces = self._texts.read(records, depths, length)
        ranked: list[int] = []
        for first, size in zip(firsts.tolist(), sizes.tolist(), strict=True):
            ranked += sorted(range(first, first + size), key=pieces.__getitem__)
        self.order[places] = self.order[places[ranked]]
        pieces = [pieces[place] for place in ranked]
        follows = numpy.ones(total, numpy.bool_)
        follows[firsts] = False
        return self._note(places, depths, _equal_bytes(pieces, length), follows, length)

    def _piece(self, records: _Indices, depths: _Indices, most: int) -> int:
        """Return how many bytes to read of each text: no more than are there, in whole words."""
        there = int((self._texts.lengths[records] - depths).max())
        return max(_WORD, min(most, _LONGEST_PIECE, there + _WORD) // _WORD * _WORD)

    def _note(
        self, places: _Indices, depths: _Indices, equal: _Indices, follows: NDArray[numpy.bool_], length: int
    ) -> _Runs:
        """Note what neighbours share, whose pieces are equal in `equal` bytes; return what is tied still.

        `follows`: they were tied with the one before.
        """
        self.shared[places[follows]] = (depths + equal)[follows] + self._head_bytes(places[follows])
        tied = follows & (equal == length) & (depths + length < MOST_TEXT)
        # A run goes from the record before the first that is tied to the last that is.
        edges = numpy.diff(numpy.append(tied, False).astype(numpy.int8), prepend=numpy.int8(0))
        begins, ends = numpy.flatnonzero(edges == 1) - 1, numpy.flatnonzero(edges == -1) - 1
        return _Runs(places[begins], places[ends] + 1, depths[begins] + length)

    def _head_bytes(self, places: _Indices) -> NDArray[numpy.uint32] | int:
        sizes = self._texts.head_bytes
        return 0 if sizes is None else sizes[self.order[places]]

    def _split_large(self, begin: int, end: int, depth: int) -> _Runs:
        length = BLOCK_BYTES if end - begin < 1 << 18 else BLOCK_BYTES // 4
        pivot = self._pivot(self.order[begin:end], depth, length)
        return self._split_by(pivot, begin, end, depth) if pivot else self._split_words(begin, end, depth, length)

    def _split_words(self, begin: int, end: int, depth: int, length: int) -> _Runs:
        """Split a tie by the next `length` bytes of its texts."""
        places = numpy.arange(begin, end)
        ranked, equal = _sort_words(self._words(self.order[begin:end], depth, length))
        self.order[begin:end] = self.order[begin:end][ranked]
        left = self._texts.lengths[self.order[begin:end]].astype(numpy.int64) - depth
        # What was padded is no text.
        equal = numpy.minimum(equal, left)
        follows = numpy.ones(end - begin, numpy.bool_)
        follows[0] = False
        depths = numpy.full(end - begin, depth)
        return self._note(places, depths, equal, follows, length)

    def _pivot(self, records: NDArray[numpy.uint32], depth: int, least: int) -> _Pivot | None:
        """Return what to split a tie by; None where most of its texts differ from it within `least` bytes.

        It is the middle one of a few, cut where three quarters of those have parted from it: what so many part from is
        worth no more reading, and the others go on together.
        """
        places = numpy.arange(min(_SAMPLE, len(records))) * _SPREAD % 1 * len(records)
        pieces = sorted(self._read(records[places.astype(numpy.int64)], depth, _LONGEST_PIECE // 8))
        text = pieces.pop(len(pieces) // 2)
        same = sorted(len(common_start(text, piece)) for piece in pieces)
        quarter, half, most = (same[len(same) * part // 4] for part in (1, 2, 3))
        if half < least:
            return None
        near = max(quarter, least)
        return _Pivot(text[:most], near if 2 * near < most else most)

    def _split_by(self, pivot: _Pivot, begin: int, end: int, depth: int) -> _Runs:
        """Split a tie by how much of the pivot each text begins with, and by the side of it on which it sorts.

        A text is read until it is told from the pivot. As that is about the middle of them, a record that is has left
        half of its tie behind: it is in few ties before its tie is small, however the texts are made.
        """
        records, most = self.order[begin:end], len(pivot.text)
        # Where a text sorts: before the pivot by how much it shares, after it by how little. 16 bits, which sort fast.
        sides = numpy.full(len(records), most, numpy.uint16)
        equal = numpy.arange(len(records))
        for start, stop in pairwise(dict.fromkeys((0, pivot.near, most))):
            text = pivot.text[start:stop]
            count = min(_LARGE, _BUDGET // (len(text) + BLOCK_BYTES))
            for some in (equal[at : at + count] for at in range(0, len(equal), count)):
                pieces = self._read(records[some], depth + start, len(text))
                for place, piece in zip(some.tolist(), pieces, strict=True):
                    if piece != text:
                        same = start + len(common_start(text, piece))
                        sides[place] = same if piece < text else 2 * most - same
            equal = numpy.flatnonzero(sides == most)
        return self._note_sides(begin, depth, sides, most)

    def _note_sides(self, begin: int, depth: int, sides: NDArray[numpy.uint16], most: int) -> _Runs:
        """Sort a tie by `sides`; note what neighbours share, and return what is tied still."""
        count = len(sides)
        ranked = numpy.argsort(sides, kind="stable")
        self.order[begin : begin + count] = self.order[begin : begin + count][ranked]
        sides = sides[ranked]
        same = most - numpy.abs(sides.astype(numpy.int64) - most)
        places = numpy.arange(begin + 1, begin + count)
        self.shared[places] = depth + numpy.minimum(same[1:], same[:-1]) + self._head_bytes(places)
        begins = numpy.flatnonzero(numpy.append(True, sides[1:] != sides[:-1]))
        runs = _Runs(begin + begins, begin + numpy.append(begins[1:], count), depth + same[begins])
        return runs.some((runs.ends - runs.begins > 1) & (runs.depths < MOST_TEXT))

    def _words(self, records: NDArray[numpy.uint32], depth: int, length: int) -> NDArray[numpy.uint64]:
        """Return pieces of texts as numbers that compare as they do, a row of words for each."""
        words = numpy.empty((len(records), length // _WORD), numpy.uint64)
        for at in range(0, len(records), _LARGE):
            words[at : at + _LARGE] = _as_words(self._read(records[at : at + _LARGE], depth, length), length)
        return words

    def _read(self, records: NDArray[numpy.uint32], depth: int, length: int) -> list[bytes]:
        return self._texts.read(records.astype(numpy.int64), numpy.full(len(records), depth), length)


def _as_words(pieces: list[bytes], length: int) -> NDArray[numpy.uint64]:
    padded = numpy.array(pieces, dtype=f"S{length}")
    return padded.view(">u8").astype(numpy.uint64).reshape(len(pieces), length // _WORD)


def _equal_bytes(pieces: list[bytes], length: int) -> _Indices:
    """Return in how many bytes each piece begins as the one before it does; 0 for the first."""
    words = _as_words(pieces, length)
    differs = words[1:] != words[:-1]
    first = differs.argmax(axis=1)
    rows = numpy.arange(len(first))
    equal = numpy.zeros(len(pieces), numpy.int64)
    equal[1:] = first * _WORD + _leading_zeros(words[1:][rows, first] ^ words[:-1][rows, first])
    same = numpy.flatnonzero(~differs[rows, first]) + 1
    equal[same] = [len(pieces[place]) for place in same.tolist()]
    return equal


def _sort_words(words: NDArray[numpy.uint64]) -> tuple[_Indices, _Indices]:
    """Return the order of rows, and in how many bytes each is equal to the one before it in that; 0 for the first."""
    count, columns = words.shape
    ranked = numpy.arange(count, dtype=numpy.uint32)
    equal = numpy.full(count, columns * _WORD, numpy.int64)
    begins = numpy.zeros(count, numpy.bool_)
    begins[0] = True
    tied = numpy.arange(count, dtype=numpy.uint32)
    for column in range(columns):
        word = words[ranked[tied], column]
        begin = begins[tied]
        if not ((word[1:] != word[:-1]) & ~begin[1:]).any():
            continue
        placed = numpy.lexsort((word, numpy.cumsum(begin, dtype=numpy.uint32)))
        ranked[tied] = ranked[tied[placed]]
        word = word[placed]
        differs = numpy.flatnonzero((word[1:] != word[:-1]) & ~begin[1:]) + 1
        equal[tied[differs]] = column * _WORD + _leading_zeros(word[differs] ^ word[differs - 1])
        begins[tied[differs]] = True
        tied = numpy.flatnonzero(~(begins & numpy.append(begins[1:], True))).astype(numpy.uint32)
        if not len(tied):
            break
    equal[0] = 0
    return ranked.astype(numpy.int64), equal


def _leading_zeros(words: NDArray[numpy.uint64]) -> _Indices:
    """Return how many of the eight bytes of each word are zero before the first that is not (7 where all are)."""
    return sum((words < 1 << _WORD * bytes_left).astype(numpy.int64) for bytes_left in range(1, _WORD))  # type: ignore[return-value]


def common_start(one: bytes, other: bytes) -> bytes:
    """Return what both begin with."""
    same, most = 0, min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        if one.startswith(other[:middle]):
            same = middle
        else:
            most = middle - 1
    return one[:same]
