"""Sharing out one job's records: what is to be done, who has it, and what came back."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy
from numpy.typing import NDArray

from freight.control.inputs import InputFile
from freight.control.intake import Index
from freight.core.answer import MAX_DEATHS, WORKER_CRASHED, Line, error_line
from freight.core.job import Totals
from freight.core.messages import SLICE_BYTES, SLICE_RECORDS, Death, Lease, Report, Returned
from freight.core.record import custom_id_of
from freight.store.database import StorageFull
from freight.store.results import Results
from freight.store.rows import JobRow

# Records that took a model server down once run again in groups of this many; after a second death, alone.
SUSPECT_GROUP: Final = 4
# Records whose lines lie this close together are read in one piece.
_READ_GAP: Final = 4096
# How often a full disk is tried again.
FULL_RETRY_S: Final = 2.0
_T = TypeVar("_T")


@dataclass(slots=True)
class _Held:
    """What one worker has: tries charged so far, by record. `suspects`: it runs those and nothing beside them."""

    tries: dict[int, int] = field(default_factory=dict[int, int])
    suspects: bool = False


class Dispatcher:
    """One job's queue. Everything that must survive goes to `results` first, by way of `writer`, one at a time."""

    def __init__(
        self, file: InputFile, index: Index, results: Results, row: JobRow, writer: Executor, reader: Executor
    ) -> None:
        self._file = file
        self._index = index
        self._results = results
        self._epoch, self._retried = row.epoch, row.retried
        self._writer = writer
        self._reader = reader
        self._settled = settled = results.settled(index.records, row.retried)
        self._todo: NDArray[numpy.int64] = numpy.flatnonzero(~settled & (index.endpoints > 0))
        self._next = 0
        self._front: deque[Returned] = deque()
        self._back: deque[Returned] = deque()
        self._suspects = {i: deaths for i, deaths in results.suspects().items() if not settled[i]}
        self._held: dict[str, _Held] = {}
        if self._suspects:
            self._todo = self._without(self._todo, list(self._suspects))
        self.left = len(self._todo) + len(self._suspects)
        self.totals: Totals = results.totals(row.retried)
        self.blocked = ""
        self._given_up = asyncio.Event()

    def give_up(self) -> None:
        """Wait for room no longer: what does not fit now runs again another time."""
        self._given_up.set()

    def is_given_up(self) -> bool:
        """Return whether the control plane is ending."""
        return self._given_up.is_set()

    async def accept(self, report: Report) -> Totals:
        """Put what a report brings on disk and return by how much the totals changed.

        While there is no room it waits, and `blocked` says so; after `give_up` it raises StorageFull instead.
        """
        held = self._held.setdefault(report.worker, _Held())
        lines = list(report.done)
        for death in report.deaths:
            lines += await self._crashed(report.worker, death)
        changed = await self._write(self._results.put, lines, self._epoch, self._retried) if lines else Totals()
        for line in lines:
            self._suspects.pop(line.index, None)
            held.tries.pop(line.index, None)
            # Once, whoever brings it: a worker may be lost, and its records shared out again, during the write.
            if not self._settled[line.index]:
                self._settled[line.index] = True
                self.left -= 1
        self._take_back(held, report)
        self.totals = self.totals.plus(changed)
        return changed

    async def _write(self, call: Callable[..., _T], *args: object) -> _T:
        loop = asyncio.get_running_loop()
        while True:
            try:
                result = await loop.run_in_executor(self._writer, call, *args)
            except StorageFull as error:
                if self._given_up.is_set():
                    raise
                self.blocked = error.message
                with suppress(TimeoutError):
                    async with asyncio.timeout(FULL_RETRY_S):
                        await self._given_up.wait()
            else:
                self.blocked = ""
                return result

    async def _crashed(self, worker: str, death: Death) -> list[Line]:
        """Charge a death to the records that were in flight; return the lines of those that have had enough."""
        if not death.charged or not death.in_flight:
            return []
        deaths = await self._write(self._results.accuse, death.in_flight, worker, death.number)
        self._suspects.update(deaths)
        lines: list[Line] = []
        for index in [i for i, count in deaths.items() if count >= MAX_DEATHS]:
            del self._suspects[index]
            [line] = await self._read([index])
            message = f"this record took a model server down {MAX_DEATHS} times; the last: {death.reason}"
            lines.append(error_line(index, custom_id_of(line), WORKER_CRASHED, message))
        return lines

    def _take_back(self, held: _Held, report: Report) -> None:
        for death in report.deaths:
            for index in death.in_flight:
                tries = held.tries.pop(index, None)
                if tries is not None and index not in self._suspects:
                    # Last, so that what may have to do with it keeps no other record from its turn.
                    self._back.append(Returned(index, tries))
        for back in report.returned:
            if held.tries.pop(back.index, None) is not None and back.index not in self._suspects:
                self._front.append(back)
        held.suspects = held.suspects and bool(held.tries)

    def adopt(self, worker: str, has: Sequence[Returned]) -> None:
        """Take note of what a worker of an earlier control plane has: nobody else gets it, as long as that lives."""
        held = self._held.setdefault(worker, _Held())
        for back in has:
            if not self._settled[back.index]:
                held.tries[back.index] = back.tries
        taken = list(held.tries)
        held.suspects = any(index in self._suspects for index in taken)
        self._todo = numpy.concatenate((self._todo[: self._next], self._without(self._todo[self._next :], taken)))

    @staticmethod
    def _without(indices: NDArray[numpy.int64], taken: Sequence[int]) -> NDArray[numpy.int64]:
        return indices[~numpy.isin(indices, taken)]

    def lost(self, worker: str) -> None:
        """Take back all that a worker held that is gone; no record is charged for it."""
        held = self._held.pop(worker, _Held())
        # Emptied, because a report of that worker may still be being written.
        left, held.tries = held.tries, {}
        for index, tries in left.items():
            if index not in self._suspects:
                self._front.append(Returned(index, tries))

    async def lease(self, worker: str, want: int, workers: int) -> list[Lease]:
        """Hand out up to `want` records to one of `workers`; fewer near the end, so that none hoards the tail."""
        held = self._held.setdefault(worker, _Held())
        if want <= 0 or held.suspects:
            return []
        chosen = self._choose_suspects(held) or self._choose(min(want, self._fair_share(workers)))
        if not chosen:
            return []
        for back in chosen:
            held.tries[back.index] = back.tries
        lines = await self._read([back.index for back in chosen])
        return [Lease(back.index, back.tries, line) for back, line in zip(chosen, lines, strict=True)]

    def _fair_share(self, workers: int) -> int:
        waiting = len(self._todo) - self._next + len(self._front) + len(self._back)
        return SLICE_RECORDS if workers < 2 else max(1, waiting // (2 * workers))

    def _choose_suspects(self, held: _Held) -> list[Returned]:
        """Suspects run on one worker that runs nothing else: a few together, or alone after a second death."""
        if not self._suspects or held.tries or any(other.suspects for other in self._held.values()):
            return []
        ordered = sorted(self._suspects, key=lambda index: (self._suspects[index], index))
        size = SUSPECT_GROUP if self._suspects[ordered[0]] == 1 else 1
        group = [index for index in ordered[:size] if self._suspects[index] == self._suspects[ordered[0]]]
        held.suspects = True
        return [Returned(index, 0) for index in group]

    def _choose(self, want: int) -> list[Returned]:
        chosen: list[Returned] = []
        size = 0
        while len(chosen) < min(want, SLICE_RECORDS):
            back = self._peek()
            if back is None:
                break
            if not self._settled[back.index] and back.index not in self._suspects:
                size += int(self._index.lengths[back.index])
                if chosen and size > SLICE_BYTES:
                    break
                chosen.append(back)
            self._pop()
        return chosen

    def _peek(self) -> Returned | None:
        """Return the record whose turn it is: what came back first, then the file, then what was with a dead server."""
        if self._front:
            return self._front[0]
        if self._next < len(self._todo):
            return Returned(int(self._todo[self._next]), 0)
        return self._back[0] if self._back else None

    def _pop(self) -> None:
        if self._front:
            self._front.popleft()
        elif self._next < len(self._todo):
            self._next += 1
        else:
            self._back.popleft()

    async def _read(self, indices: Sequence[int]) -> list[bytes]:
        return await asyncio.get_running_loop().run_in_executor(self._reader, self.read_lines, indices)

    def read_lines(self, indices: Sequence[int]) -> list[bytes]:
        """Return the lines of these records; raise OperationError when the file has changed."""
        lines: list[bytes] = []
        at = 0
        while at < len(indices):
            start = int(self._index.offsets[indices[at]])
            end = start
            first = at
            while at < len(indices) and 0 <= int(self._index.offsets[indices[at]]) - end <= _READ_GAP:
                end = int(self._index.offsets[indices[at]]) + int(self._index.lengths[indices[at]])
                at += 1
            block = self._file.read(start, end - start)
            for index in indices[first:at]:
                offset = int(self._index.offsets[index]) - start
                lines.append(block[offset : offset + int(self._index.lengths[index])])
        return lines
