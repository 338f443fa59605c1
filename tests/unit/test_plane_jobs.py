"""A control plane with several jobs: workers that go from one to the next, jobs that end in every way."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from freight.core.job import FINAL, Event, State
from freight.core.messages import Order, Phase
from freight.core.snapshot import MOST_STARTS
from freight.errors import OperationError
from freight.store.results import Results
from tests.unit.houses import PATIENCE_S, URL, House, cancel, completes
from tests.unit.planes import done


def test_a_worker_that_reports_before_the_disk_has_noted_its_process_is_known(house: House) -> None:
    async def scenario() -> None:
        noted, runs = threading.Event(), house.catalog.worker_runs

        def slow(*arguments: Any) -> None:
            noted.wait(PATIENCE_S)
            runs(*arguments)

        house.catalog.worker_runs = slow  # type: ignore[method-assign]
        house.submit("a")
        worker = await house.hand.next_worker(1)
        told = asyncio.create_task(house.say(worker))
        await asyncio.sleep(0)
        noted.set()
        orders = await told
        assert (orders.order, orders.setup is not None) == (Order.RUN, True)

    house.run(scenario)


def test_a_worker_goes_on_to_the_next_job_of_its_launch_and_then_ends(house: House) -> None:
    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        house.submit("b")
        assert (await house.finish(worker, "a")).order is Order.RELEASE
        await house.say(worker, "a", phase=Phase.IDLE)
        await house.until(lambda: house.state("a") is State.COMPLETED and house.job_of(worker) == "id-b")
        orders = await house.say(worker, phase=Phase.IDLE)
        assert (orders.order, orders.setup and orders.setup.job) == (Order.RUN, "id-b")
        await house.say(worker, "b")
        # Nobody waits for it any more.
        assert (await house.finish(worker, "b")).order is Order.STOP
        house.hand.ends[worker].set()
        await house.until(lambda: house.state("b") is State.COMPLETED)
        assert len(house.hand.places) == 1
        assert [stint.number for stint in house.catalog.stints("id-b")] == [1]

    house.run(scenario)


def test_a_worker_ends_with_its_job_where_the_next_needs_another_server(house: House) -> None:
    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        house.submit("b", url="http://127.0.0.1:10")
        assert (await house.finish(worker, "a")).order is Order.STOP

    house.run(scenario)


def test_a_warm_worker_stays_until_a_job_of_its_launch_comes(tmp_path: Path) -> None:
    house = House(tmp_path, keep_warm_s=3600)

    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        assert (await house.finish(worker, "a")).order is Order.RELEASE
        await house.say(worker, "a", phase=Phase.IDLE)
        await house.until(lambda: house.state("a") is State.COMPLETED)
        orders = await house.say(worker, phase=Phase.IDLE)
        assert (orders.order, orders.setup) == (Order.RUN, None)
        house.submit("b")
        await house.until(lambda: house.plane.roster.workers[worker].job)
        orders = await house.say(worker, phase=Phase.IDLE)
        assert orders.setup is not None
        assert len(house.hand.places) == 1

    house.run(scenario)
    house.close()


def test_a_warm_worker_that_ends_while_it_is_to_join_a_job_is_replaced(tmp_path: Path) -> None:
    house = House(tmp_path, keep_warm_s=3600)

    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        await house.finish(worker, "a")
        await house.say(worker, "a", phase=Phase.IDLE)
        await house.until(lambda: house.state("a") is State.COMPLETED)
        house.submit("b")
        release = asyncio.Event()
        join = house.catalog.worker_joins
        loop = asyncio.get_running_loop()

        def slow(*arguments: Any) -> int:
            number = join(*arguments)
            loop.call_soon_threadsafe(house.hand.ends[worker].set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(PATIENCE_S)
            return number

        house.catalog.worker_joins = slow  # type: ignore[method-assign]
        await house.until(lambda: worker not in house.plane.roster.workers)
        release.set()
        # The job must not wait for a worker that is gone.
        assert await asyncio.wait_for(house.hand.next_worker(2), 5)

    house.run(scenario)
    house.close()


@pytest.mark.parametrize("when", ["queued", "starting", "running", "suspended"])
def test_a_cancelled_job_ends_once_its_worker_is_gone(house: House, when: str) -> None:
    async def scenario() -> None:
        house.submit("first")
        worker = await house.serving("first")
        if when == "queued":
            house.submit("a")
            name = "a"
        else:
            name = "first"
            await house.until(lambda: house.state("first") is State.RUNNING)
        if when == "suspended":
            house.plane.roster.open["id-first"].found_full(time.monotonic(), "no space left")
            await house.until(lambda: house.state("first") is State.SUSPENDED)
        if when == "starting":
            house.hand.ends[worker].set()
            second = await house.started(2)
            await house.until(lambda: house.state("first") is State.STARTING)
            worker = second
        await cancel(house, name)
        if name == "first":
            await house.until_told(worker, Order.STOP, "first" if when != "starting" else "")
            assert house.state("first") is State.CANCELLING
            house.plane.roster.open["id-first"]._full_until = 0.0
            house.hand.ends[worker].set()
        await house.until(lambda: house.state(name) is State.CANCELLED)

    house.run(scenario)


@pytest.mark.parametrize(
    ("missing", "is_garbage"),
    [("index.npz", False), ("index.npz", True), ("input.jsonl", False), ("results.db", True), ("", False)],
)
def test_a_waiting_job_whose_files_are_gone_fails_alone(house: House, missing: str, is_garbage: bool) -> None:
    async def scenario() -> None:
        house.submit("good")
        worker = await house.serving("good")
        house.submit("bad")
        folder = house.folder / "id-bad"
        for path in [folder / missing] if missing else sorted(folder.iterdir()):
            path.write_bytes(b"garbage" * 1000) if is_garbage else path.unlink()
        if not missing:
            folder.rmdir()
        await house.finish(worker, "good")
        house.hand.ends[worker].set()
        await house.until(lambda: house.state("good") is State.COMPLETED)
        await house.until(lambda: house.state("bad") in FINAL or len(house.hand.places) > 1)
        assert house.state("bad") is State.FAILED
        assert house.catalog.get("id-bad").reason

    house.run(scenario)


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("broken", ["input.jsonl", "results.db"])
def test_a_running_job_whose_files_break_fails_alone(house: House, broken: str, output: bool) -> None:
    async def scenario() -> None:
        house.submit("bad", output=output)
        worker = await house.serving("bad")
        await house.until(lambda: house.state("bad") is State.RUNNING)
        await house.say(worker, "bad", want=2)
        await house.say(worker, "bad", done=done(0))
        path = house.folder / "id-bad" / broken
        if broken == "results.db":
            house.writer.submit(spoil, house.opened[0]).result()
        else:
            path.write_bytes(b"{}\n")
        await house.until_told(worker, Order.STOP, "bad", done=done(1), want=2)
        house.submit("good")
        house.hand.ends[worker].set()
        await house.until(lambda: house.state("bad") in FINAL)
        assert house.state("bad") is State.FAILED
        assert house.catalog.get("id-bad").reason
        await completes(house, "good", 2)()

    house.run(scenario)


def spoil(results: Results) -> None:
    """Damage a database under those who have it open: its pages are no SQLite any more."""
    connection: Any = results._connection
    path = Path(connection.filename)
    connection.pragma("wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    connection.pragma("shrink_memory")


@pytest.mark.parametrize("broken", [False, True])
def test_a_suspended_job_that_breaks_is_told_apart_from_one_whose_starts_are_exhausted(
    house: House, broken: bool
) -> None:
    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        await house.until(lambda: house.state("a") is State.RUNNING)
        job = house.plane.roster.open["id-a"]
        job.found_full(time.monotonic(), "no space left")
        await house.until(lambda: house.state("a") is State.SUSPENDED)
        if broken:
            job.failure = OperationError("its input is another one")
            await house.until_told(worker, Order.STOP, "a")
        else:
            job._full_until = 0.0
            for _ in range(MOST_STARTS):
                job.start_failed((URL,), "no such luck", False, time.monotonic())
        house.hand.ends[worker].set()
        await house.until(lambda: house.state("a") is State.FAILED)
        last = house.catalog.events("id-a")[-1]
        ended = (Event.STARTS_EXHAUSTED, "the worker process ended with status 1")
        expected = (Event.BROKE, "its input is another one") if broken else ended
        assert (last.event, last.detail) == expected

    house.run(scenario)
