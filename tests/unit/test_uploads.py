"""Inputs on their way in: whole or not at all."""

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from freight.control.uploads import Uploads
from freight.core.view import Upload
from freight.errors import OperationError, UserError
from freight.store.database import StorageFull

LIMIT = 10_000_000


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
        return await uploads.receive(sent(*chunks, breaks=breaks), size, limit)

    return asyncio.run(scenario())


@pytest.mark.parametrize("chunks", [(), (b"",), (b"a\n", b"", b"b\n"), (b"x" * 1_500_000, b"y" * 3, b"z" * 2_000_000)])
@pytest.mark.parametrize("is_told", [False, True])
def test_an_upload_is_kept_whole_under_an_id_of_its_own(
    uploads: Uploads, tmp_path: Path, chunks: tuple[bytes, ...], is_told: bool
) -> None:
    whole = b"".join(chunks)

    upload = receive(uploads, *chunks, size=len(whole) if is_told else None)

    assert (upload.bytes, upload.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())
    path, sha256 = uploads.find(upload.id)
    assert (path.read_bytes(), sha256) == (whole, upload.sha256)
    assert path.stat().st_mode & 0o077 == 0
    assert receive(uploads, *chunks).id != upload.id
    assert len(list(tmp_path.iterdir())) == 2


def test_an_upload_that_is_shorter_than_it_was_said_to_be_has_what_came(uploads: Uploads) -> None:
    upload = receive(uploads, b"abc", size=1_000_000)

    assert uploads.find(upload.id)[0].read_bytes() == b"abc"


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
        uploads.find(odd)
    uploads.drop(odd)
    assert uploads.find(upload.id)[0].exists()
    assert (tmp_path.parent / "x.abc").exists()


def test_the_beginning_of_an_id_is_no_id(uploads: Uploads) -> None:
    upload = receive(uploads, b"abc")

    with pytest.raises(UserError):
        uploads.find(upload.id[:-1])


def test_an_upload_that_is_on_its_way_is_not_found(uploads: Uploads, tmp_path: Path) -> None:
    (tmp_path / "abc.part").write_bytes(b"")

    with pytest.raises(UserError):
        uploads.find("abc")


def test_an_upload_can_be_dropped_once_and_again(uploads: Uploads, tmp_path: Path) -> None:
    upload = receive(uploads, b"abc")

    uploads.drop(upload.id)
    uploads.drop(upload.id)

    assert list(tmp_path.iterdir()) == []


def test_an_upload_breaks_off_when_the_service_ends_even_while_nothing_comes(uploads: Uploads, tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"a"
        uploads._stopping.set()
        await asyncio.Event().wait()

    async def scenario() -> None:
        uploads._stopping = asyncio.Event()
        await uploads.receive(endless(), None, LIMIT)

    with pytest.raises(OperationError, match="the service is ending"):
        asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []
