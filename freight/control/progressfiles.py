"""Progress files: what the users of the facility's API see of their batches in their own folders."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import Final

from freight.control.context import Context
from freight.control.destination import Destination, Standing
from freight.control.shelf import Shelf
from freight.control.views import totals_of
from freight.core.facility import FACILITY
from freight.core.job import FINAL
from freight.errors import FreightError
from freight.store.database import STORAGE_ERRORS
from freight.store.rows import JobRow

log = logging.getLogger("freight.service")

_EVERY_S: Final = 2.0
# A job's last news are tried so often; where they cannot be written, its state is told by the API all the same.
_MOST_TRIES: Final = 30
# So many jobs that have ended are looked at when the service starts.
_LAST_ENDED: Final = 200


class _Told:
    """What was written about a job, and how often its end could not be."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.standing: Standing | None = None
        self.tries = 0
        # One who looks at it now: a disk that does not answer holds up the news of the jobs on it alone.
        self.looking: asyncio.Task[None] | None = None


class ProgressFiles:
    """Writes how the batches stand, every few seconds, where anything has changed. `threads` do the writing."""

    def __init__(self, context: Context, shelf: Shelf, threads: Executor) -> None:
        self._context = context
        self._shelf = shelf
        self._threads = threads
        self._told: dict[str, _Told] = {}
        self._has_news = asyncio.Event()

    def add(self, row: JobRow) -> None:
        """Tell of a job from now on, until its end."""
        if row.id not in self._told and (destination := self._shelf.destination(row)) is not None:
            self._told[row.id] = _Told(destination)
            self._has_news.set()

    async def run(self) -> None:
        """Go on until this is cancelled."""
        try:
            await self._take_up()
            while True:
                for row in self._unfinished():
                    self.add(row)
                self._has_news.clear()
                for job, told in list(self._told.items()):
                    self._begin_to_look(job, told)
                    # There may be thousands of jobs: others have their turn in between.
                    await asyncio.sleep(0)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_EVERY_S):
                        await self._has_news.wait()
        finally:
            looking = [told.looking for told in self._told.values() if told.looking is not None]
            for task in looking:
                task.cancel()
            await asyncio.gather(*looking, return_exceptions=True)

    async def _take_up(self) -> None:
        """Tell again of jobs that ended with an earlier service, which itself ended before it could tell."""
        try:
            for row in await self._context.look(self._context.reader.last_ended, FACILITY, _LAST_ENDED):
                destination = self._shelf.destination(row)
                if destination is not None and await self._in_thread(partial(destination.tells_otherwise, row.state)):
                    self.add(row)
        except (FreightError, *STORAGE_ERRORS, OSError) as error:
            log.warning("what earlier jobs came to cannot be looked up: %s", error)

    def _unfinished(self) -> list[JobRow]:
        roster = self._context.plane.roster
        hands = [*roster.open.values(), *roster.waiting.values(), *self._context.checking.values()]
        return [hand.row for hand in hands if hand.row.api == FACILITY]

    def _begin_to_look(self, job: str, told: _Told) -> None:
        """See to a job that there may be news of, and that nobody sees to already."""
        hand = self._context.in_hand(job)
        has_news = hand is None or not self._standing(hand.row).is_as(told.standing)
        if has_news and (told.looking is None or told.looking.done()):
            told.looking = asyncio.create_task(self._look(job, told))

    async def _look(self, job: str, told: _Told) -> None:
        try:
            await self._look_at(job, told)
        except (FreightError, *STORAGE_ERRORS, OSError) as error:
            log.warning("job %s: its progress cannot be told: %s", job, error)

    def _standing(self, row: JobRow) -> Standing:
        return Standing(row.state, row.records, totals_of(row, self._context.in_hand(row.id)), time.monotonic())

    async def _look_at(self, job: str, told: _Told) -> None:
        """Write how a job stands, unless that was written; forget a job that has ended once its end is told."""
        hand = self._context.in_hand(job)
        try:
            row = hand.row if hand is not None else await self._context.look(self._context.reader.get, job)
        except KeyError:
            self._told.pop(job, None)  # It was deleted.
            return
        standing = self._standing(row)
        is_told = standing.is_as(told.standing)
        if not is_told:
            is_told = await self._in_thread(lambda: told.destination.tell(job, standing))
            told.standing = standing if is_told else told.standing
        if row.state in FINAL:
            told.tries += 1
            if is_told or told.tries >= _MOST_TRIES:
                self._told.pop(job, None)

    async def _in_thread(self, call: Callable[[], bool]) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
