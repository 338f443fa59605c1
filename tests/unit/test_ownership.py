"""Who may see and change whose jobs and uploads, and how much of them each user may have."""

import asyncio
from typing import Any

import pytest

from freight.core.account import Account, Role
from freight.core.job import State
from freight.core.view import JobRequest
from freight.errors import (
    Conflict,
    NoSuchJob,
    NoSuchUpload,
    NotAllowed,
    TooMany,
    UserError,
)
from tests.unit.services import MINE, Office

ALICE = Account("alice")
BOB = Account("bob")
ADMIN = Account("root-of-all", Role.ADMIN)


async def put(office: Office, account: Account, name: str, key: str | None = None, **options: Any) -> str:
    """Make a job of a user's; return its id."""
    upload = await office.upload(account)
    request = JobRequest(upload=upload.id, name=name, model=MINE, **options)
    return (await office.service.submit(account, request, key)).job.id


def test_names_and_keys_are_each_users_own(office: Office) -> None:
    async def scenario() -> None:
        first = await put(office, ALICE, "nightly", "k")
        second = await put(office, BOB, "nightly", "k")

        assert first != second
        assert (await office.service.finder.find(ALICE, "nightly")).id == first
        assert (await office.service.finder.find(BOB, "nightly")).id == second
        with pytest.raises(Conflict):
            await put(office, BOB, "nightly")
        assert await put(office, ALICE, "nightly", "k") == first

    office.run(scenario)


def test_others_jobs_are_not_there_whatever_they_are_called_by(office: Office) -> None:
    async def scenario() -> None:
        job = await put(office, ALICE, "nightly")
        service = office.service
        for name in ("nightly", job, job[:8], "alice/nightly", f"alice/{job}", f"alice/{job[:8]}"):
            for ask in (
                service.finder.status, service.cancel, service.resume, service.retry, service.delete,
                lambda account, name: service.streams.results(account, name, None, True),
                lambda account, name: service.streams.logs(account, name, None, None, False),
            ):  # fmt: skip
                with pytest.raises(NoSuchJob) as refused:
                    await ask(BOB, name)
                with pytest.raises(NoSuchJob) as unknown:
                    await ask(BOB, "0000")
                assert refused.value.message.replace(name, "0000") == unknown.value.message
        assert (await service.finder.page(BOB, None, 10, None)).jobs == []
        assert (await service.finder.names(BOB)).names == []
        assert (await service.finder.find(ALICE, "alice/nightly")).id == job
        assert (await service.finder.names(ALICE)).names == ["nightly"]

    office.run(scenario)


def test_admins_find_everybodys_jobs(office: Office) -> None:
    async def scenario() -> None:
        finder = office.service.finder
        first, second = await put(office, ALICE, "nightly"), await put(office, BOB, "nightly")
        alone = await put(office, BOB, "weekly")
        own = await put(office, ADMIN, "own")

        for name, job in (("alice/nightly", first), ("bob/nightly", second), ("weekly", alone), (first, first)):
            assert (await finder.find(ADMIN, name)).id == job
        with pytest.raises(UserError, match="several users") as refused:
            await finder.find(ADMIN, "nightly")
        assert refused.value.hint == "say whose: alice/nightly, bob/nightly"
        assert [(job.user, job.name) for job in (await finder.page(ADMIN, None, 10, None)).jobs] == [
            ("root-of-all", "own"), ("bob", "weekly"), ("bob", "nightly"), ("alice", "nightly"),
        ]  # fmt: skip
        assert (await finder.names(ADMIN)).names == ["alice/nightly", "bob/nightly", "own", "bob/weekly"]
        assert (await finder.find(ADMIN, "own")).id == own
        await office.service.cancel(ADMIN, "alice/nightly")

    office.run(scenario)


def test_nobody_can_call_a_job_so_that_an_admin_takes_it_for_another(office: Office) -> None:
    async def scenario() -> None:
        victim = await put(office, ALICE, "victim")
        await put(office, BOB, victim[:12])
        await put(office, BOB, victim)
        assert (await office.service.finder.find(ADMIN, victim[:12])).id == victim
        assert (await office.service.finder.find(ADMIN, victim)).id == victim

    office.run(scenario)


def test_pages_of_one_user_are_whole(office: Office) -> None:
    async def scenario() -> None:
        for number in range(5):
            await put(office, ALICE, f"a{number}")
            await put(office, BOB, f"b{number}")
        names, after = list[str](), None
        while True:
            page = await office.service.finder.page(BOB, "active", 2, after)
            names += [job.name for job in page.jobs]
            after = page.next
            if after is None:
                break
        assert names == ["b4", "b3", "b2", "b1", "b0"]

    office.run(scenario)


def test_others_uploads_are_not_there(office: Office) -> None:
    async def scenario() -> None:
        upload = await office.upload(ALICE)
        for attempt in (
            lambda: office.service.submit(BOB, JobRequest(upload=upload.id, model=MINE), None),
            lambda: asyncio.to_thread(office.service.drop_upload, BOB, upload.id),
        ):
            with pytest.raises(NoSuchUpload):
                await attempt()
        assert (await office.service.submit(ALICE, JobRequest(upload=upload.id, model=MINE), None)).is_new

    office.run(scenario)


@pytest.mark.parametrize(
    "options", [{"priority": 1}, {"output": "/tmp"}, {"model": "http://127.0.0.1:9"}, {"model": "/etc/passwd"}]
)
def test_what_reaches_beyond_ones_own_things_is_for_admins(office: Office, options: dict[str, Any]) -> None:
    async def scenario() -> None:
        upload = await office.upload(ALICE)
        with pytest.raises(NotAllowed):
            request = JobRequest(**{"upload": upload.id, "model": MINE, **options})
            await office.service.submit(ALICE, request, None)
        assert (await office.service.finder.names(ALICE)).names == []
        await put(office, ADMIN, "first", priority=1)
        await put(office, ALICE, "last", priority=-1)

    office.run(scenario)


