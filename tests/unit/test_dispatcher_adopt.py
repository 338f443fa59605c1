"""Records that a worker of an earlier control plane has: nobody else gets them while it lives."""

import asyncio
from collections.abc import Generator
from pathlib import Path

import pytest

from freight.core.answer import MAX_DEATHS
from freight.core.messages import Death, Returned
from tests.unit.planes import COUNT, Parts, done, opened_parts


@pytest.fixture
def parts(tmp_path: Path) -> Generator[Parts]:
    with opened_parts(tmp_path) as opened:
        yield opened


def test_what_an_adopted_worker_holds_is_leased_to_nobody_else(parts: Parts) -> None:
    async def scenario() -> None:
        parts.dispatcher.adopt("old", [Returned(3, 0), Returned(7, 1)])
        assert await parts.lease("new", COUNT) == [i for i in range(COUNT) if i not in (3, 7)]
        assert await parts.lease("new", COUNT) == []
        assert parts.dispatcher.left == COUNT
        await parts.accept("old", done=done(3, 7))
        assert parts.dispatcher.left == COUNT - 2

    asyncio.run(scenario())


def test_what_a_lost_adopted_worker_held_comes_next_with_the_tries_that_it_had(parts: Parts) -> None:
    async def scenario() -> None:
        parts.dispatcher.adopt("old", [Returned(5, 2), Returned(6, 0)])
        await parts.accept("old", done=done(6))
        parts.dispatcher.lost("old")
        leases = await parts.dispatcher.lease("new", 2, 1)
        assert [(lease.index, lease.tries) for lease in leases] == [(5, 2), (0, 0)]
        assert parts.dispatcher.left == COUNT - 1

    asyncio.run(scenario())


def test_what_an_adopted_worker_gives_back_keeps_its_tries(parts: Parts) -> None:
    async def scenario() -> None:
        parts.dispatcher.adopt("old", [Returned(5, 1)])
        await parts.accept("old", returned=[Returned(5, 2)])
        parts.dispatcher.lost("old")
        leases = await parts.dispatcher.lease("new", 1, 1)
        assert [(lease.index, lease.tries) for lease in leases] == [(5, 2)]
        assert sorted(await parts.lease("new", COUNT)) == [i for i in range(COUNT) if i != 5]

    asyncio.run(scenario())


def test_a_record_that_is_done_already_is_not_taken_for_held(parts: Parts) -> None:
    async def scenario() -> None:
        await parts.lease("first", 2)
        await parts.accept("first", done=done(0))
        parts.dispatcher.adopt("old", [Returned(0, 0), Returned(4, 0)])
        parts.dispatcher.lost("old")
        assert await parts.lease("new", 2) == [4, 2]

    asyncio.run(scenario())


def test_suspects_of_an_adopted_worker_stay_alone_there(parts: Parts) -> None:
    async def scenario() -> None:
        parts.results.accuse([2, 9], "gone", 1)
        parts.dispatcher = type(parts.dispatcher)(
            parts.file, parts.index, parts.results, parts.catalog.get("job"), parts.writer, parts.writer
        )
        parts.dispatcher.adopt("old", [Returned(2, 0)])
        assert parts.dispatcher.left == COUNT
        # It gets nothing beside its suspect, and no other worker gets suspects meanwhile.
        assert await parts.lease("old", COUNT) == []
        assert await parts.lease("new", COUNT) == [i for i in range(COUNT) if i not in (2, 9)]
        await parts.accept("old", done=done(2))
        assert await parts.lease("old", COUNT) == [9]

    asyncio.run(scenario())


def test_records_of_a_death_that_an_adopted_worker_tells_of_run_alone_and_once(parts: Parts) -> None:
    async def scenario() -> None:
        # The server died while there was no control plane: the records in flight are held no more.
        parts.dispatcher.adopt("old", [Returned(1, 0)])
        await parts.accept("old", deaths=[Death(1, "it died", charged=True, in_flight=[5])])
        assert parts.results.suspects() == {5: 1}
        assert await parts.lease("suspicious", COUNT) == [5]
        assert await parts.lease("other", COUNT) == [i for i in range(COUNT) if i not in (1, 5)]

    asyncio.run(scenario())


def test_records_of_a_death_that_is_written_while_their_worker_is_lost_run_alone_and_once(parts: Parts) -> None:
    async def scenario() -> None:
        assert await parts.lease("old", 3) == [0, 1, 2]
        with parts.writing() as free:
            late = asyncio.create_task(
                parts.accept("old", deaths=[Death(1, "it died", charged=True, in_flight=[0, 1])])
            )
            await asyncio.sleep(0)
            parts.dispatcher.lost("old")
            free()
            await late
        assert await parts.lease("suspicious", COUNT) == [0, 1]
        assert sorted(await parts.lease("other", COUNT)) == list(range(2, COUNT))

    asyncio.run(scenario())


def test_a_death_that_two_control_planes_are_told_of_is_charged_once(parts: Parts) -> None:
    async def scenario() -> None:
        death = Death(1, "it died", charged=True, in_flight=[5])
        await parts.lease("old", COUNT)
        for _ in range(MAX_DEATHS + 1):
            await parts.accept("old", deaths=[death])
        assert parts.results.suspects() == {5: 1}
        assert parts.dispatcher.left == COUNT

    asyncio.run(scenario())
