"""Sharing out a job's records: each is with one worker at a time, and done once, whoever dies meanwhile."""

import asyncio
from collections.abc import Generator
from pathlib import Path

import pytest

from freight.control.jobrun import JobRun
from freight.control.plane import ControlPlane, Policy
from freight.core.answer import MAX_DEATHS
from freight.core.job import State
from freight.core.messages import Death, Order, Returned
from freight.store.folder import FolderLock
from tests.unit.planes import COUNT, LIMITS, PATIENCE_S, Hand, Parts, done, job_of, opened_parts


@pytest.fixture
def parts(tmp_path: Path) -> Generator[Parts]:
    with opened_parts(tmp_path) as opened:
        yield opened


def test_records_of_a_lost_worker_come_next_and_are_done_once_though_its_last_report_comes_late(parts: Parts) -> None:
    async def scenario() -> None:
        assert await parts.lease("a", 3) == [0, 1, 2]
        with parts.writing() as free:
            late = asyncio.create_task(parts.accept("a", done=done(0, 1)))
            await asyncio.sleep(0)
            parts.dispatcher.lost("a")
            # Not known to be done yet, so another worker may get them and bring them as well.
            assert await parts.lease("b", 4) == [0, 1, 2, 3]
            free()
            await late
        assert parts.dispatcher.left == COUNT - 2
        await parts.accept("b", done=done(0, 1, 2, 3))
        assert (parts.dispatcher.left, parts.dispatcher.totals.done) == (COUNT - 4, 4)
        await parts.accept("b", done=done(0, 1, 2, 3))
        assert (parts.dispatcher.left, parts.dispatcher.totals.done) == (COUNT - 4, 4)

    asyncio.run(scenario())


def test_what_a_lost_worker_gave_back_in_its_last_report_is_shared_out_once(parts: Parts) -> None:
    async def scenario() -> None:
        assert await parts.lease("a", 3) == [0, 1, 2]
        with parts.writing() as free:
            late = asyncio.create_task(parts.accept("a", done=done(0), returned=[Returned(1, 1), Returned(2, 0)]))
            await asyncio.sleep(0)
            parts.dispatcher.lost("a")
            free()
            await late
        assert sorted(await parts.lease("b", COUNT)) == list(range(1, COUNT))
        assert await parts.lease("c", COUNT) == []

    asyncio.run(scenario())


def test_left_is_what_is_not_done_and_never_negative_whoever_brings_what_twice(parts: Parts) -> None:
    async def scenario() -> None:
        for worker in ("a", "b", "c"):
            await parts.lease(worker, COUNT)
            parts.dispatcher.lost(worker)
        lefts: list[int] = []
        for worker in ("a", "b", "a"):
            await parts.accept(worker, done=done(*range(COUNT)))
            lefts.append(parts.dispatcher.left)
        assert lefts == [0, 0, 0]
        assert parts.dispatcher.totals.done == COUNT
        assert await parts.lease("d", COUNT) == []

    asyncio.run(scenario())


def test_records_of_a_death_that_nobody_is_charged_for_come_last(parts: Parts) -> None:
    async def scenario() -> None:
        assert await parts.lease("a", 3) == [0, 1, 2]
        await parts.accept("a", deaths=[Death(1, "out of memory", charged=False, in_flight=[0, 1])])
        assert parts.results.suspects() == {}
        parts.dispatcher.lost("a")
        # What was only lost with the worker comes first, then the file, and at the end what was with the dead server.
        assert await parts.lease("b", COUNT) == [2, *range(3, COUNT), 0, 1]
        assert parts.dispatcher.left == COUNT

    asyncio.run(scenario())


