"""Workers of the service that cannot start, come too late, stay warm or cannot join: what becomes of their jobs."""

import asyncio
import os
import resource
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from freight.control import jobrun
from freight.control.recovery import _adopted
from freight.core.job import State
from freight.core.messages import Order, Phase
from freight.errors import OutOfResources
from freight.launchers.base import WorkerPlace
from freight.launchers.devices import Inventory
from freight.launchers.local import LocalLauncher
from freight.store.database import StorageFull
from tests.unit.planes import COUNT
from tests.unit.services import PATIENCE_S, Office


@pytest.fixture(autouse=True)
def endless_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was full is tried again when a test says so."""
    monkeypatch.setattr(jobrun, "_FULL_PAUSE_S", (3600.0, 3600.0))


async def until_room(office: Office, name: str) -> None:
    """Wait until a job is suspended for want of something, and let its pause be over."""
    await office.until_state(name, State.SUSPENDED)
    office.plane.roster.open[office.id_of(name)]._full_until = 0.0
    office.plane.changed()


def test_job_whose_worker_finds_no_descriptors_is_suspended_and_goes_on(office: Office) -> None:
    words = "cannot start a worker process: Too many open files"

    async def scenario() -> None:
        # More often than a worker may fail to start for reasons of its own.
        office.hand.refusals = [OutOfResources(words) for _ in range(4)]
        await office.submit("a")
        for left in (3, 2, 1, 0):
            await office.until(lambda left=left: len(office.hand.refusals) == left)  # type: ignore[misc]
            await until_room(office, "a")
        await office.complete("a")
        events = (await office.service.finder.status(office.owner, "a")).events
        assert [event.detail for event in events if event.state == State.SUSPENDED] == [words] * 4

    office.run(scenario)


def test_launcher_tells_a_lack_of_descriptors_from_a_worker_that_cannot_start(tmp_path: Path) -> None:
    launcher = LocalLauncher(Inventory((), ()), tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(tmp_path, os.O_RDONLY)
    os.close(free)
    # The next descriptor would be the first that is too many.
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(OutOfResources, match="Too many open files"):
            launcher.start(WorkerPlace("w", tmp_path / "control", tmp_path, tmp_path / "log"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_job_with_all_records_done_is_complete_though_its_time_runs_out_before_its_server_ends(office: Office) -> None:
    async def scenario() -> None:
        await office.submit("a", timeout_s=3600.0)
        worker = await office.serving("a")
        assert (await office.finish(worker, "a")).order is Order.STOP
        office.plane.roster.open[office.id_of("a")].ran_s = 3601.0
        office.hand.ends[worker].set()
        await office.until(lambda: office.state("a") in (State.COMPLETED, State.TIMED_OUT))
        assert office.state("a") is State.COMPLETED

    office.run(scenario)


def test_status_of_a_job_that_ends_while_it_is_asked_for_is_final(office: Office) -> None:
    async def scenario() -> None:
        await office.submit("a")
        worker = await office.serving("a")
        await office.until_state("a", State.RUNNING)
        asked, free = threading.Event(), threading.Event()
        count = office.service.finder.failures

        def slowly(*arguments: Any) -> Any:
            asked.set()
            free.wait(PATIENCE_S)
            return count(*arguments)

        office.service.finder.failures = slowly  # type: ignore[method-assign]
        asking = asyncio.create_task(office.service.finder.status(office.owner, "a"))
        try:
            await office.until(asked.is_set)
            await office.finish(worker, "a")
            office.hand.ends[worker].set()
            await office.until(lambda: office.context.in_hand(office.id_of("a")) is None)
        finally:
            free.set()
        status = await asking
        assert (status.state, status.done, status.events[-1].state) == (State.COMPLETED, COUNT, State.COMPLETED)

    office.run(scenario)


async def warm_worker(office: Office) -> str:
    """Run a job `first`; return its worker, which stays without a job."""
    await office.submit("first")
    worker = await office.serving("first")
    assert (await office.finish(worker, "first")).order is Order.RELEASE
    await office.say(worker, "first", phase=Phase.IDLE)
    await office.until_state("first", State.COMPLETED)
    assert (await office.say(worker, phase=Phase.IDLE)).setup is None
    return worker


def append(path: Path, text: str) -> None:
    """Write to a log as a server does."""
    with path.open("a") as log:
        log.write(text)


def test_what_a_warm_server_wrote_while_idle_is_in_no_jobs_log(office: Office) -> None:
    office.configure(pool='keep_warm = "1h"')

    async def scenario() -> None:
        worker = await warm_worker(office)
        log = office.hand.places[0].log
        append(log, "while idle\n")
        await office.submit("second")
        await office.until(lambda: office.plane.roster.workers[worker].number and office.state("second") == "STARTING")
        append(log, "at work\n")
        await office.say(worker, phase=Phase.IDLE)
        await office.say(worker, "second")
        await office.finish(worker, "second")
        await office.say(worker, "second", phase=Phase.IDLE)
        await office.until_state("second", State.COMPLETED)
        pieces = [piece async for piece in await office.service.streams.logs(office.owner, "second", 1, None, False)]
        assert b"".join(pieces) == b"at work\n"
        assert not [path for path in office.holds("while idle") if path != log]

    office.run(scenario)


def test_records_of_a_worker_whose_joining_found_no_room_are_handed_out_again(office: Office) -> None:
    office.configure(pool='keep_warm = "1h"')

    async def scenario() -> None:
        worker = await warm_worker(office)
        loop = asyncio.get_running_loop()
        join = office.context.catalog.worker_joins

        def full(*_: Any) -> int:
            # By an exchange that comes just then.
            dispatcher = office.plane.roster.open[office.id_of("second")].dispatcher
            leases = asyncio.run_coroutine_threadsafe(dispatcher.lease(worker, 5, 1), loop).result(PATIENCE_S)
            assert len(leases) == 5
            office.context.catalog.worker_joins = join  # type: ignore[method-assign]
            raise StorageFull("no space left")

        office.context.catalog.worker_joins = full  # type: ignore[method-assign]
        await office.submit("second")
        await office.until_told(worker, Order.STOP, phase=Phase.IDLE)
        office.hand.ends[worker].set()
        await until_room(office, "second")
        second = await office.serving("second", 2)
        # It gets all records there are.
        assert (await office.finish(second, "second")).order is Order.RELEASE

    office.run(scenario)


def test_adopted_worker_counts_among_those_that_load_from_its_file_system(office: Office, tmp_path: Path) -> None:
    office.configure(entry=f'source = "{tmp_path}"')
    file_system = str(tmp_path.stat().st_dev)

    async def scenario() -> None:
        await office.submit("a")
        worker = await office.started(1)
        store = office.plane.roster.workers[worker].store
        assert store == file_system
        await office.say(worker, phase=Phase.LOADING)
        await office.until(lambda: office.context.catalog.live_workers()[0].process is not None)
        [row] = office.context.catalog.live_workers()
        launcher: Any = SimpleNamespace(adopt=lambda *_: office.plane.roster.workers[worker].process)
        adopted = _adopted(msgspec.structs.replace(row, process={"pid": 1}), launcher)
        assert adopted is not None
        office.plane.roster.workers[worker] = adopted
        assert office.plane.apply.starts.pacing(4).loading == ()
        await office.say(worker, "a", phase=Phase.LOADING)
        assert office.plane.apply.starts.pacing(4).loading == (store,)

    office.run(scenario)
