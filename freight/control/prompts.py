"""Where the texts of a job's records stand in its input, from which the order of dispatch is made."""

import zlib
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

import numpy
from numpy.typing import NDArray

from freight.control.inputs import InputFile
from freight.core.order import BLOCK_BYTES, Order, Texts, common_start, dispatch_order
from freight.core.prompt import DIGEST_BYTES, NO_BUDGET, STAND_IN_BYTES, Media, Prompt
from freight.errors import Interrupted

# Of the heads (tools, instructions) so many are known by their text, of so many bytes together; others by a digest.
MOST_HEADS: Final = 1024
MOST_HEAD_BYTES: Final = 4_000_000
# Pieces that lie this close together are read at once, in blocks of this size.
_READ_GAP: Final = 8192
_BLOCK_BITS: Final = 21
_LONGEST_COMMON: Final = 1 << 16

_Indices = NDArray[numpy.int64]


class Prompts:
    """What intake has seen of each record's text: 16 bytes a record, and 20 for each medium."""

    def __init__(self) -> None:
        self._at, self._lengths, self._budgets = array("I"), array("I"), array("I")
        self._heads = array("I")
        self._known: dict[bytes, int] = {}
        self._known_bytes = 0
        self._common: bytes | None = None
        self._media = _MediaArrays()

    def add(self, line: bytes, prompt: Prompt | None) -> None:
        """Take note of the next record; None is one that is not dispatched."""
        if prompt is None:
            prompt = Prompt(b"", 0, 0, NO_BUDGET)
        else:
            self._narrow(line, prompt)
        self._add_head(prompt.head)
        self._at.append(prompt.at)
        self._budgets.append(prompt.budget)
        length = prompt.length
        for medium in prompt.media:
            self._media.add(len(self._at) - 1, medium)
            length += STAND_IN_BYTES - medium.length
        self._lengths.append(length)

    def _narrow(self, line: bytes, prompt: Prompt) -> None:
        """Keep what all texts begin with; media are no part of it."""
        common, at = self._common, prompt.at
        end = prompt.media[0].at if prompt.media else at + prompt.length
        if common is None:
            self._common = line[at : min(end, at + _LONGEST_COMMON)]
        elif common and not (at + len(common) <= end and line.startswith(common, at)):
            self._common = common_start(common, line[at : min(end, at + len(common))])

    def _add_head(self, head: bytes) -> None:
        """Number the heads as they come; `_ranks` puts the numbers in order."""
        if not head:
            if self._known:
                self._heads.append(0)
            return
        if not self._known:
            self._heads.extend([0] * len(self._at))
            self._known[b""] = 0
        number = self._known.get(head)
        if number is None:
            if len(self._known) < MOST_HEADS and self._known_bytes + len(head) <= MOST_HEAD_BYTES:
                number = self._known[head] = len(self._known)
                self._known_bytes += len(head)
            else:
                number = MOST_HEADS + zlib.crc32(head) % (0xFFFFFFFF - MOST_HEADS)
        self._heads.append(number)

    def order(
        self, file: InputFile, offsets: _Indices, records: _Indices, stopped: Callable[[], bool] = lambda: False
    ) -> Order:
        """Return the order in which `records` are best dispatched; `offsets` say where each record's line begins.

        Raises OperationError when the file has changed, Interrupted once `stopped` returns True.
        """
        heads, head_bytes = self._ranks()
        lengths = numpy.frombuffer(self._lengths, numpy.uint32)
        reader = _Reader(file, offsets, numpy.frombuffer(self._at, numpy.uint32), lengths, self._media, stopped)
        texts = Texts(lengths, reader.read, heads, head_bytes, len(self._common or b""))
        order = dispatch_order(records, texts, numpy.frombuffer(self._budgets, numpy.uint32))
        file.check_unchanged()
        return order

    def _ranks(self) -> tuple[NDArray[numpy.uint32] | None, NDArray[numpy.uint32] | None]:
        """Return numbers of the heads that compare as those do, and their lengths, by record; None without any."""
        if not self._known:
            return None, None
        known = sorted(self._known)
        ranks = numpy.zeros(len(known), numpy.uint32)
        sizes = numpy.zeros(len(known), numpy.uint32)
        for rank, head in enumerate(known):
            ranks[self._known[head]], sizes[self._known[head]] = rank, len(head)
        heads = numpy.frombuffer(self._heads, numpy.uint32)
        strange = heads >= MOST_HEADS
        numbers = numpy.where(strange, 0, heads)
        return numpy.where(strange, heads, ranks[numbers]), numpy.where(strange, BLOCK_BYTES, sizes[numbers])


