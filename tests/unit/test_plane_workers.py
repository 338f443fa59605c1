"""A control plane and its workers: adopted ones, those that do not report or do not end, starts that are hopeless."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from freight.control import plane as plane_module
from freight.control.apply import Apply
from freight.control.jobrun import JobRun
from freight.control.plane import ControlPlane
from freight.control.workerrun import WorkerRun
from freight.core.job import State
from freight.core.messages import Order, Phase, Returned
from freight.core.snapshot import MOST_STARTS
from freight.launchers.base import WorkerPlace
from tests.unit.houses import PATIENCE_S, URL, House
from tests.unit.planes import COUNT


def test_an_adopted_worker_that_never_reports_is_ended_and_its_job_goes_on(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane_module, "ATTACH_S", 0.0)

    async def scenario() -> None:
        waiting = house.submit("a")
        del house.plane.roster.waiting["id-a"]
        job = await house.open(waiting)
        adopted = adopt(house, job)
        house.plane.roster.open["id-a"] = job
        worker = await house.started(1)
        assert adopted.id not in house.plane.roster.workers
        assert adopted.stopping
        orders = await house.say(worker)
        assert orders.setup is not None

    house.run(scenario)


def test_nobody_gets_records_before_an_adopted_worker_has_said_what_it_holds(house: House) -> None:
    async def scenario() -> None:
        waiting = house.submit("a")
        del house.plane.roster.waiting["id-a"]
        job = await house.open(waiting)
        adopted = adopt(house, job, attached=False)
        house.plane.roster.open["id-a"] = job
        job.row = msgspec.structs.replace(job.row, state=State.RUNNING)
        stranger = await house.say(adopted.id, "a", plane="another")
        assert (stranger.order, stranger.leases) == (Order.ATTACH, [])
        assert stranger.plane == house.plane.id
        orders = await house.say(adopted.id, "a", held=[Returned(3, 1)], want=COUNT)
        assert [lease.index for lease in orders.leases] == [i for i in range(COUNT) if i != 3]

    house.run(scenario)


def adopt(house: House, job: JobRun, attached: bool = False) -> WorkerRun:
    """Give the control plane a worker of an earlier one."""
    end = house.hand.ends["old"] = asyncio.Event()

    async def ended() -> None:
        await end.wait()

    async def clear(_: float) -> tuple[()]:
        return ()

    process: Any = SimpleNamespace(pid=1, identity=dict, ended=ended, clear=clear, kill=end.set)
    folder = house.folder / "sockets" / "old"
    worker = WorkerRun(
        "old", URL, (), folder, house.folder / "old.log", process, job, job.launch, "m", 1, attached=attached,
        since=time.monotonic() - 1,
    )  # fmt: skip
    job.workers["old"] = house.plane.roster.workers["old"] = worker
    house.plane.apply.watch(worker)
    return worker


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.STOPPED])
def test_a_worker_that_says_it_has_ended_and_has_not_is_killed_after_a_grace(
    house: House, monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    monkeypatch.setattr(Apply.expect_end, "__defaults__", (0.01,))

    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        orders = await house.say(worker, "a", phase=phase, note="no such luck")
        assert orders.order is Order.STOP
        # Its process goes on, and nobody ends it but the control plane.
        second = await house.started(2)
        assert house.hand.ends[worker].is_set()
        assert worker not in house.plane.roster.workers
        [trouble] = house.plane.roster.open["id-a"].troubles.values()
        assert (trouble.count, trouble.words) == (1, "no such luck")
        assert (await house.say(second)).setup is not None

    house.run(scenario)


def test_a_worker_that_never_reports_is_ended_and_counts_as_a_start_that_failed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane_module, "FIRST_REPORT_S", 0.05)

    async def scenario() -> None:
        house.submit("a")
        first = await house.started(1)
        second = await house.started(2)
        assert first not in house.plane.roster.workers
        [trouble] = house.plane.roster.open["id-a"].troubles.values()
        assert (trouble.count, trouble.words) == (1, "the worker did not report within 0.05 s")
        # One that has reported may take its time.
        monkeypatch.setattr(plane_module, "FIRST_REPORT_S", 60.0)
        await house.say(second, phase=Phase.LOADING)
        monkeypatch.setattr(plane_module, "FIRST_REPORT_S", 0.0)
        await house.say(second, "a")
        await house.finish(second, "a")

    house.run(scenario)


def test_a_job_that_comes_just_after_a_look_at_the_devices_is_planned_after_the_next_one(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        starts = house.plane.apply.starts
        look_around, start = starts.look_around, house.hand.start
        noticed: list[bool] = []

        async def look(now: float) -> None:
            await look_around(now)
            if "id-late" not in house.plane.roster.waiting and not noticed:
                house.submit("late")

        def started(place: WorkerPlace) -> Any:
            noticed.append("id-late" in starts.noticed)
            return start(place)

        monkeypatch.setattr(house.hand, "start", started)
        monkeypatch.setattr(starts, "look_around", look)
        await house.finish(await house.serving("late"), "late")
        assert noticed == [True]

    house.run(scenario)


def test_a_worker_that_falls_silent_is_ended_and_its_records_go_to_another(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        house.submit("a")
        first = await house.serving("a")
        await house.until(lambda: house.state("a") is State.RUNNING)
        assert len((await house.say(first, "a", want=3)).leases) == 3
        monkeypatch.setattr(plane_module, "SILENT_S", 0.5)
        second = await house.started(2)
        assert house.hand.ends[first].is_set()
        [trouble] = house.plane.roster.open["id-a"].troubles.values()
        assert trouble.words == "the worker has not reported for 0.5 s"
        monkeypatch.setattr(plane_module, "SILENT_S", 60.0)
        await house.say(second)
        await house.say(second, "a")
        await house.finish(second, "a")

    house.run(scenario)


def test_a_worker_whose_report_takes_long_to_be_kept_is_not_silent(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        monkeypatch.setattr(plane_module, "SILENT_S", 0.2)
        began = time.monotonic()
        async with house.plane.roster.workers[worker].exchanging:
            await house.until(lambda: house.plane._looked_at > began + 1.0)
            assert not house.hand.ends[worker].is_set()
        monkeypatch.setattr(plane_module, "SILENT_S", 60.0)
        await house.finish(worker, "a")

    house.run(scenario)


def test_a_control_plane_that_stood_still_itself_blames_no_worker(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        monkeypatch.setattr(plane_module, "SILENT_S", 1.0)
        # As after SIGSTOP and SIGCONT: the clock went on, and nothing was done.
        house.plane._looked_at -= 100.0
        await house.finish(worker, "a")

    house.run(scenario)


def test_a_worker_of_a_job_that_is_gone_is_told_to_stop_and_killed_when_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Apply.stop_worker, "__defaults__", (0.01,))
    house = House(tmp_path, keep_warm_s=3600)

    async def scenario() -> None:
        waiting = house.submit("a")
        del house.plane.roster.waiting["id-a"]
        job = await house.open(waiting)
        adopted = adopt(house, job)
        adopted.job = None
        adopted.since = time.monotonic()
        assert (await house.say(adopted.id, "a", plane="another")).order is Order.ATTACH
        assert (await house.say(adopted.id, "a")).order is Order.STOP
        await house.until(house.hand.ends["old"].is_set)
        await house.until(lambda: not house.plane.roster.workers)

    house.run(scenario)
    house.close()


def test_nothing_is_planned_for_a_moment_in_which_adopted_workers_may_say_that_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a second worker would be started for a job that the first can take."""
    house = House(tmp_path, keep_warm_s=3600)
    hear, hearing = ControlPlane._hear_adopted, asyncio.Event()

    async def with_one(plane: ControlPlane) -> None:
        # At another place than the job's own, which is free.
        job = await house.open(house.submit("a", url="http://127.0.0.1:10"))
        adopted = adopt(house, job)
        job.workers.clear()
        adopted.job, adopted.since = None, time.monotonic()
        hearing.set()
        await hear(plane)

    monkeypatch.setattr(ControlPlane, "_hear_adopted", with_one)
    monkeypatch.setattr(plane_module, "ADOPTED_S", PATIENCE_S)

    async def scenario() -> None:
        await hearing.wait()
        house.plane.changed()
        await house.until(lambda: not house.plane._changed.is_set())
        assert not house.hand.places
        await house.say("old", phase=Phase.IDLE)
        await house.until(lambda: house.job_of("old") == "id-a")
        orders = await house.say("old", phase=Phase.IDLE)
        assert orders.setup is not None
        await house.say("old", "a")
        await house.finish("old", "a")
        assert not house.hand.places

    house.run(scenario)
    house.close()


@pytest.mark.parametrize(("hopeless", "starts"), [(True, 1), (False, MOST_STARTS)])
def test_a_start_of_which_no_other_would_go_better_is_not_tried_again(
    house: House, monkeypatch: pytest.MonkeyPatch, hopeless: bool, starts: int
) -> None:
    monkeypatch.setattr("freight.core.snapshot.START_BACKOFF_S", (0.0, 0.0))

    async def scenario() -> None:
        house.submit("a")
        for number in range(1, starts + 1):
            worker = await house.started(number)
            await house.say(worker)
            await house.say(worker, "a", phase=Phase.FAILED, note="there is no program serve", hopeless=hopeless)
            house.hand.ends[worker].set()
        await house.until(lambda: house.state("a") is State.FAILED)
        assert house.catalog.get("id-a").reason == "there is no program serve"
        assert len(house.hand.places) == starts

    house.run(scenario)
