"""Inputs on their way in: whole or not at all."""

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from freight.control.uploads import Uploads
from freight.core.account import Account
from freight.core.view import Upload
from freight.errors import OperationError, UserError
from freight.store.database import StorageFull

LIMIT = 10_000_000
ALICE = Account("alice")


@pytest.fixture
def uploads(tmp_path: Path) -> Generator[Uploads]:
    with ThreadPoolExecutor(1) as threads:
        yield Uploads(tmp_path, threads, asyncio.Event())


class BrokenOff(Exception):
    """The sender went away."""


async def sent(*chunks: bytes, breaks: bool = False) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    if breaks:
        raise BrokenOff


def receive(
    uploads: Uploads, *chunks: bytes, size: int | None = None, limit: int = LIMIT, breaks: bool = False
) -> Upload:
    async def scenario() -> Upload:
        uploads._stopping = asyncio.Event()  # Of this loop.
        return await uploads.receive("alice", sent(*chunks, breaks=breaks), size, limit)

    return asyncio.run(scenario())


def test_an_upload_that_was_acknowledged_is_on_disk_under_its_name(
    uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[list[str]] = []
    fsync = os.fsync

    def noting(file: int) -> None:
        fsync(file)
        if Path(f"/proc/self/fd/{file}").readlink() == tmp_path:
            held.append([path.name for path in tmp_path.iterdir()])

    monkeypatch.setattr(os, "fsync", noting)
    upload = receive(uploads, b"a\n")

    assert held[-1] == [uploads.find(ALICE, upload.id)[0].name]


@pytest.mark.parametrize("chunks", [(), (b"",), (b"a\n", b"", b"b\n"), (b"x" * 1_500_000, b"y" * 3, b"z" * 2_000_000)])
@pytest.mark.parametrize("is_told", [False, True])
def test_an_upload_is_kept_whole_under_an_id_of_its_own(
    uploads: Uploads, tmp_path: Path, chunks: tuple[bytes, ...], is_told: bool
) -> None:
    whole = b"".join(chunks)

    upload = receive(uploads, *chunks, size=len(whole) if is_told else None)

    assert (upload.bytes, upload.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())
    path, sha256 = uploads.find(ALICE, upload.id)
    assert (path.read_bytes(), sha256) == (whole, upload.sha256)
    assert path.stat().st_mode & 0o077 == 0
    assert receive(uploads, *chunks).id != upload.id
    assert len(list(tmp_path.iterdir())) == 2


def test_an_upload_that_is_shorter_than_it_was_said_to_be_has_what_came(uploads: Uploads) -> None:
    upload = receive(uploads, b"abc", size=1_000_000)

    assert uploads.find(ALICE, upload.id)[0].read_bytes() == b"abc"


@pytest.mark.parametrize("size", [None, 5_000_000])
@pytest.mark.parametrize("chunks", [(), (b"abc",), (b"x" * 2_000_000,)])
def test_an_upload_that_breaks_off_leaves_nothing(
    uploads: Uploads, tmp_path: Path, size: int | None, chunks: tuple[bytes, ...]
) -> None:
    with pytest.raises(BrokenOff):
        receive(uploads, *chunks, size=size, breaks=True)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("size", "count"), [(None, 11), (11, 11), (11, 0), (None, 3_000_000)])
