"""Files of the OpenAI API as they lie in the service's folder: none is lost, none is left, each counts once."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from freight.control import keptfiles
from freight.control.keptfiles import NewFile
from freight.core.account import Account, Role
from freight.core.openaifile import FileObject
from freight.errors import NoSuchFile, OperationError, UserError
from freight.store import files
from freight.store.database import StorageFull
from freight.store.filetable import FileRow
from tests.unit.services import Office

ALICE, BOB, CAROL = Account("alice"), Account("bob"), Account("carol", Role.ADMIN)
SENT = b"x" * 4000
DAY_S = 86_400.0


async def send(office: Office, sender: Account = ALICE, expires_s: int | None = None) -> FileObject:
    async def chunks() -> AsyncIterator[bytes]:
        yield SENT

    return await office.service.files.receive(sender, chunks(), 0, lambda: NewFile("in.jsonl", expires_s))


def names(office: Office, folder: str) -> list[str]:
    return sorted(path.name for path in (office.data / folder).iterdir())


def test_file_that_has_expired_is_gone_at_once_and_removed_soon(office: Office) -> None:
    async def scenario() -> None:
        service = office.service
        short, long = await send(office, expires_s=3600), await send(office)
        assert short.expires_at == short.created_at + 3600
        service.files._now = lambda: short.created_at + 3602.0

        for attempt in (service.files.show, service.files.content, service.files.as_upload, service.files.delete):
            with pytest.raises(NoSuchFile):
                await attempt(ALICE, short.id)
        page = await service.files.page(ALICE, None, 10, True, None)
        assert [file.id for file in page.data] == [long.id]
        assert names(office, "files") == sorted([short.id, long.id])

        await service.files.forget_expired()
        assert names(office, "files") == [long.id]
        assert (await service.files.show(ALICE, long.id)).bytes == len(SENT)

    office.run(scenario)


def test_service_removes_expired_files_by_itself(office: Office) -> None:
    async def sent() -> None:
        file = await send(office, expires_s=3600)
        row = FileRow(file.id + "-old", "alice", "a", 1, "0" * 64, "batch", 1.0, 2.0)
        (office.data / "files" / row.id).write_bytes(b"x")
        await office.context.write(office.context.catalog.files.add, row)

    async def later() -> None:
        await office.until(lambda: len(names(office, "files")) == 1)

    office.run(sent, later)


def test_start_removes_what_no_file_owns_and_keeps_the_others(office: Office) -> None:
    kept: list[str] = []

    async def sent() -> None:
        kept.append((await send(office)).id)
        (office.data / "files" / "file-left").write_bytes(b"x")
        await office.service.files.as_upload(ALICE, kept[0])  # Whoever wanted a job of it has gone.

    async def later() -> None:
        assert names(office, "files") == kept
        assert names(office, "uploads") == []
        stream = await office.service.files.content(ALICE, kept[0])
        assert b"".join(stream.pieces) == SENT
        stream.close()

    office.run(sent, later)


def test_upload_of_a_file_takes_no_room_and_outlives_the_file(office: Office) -> None:
    async def scenario() -> None:
        service = office.service
        file = await send(office)
        first, second = [await service.files.as_upload(ALICE, file.id) for _ in range(2)]

        assert first.id != second.id
        assert first.sha256 == second.sha256 and first.bytes == len(SENT)
        assert abs(await service._quotas.stored("alice") - len(SENT)) <= 3
        await service.files.delete(ALICE, file.id)
        path, sha256 = service._uploads.find(ALICE, first.id)
        assert (path.read_bytes(), sha256) == (SENT, first.sha256)
        assert await service._quotas.stored("alice") == len(SENT)
        service._uploads.drop(ALICE, first.id)
        service._uploads.drop(ALICE, second.id)
        assert await service._quotas.stored("alice") == 0

    office.run(scenario)


def test_upload_of_an_old_file_is_not_swept_as_an_old_upload(office: Office) -> None:
    async def scenario() -> None:
        service = office.service
        file = await send(office)
        os.utime(office.data / "files" / file.id, (1.0, 1.0))
        upload = await service.files.as_upload(ALICE, file.id)

        office.context.folder.tidy_uploads(DAY_S)
        assert service._uploads.find(ALICE, upload.id)[0].read_bytes() == SENT
        await service.files.delete(ALICE, file.id)
        office.context.folder.tidy_uploads(DAY_S)
        assert names(office, "uploads") == []

    office.run(scenario)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK])
def test_upload_is_a_copy_where_the_disk_has_no_further_link(
    office: Office, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    async def scenario() -> None:
        file = await send(office)
        with monkeypatch.context() as patched:
            patched.setattr(files.os, "link", refuse)
            upload = await office.service.files.as_upload(ALICE, file.id)
        path, _ = office.service._uploads.find(ALICE, upload.id)
        assert path.read_bytes() == SENT and path.stat().st_nlink == 1
        assert path.stat().st_mode & 0o077 == 0
        assert await office.service._quotas.stored("alice") == 2 * len(SENT)

    office.run(scenario)


def test_file_is_there_for_its_user_alone_admins_or_not(office: Office) -> None:
    async def scenario() -> None:
        service = office.service
        file = await send(office)
        for other in (BOB, CAROL, office.owner):
            for attempt in (service.files.show, service.files.content, service.files.as_upload, service.files.delete):
                with pytest.raises(NoSuchFile):
                    await attempt(other, file.id)
        assert names(office, "files") == [file.id]

    office.run(scenario)


def test_file_whose_contents_are_gone_is_not_there(office: Office, tmp_path: Path) -> None:
    async def scenario() -> None:
        file = await send(office)
        (office.data / "files" / file.id).unlink()
        for attempt in (office.service.files.content, office.service.files.as_upload):
            with pytest.raises(NoSuchFile):
                await attempt(ALICE, file.id)
        await office.service.files.delete(ALICE, file.id)

    office.run(scenario)


def test_file_that_cannot_be_noted_is_not_left_behind(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise UserError("no")

    async def scenario() -> None:
        with monkeypatch.context() as patched, pytest.raises(UserError):
            patched.setattr(office.context.catalog.files, "add", broken)
            await send(office)
        assert names(office, "files") == names(office, "uploads") == []

    office.run(scenario)


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, StorageFull), (errno.EIO, OperationError)])
def test_file_that_cannot_be_put_in_its_place_leaves_nothing(
    office: Office, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[OperationError]
) -> None:
    def broken(_: Path) -> None:
        raise OSError(number, os.strerror(number))

    async def scenario() -> None:
        for name in ("sync_folder", "_move"):
            with monkeypatch.context() as patched, pytest.raises(kind):
                patched.setattr(keptfiles, name, broken if name == "sync_folder" else lambda *_: broken(Path()))
                await send(office)
            assert names(office, "files") == names(office, "uploads") == []
        assert await office.service._quotas.stored("alice") == 0

    office.run(scenario)


@pytest.mark.parametrize("is_late", [False, True])
def test_sender_who_goes_away_leaves_a_whole_file_or_none(office: Office, is_late: bool) -> None:
    async def scenario() -> None:
        kept = office.service.files
        sending = asyncio.create_task(send(office))
        while not (kept._keeping if is_late else names(office, "uploads")):  # noqa: ASYNC110 - no turn may be missed.
            await asyncio.sleep(0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await office.until(lambda: not kept._keeping)

        page = await kept.page(ALICE, None, 10, True, None)
        assert names(office, "files") == [file.id for file in page.data]
        assert len(page.data) == is_late
        assert names(office, "uploads") == []

    office.run(scenario)
