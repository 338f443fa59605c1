"""A folder has one owner at a time, whatever its file system can do."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from freight.errors import OperationError
from freight.store.folder import OWNER_STALE_S, FolderLock, Locking, Owner
from freight.store.processes import ProcessId, identify, this_process

OWNER = """
import sys
from pathlib import Path
from freight.errors import OperationError
from freight.store.database import open_database
from freight.store.folder import FolderLock
folder = Path(sys.argv[1])
lock = FolderLock(folder)
try:
    lock.take("the folder", wait=lambda seconds: None)
except OperationError as error:
    sys.exit(error.message)
database = open_database(folder / "x.db", "results_migrations", lock.locking)
print(lock.locking.name, flush=True)
sys.stdin.read()
database.close()
lock.release()
"""
NO_LOCKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>

static int refused(void) { errno = ENOLCK; return -1; }

static int others(const char *name, int fd, int command, va_list rest) {
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (command == F_GETLK || command == F_SETLK || command == F_SETLKW) return refused();
    return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, name))(fd, command, argument);
}

int flock(int fd, int operation) { return refused(); }
int fcntl(int fd, int command, ...) { va_list r; va_start(r, command); return others("fcntl", fd, command, r); }
int fcntl64(int fd, int command, ...) { va_list r; va_start(r, command); return others("fcntl64", fd, command, r); }
"""


