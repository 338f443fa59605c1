"""The files of the OpenAI API, in the catalog's database; their contents lie elsewhere."""

from collections.abc import Collection
from typing import Final

import msgspec

from freight.core.openaifile import BATCH_OUTPUT, Part, result_id, result_name
from freight.store.database import Database, transaction

_COLUMNS: Final = "id, user, filename, bytes, sha256, purpose, created_at, expires_at, job, part"
_ADD: Final = f"INSERT INTO file ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
# A file that has expired is not there, whether or not it was removed yet.
_LIVE: Final = "(expires_at IS NULL OR expires_at > ?1)"
_GET: Final = f"SELECT {_COLUMNS} FROM file WHERE {_LIVE} AND user = ?2 AND id = ?3"
_PAGE: Final = (
    f"SELECT {_COLUMNS} FROM file WHERE {_LIVE} AND user = ?2 AND (?3 IS NULL OR purpose = ?3) "
    "AND (created_at, id) {0} (?4, ?5) ORDER BY created_at {1}, id {1} LIMIT ?6"
)
_NEWEST_FIRST: Final = _PAGE.format("<", "DESC")
_OLDEST_FIRST: Final = _PAGE.format(">", "ASC")
_OF_JOBS: Final = f"SELECT {_COLUMNS} FROM file WHERE {_LIVE} AND job IN (SELECT value FROM json_each(?2))"
_INPUTS: Final = "SELECT id FROM file WHERE job IS NULL"
_INPUTS_OF: Final = "SELECT id FROM file WHERE job IS NULL AND user = ?"
_EXPIRED: Final = f"SELECT {_COLUMNS} FROM file WHERE expires_at <= ?"
_COUNTED: Final = "UPDATE file SET bytes = ? WHERE id = ? AND created_at = ?"
_DELETE: Final = "DELETE FROM file WHERE id = ?1 AND (?2 IS NULL OR expires_at <= ?2) RETURNING id"
_WITHDRAW: Final = "DELETE FROM file WHERE job = ?"


class FileRow(msgspec.Struct, frozen=True):
    """A file. `size` and `sha256` are None for a batch's output whose bytes nobody has counted yet.

    `job` and `part` say whose output it is, and which of its two files; they are None for an input.
    """

    id: str
    user: str
    filename: str
    size: int | None
    sha256: str | None
    purpose: str
    created_at: float
    expires_at: float | None = None
    job: str | None = None
    part: str | None = None


class FileTable:
    """The files on disk. Times are seconds of the clock of day. Not for several threads at once."""

    def __init__(self, connection: Database) -> None:
        self._connection = connection

    def add(self, row: FileRow) -> None:
        """Add a file."""
        with transaction(self._connection):
            self._put(row)

    def _put(self, row: FileRow) -> None:
        self._connection.execute(_ADD, msgspec.structs.astuple(row))

    def get(self, user: str, file: str, now: float) -> FileRow | None:
        """Return a user's file, None where there is none of that id, or no more."""
        row = self._connection.execute(_GET, (now, user, file)).fetchone()
        return None if row is None else FileRow(*row)

    def page(
        self, user: str, now: float, limit: int, after: tuple[float, str], purpose: str | None, newest_first: bool
    ) -> list[FileRow]:
        """Return up to `limit` files of a user that come after (created_at, id) `after` in the order asked for."""
        statement = _NEWEST_FIRST if newest_first else _OLDEST_FIRST
        return [FileRow(*row) for row in self._connection.execute(statement, (now, user, purpose, *after, limit))]

    def of_jobs(self, jobs: Collection[str], now: float) -> list[FileRow]:
        """Return the output and error files of jobs."""
        named = msgspec.json.encode(list(jobs)).decode()
        return [FileRow(*row) for row in self._connection.execute(_OF_JOBS, (now, named))]

    def inputs(self) -> set[str]:
        """Return the ids of all files whose contents lie in the data folder's files."""
        return {file for (file,) in self._connection.execute(_INPUTS)}

    def inputs_of(self, user: str) -> list[str]:
        """Return the ids of a user's files whose contents lie there."""
        return [file for (file,) in self._connection.execute(_INPUTS_OF, (user,))]

    def count_of(self, user: str) -> int:
        """Return how many files of a user's have their contents there."""
        return len(self.inputs_of(user))

    def expired(self, now: float) -> list[FileRow]:
        """Return the files whose time is over."""
        return [FileRow(*row) for row in self._connection.execute(_EXPIRED, (now,))]

    def counted(self, row: FileRow, size: int) -> None:
        """Keep how many bytes an output has, unless it is another by now: its job may have run again."""
        with transaction(self._connection):
            self._connection.execute(_COUNTED, (size, row.id, row.created_at))

    def delete(self, file: str, until: float | None = None) -> bool:
        """Forget a file, with `until` only if its time is over then; return whether it was there."""
        with transaction(self._connection):
            return self._connection.execute(_DELETE, (file, until)).fetchone() is not None

    def offer(self, job: str, user: str, parts: Collection[Part], now: float, kept_s: float | None) -> None:
        """Add the files that a job which ends has to give, within the caller's transaction."""
        expires_at = now + kept_s if kept_s else None
        for part in parts:
            name = result_name(job, part)
            self._put(FileRow(result_id(job, part), user, name, None, None, BATCH_OUTPUT, now, expires_at, job, part))

    def withdraw(self, job: str) -> None:
        """Forget the files of a job that goes on, within the caller's transaction."""
        self._connection.execute(_WITHDRAW, (job,))
