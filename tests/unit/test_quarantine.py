"""Devices in quarantine, in a service whose workers and launcher the test plays."""

import asyncio
from typing import Final

import pytest

from freight.core.job import State
from freight.core.messages import Order, Phase
from freight.errors import UserError, WrongState
from freight.launchers.base import Remains
from freight.store.database import StorageFull
from tests.unit.services import Office

DEVICE: Final = "cpu:0"
LEFT: Final = Remains(DEVICE, "5.0 GB more of its memory are in use than before", 77, {"worker": "w", "device": DEVICE})
OTHER: Final = Remains(DEVICE, "process 78 of the worker there does not end", 78, LEFT.hold)
OFTEN: Final = '[devices]\nquarantine_retry = "0.01s"\n'


async def leave(office: Office, name: str = "a") -> None:
    """Run a job that ends well, after which something is left on the device."""
    await office.submit(name)
    worker = await office.serving(name)
    assert (await office.finish(worker, name)).order is Order.STOP
    office.hand.remains[worker] = (LEFT,)
    office.hand.left[DEVICE] = LEFT
    office.hand.ends[worker].set()
    await office.until_state(name, State.COMPLETED)


def kept(office: Office) -> dict[str, str]:
    """Return the words of each device in quarantine."""
    return {device: row.words for device, row in office.plane.apply.quarantine.rows().items()}


async def until_waits(office: Office, name: str) -> None:
    """Wait until a job says that it waits for the quarantine."""
    waiting, words = office.plane.roster.waiting, f"{DEVICE} is held by the quarantine ({LEFT.words})"
    await office.until(lambda: waiting[office.id_of(name)].reason == words)


def test_job_ends_as_it_should_and_the_next_starts_when_the_device_is_as_before(office: Office) -> None:
    office.configure(OFTEN)

    async def scenario() -> None:
        await leave(office)
        assert kept(office) == {DEVICE: LEFT.words}
        await office.submit("b")
        await until_waits(office, "b")
        assert len(office.hand.places) == 1
        del office.hand.left[DEVICE]
        await office.complete("b", 2)
        assert kept(office) == {}
        assert office.context.catalog.quarantined() == []

    office.run(scenario)


def test_what_is_seen_later_is_what_is_told(office: Office) -> None:
    office.configure(OFTEN)

    async def scenario() -> None:
        await leave(office)
        since = office.plane.apply.quarantine.rows()[DEVICE].since
        office.hand.left[DEVICE] = OTHER
        await office.until(lambda: kept(office) == {DEVICE: OTHER.words})
        row = office.plane.apply.quarantine.rows()[DEVICE]
        assert (row.since, row.pid) == (since, OTHER.pid)
        [device] = (await office.service.machine.devices(office.owner)).devices
        assert (device.state, device.holder, device.pid) == ("quarantined", OTHER.words, OTHER.pid)

    office.run(scenario)


def test_device_is_released_by_hand_whatever_is_left_there(office: Office) -> None:
    async def scenario() -> None:
        await leave(office)
        await office.submit("b")
        await until_waits(office, "b")
        with pytest.raises(UserError, match="there is no device GPU-x"):
            await office.service.machine.release("GPU-x")
        await office.service.machine.release(DEVICE)
        assert office.hand.freed == [DEVICE]
        await office.complete("b", 2)
        with pytest.raises(WrongState, match="in no quarantine"):
            await office.service.machine.release(DEVICE)

    office.run(scenario)


def test_quarantine_is_taken_up_by_the_next_service_as_it_was(office: Office) -> None:
    office.configure(OFTEN)
    since: list[float] = []

    async def first() -> None:
        await leave(office)
        since.append(office.plane.apply.quarantine.rows()[DEVICE].since)

    async def second() -> None:
        # The launcher of this service finds nothing left there.
        assert kept(office) == {}
        assert office.context.catalog.quarantined() == []

    office.run(first)
    office.left_at_start = {DEVICE: OTHER}

    async def again() -> None:
        row = office.plane.apply.quarantine.rows()[DEVICE]
        assert (row.words, row.pid, row.since) == (OTHER.words, OTHER.pid, since[0])
        await office.submit("b")
        await office.until(lambda: "quarantine" in office.plane.roster.waiting[office.id_of("b")].reason)

    office.run(again)
    office.left_at_start = {}
    office.run(second)


def test_full_disk_does_not_let_a_device_out_of_quarantine_nor_break_the_service(office: Office) -> None:
    async def scenario() -> None:
        catalog = office.context.catalog

        def full(*_: object) -> None:
            raise StorageFull("no space left")

        catalog.quarantine = full  # type: ignore[method-assign]
        catalog.end_quarantine = full  # type: ignore[method-assign]
        await leave(office)
        await office.submit("b")
        await until_waits(office, "b")
        await office.service.machine.release(DEVICE)
        await office.complete("b", 2)

    office.run(scenario)


def test_release_waits_for_a_look_that_goes_on(office: Office) -> None:
    office.configure(OFTEN)

    async def scenario() -> None:
        loop, looking, free = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        async def slowly() -> None:
            looking.set()
            await free.wait()

        def look(device: str, _: dict[str, object]) -> Remains | None:
            asyncio.run_coroutine_threadsafe(slowly(), loop).result(20)
            assert not office.hand.freed
            return LEFT

        await leave(office)
        office.hand.look_again = look  # type: ignore[method-assign]
        await looking.wait()
        releasing = asyncio.create_task(office.service.machine.release(DEVICE))
        await asyncio.sleep(0)
        assert not office.hand.freed
        free.set()
        await releasing
        assert (office.hand.freed, kept(office)) == ([DEVICE], {})

    office.run(scenario)


def test_worker_that_is_warm_keeps_its_device_out_of_quarantine(office: Office) -> None:
    office.configure(OFTEN, pool='keep_warm = "1h"')

    async def scenario() -> None:
        await office.submit("a")
        worker = await office.serving("a")
        assert (await office.finish(worker, "a")).order is Order.RELEASE
        await office.say(worker, "a", phase=Phase.IDLE)
        await office.until_state("a", State.COMPLETED)
        assert kept(office) == {}

    office.run(scenario)
