"""Opening a database: how it is locked, and what is refused."""

import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import apsw
import pytest

from freight.errors import OperationError
from freight.store.database import StorageFull, open_database, transaction
from freight.store.folder import Locking

MIGRATIONS = ["catalog_migrations", "results_migrations"]
EVERY_LOCKING = list(Locking)


def fill(connection: apsw.Connection, rows: int = 50) -> None:
    with transaction(connection):
        for index in range(rows):
            connection.execute("INSERT INTO result (idx, epoch, tail) VALUES (?, 0, zeroblob(5000))", (index,))


@pytest.mark.parametrize("locking", EVERY_LOCKING)
def test_there_is_never_a_shared_memory_file(tmp_path: Path, locking: Locking) -> None:
    path = tmp_path / "x.db"
    connection = open_database(path, "results_migrations", locking)
    fill(connection)

    assert not list(tmp_path.glob("*-shm"))
    connection.execute("SELECT count(*) FROM result").fetchall()
    assert not list(tmp_path.glob("*-shm"))
    connection.close()
    assert not list(tmp_path.glob("*-shm"))


@pytest.mark.parametrize(
    ("locking", "mode"), [(Locking.LOCAL, "wal"), (Locking.NETWORK, "truncate"), (Locking.OWNER_FILE, "truncate")]
)
def test_the_journal_is_what_the_file_system_can_bear(tmp_path: Path, locking: Locking, mode: str) -> None:
    connection = open_database(tmp_path / "x.db", "results_migrations", locking)

    assert connection.pragma("journal_mode") == mode
    assert connection.pragma("locking_mode") == "exclusive"
    assert connection.pragma("synchronous") == 2
    assert connection.pragma("foreign_keys") == 1
    connection.close()


@pytest.mark.parametrize("first", EVERY_LOCKING)
@pytest.mark.parametrize("then", EVERY_LOCKING)
def test_a_database_moved_to_another_file_system_opens_there(tmp_path: Path, first: Locking, then: Locking) -> None:
    connection = open_database(tmp_path / "x.db", "results_migrations", first)
    fill(connection, rows=3)
    connection.close()

    again = open_database(tmp_path / "x.db", "results_migrations", then)

    assert again.execute("SELECT count(*) FROM result").fetchall() == [(3,)]
    assert not list(tmp_path.glob("*-shm"))
    again.close()


@pytest.mark.parametrize("locking", [Locking.LOCAL, Locking.NETWORK])
def test_a_database_that_another_connection_has_is_in_use(tmp_path: Path, locking: Locking) -> None:
    connection = open_database(tmp_path / "x.db", "results_migrations", locking)
    fill(connection, rows=1)

    with pytest.raises(OperationError, match="in use"):
        open_database(tmp_path / "x.db", "results_migrations", locking)
    connection.close()


@pytest.mark.parametrize("migrations", MIGRATIONS)
def test_each_step_is_taken_once_and_in_order(tmp_path: Path, migrations: str) -> None:
    names = sorted(entry.name for entry in files("freight.store").joinpath(migrations).iterdir())
    assert [name[:4] for name in names] == [f"{number:04}" for number in range(1, len(names) + 1)]

    for _ in range(2):
        connection = open_database(tmp_path / "x.db", migrations, Locking.LOCAL)
        assert connection.pragma("user_version") == len(names)
        connection.close()


@pytest.mark.parametrize("migrations", MIGRATIONS)
def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path, migrations: str) -> None:
    path = tmp_path / "x.db"
    connection = open_database(path, migrations, Locking.NETWORK)
    connection.pragma("user_version", 99)
    connection.close()
    before = path.read_bytes()

    with pytest.raises(OperationError, match="newer") as caught:
        open_database(path, migrations, Locking.NETWORK)

    assert "99" in caught.value.message
    assert str(path) in caught.value.message
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"not a database at all" * 100, b"\0" * 8192, b"SQLite format 3\0" + b"\xff" * 8192, os.urandom(4096)]
)
def test_a_file_that_is_no_database_gives_a_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.db"
    path.write_bytes(content)

    with pytest.raises(OperationError) as caught:
        open_database(path, "catalog_migrations", Locking.LOCAL)

    assert str(path) in caught.value.message
    assert caught.value.hint
    assert path.read_bytes() == content


def test_a_database_whose_first_page_is_damaged_gives_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    open_database(path, "catalog_migrations", Locking.NETWORK).close()
    damaged = bytearray(path.read_bytes())
    damaged[100:2000] = b"\xa5" * 1900
    path.write_bytes(damaged)

    with pytest.raises(OperationError, match="damaged"):
        open_database(path, "catalog_migrations", Locking.NETWORK)


def test_a_place_where_no_file_can_be_gives_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="cannot open"):
        open_database(tmp_path / "missing" / "x.db", "catalog_migrations", Locking.LOCAL)
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(OperationError, match="cannot open"):
        open_database(tmp_path / "folder.db", "catalog_migrations", Locking.LOCAL)


def test_a_block_that_raises_leaves_nothing_behind(tmp_path: Path) -> None:
    connection = open_database(tmp_path / "x.db", "results_migrations", Locking.LOCAL)

    with pytest.raises(ZeroDivisionError), transaction(connection):
        connection.execute("INSERT INTO result (idx, epoch, tail) VALUES (1, 0, x'00')")
        raise ZeroDivisionError

    assert not connection.in_transaction
    assert connection.execute("SELECT * FROM result").fetchall() == []
    connection.close()


@pytest.mark.parametrize("locking", EVERY_LOCKING)
def test_a_full_disk_is_told_apart_and_loses_nothing(tmp_path: Path, locking: Locking) -> None:
    connection = open_database(tmp_path / "x.db", "results_migrations", locking)
    fill(connection, rows=2)
    connection.pragma("max_page_count", connection.pragma("page_count"))

    with pytest.raises(StorageFull), transaction(connection):
        for index in range(10, 40):
            connection.execute("INSERT INTO result (idx, epoch, tail) VALUES (?, 0, zeroblob(5000))", (index,))

    assert connection.execute("SELECT idx FROM result").fetchall() == [(0,), (1,)]
    connection.pragma("max_page_count", 10_000)
    with transaction(connection):
        connection.execute("INSERT INTO result (idx, epoch, tail) VALUES (9, 0, x'00')")
    connection.close()


KILLED = """
import os, sys
from pathlib import Path
from freight.store.database import open_database, transaction
from freight.store.folder import Locking
connection = open_database(Path(sys.argv[1]), "results_migrations", Locking[sys.argv[2]])
with transaction(connection):
    connection.execute("INSERT INTO result (idx, epoch, tail) VALUES (1, 0, zeroblob(9000))")
connection.execute("BEGIN IMMEDIATE")
connection.execute("INSERT INTO result (idx, epoch, tail) VALUES (2, 0, zeroblob(9000))")
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("locking", EVERY_LOCKING)
def test_a_killed_process_leaves_what_it_committed_and_nothing_else(tmp_path: Path, locking: Locking) -> None:
    path = tmp_path / "x.db"
    child = subprocess.run([sys.executable, "-c", KILLED, str(path), locking.name], check=False, timeout=60)
    assert child.returncode == -9

    connection = open_database(path, "results_migrations", locking)

    assert connection.execute("SELECT idx FROM result").fetchall() == [(1,)]
    connection.close()