@contextmanager
def another_owner(folder: Path, preload: Path | None = None) -> Generator[tuple[subprocess.Popen[str], str]]:
    """Run a process that owns the folder, and tell how it locks it; without an owner, tell why."""
    environment = {**os.environ, **({"LD_PRELOAD": str(preload)} if preload else {})}
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            yield child, child.stdout.readline().strip() or child.stderr.read().strip()
        finally:
            child.kill()


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process see a file system that refuses flock."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library in whose processes every lock on a file is refused."""
    compiler = shutil.which("cc")
    assert compiler, "there is no C compiler (cc)"
    folder = tmp_path_factory.mktemp("shim")
    (folder / "nolocks.c").write_text(NO_LOCKS)
    library = folder / "nolocks.so"
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(folder / "nolocks.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


def own(folder: Path, wait: Callable[[float], None] = lambda seconds: None) -> FolderLock:
    lock = FolderLock(folder)
    lock.take("the folder", wait)
    return lock


def refusal(folder: Path, wait: Callable[[float], None] = lambda seconds: None) -> OperationError:
    with pytest.raises(OperationError) as caught:
        own(folder, wait)
    return caught.value


def claim(folder: Path, process: ProcessId, beat: int = 0) -> None:
    """Write an owner file as another process would."""
    (folder / "owner").write_bytes(msgspec.json.encode(Owner(process, beat)))


def elsewhere(pid: int = 4711) -> ProcessId:
    return ProcessId("another-host", "another-boot", pid, 5)


def test_a_second_owner_is_refused_and_told_the_pid_of_the_first(tmp_path: Path) -> None:
    with another_owner(tmp_path) as (child, locking):
        assert locking in ("LOCAL", "NETWORK")
        error = refusal(tmp_path)

    assert f"process {child.pid} " in error.message
    assert "the folder is in use" in error.message
    assert error.hint


def test_a_folder_whose_owner_was_killed_is_free_at_once(tmp_path: Path) -> None:
    with another_owner(tmp_path) as (child, _):
        child.kill()
        child.wait()
        own(tmp_path).release()


def test_a_released_folder_is_free_and_a_lock_in_one_process_excludes_another(tmp_path: Path) -> None:
    first = own(tmp_path)
    assert f"process {os.getpid()} " in refusal(tmp_path).message

    first.release()

    own(tmp_path).release()


def test_a_lock_does_not_wait_where_flock_works(tmp_path: Path) -> None:
    def wait(seconds: float) -> None:
        raise AssertionError("waited")

    lock = own(tmp_path, wait)
    lock.beat()
    lock.release()


def test_only_the_user_can_read_the_owner(tmp_path: Path) -> None:
    lock = own(tmp_path)

    assert (tmp_path / "owner").stat().st_mode & 0o777 == 0o600
    lock.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_flock_is_refused_an_owner_file_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = own(tmp_path)

    assert lock.locking is Locking.OWNER_FILE
    assert f"process {os.getpid()} " in refusal(tmp_path).message
    lock.release()
    own(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_another_failure_of_flock_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)

    assert "cannot lock the folder" in refusal(tmp_path).message


@pytest.mark.usefixtures("no_flock")
def test_a_dead_owner_of_this_host_is_followed_without_watching_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = identify(child.pid)
        claim(tmp_path, process)
        assert f"process {child.pid} " in refusal(tmp_path).message
    waited: list[float] = []

    own(tmp_path, waited.append).release()

    assert sum(waited) < 1


@pytest.mark.usefixtures("no_flock")
def test_an_owner_of_an_earlier_boot_or_with_a_pid_used_again_is_dead(tmp_path: Path) -> None:
    me = this_process()
    for process in (
        msgspec.structs.replace(me, boot="an-earlier-one"),
        msgspec.structs.replace(me, started=me.started + 1),
    ):
        claim(tmp_path, process)
        own(tmp_path).release()


@pytest.mark.usefixtures("no_flock")
def test_a_silent_owner_on_another_host_is_watched_for_its_time_and_then_followed(tmp_path: Path) -> None:
    claim(tmp_path, elsewhere())
    waited: list[float] = []

    lock = own(tmp_path, waited.append)

    assert OWNER_STALE_S <= sum(waited) < OWNER_STALE_S + 2
    assert msgspec.json.decode((tmp_path / "owner").read_bytes(), type=Owner).process == this_process()
    lock.release()


@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize("after_s", [1, 10, 59])
def test_an_owner_on_another_host_that_shows_itself_keeps_the_folder(tmp_path: Path, after_s: int) -> None:
    claim(tmp_path, elsewhere())
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if sum(waited) >= after_s:
            claim(tmp_path, elsewhere(), beat=1)

    error = refusal(tmp_path, wait)

    assert "process 4711 on another-host" in error.message
    assert sum(waited) == after_s
    assert msgspec.json.decode((tmp_path / "owner").read_bytes(), type=Owner).process == elsewhere()


@pytest.mark.usefixtures("no_flock")
def test_an_owner_on_another_host_that_lets_go_is_followed_at_once(tmp_path: Path) -> None:
    claim(tmp_path, elsewhere())
    waited: list[float] = []

    def wait(seconds: float) -> None:
        if not waited:
            (tmp_path / "owner").unlink()
        waited.append(seconds)

    own(tmp_path, wait).release()

    assert sum(waited) < 2


@pytest.mark.usefixtures("no_flock")
def test_of_two_that_start_at_once_one_gives_way(tmp_path: Path) -> None:
    error = refusal(tmp_path, wait=lambda seconds: claim(tmp_path, elsewhere(99)))

    assert "process 99 on another-host" in error.message


@pytest.mark.usefixtures("no_flock")
def test_an_owner_shows_itself_by_a_count_that_grows(tmp_path: Path) -> None:
    lock = own(tmp_path)
    beats: list[int] = []
    for _ in range(3):
        lock.beat()
        beats.append(msgspec.json.decode((tmp_path / "owner").read_bytes(), type=Owner).beat)
    lock.release()

    assert beats == sorted(set(beats))


@pytest.mark.usefixtures("no_flock")
def test_a_damaged_owner_file_owns_nothing(tmp_path: Path) -> None:
    (tmp_path / "owner").write_bytes(b"{half")

    own(tmp_path).release()


def test_a_real_process_without_any_file_locks_keeps_the_folder_and_its_database(tmp_path: Path, shim: Path) -> None:
    with another_owner(tmp_path, shim) as (first, locking):
        assert locking == "OWNER_FILE"
        with another_owner(tmp_path, shim) as (second, why):
            assert f"in use by process {first.pid} " in why
            assert second.wait(60) == 1
        assert not list(tmp_path.glob("*-shm"))
        first.kill()
        first.wait()
        with another_owner(tmp_path, shim) as (third, again):
            assert again == "OWNER_FILE"
            third.communicate("", timeout=60)
            assert third.returncode == 0
    assert not (tmp_path / "owner").exists()
