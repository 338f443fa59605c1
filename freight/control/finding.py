"""Looking jobs up, and telling how they stand."""

import re
from collections.abc import Sequence
from typing import Final

from freight.control.context import Context
from freight.control.views import status, summary
from freight.core.job import FINAL, State
from freight.core.view import JobPage, JobStatus
from freight.errors import NoSuchJob, UserError, WrongState
from freight.store.catalog import JobRow
from freight.store.database import STORAGE_ERRORS, Sharing
from freight.store.results import Failure

_ID_START: Final = re.compile(r"[0-9a-f][0-9a-f-]{0,35}")
_NEWEST: Final = (1e12, "")
MOST_PAGE: Final = 1000


class Finder:
    """Answers questions about jobs, from memory and by the reading connection."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def find(self, name: str) -> JobRow:
        """Return the job of a name, an id, or a unique prefix of an id, looked up in that order.

        Raises NoSuchJob, or UserError for a prefix that several ids have.
        """
        row = await self._context.look(self._find, name)
        hand = self._context.in_hand(row.id)
        return row if hand is None else hand.row

    def _find(self, name: str) -> JobRow:
        reader = self._context.reader
        row = reader.named(name)
        if row is not None:
            return row
        found = reader.starting_with(name) if _ID_START.fullmatch(name) else []
        if not found:
            raise NoSuchJob(f"there is no job {name}", "jobs: freight batch list")
        if len(found) > 1:
            raise UserError(f"several jobs have an id that begins with {name}", "give more of the id, or the name")
        return found[0]

    async def status(self, name: str) -> JobStatus:
        """Return all about a job."""
        row = await self.find(name)
        events = await self._context.look(self._context.reader.events, row.id)
        try:
            failures = await self._context.in_thread(self.failures, row)
        except STORAGE_ERRORS:
            failures = []  # The rest is worth knowing all the same; asking for the results says what is wrong.
        hand = self._context.in_hand(row.id)
        if hand is None and row.state not in FINAL:
            # It has ended in between.
            return await self.status(row.id)
        return status(row, hand, events, failures)

    def failures(self, row: JobRow) -> list[Failure]:
        """Return a job's failures by kind, the commonest first. For threads."""
        if not self._context.folder.has_results(row.id):
            return []
        results = self._context.folder.open_results(row.id, Sharing.READER)
        try:
            return results.failures(row.retried)
        finally:
            results.close()

    async def page(self, state: str | None, limit: int, after: str | None) -> JobPage:
        """Return up to `limit` jobs, the newest first, in a state or "active"; `after` is an earlier page's `next`."""
        states = states_of(state)
        before = _NEWEST if after is None else _cursor(after)
        rows = await self._context.look(self._context.reader.page, states, limit + 1, before)
        jobs = [summary(row, self._context.in_hand(row.id)) for row in rows[:limit]]
        last = rows[limit - 1] if len(rows) > limit else None
        return JobPage(jobs=jobs, next=f"{last.created_at!r}~{last.id}" if last else None)

    async def names(self) -> list[str]:
        """Return the names of all jobs."""
        return await self._context.look(self._context.reader.names)


def states_of(state: str | None) -> Sequence[State]:
    """Return the states that a filter asks for; raise UserError for one that there is not."""
    if state is None:
        return tuple(State)
    if state.lower() == "active":
        return tuple(each for each in State if each not in FINAL)
    if state.upper() not in State.__members__:
        raise UserError(f"there is no state {state}", f"states: active, {', '.join(State)}")
    return (State[state.upper()],)


def _cursor(text: str) -> tuple[float, str]:
    at, _, job = text.partition("~")
    try:
        return float(at), job
    except ValueError:
        raise UserError(f"{text!r} is no cursor of this list", "pass what `next` said") from None


def unfinished(row: JobRow, hint: str) -> WrongState:
    """Return the error that a job has not ended yet."""
    return WrongState(f"job {row.name} is {row.state}", hint)
