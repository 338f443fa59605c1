"""What each user may have here at a time. The machine's owner, on the Unix socket, has no limits."""

import stat
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from freight.control.context import Context
from freight.control.uploads import Uploads
from freight.core.account import Account
from freight.errors import TooMany

# Uploads of which no job was made yet. They are looked for by their names: empty ones without number, which take no
# bytes, would have everybody wait.
MOST_UPLOADS: Final = 1000


class _Room:
    """What an upload takes of its user's room: `used` bytes are there without it, `count` are its own."""

    def __init__(self, count: int) -> None:
        self.used = 0
        self.count = count


class Quotas:
    """The limits of users, and what they have."""

    def __init__(self, context: Context, uploads: Uploads) -> None:
        self._context = context
        self._uploads = uploads
        # The uploads that are under way.
        self._rooms: dict[str, list[_Room]] = {}

    def most_records(self, account: Account) -> int | None:
        """Return how many records a job may have, None for any number."""
        return None if account.is_local else self._context.settings()["limits.records"]

    async def check_active(self, account: Account) -> None:
        """Raise TooMany where a user may have no further job that has not ended."""
        if account.is_local:
            return
        limit = self._context.settings()["limits.active_jobs"]
        count = await self._context.write(self._context.catalog.active, account.user)
        if count >= limit:
            raise TooMany(
                f"you have {count} jobs that have not ended; the limit (limits.active_jobs) is {limit}",
                "wait until one has ended, or cancel one",
            )

    @asynccontextmanager
    async def room(self, account: Account, size: int | None) -> AsyncGenerator[Callable[[int], None]]:
        """Give what is called with the bytes of an upload that have come, and raises TooMany where there is no room.

        `size` is how many there will be, None where nobody knows. Uploads at the same time share the room. Raises
        TooMany for a user with MOST_UPLOADS of which no job was made, too.
        """
        if account.is_local:
            yield _anything
            return
        if await self._context.in_thread(self._uploads.count_of, account.user) >= MOST_UPLOADS:
            raise TooMany(
                f"you have {MOST_UPLOADS} uploads of which no job was made, the limit",
                "make jobs of them or delete them; each is kept for a day",
            )
        limit: int = self._context.settings()["limits.stored_bytes"]
        room = _Room(size or 0)
        rooms = self._rooms.setdefault(account.user, [])
        rooms.append(room)

        def check(count: int) -> None:
            room.count = max(count, room.count)
            total = room.used + sum(each.count for each in rooms)
            if total > limit:
                raise TooMany(
                    f"you have {room.used} bytes here, and would have {total}; "
                    f"the limit (limits.stored_bytes) is {limit}",
                    "delete jobs that you do not need any more",
                )

        try:
            room.used += await self.stored(account.user)
            check(0)
            yield check
            for other in rooms:
                other.used += room.count if other is not room else 0
        finally:
            rooms.remove(room)
            if not rooms:
                self._rooms.pop(account.user, None)

    async def stored(self, user: str) -> int:
        """Return how many bytes a user has here: uploads, files, and the inputs and results of jobs."""
        jobs = await self._context.look(self._context.reader.ids_of, user)
        folders = [self._context.folder.job(job) for job in jobs]
        files = [self._context.folder.files / file for file in await self._context.look(self._files_of, user)]

        def count() -> int:
            return self._uploads.bytes_of(user) + sum(map(_bytes_of, files)) + sum(map(_bytes_in, folders))

        return await self._context.in_thread(count)

    def _files_of(self, user: str) -> list[str]:
        return self._context.reader.files.inputs_of(user)


def _anything(_: int) -> None:
    """Whatever comes has room."""


def _bytes_in(folder: Path) -> int:
    try:
        return sum(_bytes_of(entry) for entry in folder.iterdir())
    except OSError:
        return 0  # It was deleted in this moment.


def _bytes_of(path: Path) -> int:
    """Return a file's part of what it takes: what has several names counts once. 0 for one that is gone."""
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_size // max(1, found.st_nlink) if stat.S_ISREG(found.st_mode) else 0
