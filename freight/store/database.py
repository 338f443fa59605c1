"""Opening a database: durability, locking and migrations, the same for every file."""

import errno
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol, cast

import apsw

from freight.errors import OperationError
from freight.store.folder import Locking


class Sharing(Enum):
    """Whether a database has one connection, or one that writes and readers beside it in the same process."""

    ALONE = auto()
    WRITER = auto()
    READER = auto()


class Rows(Protocol):
    """What a statement returns."""

    def __iter__(self) -> Iterator[tuple[Any, ...]]: ...
    def fetchone(self) -> tuple[Any, ...] | None: ...


class Database(Protocol):
    """The part of an apsw connection that Freight uses; apsw's own hints are incomplete."""

    in_transaction: bool
    system_errno: int

    def execute(self, statements: str, bindings: Sequence[object] = ..., /) -> Rows: ...
    def executemany(self, statements: str, bindings: Iterable[Sequence[object]], /) -> Rows: ...
    def pragma(self, name: str, value: object = ..., /) -> Any: ...
    def total_changes(self) -> int: ...
    def close(self) -> None: ...


class StorageFull(OperationError):
    """The disk (or a quota) has no room. Nothing was written; the same call may succeed later."""

    code = "storage_full"


# What opening or reading a database raises when the storage is at fault, and not the program.
STORAGE_ERRORS = (
    OperationError, apsw.CorruptError, apsw.NotADBError, apsw.IOError, apsw.FullError, apsw.CantOpenError,
    apsw.ReadOnlyError, apsw.BusyError,
)  # fmt: skip

# How long a connection waits for another of the same process; only while a log is being folded in.
_BUSY_MS = 5000

_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full(error: OSError) -> bool:
    """Return whether an operating-system error means that there is no room left."""
    return error.errno in _FULL_ERRNOS


def open_database(path: Path, migrations: str, locking: Locking, sharing: Sharing = Sharing.ALONE) -> Database:
    """Return a connection to the database at `path`, made or migrated as needed; a reader needs one that is there.

    `migrations` is the folder of numbered SQL files in this package. What a transaction wrote is on
    disk when it returns. Raises OperationError for a database of a newer version or a damaged one.
    """
    with clear_errors(path):
        if sharing is Sharing.READER:
            reader = cast(Database, apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE))
            reader.pragma("busy_timeout", _BUSY_MS)
            reader.pragma("query_only", True)
            if not int(str(reader.pragma("user_version"))):
                reader.close()
                raise OperationError(f"{path} holds nothing yet")
            return reader
        vfs = "unix-none" if locking is Locking.OWNER_FILE else None
        path.touch(0o600)
        connection = cast(Database, apsw.Connection(str(path), vfs=vfs))
        if sharing is Sharing.ALONE:
            # Exclusive: no shared-memory file, which network file systems and some containers lack.
            connection.pragma("locking_mode", "EXCLUSIVE")
        else:
            connection.pragma("busy_timeout", _BUSY_MS)
        connection.pragma("journal_mode", "WAL" if locking is Locking.LOCAL else "TRUNCATE")
        connection.pragma("synchronous", "FULL")
        # What is deleted is gone from the file: reasons may hold a model server's last words.
        connection.pragma("secure_delete", True)
        connection.pragma("foreign_keys", True)
        _migrate(connection, path, migrations)
        return connection


def _migrate(connection: Database, path: Path, migrations: str) -> None:
    steps = sorted(
        (entry for entry in files("freight.store").joinpath(migrations).iterdir() if entry.name.endswith(".sql")),
        key=lambda entry: entry.name,
    )
    version = int(str(connection.pragma("user_version")))
    if version > len(steps):
        raise OperationError(
            f"{path} was written by a newer Freight (format {version}; this one knows {len(steps)})",
            "update Freight, or use another folder",
        )
    if version == len(steps):
        return
    # All in one transaction: each would wait for the disk.
    with transaction(connection):
        for step in steps[version:]:
            connection.execute(step.read_text())
        connection.pragma("user_version", len(steps))


@contextmanager
def transaction(connection: Database) -> Generator[None]:
    """Run the block in one immediate transaction: all of it is on disk at the end, or none.

    Raises StorageFull when there is no room.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    except (apsw.FullError, apsw.IOError, apsw.ReadOnlyError, apsw.BusyError) as error:
        raise _storage_error(error, connection.system_errno) from error


def _storage_error(error: apsw.Error, system_errno: int) -> OperationError:
    if isinstance(error, apsw.FullError) or system_errno in _FULL_ERRNOS:
        return StorageFull(
            "no space left for results",
            "free some space; a run that is under way waits for it",
        )
    if system_errno == errno.EFBIG:
        return OperationError("the storage failed: a file is as large as this process may make it", "see ulimit -f")
    return OperationError(f"the storage failed: {error}")


@contextmanager
def clear_errors(path: Path) -> Generator[None]:
    """Turn what SQLite raises about the database at `path` into OperationError, naming it."""
    try:
        yield
    except (apsw.NotADBError, apsw.CorruptError) as error:
        raise OperationError(
            f"{path} is damaged or not Freight's: {error}", "restore it from a copy, or start over with --fresh"
        ) from error
    except apsw.BusyError as error:
        raise OperationError(f"{path} is in use by another process") from error
    except apsw.FullError as error:
        raise _no_space(path) from error
    except (apsw.CantOpenError, apsw.IOError, apsw.ReadOnlyError) as error:
        raise OperationError(f"cannot open {path}: {error}") from error
    except OSError as error:
        if is_full(error):
            raise _no_space(path) from error
        raise OperationError(f"cannot open {path}: {error.strerror}") from error


def _no_space(path: Path) -> StorageFull:
    return StorageFull(f"no space left to open {path}", "free some space and run the same command again")