class _MediaArrays:
    """The media of all records, numbered as they stand in the file: 20 bytes for each."""

    def __init__(self) -> None:
        self._records, self._at, self._lengths = array("I"), array("I"), array("I")
        self._digests = bytearray()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: int, medium: Media) -> None:
        """Take the next medium; records come in ascending order."""
        self._records.append(record)
        self._at.append(medium.at)
        self._lengths.append(medium.length)
        self._digests += medium.digest

    def numbers_of(self, records: _Indices) -> tuple[_Indices, _Indices]:
        """Return the number of each record's first medium, and that after its last."""
        owners = numpy.frombuffer(self._records, numpy.uint32)
        # Of the same type, or the search would make a copy of the whole array.
        wanted = records.astype(numpy.uint32)
        return numpy.searchsorted(owners, wanted), numpy.searchsorted(owners, wanted, "right")

    def medium(self, number: int) -> Media:
        """Return a medium by its number."""
        digest = bytes(self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])
        return Media(self._at[number], self._lengths[number], digest)


class _Reader:
    """Reads pieces of texts. `lengths` count each medium as what stands for it."""

    def __init__(
        self,
        file: InputFile,
        offsets: _Indices,
        at: NDArray[numpy.uint32],
        lengths: NDArray[numpy.uint32],
        media: _MediaArrays,
        stopped: Callable[[], bool],
    ) -> None:
        self._file = file
        self._offsets = offsets
        self._at = at
        self._lengths = lengths
        self._media = media
        self._stopped = stopped

    def read(self, records: _Indices, starts: _Indices, length: int) -> list[bytes]:
        """Return the text of each record from a place on, up to `length` bytes."""
        # Whoever sorts reads again and again, and a large file is sorted for seconds.
        if self._stopped():
            raise Interrupted("interrupted while looking for the order of the records")
        begins = self._offsets[records] + self._at[records] + starts
        ends = begins + numpy.clip(self._lengths[records].astype(numpy.int64) - starts, 0, length)
        pieces = self._plain(begins, ends)
        if len(self._media):
            firsts, lasts = self._media.numbers_of(records)
            for place in numpy.flatnonzero(firsts < lasts).tolist():
                spans = self._spans(int(records[place]), range(firsts[place], lasts[place]))
                pieces[place] = self._mixed(int(self._offsets[records[place]]), spans, int(starts[place]), length)
        return pieces

    def _plain(self, begins: _Indices, ends: _Indices) -> list[bytes]:
        """Return these pieces of the file; what lies close together is read at once."""
        placed = numpy.argsort(begins, kind="stable")
        begins, ends = begins[placed], ends[placed]
        apart = begins[1:] - numpy.maximum.accumulate(ends)[:-1] > _READ_GAP
        apart |= begins[1:] >> _BLOCK_BITS != begins[:-1] >> _BLOCK_BITS
        edges = numpy.flatnonzero(numpy.concatenate(([True], apart, [True])))
        pieces = [b""] * len(placed)
        places, firsts, lasts = placed.tolist(), begins.tolist(), ends.tolist()
        for first, last in pairwise(edges.tolist()):
            start = firsts[first]
            block = self._file.read_unchecked(start, max(lasts[first:last]) - start)
            for number in range(first, last):
                pieces[places[number]] = block[firsts[number] - start : lasts[number] - start]
        return pieces

    def _mixed(self, line_at: int, spans: Iterator[range | bytes], start: int, length: int) -> bytes:
        piece = b""
        for span in spans:
            size = len(span)
            if start < size and len(piece) < length:
                taken = span[start : start + length - len(piece)]
                offset = line_at + taken.start if isinstance(taken, range) else 0
                piece += self._file.read_unchecked(offset, len(taken)) if isinstance(taken, range) else taken
            start = max(0, start - size)
        return piece

    def _spans(self, record: int, media: range) -> Iterator[range | bytes]:
        """Yield what a text with media, given by number, is made of: bytes of its line, and what stands for media."""
        at = int(self._at[record])
        left = int(self._lengths[record])
        for medium in map(self._media.medium, media):
            yield range(at, medium.at)
            yield medium.stand_in()
            left -= medium.at - at + STAND_IN_BYTES
            at = medium.at + medium.length
        yield range(at, at + left)
