"""Sharing out an order among workers: parts of the file for each, smaller and smaller leases, and twins run once."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest

from freight.control.intake import Wishes
from freight.control.twins import PART_BYTES, PART_LINES, Twins
from freight.core.answer import MAX_DEATHS, Answer, answer_line, refused_line
from freight.core.job import Totals
from freight.core.messages import SLICE_BYTES, Death, Returned
from freight.errors import OperationError
from freight.store.database import StorageFull
from tests.unit.planes import COUNT, Parts, done, job_of, opened_parts

ORDERED = Wishes(order=True)
DEDUPED = Wishes(dedupe=True)
SAME = '{"messages":[{"role":"user","content":"same"}]}'


def chat(*contents: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": content} for content in contents]})


def documents(count: int, questions: int) -> list[str]:
    """Return questions on documents, the documents one after the other again and again."""
    return [chat(f"{n % count:05}" * 100, f"Question {n}?") for n in range(count * questions)]


def results_of(parts: Parts) -> dict[int, dict[str, object]]:
    rows = [row for page in parts.results.pages() for row in page]
    return {index: json.loads(b"{" + tail) for index, tail, _ in rows}


def test_questions_on_a_document_go_to_one_worker_and_every_record_to_one(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        got: dict[str, list[int]] = {worker: [] for worker in "abcd"}
        while any(leases := [await parts.lease(worker, 3, 4) for worker in "abcd"]):
            for worker, indices in zip("abcd", leases, strict=True):
                got[worker] += indices
        assert sorted(index for indices in got.values() for index in indices) == list(range(160))
        workers_of = [
            {worker for worker in "abcd" for i in got[worker] if i % 20 == document} for document in range(20)
        ]
        # All but those that are cut at the very end.
        assert sum(len(workers) == 1 for workers in workers_of) >= 15

    with opened_parts(tmp_path, documents(20, 8), ORDERED) as parts:
        asyncio.run(scenario(parts))


def test_leases_shrink_towards_the_end_so_that_no_worker_hoards_the_tail(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        sizes: list[int] = []
        while leased := await parts.lease("abcd"[len(sizes) % 4], 1000, 4):
            sizes.append(len(leased))
        assert sizes[0] == 160 // 8
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-8:] == [1] * 8

    with opened_parts(tmp_path, documents(20, 8), ORDERED) as parts:
        asyncio.run(scenario(parts))


def test_the_tail_is_shared_out_by_bytes_too(tmp_path: Path) -> None:
    bodies = [chat("x" * (9000 if n < 4 else 10)) for n in range(COUNT)]

    async def scenario(parts: Parts) -> None:
        # Two workers: a fourth of the bytes is one large record, of the records it would be five.
        assert await parts.lease("a", COUNT, 2) == [0]
        assert await parts.lease("b", COUNT, 2) == [1]

    with opened_parts(tmp_path, bodies) as parts:
        asyncio.run(scenario(parts))


def test_what_came_back_goes_out_in_more_than_ones_though_nothing_else_is_left(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        assert len(await parts.lease("a", COUNT, 1)) == COUNT
        parts.dispatcher.lost("a")
        assert len(await parts.lease("b", COUNT, 2)) == COUNT // 4

    with opened_parts(tmp_path) as parts:
        asyncio.run(scenario(parts))


def test_a_dispatcher_on_what_is_left_keeps_the_order(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        order = parts.index.order.tolist()
        assert order != sorted(order)
        assert await parts.lease("a", 50, 1) == order[:50]
        await parts.accept("a", done=done(*order[:30], *order[40:45]))
        parts.open_again()
        parts.dispatcher.adopt("a", [Returned(order[30], 0), Returned(order[60], 0)])
        assert parts.dispatcher.left == 125
        left = [i for n, i in enumerate(order) if not (n <= 30 or 40 <= n < 45 or n == 60)]
        assert await parts.lease("b", 200, 1) == left

    with opened_parts(tmp_path, documents(20, 8), ORDERED) as parts:
        asyncio.run(scenario(parts))


def test_what_a_lost_worker_had_of_the_order_goes_on_with_the_next(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        order = parts.index.order.tolist()
        assert await parts.lease("a", 3, 2) == order[:3]
        assert await parts.lease("b", 3, 2) == order[80:83]
        parts.dispatcher.lost("a")
        assert await parts.lease("c", 5, 2) == [*order[:3], *order[3:5]]

    with opened_parts(tmp_path, documents(20, 8), ORDERED) as parts:
        asyncio.run(scenario(parts))


def test_of_records_with_equal_bodies_the_first_runs_and_all_get_its_answer(tmp_path: Path) -> None:
    bodies = [chat("own"), SAME, chat("other"), SAME, SAME.replace(":", ": "), SAME]

    async def scenario(parts: Parts) -> None:
        assert await parts.lease("a", 9) == [0, 1, 2, 4]
        assert parts.dispatcher.left == 6
        line = answer_line(1, b'"r1"', 200, "req-1", Answer(b'{"text":"an answer"}', 7, 5, 3, True))
        await parts.accept("a", done=[line])
        await parts.accept("a", done=[line])
        assert parts.dispatcher.left == 3
        # Each is done and cut, but the tokens were spent once.
        assert parts.dispatcher.totals == Totals(3, 0, 3, 7, 5, 3) == parts.results.totals()
        found = results_of(parts)
        assert [found[index]["custom_id"] for index in (1, 3, 5)] == ["r1", "r3", "r5"]
        assert found[1]["response"] == found[3]["response"] == found[5]["response"]
        await parts.accept("a", done=done(0, 2, 4))
        assert parts.dispatcher.left == 0

    with opened_parts(tmp_path, bodies, DEDUPED) as parts:
        asyncio.run(scenario(parts))


def test_a_body_may_come_any_number_of_times(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        assert await parts.lease("a", 9) == [0]
        await parts.accept("a", done=done(0))
        assert (parts.dispatcher.left, parts.dispatcher.totals.done) == (0, 1000)
        assert [line["custom_id"] for _, line in sorted(results_of(parts).items())] == [
            str(0), *(f"r{n}" for n in range(1, 1000)),
        ]  # fmt: skip

    with opened_parts(tmp_path, [SAME] * 1000, DEDUPED) as parts:
        asyncio.run(scenario(parts))


def test_twins_get_the_final_error_of_the_one_that_ran(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        assert await parts.lease("a", 9) == [0, 2]
        await parts.accept("a", done=[refused_line(0, b'"r0"', 400, "req", b'{"error":{"message":"no"}}')])
        for _ in range(MAX_DEATHS):
            parts.dispatcher.lost("a")
            assert await parts.lease("a", 9) == [2]
            number = parts.numbers["a"]
            await parts.accept("a", deaths=[Death(number, "it died", charged=True, in_flight=[2])])
        assert (parts.dispatcher.left, parts.dispatcher.totals.failed) == (0, 4)
        found = results_of(parts)
        assert found[0]["error"] == found[1]["error"] and found[2]["error"] == found[3]["error"]
        assert [found[index]["custom_id"] for index in range(4)] == ["r0", "r1", "r2", "r3"]

    with opened_parts(tmp_path, [SAME, SAME, chat("bad"), chat("bad")], DEDUPED) as parts:
        asyncio.run(scenario(parts))


def test_a_control_plane_that_starts_anew_runs_no_twin_again(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        assert await parts.lease("a", 1) == [0]
        await parts.accept("a", done=done(0))
        parts.open_again()
        assert parts.dispatcher.left == 2
        assert await parts.lease("a", 9) == [2]
        await parts.accept("a", done=done(2))
        assert parts.dispatcher.left == 0

    with opened_parts(tmp_path, [SAME, SAME, chat("b"), chat("b")], DEDUPED) as parts:
        asyncio.run(scenario(parts))


def test_an_id_with_anything_in_it_does_not_mix_up_twins(tmp_path: Path) -> None:
    strange = '"r0,\\"response\\":null,\\u0022"'

    async def scenario(parts: Parts) -> None:
        await parts.lease("a", 1)
        await parts.accept("a", done=[answer_line(0, strange.encode(), 200, "r", Answer(b'{"a":1}', 1, 1, 0, False))])
        assert [line["custom_id"] for line in results_of(parts).values()] == [json.loads(strange), "r1"]

    with opened_parts(tmp_path, [SAME, SAME], DEDUPED) as parts:
        asyncio.run(scenario(parts))


def test_without_dedupe_equal_bodies_all_run(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        assert await parts.lease("a", 9) == [0, 1, 2]

    with opened_parts(tmp_path, [SAME] * 3, ORDERED) as parts:
        asyncio.run(scenario(parts))


def test_what_has_only_twins_left_has_few_requests_left(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        lefts = [(view.left, view.twins) for view in [job_of(parts, tmp_path).view()]]
        await parts.lease("a", 9)
        for index in (0, 1, 1):
            await parts.accept("a", done=done(index))
            view = job_of(parts, tmp_path).view()
            lefts.append((view.left, view.twins))
        assert lefts == [(5, 3), (4, 3), (0, 0), (0, 0)]

    with opened_parts(tmp_path, [chat("own"), *[SAME] * 4], DEDUPED) as parts:
        asyncio.run(scenario(parts))


def test_looking_up_twins_copies_nothing() -> None:
    count = 300_000
    twins = Twins(numpy.arange(count, dtype=numpy.uint32) // 3 * 3, numpy.ones(count, numpy.bool_))
    tracemalloc.start()
    try:
        assert [twins.of(n * 3).tolist() for n in range(3)] == [[1, 2], [4, 5], [7, 8]]
        assert tracemalloc.get_traced_memory()[1] < count
    finally:
        tracemalloc.stop()


def test_twins_with_large_records_take_no_more_memory_than_a_slice_of_them(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        assert await parts.lease("a", 1) == [0]
        tracemalloc.start()
        try:
            await parts.accept("a", done=done(0))
            assert tracemalloc.get_traced_memory()[1] < 3 * SLICE_BYTES
        finally:
            tracemalloc.stop()
        assert parts.dispatcher.left == 0

    with opened_parts(tmp_path, [chat("x" * 3_000_000)] * 16, DEDUPED) as parts:
        asyncio.run(scenario(parts))


@asynccontextmanager
async def on_its_way_to_disk(parts: Parts) -> AsyncGenerator["asyncio.Task[Totals]"]:
    """Have the one answer to all records be put on disk, and hold that up for as long as the block takes."""
    await parts.lease("a", 1)
    with parts.putting() as until_there:
        accepting = asyncio.create_task(parts.dispatcher.accept(parts.report("a", done=done(0))))
        assert await until_there()
        yield accepting


def test_others_write_in_between_while_a_body_that_comes_often_is_put_on_disk(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        async with on_its_way_to_disk(parts) as accepting:
            other = parts.writer.submit(parts.results.totals)
        await accepting
        assert other.result().done == PART_LINES
        assert parts.dispatcher.totals == parts.results.totals()
        assert parts.dispatcher.totals.done == 2 * PART_LINES + 5

    with opened_parts(tmp_path, [SAME] * (2 * PART_LINES + 5), DEDUPED) as parts:
        asyncio.run(scenario(parts))


def test_what_was_put_before_the_disk_was_full_counts_in_a_job_that_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(parts: Parts) -> None:
        await parts.lease("a", 1)
        put, puts = parts.results.put, 0

        def put_once(*arguments: Any) -> Totals:
            nonlocal puts
            puts += 1
            if puts > 1:
                raise StorageFull("no space left for results")
            return put(*arguments)

        monkeypatch.setattr(parts.results, "put", put_once)
        parts.dispatcher.give_up()
        with pytest.raises(StorageFull):
            await parts.accept("a", done=done(0))
        assert parts.dispatcher.totals == parts.results.totals()
        assert parts.dispatcher.totals.done == PART_LINES

    with opened_parts(tmp_path, [SAME] * (2 * PART_LINES), DEDUPED) as parts:
        asyncio.run(scenario(parts))


def test_long_answers_make_small_parts(tmp_path: Path) -> None:
    lengths = numpy.full(9, 20, numpy.uint32)
    twins = Twins(numpy.zeros(9, numpy.uint32), numpy.ones(9, numpy.bool_))
    line = answer_line(0, b'"r0"', 200, "r", Answer(b'"%s"' % (b"x" * (PART_BYTES // 3)), 1, 1, 0, False))

    parts = twins.parts([line], lengths, lambda indices: [b'{"custom_id":"r"}'] * len(indices))

    assert [[line.index for line in part] for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_job_that_is_over_puts_nothing_more_on_disk_once_it_is_closed(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        async with on_its_way_to_disk(parts) as accepting:
            closing = asyncio.create_task(parts.dispatcher.close())
            await asyncio.sleep(0)
        await closing
        assert accepting.done()
        assert parts.results.totals().done == PART_LINES

    with opened_parts(tmp_path, [SAME] * (2 * PART_LINES), DEDUPED) as parts:
        asyncio.run(scenario(parts))


def test_an_answer_is_kept_though_the_input_changed_and_its_twins_cannot_be_read(tmp_path: Path) -> None:
    async def scenario(parts: Parts) -> None:
        assert await parts.lease("a", 9) == [0, 2]
        with (tmp_path / "in.jsonl").open("a") as file:
            file.write("\n")
        with pytest.raises(OperationError, match="changed"):
            await parts.accept("a", done=done(0, 2))
        assert sorted(results_of(parts)) == [0, 2]
        assert parts.dispatcher.totals == parts.results.totals()

    with opened_parts(tmp_path, [SAME, SAME, chat("own")], DEDUPED) as parts:
        asyncio.run(scenario(parts))
