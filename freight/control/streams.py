"""What a job has to give, in pieces: its results, and its workers' output."""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial as partial_call
from pathlib import Path
from typing import Final

from freight.control.apply import log_of
from freight.control.context import Context
from freight.control.finding import Finder
from freight.control.inputs import InputFile
from freight.control.intake import Index
from freight.control.layout import Layout, Render, Source, measured, part_of
from freight.control.output import Missing, Only, whole_lines
from freight.control.views import totals_of
from freight.core.account import Account
from freight.core.answer import BATCH_CANCELLED, BATCH_EXPIRED, BATCH_FAILED
from freight.core.job import FINAL, State
from freight.core.record import custom_id_of
from freight.errors import FreightError, OperationError, UserError, WrongState
from freight.store.database import STORAGE_ERRORS, Sharing
from freight.store.results import Results
from freight.store.rows import JobRow, StintRow

log = logging.getLogger("freight.service")

_PIECE_BYTES: Final = 1 << 18
_FOLLOW_S: Final = 0.25
# To be counted up where the same results are written otherwise than before.
_SHAPE: Final = 1
_MOST_LAYOUTS: Final = 256
_NOT_REACHED: Final = {
    State.CANCELLED: (BATCH_CANCELLED, "not reached: the job was cancelled"),
    State.TIMED_OUT: (BATCH_EXPIRED, "not reached: the job's time ran out"),
    State.FAILED: (BATCH_FAILED, "not reached: the job failed"),
}


@dataclass(frozen=True, slots=True)
class ResultStream:
    """A job's results file in pieces: `done` of `total` records have a line of their own in it, `state` is the job's.

    Of a job that has ended, `etag` names these bytes and no others, `size` is how many they are, and `part` gives some
    of them. Else these are None. `close` lets go of what it is read from; it must be called, read or not.
    """

    done: int
    total: int
    state: State
    pieces: Iterator[bytes]
    close: Callable[[], None]
    size: int | None = None
    etag: str | None = None
    part: Callable[[range], Iterator[bytes]] | None = None


@dataclass(frozen=True, slots=True)
class Rendering:
    """Which of a job's results are wanted, and how they are shown: lines as they are, or made others by `render`.

    `kind` names the way they are shown: results of the same kind have the same bytes.
    """

    only: Only | None = None
    kind: str = ""
    render: Render | None = None


