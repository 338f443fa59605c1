"""Sharing out one job's records: what is to be done, who has it, and what came back."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

from freight.control.inputs import InputFile
from freight.control.intake import Index
from freight.control.stretches import Stretches
from freight.control.twins import Twins
from freight.core.answer import MAX_DEATHS, WORKER_CRASHED, Line, error_line
from freight.core.job import Totals
from freight.core.messages import SLICE_BYTES, SLICE_RECORDS, Death, Lease, Report, Returned
from freight.core.record import custom_id_of
from freight.errors import OperationError
from freight.store.database import StorageFull
from freight.store.results import Results
from freight.store.rows import JobRow

# Records that took a model server down once run again in groups of this many; after a second death, alone.
SUSPECT_GROUP: Final = 4
# A lease is at most what is left divided by so many times the workers: the last of a job go out one by one.
_SHARES: Final = 2
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
        # Views: looked at one by one, arrays are slow.
        self._offsets, self._lengths = index.offsets.data, index.lengths.data
        self._results = results
        self._epoch, self._retried = row.epoch, row.retried
        self._writer = writer
        self._reader = reader
        self._all_settled = settled = results.settled(index.records, row.retried)
        self._settled = settled.data
        self._front: deque[Returned] = deque()
        self._back: deque[Returned] = deque()
        # What has had its last death and has no result yet: that was lost on its way to the disk, and runs once more.
        self._suspects = {i: min(n, MAX_DEATHS - 1) for i, n in results.suspects().items() if not settled[i]}
        self._held: dict[str, _Held] = {}
        wanted = ~settled & (index.endpoints > 0)
        self.left = int(wanted.sum())
        self._twins = Twins(index.firsts, wanted)
        # How many of those left get the line of another one, and run themselves never.
        self.twins_left = len(self._twins.followers)
        wanted[self._twins.followers] = False
        wanted[list(self._suspects)] = False
        self._stretches = Stretches(index, wanted)
        self._mean_bytes = int(index.lengths.mean()) if index.records else 0
        self.totals: Totals = results.totals(row.retried)
        self.blocked = ""
        self._given_up = asyncio.Event()
        self._is_over = False
        self._reports = 0
        self._quiet = asyncio.Event()

    def give_up(self) -> None:
        """Wait for room no longer: what does not fit now runs again another time."""
        self._given_up.set()

    def is_given_up(self) -> bool:
        """Return whether the control plane is ending."""
        return self._given_up.is_set()

    async def close(self) -> None:
        """Put nothing more on disk, the job being over, and return once its files are not in use any more."""
        self._is_over = True
        self.give_up()
        while self._reports:
            self._quiet.clear()
            await self._quiet.wait()
        # What a report began that was broken off itself.
        await asyncio.get_running_loop().run_in_executor(self._writer, lambda: None)

    async def accept(self, report: Report) -> Totals:
        """Put what a report brings on disk and return by how much the totals changed.

        While there is no room it waits, and `blocked` says so; after `give_up` it raises StorageFull instead.
        """
        self._reports += 1
        try:
            return await self._accept(report)
        finally:
            self._reports -= 1
            self._quiet.set()

    async def _accept(self, report: Report) -> Totals:
        held = self._held.setdefault(report.worker, _Held())
        lines = list(report.done)
        for death in report.deaths:
            lines += await self._crashed(report.worker, death)
        changed = await self._put_all(lines) if lines else Totals()
        self.totals = self.totals.plus(changed)
        if self._is_over:
            return changed
        for line in lines:
            self._settle(line.index)
            self._suspects.pop(line.index, None)
            held.tries.pop(line.index, None)
        self._take_back(held, report)
        return changed

    async def _put_all(self, lines: list[Line]) -> Totals:
        """Put the lines and those of their twins on disk, and let others write in between."""
        changed = Totals()
        try:
            for part in self._twins.parts(lines, self._index.lengths, self.read_lines):
                if self._is_over:
                    break
                changed = changed.plus(await self._put(part))
        except StorageFull:
            self.totals = self.totals.plus(changed)
            raise
        except OperationError:
            # The twins' own ids cannot be read: what the engine answered is kept nevertheless.
            changed = changed.plus(await self._put(lines))
            self.totals = self.totals.plus(changed)
            raise
        return changed

    async def _put(self, lines: Iterable[Line]) -> Totals:
        return await self._write(self._results.put, lines, self._epoch, self._retried)

    def _settle(self, runner: int) -> None:
        """Count a record and its twins as done.

        Once, whoever brings it: a worker may be lost, and its records shared out again, during the write.
        """
        if not self._settled[runner]:
            self._settled[runner] = True
            self.left -= 1
        twins = self._twins.of(runner)
        if len(twins):
            news = len(twins) - int(self._all_settled[twins].sum())
            self._all_settled[twins] = True
            self.left -= news
            self.twins_left -= news

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
            # It stays a suspect, so that nobody has it again before this is on disk.
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
        self._stretches.leave_out(held.tries)
        held.suspects = any(index in self._suspects for index in held.tries)

    def lost(self, worker: str) -> None:
        """Take back all that a worker held that is gone; no record is charged for it."""
        held = self._held.pop(worker, _Held())
        self._stretches.release(worker)
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
        chosen = self._choose_suspects(held) or self._choose(worker, want, workers)
        if not chosen:
            return []
        for back in chosen:
            held.tries[back.index] = back.tries
        lines = await self._read([back.index for back in chosen])
        return [Lease(back.index, back.tries, line) for back, line in zip(chosen, lines, strict=True)]

    def _fair_share(self, workers: int) -> tuple[int, int]:
        """Return the most records, and bytes of them, that one of `workers` gets now: a part of what is left."""
        if workers < 2:
            return SLICE_RECORDS, SLICE_BYTES
        waiting = self._stretches.left + len(self._front) + len(self._back)
        parts = _SHARES * workers
        most = max(1, waiting // parts)
        # What came back may be much of what is left.
        most_bytes = max(self._stretches.bytes_left // parts, most * self._mean_bytes)
        return min(SLICE_RECORDS, most), min(SLICE_BYTES, most_bytes)

    def _choose_suspects(self, held: _Held) -> list[Returned]:
        """Suspects run on one worker that runs nothing else: a few together, or alone after a second death."""
        if not self._suspects or held.tries or any(other.suspects for other in self._held.values()):
            return []
        waiting = [index for index, deaths in self._suspects.items() if deaths < MAX_DEATHS]
        if not waiting:
            return []
        ordered = sorted(waiting, key=lambda index: (self._suspects[index], index))
        size = SUSPECT_GROUP if self._suspects[ordered[0]] == 1 else 1
        group = [index for index in ordered[:size] if self._suspects[index] == self._suspects[ordered[0]]]
        held.suspects = True
        return [Returned(index, 0) for index in group]

    def _choose(self, worker: str, want: int, workers: int) -> list[Returned]:
        chosen: list[Returned] = []
        most, most_bytes = self._fair_share(workers)
        most = min(want, most)
        size = 0
        while len(chosen) < most:
            back = self._peek(worker)
            if back is None:
                break
            if not self._settled[back.index] and back.index not in self._suspects:
                size += self._lengths[back.index]
                if chosen and size > most_bytes:
                    break
                chosen.append(back)
            self._pop(worker)
        return chosen

    def _peek(self, worker: str) -> Returned | None:
        """Return the record whose turn it is: what came back first, the order, then what was with a dead server."""
        if self._front:
            return self._front[0]
        index = self._stretches.next_of(worker)
        if index is not None:
            return Returned(index, 0)
        return self._back[0] if self._back else None

    def _pop(self, worker: str) -> None:
        if self._front:
            self._front.popleft()
        elif self._stretches.left:
            self._stretches.pop(worker)
        else:
            self._back.popleft()

    async def _read(self, indices: Sequence[int]) -> list[bytes]:
        return await asyncio.get_running_loop().run_in_executor(self._reader, self.read_lines, indices)

    def read_lines(self, indices: Sequence[int]) -> list[bytes]:
        """Return the lines of these records; raise OperationError when the file has changed."""
        lines: dict[int, bytes] = {}
        placed = sorted(set(indices))
        at = 0
        while at < len(placed):
            start = end = self._offsets[placed[at]]
            first = at
            while at < len(placed) and self._offsets[placed[at]] - end <= _READ_GAP:
                end = self._offsets[placed[at]] + self._lengths[placed[at]]
                at += 1
            block = self._file.read_unchecked(start, end - start)
            for index in placed[first:at]:
                offset = self._offsets[index] - start
                lines[index] = block[offset : offset + self._lengths[index]]
        self._file.check_unchanged()
        return [lines[index] for index in indices]