def test_an_upload_over_the_limit_is_refused_and_leaves_nothing(
    uploads: Uploads, tmp_path: Path, size: int | None, count: int
) -> None:
    with pytest.raises(UserError, match="limit"):
        receive(uploads, b"x" * count, size=size, limit=10)

    assert list(tmp_path.iterdir()) == []
    assert receive(uploads, b"x" * 10, size=10, limit=10).bytes == 10


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_room_for_a_known_size_is_told_before_anything_is_sent(
    uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(StorageFull):
        receive(uploads, size=5, breaks=True)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_it_is_sent_keeps_nothing(
    uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(StorageFull):
        patched.setattr(os, "write", full)
        receive(uploads, b"abc")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_told_in_words(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads, pytest.raises(OperationError, match="cannot be kept"):
        receive(Uploads(tmp_path / "gone", threads, asyncio.Event()), b"abc")


@pytest.mark.parametrize("odd", ["", "../x", "*", "?" * 32, "[a-f]", "a/b", "a.b", ".", "..", "0" * 32, "é"])
def test_an_id_that_nothing_has_is_refused_and_drops_nothing(uploads: Uploads, tmp_path: Path, odd: str) -> None:
    upload = receive(uploads, b"abc")
    (tmp_path.parent / "x.abc").write_bytes(b"another's")

    with pytest.raises(UserError, match="no upload"):
        uploads.find(ALICE, odd)
    uploads.drop(ALICE, odd)
    assert uploads.find(ALICE, upload.id)[0].exists()
    assert (tmp_path.parent / "x.abc").exists()


def test_the_beginning_of_an_id_is_no_id(uploads: Uploads) -> None:
    upload = receive(uploads, b"abc")

    with pytest.raises(UserError):
        uploads.find(ALICE, upload.id[:-1])


def test_an_upload_that_is_on_its_way_is_not_found(uploads: Uploads, tmp_path: Path) -> None:
    (tmp_path / "abc.part").write_bytes(b"")

    with pytest.raises(UserError):
        uploads.find(ALICE, "abc")


def test_an_upload_can_be_dropped_once_and_again(uploads: Uploads, tmp_path: Path) -> None:
    upload = receive(uploads, b"abc")

    uploads.drop(ALICE, upload.id)
    uploads.drop(ALICE, upload.id)

    assert list(tmp_path.iterdir()) == []


def test_an_upload_breaks_off_when_the_service_ends_even_while_nothing_comes(uploads: Uploads, tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"a"
        uploads._stopping.set()
        await asyncio.Event().wait()

    async def scenario() -> None:
        uploads._stopping = asyncio.Event()
        await uploads.receive("alice", endless(), None, LIMIT)

    with pytest.raises(OperationError, match="the service is ending"):
        asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


def take(uploads: Uploads, path: Path, limit: int = LIMIT, check: Callable[[int], None] = lambda size: None) -> Upload:
    """Have a file copied."""

    async def scenario() -> Upload:
        source = os.open(path, os.O_RDONLY)
        try:
            with ThreadPoolExecutor(1) as threads:
                return await uploads.take_copy("alice", source, "the file", limit, threads, check)
        finally:
            os.close(source)

    return asyncio.run(scenario())


@pytest.fixture
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "in.jsonl"
    path.write_bytes(b"0123456789" * 300_000)
    return path


def test_a_copy_of_a_file_is_an_upload_like_any(uploads: Uploads, source: Path) -> None:
    made = take(uploads, source)
    path, sha256 = uploads.find(ALICE, made.id)
    assert path.read_bytes() == source.read_bytes()
    assert made.bytes == 3_000_000
    assert made.sha256 == sha256 == hashlib.sha256(source.read_bytes()).hexdigest()


def test_a_copy_that_may_not_be_or_breaks_off_leaves_nothing(
    uploads: Uploads, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int) -> None:
        assert size == 3_000_000
        assert not list(tmp_path.iterdir())
        raise BrokenOff

    with pytest.raises(BrokenOff):
        take(uploads, source, check=refuse)
    with pytest.raises(UserError, match=r"limits\.file_bytes"):
        take(uploads, source, limit=2_999_999)

    def append(target: int, fd: int, count: int, offset: int) -> int:
        with source.open("ab") as file:
            file.write(b"more")
        return os.write(target, os.pread(fd, count, offset))

    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", append)
        with pytest.raises(OperationError, match="the file changed while it was being copied"):
            take(uploads, source)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(StorageFull):
        take(uploads, source)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_copy_breaks_off_when_the_service_ends(
    source: Path, tmp_path: Path, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = asyncio.Event()
    if is_copied:
        monkeypatch.setattr(os, "fsync", lambda _: stopping.set())
    else:
        stopping.set()
    with ThreadPoolExecutor(1) as threads, pytest.raises(OperationError, match="the service is ending"):
        take(Uploads(tmp_path, threads, stopping), source)
    assert not list(tmp_path.iterdir())
