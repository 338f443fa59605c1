"""The webhooks that are still to be delivered, in the catalog's database."""

from collections.abc import Callable, Collection
from typing import Final

import msgspec

from freight.core.webhook import GIVEN_UP, Letter
from freight.store.database import Database, transaction

_COLUMNS: Final = "id, job, url, receiver, event, body, attempts, next_at, created_at"
# A job's end must not fail for a letter that is there already.
_PUT: Final = f"INSERT INTO webhook ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING"
_SURPLUS: Final = f"SELECT {_COLUMNS} FROM webhook WHERE job = ? ORDER BY created_at DESC, rowid DESC LIMIT -1 OFFSET ?"
_NEXT: Final = (
    f"SELECT {_COLUMNS} FROM webhook WHERE id NOT IN (SELECT value FROM json_each(?)) "
    "AND receiver NOT IN (SELECT value FROM json_each(?)) ORDER BY next_at, id LIMIT 1"
)
_LATER: Final = "UPDATE webhook SET attempts = attempts + 1, next_at = ? WHERE id = ?"
_DROP: Final = "DELETE FROM webhook WHERE id = ?"
# Nothing for a job that was deleted meanwhile.
_NOTE: Final = """
INSERT INTO event (job, number, at, event, state, detail)
SELECT id, (SELECT coalesce(max(number), 0) + 1 FROM event WHERE job = ?1), ?2, ?3, state, ?4 FROM job WHERE id = ?1
"""

# A job that is retried over and over while its receiver is silent keeps so many letters, the newest.
MOST_OF_A_JOB: Final = 20


class Outbox:
    """Letters on disk, on the connection that writes to the catalog. Not for several threads at once."""

    def __init__(self, connection: Database) -> None:
        self._connection = connection
        # Called by the writing thread when there is a new letter, before that is committed.
        self.on_put: Callable[[], None] | None = None

    def put(self, letter: Letter) -> None:
        """Add a letter within the caller's transaction: it is on disk with what it tells of, or neither is."""
        values = (
            letter.id, letter.job, letter.url, letter.receiver, letter.event, letter.body, letter.attempts,
            letter.next_at, letter.created_at,
        )  # fmt: skip
        self._connection.execute(_PUT, values)
        for row in list(self._connection.execute(_SURPLUS, (letter.job, MOST_OF_A_JOB))):
            self._give_up(Letter(*row), "newer events took its place", letter.created_at)
        if self.on_put is not None:
            self.on_put()

    def next(self, except_ids: Collection[str] = (), except_receivers: Collection[str] = ()) -> Letter | None:
        """Return the letter that is to go out the soonest, but for some and those to some receivers."""
        bindings = (_list(except_ids), _list(except_receivers))
        row = self._connection.execute(_NEXT, bindings).fetchone()
        return None if row is None else Letter(*row)

    def later(self, letter: str, at: float) -> None:
        """Note that an attempt failed, and when the next is due."""
        with transaction(self._connection):
            self._connection.execute(_LATER, (at, letter))

    def delivered(self, letter: str) -> None:
        """Forget a letter that its receiver has."""
        with transaction(self._connection):
            self._connection.execute(_DROP, (letter,))

    def give_up(self, letter: Letter, words: str, now: float) -> None:
        """Forget a letter that nobody will get, and say so in its job's timeline."""
        with transaction(self._connection):
            self._give_up(letter, words, now)

    def _give_up(self, letter: Letter, words: str, now: float) -> None:
        self._connection.execute(_DROP, (letter.id,))
        detail = f"{letter.event} for {letter.receiver}: {words}"
        self._connection.execute(_NOTE, (letter.job, now, GIVEN_UP, detail))


def _list(values: Collection[str]) -> str:
    return msgspec.json.encode(list(values)).decode()
