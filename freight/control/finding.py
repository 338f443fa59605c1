"""Looking jobs up, and telling how they stand."""

import re
from collections.abc import Sequence
from typing import Final

from freight.control.context import Context
from freight.control.views import status, summary
from freight.core.account import Account, is_user_name
from freight.core.job import FINAL, State
from freight.core.openaibatch import job_of
from freight.core.paging import MOST_PAGE, cursor_of, no_cursor, place_of, time_of
from freight.core.view import JobPage, JobStatus, NameList
from freight.errors import NoSuchJob, NotAllowed, UserError, WrongState
from freight.store.database import STORAGE_ERRORS, Sharing
from freight.store.jobfilter import JobFilter
from freight.store.results import Failure
from freight.store.rows import JobRow

_ID_START: Final = re.compile(r"[0-9a-f][0-9a-f-]{0,35}")
_NAME_START: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_NEWEST: Final = (1e12, "")
_MOST_ENDED: Final = 1000


class Finder:
    """Answers questions about jobs, from memory and by the reading connection."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # Failures of jobs that have ended, which are asked about again and again; a job that goes on has a new epoch.
        self._ended: dict[tuple[str, int], list[Failure]] = {}

    async def find(self, account: Account, name: str) -> JobRow:
        """Return the job of a name, an id (also a batch's), or a unique prefix of an id, looked up in that order.

        Others' jobs are there for admins alone: by their id, as USER/NAME, and by their name where it is the only one.
        Raises NoSuchJob, or UserError for a prefix that several ids have.
        """
        row = await self._context.look(self._find, account, name)
        return self._now(row)

    async def get(self, job: str) -> JobRow:
        """Return the job of an id, whoever's it is; raise NoSuchJob where there is none."""
        try:
            return self._now(await self._context.look(self._context.reader.get, job))
        except KeyError:
            raise _none(job) from None

    def _now(self, row: JobRow) -> JobRow:
        hand = self._context.in_hand(row.id)
        return row if hand is None else hand.row

    def _find(self, account: Account, name: str) -> JobRow:
        reader = self._context.reader
        user, slash, own = name.rpartition("/")
        if slash and not account.may_see(user):
            raise _none(name)
        row = reader.named(user if slash else account.user, own)
        if row is not None:
            return row
        whose = user if slash else None if account.is_admin() else account.user
        # The OpenAI API calls a job by its id in another dress.
        begins = job_of(own) or own
        found = reader.starting_with(begins, whose) if _ID_START.fullmatch(begins) else []
        if len(found) > 1:
            raise UserError(f"several jobs have an id that begins with {own}", "give more of the id, or the name")
        if found:
            return found[0]
        # After the ids: others choose their jobs' names, and nobody chooses an id.
        others = reader.all_named(name) if account.is_admin() and not slash else []
        if len(others) > 1:
            listed = ", ".join(f"{row.user}/{row.name}" for row in others)
            raise UserError(f"several users have a job {name}", f"say whose: {listed}")
        if not others:
            raise _none(name)
        return others[0]

    async def status(self, account: Account, name: str) -> JobStatus:
        """Return all about a job."""
        return await self.status_of(await self.find(account, name))

    async def status_of(self, row: JobRow) -> JobStatus:
        """Return all about a job that was looked up."""
        events = await self._context.look(self._context.reader.events, row.id)
        try:
            failures = await self._failures(row)
        except STORAGE_ERRORS:
            failures = []  # The rest is worth knowing all the same; asking for the results says what is wrong.
        hand = self._context.in_hand(row.id)
        if hand is None and row.state not in FINAL:
            # It has ended in between.
            return await self.status_of(await self.get(row.id))
        return status(row, hand, events, failures)

    async def _failures(self, row: JobRow) -> list[Failure]:
        ended = (row.id, row.epoch) if row.state in FINAL else None
        if ended in self._ended:
            return self._ended[ended]
        failures = await self._context.in_thread(self.failures, row)
        if ended is not None:
            if len(self._ended) >= _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
            self._ended[ended] = failures
        return failures

    def failures(self, row: JobRow) -> list[Failure]:
        """Return a job's failures by kind, the commonest first. For threads."""
        if not self._context.folder.has_results(row.id):
            return []
        results = self._context.folder.open_results(row.id, Sharing.READER)
        try:
            return results.failures(row.retried)
        finally:
            results.close()

    async def page(
        self,
        account: Account,
        state: str | None,
        limit: int,
        after: str | None,
        *,
        model: str | None = None,
        name: str | None = None,
        user: str | None = None,
        created_after: str | None = None,
        created_before: str | None = None,
    ) -> JobPage:
        """Return up to `limit` jobs, the newest first, in a state or "active"; `after` is an earlier page's `next`.

        They are of a model, have a name that begins so, and were created since and before times in RFC 3339, as far as
        these are given. Admins see everybody's, or those of `user`. Raises UserError for what cannot be.
        """
        wanted = JobFilter(
            user=_whose(account, user),
            states=None if state is None else states_of(state),
            model=model,
            name=_name_start(name),
            since=None if created_after is None else time_of("created_after", created_after),
            until=None if created_before is None else time_of("created_before", created_before),
        )
        before = _NEWEST if after is None else place_of(after)
        rows = await self._context.look(self._context.reader.page, wanted, limit + 1, before)
        jobs = [summary(row, self._context.in_hand(row.id)) for row in rows[:limit]]
        last = rows[limit - 1] if len(rows) > limit else None
        return JobPage(jobs=jobs, next=cursor_of((last.created_at, last.id)) if last else None)

    async def names(self, account: Account, limit: int = MOST_PAGE, after: str | None = None) -> NameList:
        """Return up to `limit` names of the user's jobs; for an admin also those of others, as USER/NAME."""
        whose = None if account.is_admin() else account.user
        since = ("", "") if after is None else _after_name(after)
        rows = await self._context.look(self._context.reader.names, whose, limit + 1, since)
        names = [name if user == account.user else f"{user}/{name}" for name, user in rows[:limit]]
        return NameList(names=names, next="~".join(rows[limit - 1]) if len(rows) > limit else None)


def _none(name: str) -> NoSuchJob:
    return NoSuchJob(f"there is no job {name}", "jobs: freight batch list")


def states_of(state: str | None) -> Sequence[State]:
    """Return the states that a filter asks for; raise UserError for one that there is not."""
    if state is None:
        return tuple(State)
    if state.lower() == "active":
        return tuple(each for each in State if each not in FINAL)
    if state.upper() not in State.__members__:
        raise UserError(f"state: there is no state {state}", f"states: active, {', '.join(State)}")
    return (State[state.upper()],)


def _whose(account: Account, user: str | None) -> str | None:
    """Return of whom jobs are listed, None for everybody; raise NotAllowed for those of others."""
    if user is not None and not account.may_see(user):
        raise NotAllowed("user: the jobs of others are listed for admins alone", "leave it out")
    return user if account.is_admin() else account.user


def _name_start(name: str | None) -> str | None:
    if name and not _NAME_START.fullmatch(name):
        raise UserError(f"name: {name!r} is the beginning of no job's name", "names are letters, digits, _ . and -")
    return name or None


def _after_name(text: str) -> tuple[str, str]:
    name, tilde, user = text.partition("~")
    if not tilde or not _NAME_START.fullmatch(name) or not is_user_name(user):
        raise no_cursor(text)
    return name, user


def unfinished(row: JobRow, hint: str) -> WrongState:
    """Return the error that a job has not ended yet."""
    return WrongState(f"job {row.name} is {row.state}", hint)