class StreamBroken(Exception):
    """A stream cannot be completed: its reader must not take what came for the whole."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """What results are read from; `files` closes it all."""

    results: Results
    version: int
    missing: Missing | None
    files: ExitStack


class Streams:
    """Reads what jobs have on disk, in bounded memory, beside whoever writes it."""

    def __init__(self, context: Context, finder: Finder) -> None:
        self._context = context
        self._finder = finder
        # What is being measured, or was: the last used is the last.
        self._layouts: OrderedDict[str, asyncio.Task[Layout]] = OrderedDict()

    async def results(self, account: Account, name: str, only: Only | None, partial: bool) -> ResultStream:
        """Return a job's results; raise WrongState for those of an unfinished one, unless `partial` ones will do."""
        return await self.rendered(await self._finder.find(account, name), Rendering(only), partial)

    async def rendered(self, row: JobRow, rendering: Rendering, partial: bool = False) -> ResultStream:
        """Return the results of a job that was looked up, shown in one way; raise as `results` does."""
        totals = totals_of(row, self._context.in_hand(row.id))
        if row.records is None:
            if row.state in FINAL:
                why, hint = f"its input was refused: {row.reason}", "submit a corrected input"
            else:
                why, hint = "its input is still being checked", f"wait for it: freight batch wait {row.name}"
            raise WrongState(f"job {row.name} has no results: {why}", hint)
        if row.state not in FINAL and not partial:
            raise WrongState(
                f"job {row.name} is {row.state}: {totals.done} of {row.records} records are done",
                f"wait for it: freight batch wait {row.name}; or take what there is with --partial",
            )
        opened = await self._context.in_thread(self._open, row, rendering.only)
        close = opened.files.close
        if row.state not in FINAL:
            pieces = self._pieces(row, rendering.only, opened)
            return ResultStream(totals.done, row.records, row.state, pieces, close)
        try:
            # It may have been resumed before its results were opened: what is kept of it would be another epoch's.
            now = await self._finder.get(row.id)
            etag = _etag(row, rendering)
            if _etag(now, rendering) == etag:
                layout = await self._layout(row, rendering, etag)
                part = partial_call(self._part, row, _source(row, rendering, opened), opened.version, layout)
                whole = part(range(layout.size))
                return ResultStream(row.records, row.records, row.state, whole, close, layout.size, etag, part)
        except BaseException:
            close()
            raise
        close()
        return await self.rendered(now, rendering, partial)

    async def _layout(self, row: JobRow, rendering: Rendering, etag: str) -> Layout:
        """Return the layout of a job's results, which is measured once, however many want it."""
        task = self._layouts.get(etag)
        if task is None:
            task = self._layouts[etag] = asyncio.create_task(self._context.in_thread(self._measure, row, rendering))
            task.add_done_callback(lambda done: self._measured(etag, done))
        self._layouts.move_to_end(etag)
        return await asyncio.shield(task)

    def _measured(self, etag: str, task: asyncio.Task[Layout]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._layouts.pop(etag, None)
        while len(self._layouts) > _MOST_LAYOUTS:
            self._layouts.popitem(last=False)

    def _measure(self, row: JobRow, rendering: Rendering) -> Layout:
        opened = self._open(row, rendering.only)
        with opened.files:
            return measured(_source(row, rendering, opened))

    def _open(self, row: JobRow, only: Only | None) -> "_Opened":
        """Open all that results are made of, so that what cannot be read is said before anything is sent."""
        folder = self._context.folder
        with ExitStack() as stack:
            results = folder.open_results(row.id, Sharing.READER)
            stack.callback(results.close)
            version = results.version()
            missing: Missing | None = None
            if row.state in FINAL and only is not Only.OK:
                try:
                    file = InputFile(folder.input(row.id), f"the input of job {row.name}")
                except UserError as error:
                    raise OperationError(
                        f"the input of job {row.name}, {folder.input(row.id)}, is gone or cannot be read",
                        f"take the answers alone: freight batch results {row.name} --only ok",
                    ) from error
                stack.callback(file.close)
                missing = missing_of(row, file, Index.load(folder.index(row.id)))
            return _Opened(results, version, missing, stack.pop_all())

    def _pieces(self, row: JobRow, only: Only | None, opened: "_Opened") -> Iterator[bytes]:
        source = _source(row, Rendering(only), opened)
        return self._sent(row, whole_lines(row.id, source.rests()))

    def _part(self, row: JobRow, source: Source, version: int, layout: Layout, part: range) -> Iterator[bytes]:
        return self._sent(row, part_of(source, layout, part, version))

    def _sent(self, row: JobRow, lines: Iterator[bytes]) -> Iterator[bytes]:
        held = bytearray()
        while (line := _next(lines, row)) is not None:
            held += line
            if len(held) >= _PIECE_BYTES:
                yield bytes(held)
                held.clear()
                if self._context.stopping.is_set():
                    raise StreamBroken
        yield bytes(held)

    async def logs(
        self, account: Account, name: str, worker: int | None, tail: int | None, follow: bool
    ) -> AsyncIterator[bytes]:
        """Return the output of a job's workers, or of its worker number `worker`, from its last `tail` lines on.

        With `follow` it goes on until the job has ended. Raises UserError for a worker that the job has not had.
        """
        row = await self._finder.find(account, name)
        stints = await self._stints(row.id)
        if worker is not None and not any(stint.number == worker for stint in stints):
            there = f"its workers are 1 to {len(stints)}" if stints else "it has had none yet"
            raise UserError(f"job {row.name} has no worker {worker}", there)
        return self._follow(row.id, worker, tail, follow)

    async def _stints(self, job: str) -> list[StintRow]:
        return await self._context.look(self._context.reader.stints, job)

    async def _follow(self, job: str, worker: int | None, tail: int | None, follow: bool) -> AsyncIterator[bytes]:
        at: dict[int, int] = {}
        shown = 0
        while True:
            in_hand = self._context.in_hand(job)
            for stint in await self._stints(job):
                if worker not in (None, stint.number):
                    continue
                path = self._log(job, stint)
                if stint.number not in at:
                    at[stint.number] = await self._context.in_thread(_tail_start, path, tail)
                at[stint.number] = await self._context.in_thread(_from_start_if_cut, path, at[stint.number])
                piece = await self._context.in_thread(_read_from, path, at[stint.number])
                while piece:
                    if worker is None and shown != stint.number:
                        yield b"==> worker %d <==\n" % stint.number
                        shown = stint.number
                    at[stint.number] += len(piece)
                    yield piece
                    piece = await self._context.in_thread(_read_from, path, at[stint.number])
            if not follow or in_hand is None or self._context.stopping.is_set():
                return
            await asyncio.sleep(_FOLLOW_S)

    def _log(self, job: str, stint: StintRow) -> Path:
        kept = log_of(self._context.folder.job(job), stint.number)
        return kept if stint.ended_at is not None or kept.exists() else Path(stint.log)


def _source(row: JobRow, rendering: Rendering, opened: _Opened) -> Source:
    return Source(row.id, row.records or 0, opened.results, opened.missing, rendering.only, rendering.render)


def _etag(row: JobRow, rendering: Rendering) -> str:
    """Return what names a job's results: they are others in every epoch, and in none but final states the same."""
    what = (_SHAPE, row.id, row.state, row.epoch, row.retried, rendering.only or "", rendering.kind)
    return f'"{hashlib.sha256("/".join(map(str, what)).encode()).hexdigest()[:32]}"'


def _next(lines: Iterator[bytes], row: JobRow) -> bytes | None:
    """Return the next line, None after the last; raise StreamBroken where it cannot be read."""
    try:
        return next(lines, None)
    except (FreightError, *STORAGE_ERRORS) as error:
        log.warning("job %s: its results cannot be read: %s", row.name, error)
        raise StreamBroken from None


def missing_of(row: JobRow, file: InputFile, index: Index) -> Missing:
    code, words = _NOT_REACHED.get(row.state, (BATCH_FAILED, "not reached"))

    def missing(record: int) -> tuple[bytes | None, str, str]:
        line = file.read(int(index.offsets[record]), int(index.lengths[record]))
        return custom_id_of(line), code, words

    return missing


def _from_start_if_cut(path: Path, offset: int) -> int:
    """Return the offset to read on from: that given, or 0 where the file was cut meanwhile."""
    try:
        return offset if offset <= path.stat().st_size else 0
    except OSError:
        return offset


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_PIECE_BYTES)
    except OSError:
        return b""


def _tail_start(path: Path, lines: int | None) -> int:
    """Return where the last `lines` lines of a file begin."""
    if lines is None:
        return 0
    try:
        with path.open("rb") as file:
            end = at = file.seek(0, 2)
            if not lines:
                return end
            found = 0
            while at > 0:
                start = max(0, at - _PIECE_BYTES)
                file.seek(start)
                block = file.read(at - start)
                for place in range(len(block) - 1, -1, -1):
                    # The newline that ends the file ends its last line, and begins none.
                    if block[place] == 0x0A and start + place != end - 1:
                        found += 1
                        if found == lines:
                            return start + place + 1
                at = start
            return 0
    except OSError:
        return 0