def test_records_that_took_a_server_down_thrice_fail_and_no_other_does(parts: Parts) -> None:
    async def scenario() -> None:
        await parts.lease("a", COUNT)
        await parts.accept("a", deaths=[Death(2, "it died", charged=True, in_flight=[3, 4, 5])])
        parts.dispatcher.lost("a")
        assert await parts.lease("b", COUNT) == [3, 4, 5]
        assert await parts.lease("b", COUNT) == []
        await parts.accept("b", done=done(4, 5))
        for _ in range(2, MAX_DEATHS):
            await parts.accept("b", deaths=[Death(3, "it died", charged=True, in_flight=[3])])
            parts.dispatcher.lost("b")
            assert await parts.lease("b", COUNT) == [3]
        assert parts.dispatcher.left == COUNT - 2
        await parts.accept("b", deaths=[Death(4, "it died", charged=True, in_flight=[3])])
        assert parts.dispatcher.left == COUNT - 3
        assert parts.dispatcher.totals.failed == 1
        assert parts.results.suspects() == {}

    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["a new control plane", "a lost worker"])
def test_a_record_with_its_last_death_goes_to_nobody_while_its_error_is_written(parts: Parts, what: str) -> None:
    async def scenario() -> None:
        for number in range(1, MAX_DEATHS):
            assert await parts.lease("a", 1) == [0]
            await parts.accept("a", deaths=[Death(number, "it died", charged=True, in_flight=[0])])
        if what == "a new control plane":
            parts.open_again()
        assert await parts.lease("a", 1) == [0]
        last = parts.report("a", deaths=[Death(MAX_DEATHS, "it died", charged=True, in_flight=[0])])
        with parts.putting() as until_there:
            accepting = asyncio.create_task(parts.dispatcher.accept(last))
            assert await until_there()
            if what == "a lost worker":
                parts.dispatcher.lost("a")
            assert await parts.lease("b", 2) == [1, 2]
        await accepting
        assert await parts.lease("c", COUNT) == list(range(3, COUNT))
        assert (parts.dispatcher.left, parts.dispatcher.totals.failed) == (COUNT - 1, 1)

    asyncio.run(scenario())


def test_a_last_death_of_which_the_error_got_lost_lets_the_record_run_once_more(parts: Parts) -> None:
    async def scenario() -> None:
        for number in range(1, MAX_DEATHS + 1):
            parts.results.accuse([0], "a", number)
        parts.open_again()
        assert await parts.lease("b", COUNT) == [0]
        await parts.accept("b", done=done(0))
        assert await parts.lease("b", COUNT) == list(range(1, COUNT))

    asyncio.run(scenario())


def test_worker_that_is_lost_while_its_report_is_written_gets_no_leases_any_more(parts: Parts, tmp_path: Path) -> None:
    async def scenario() -> None:
        hand = Hand()
        lock = FolderLock(tmp_path)
        lock.take("the folder")
        (tmp_path / "sockets").mkdir()

        def places(_: JobRun | None, worker: str) -> tuple[Path, Path]:
            return tmp_path / "sockets" / worker, tmp_path / f"{worker}.log"

        plane = ControlPlane(
            parts.catalog, hand, lock, parts.writer, hand.listen, tmp_path / "sockets" / "control.sock", places,  # type: ignore[arg-type]
            Policy(LIMITS),
        )  # fmt: skip
        job = job_of(parts, tmp_path)
        run = asyncio.create_task(plane.run(job, lambda progress: None))
        first = await hand.next_worker(1)
        assert (await hand.say(parts.report(first))).setup is not None
        got = (await hand.say(parts.report(first, want=3))).leases
        assert [lease.index for lease in got] == [0, 1, 2]
        with parts.writing() as free:
            late = asyncio.create_task(hand.say(parts.report(first, done=done(0), want=9)))
            await asyncio.sleep(0)
            hand.ends[first].set()
            async with asyncio.timeout(PATIENCE_S):
                while first in job.workers:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            free()
            orders = await late
        assert (orders.order, orders.leases) == (Order.STOP, [])
        # All but what it had brought goes to the next.
        second = await hand.next_worker(2)
        await hand.say(parts.report(second))
        got = (await hand.say(parts.report(second, want=COUNT))).leases
        assert sorted(lease.index for lease in got) == list(range(1, COUNT))
        assert (await hand.say(parts.report(second, done=done(*range(1, COUNT))))).order is Order.STOP
        hand.ends[second].set()
        await asyncio.wait_for(run, PATIENCE_S)
        assert (job.row.state, job.dispatcher.left) == (State.COMPLETED, 0)
        lock.release()

    asyncio.run(scenario())
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == COUNT
