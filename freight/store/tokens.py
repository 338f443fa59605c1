"""The tokens that users are known by, in the catalog's database: what they are good for, and never they themselves."""

from typing import Any, Final

import msgspec

from freight.store.database import Database, transaction

_COLUMNS: Final = "id, digest, user, role, label, created_at, expires_at, revoked_at, used_on, groups"
_ADD: Final = f"INSERT INTO token ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_ALL: Final = f"SELECT {_COLUMNS} FROM token ORDER BY created_at, id"
_REVOKE: Final = "UPDATE token SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"
_USED: Final = "UPDATE token SET used_on = ? WHERE id = ?"
_FORGET: Final = "DELETE FROM token WHERE min(coalesce(revoked_at, 1e12), coalesce(expires_at, 1e12)) < ?"


class TokenRow(msgspec.Struct, frozen=True):
    """A token. `digest` is its SHA-256, `used_on` the last day (UTC) of its use; who shows it is in `groups`."""

    id: str
    digest: bytes
    user: str
    role: str
    label: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    used_on: str | None = None
    groups: tuple[str, ...] = ()

    def is_good(self, now: float) -> bool:
        """Return whether it shows who asks: it was not revoked and has not expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


def _token(row: tuple[Any, ...]) -> TokenRow:
    return TokenRow(*row[:-1], groups=msgspec.json.decode(row[-1], type=tuple[str, ...]))


class TokenTable:
    """The tokens on disk. Not for several threads at once."""

    def __init__(self, connection: Database) -> None:
        self._connection = connection

    def add(self, row: TokenRow) -> None:
        """Add a token."""
        with transaction(self._connection):
            *values, groups = msgspec.structs.astuple(row)
            self._connection.execute(_ADD, (*values, msgspec.json.encode(groups).decode()))

    def all(self) -> list[TokenRow]:
        """Return all tokens, the oldest first."""
        return [_token(row) for row in self._connection.execute(_ALL)]

    def revoke(self, token: str, now: float) -> None:
        """Note that a token is good for nothing any more."""
        with transaction(self._connection):
            self._connection.execute(_REVOKE, (now, token))

    def used(self, token: str, day: str) -> None:
        """Note the day on which a token was used."""
        with transaction(self._connection):
            self._connection.execute(_USED, (day, token))

    def forget(self, before: float) -> None:
        """Forget the tokens that have been good for nothing since before a time."""
        with transaction(self._connection):
            self._connection.execute(_FORGET, (before,))