def test_others_jobs_that_hold_a_device_are_not_named(office: Office) -> None:
    async def scenario() -> None:
        await put(office, ALICE, "secret-plan")
        await office.serving_of("alice", "secret-plan")
        await put(office, BOB, "waits")
        finder, machine = office.service.finder, office.service.machine

        async def reason(account: Account, name: str) -> str:
            return (await finder.status(account, name)).reason

        while not await reason(BOB, "waits"):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert await reason(BOB, "waits") == "cpu:0 is held by another user's job"
        await put(office, ALICE, "next")
        while not await reason(ALICE, "next"):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert "cpu:0 is held by secret-plan" in await reason(ALICE, "next")
        [seen] = (await machine.devices(BOB)).devices
        assert (seen.state, seen.holder, seen.job, seen.pid) == ("leased", "another user's job", None, None)
        [own] = (await machine.devices(ALICE)).devices
        assert (own.holder, own.job) == ("job secret-plan", "secret-plan")
        [worker] = machine.workers(BOB).workers
        assert (worker.job, worker.number, worker.note, worker.model) == ("another user's job", None, "", MINE)
        [worker] = machine.workers(ADMIN).workers
        assert (worker.job, worker.user) == ("secret-plan", "alice")

    office.run(scenario)


# Limits.


def test_jobs_that_have_not_ended_are_limited_for_each_user_and_not_for_the_owner(office: Office) -> None:
    office.configure("[limits]\nactive_jobs = 2\n")

    async def scenario() -> None:
        for number in range(2):
            await put(office, ALICE, f"a{number}")
        with pytest.raises(TooMany, match=r"2 jobs that have not ended; the limit \(limits.active_jobs\) is 2") as told:
            await put(office, ALICE, "one-more")
        assert told.value.retry_after_s is None
        await put(office, BOB, "b")
        for number in range(4):
            await office.submit(f"mine{number}")
        await office.service.cancel(ALICE, "a1")
        while (await office.service.finder.find(ALICE, "a1")).state is not State.CANCELLED:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await put(office, ALICE, "one-more")
        with pytest.raises(TooMany):
            await office.service.resume(ALICE, "a1")

    office.run(scenario)


def test_records_of_jobs_from_afar_are_limited(office: Office) -> None:
    office.configure("[limits]\nrecords = 19\n")

    async def scenario() -> None:
        with pytest.raises(UserError, match=r"more than 19 records, the limit \(limits.records\)"):
            await put(office, ALICE, "large")
        await office.submit("mine")

    office.run(scenario)


def test_what_users_store_is_limited_whatever_it_is(office: Office) -> None:
    async def scenario() -> None:
        size = (await office.upload(ALICE)).bytes
        office.configure(f"[limits]\nstored_bytes = {3 * size + size // 2}\n")
        await office.upload(ALICE)
        await office.upload(ALICE)
        with pytest.raises(TooMany, match=r"limits\.stored_bytes"):
            await office.upload(ALICE)
        await office.upload(BOB)
        for _ in range(5):
            await office.upload()

    office.run(scenario)


def test_uploads_at_the_same_time_share_the_room(office: Office) -> None:
    office.configure("[limits]\nstored_bytes = 5000000\n")

    async def scenario() -> None:
        go_on = asyncio.Event()

        async def slow() -> Any:
            yield b"x" * 2_000_000
            await go_on.wait()
            yield b"x" * 2_000_000

        async def send() -> bool:
            try:
                await office.service.receive(ALICE, slow(), None)
            except TooMany:
                return False
            return True

        sending = [asyncio.create_task(send()) for _ in range(2)]
        await office.until(lambda: sum(room.count for room in office.service._quotas._rooms.get("alice", [])) > 3e6)
        go_on.set()
        assert sorted(await asyncio.gather(*sending)) == [False, True]
        assert office.service._quotas._rooms == {}
        assert await office.service._quotas.stored("alice") == 4_000_000

    office.run(scenario)


def test_upload_that_has_ended_takes_room_of_those_that_go_on(office: Office) -> None:
    office.configure("[limits]\nstored_bytes = 5000000\n")

    async def scenario() -> None:
        go_on = asyncio.Event()

        async def pieces(*sizes: int) -> Any:
            for size in sizes:
                yield b"x" * size
                if len(sizes) > 1:
                    await go_on.wait()

        slow = asyncio.create_task(office.service.receive(ALICE, pieces(1_100_000, 2_000_000), None))
        await office.until(lambda: any(room.count for room in office.service._quotas._rooms.get("alice", [])))
        await office.service.receive(ALICE, pieces(3_000_000), None)
        go_on.set()
        with pytest.raises(TooMany):
            await slow

    office.run(scenario)


def test_jobs_of_before_there_were_users_are_the_owners(office: Office) -> None:
    async def before() -> None:
        office.context.catalog._connection.execute("UPDATE job SET user = ''")

    async def scenario() -> None:
        await office.submit("old")
        await before()

    async def after() -> None:
        assert (await office.service.finder.status(office.owner, "old")).user == office.owner.user

    office.run(scenario, after)


def test_files_are_not_called_by_a_users_name(office: Office) -> None:
    async def scenario() -> None:
        await office.upload(Account("a.very.odd|name"))
        assert not [path for path in office.data.rglob("*") if "odd" in path.name]

    office.run(scenario)
