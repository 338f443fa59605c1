"""An order cut into stretches: every record once, each worker in a part of its own, until that is done."""

from collections import Counter

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.control.intake import Index
from freight.control.stretches import Stretches


def index_of(records: list[int], shared: list[int], lengths: list[int] | None = None) -> Index:
    """Return an index whose order is `records`, each of which shares so many blocks with the one before it."""
    count = max(records, default=-1) + 1 if records else len(lengths or ())
    return Index(
        "",
        numpy.zeros(count, numpy.int64),
        numpy.array(lengths or [100] * count, numpy.uint32),
        numpy.zeros(count, numpy.uint32),
        numpy.ones(count, numpy.uint8),
        numpy.array(records, numpy.uint32),
        numpy.array(shared, numpy.uint16),
    )


def stretches_of(index: Index, without: tuple[int, ...] = ()) -> Stretches:
    wanted = numpy.ones(index.records, numpy.bool_)
    wanted[list(without)] = False
    return Stretches(index, wanted)


def take(stretches: Stretches, worker: str, count: int = 1) -> list[int]:
    """Return the next records of a worker, as many as there are."""
    taken: list[int] = []
    while len(taken) < count and (record := stretches.next_of(worker)) is not None:
        stretches.pop(worker)
        taken.append(record)
    return taken


def grouped(groups: int, size: int) -> Index:
    """Return an index of groups; record n is in group n // size."""
    return index_of(list(range(groups * size)), ([0] + [9] * (size - 1)) * groups)


def test_a_worker_alone_gets_the_whole_order() -> None:
    stretches = stretches_of(index_of([3, 1, 2, 0], [0, 1, 0, 1]))

    assert take(stretches, "a", 9) == [3, 1, 2, 0]
    assert (stretches.next_of("a"), stretches.left, stretches.bytes_left) == (None, 0, 0)


def test_without_an_order_all_workers_take_from_the_files_beginning() -> None:
    stretches = stretches_of(index_of([], [], [100] * 6), without=(1,))

    assert [take(stretches, worker) for worker in "abcab"] == [[0], [2], [3], [4], [5]]
    assert take(stretches, "c") == []


def test_another_worker_takes_the_second_half_of_the_fullest_stretch_and_keeps_to_it() -> None:
    stretches = stretches_of(grouped(8, 10))

    assert take(stretches, "a", 3) == [0, 1, 2]
    assert take(stretches, "b", 2) == [40, 41]
    assert take(stretches, "c", 2) == [60, 61]
    assert [take(stretches, worker) for worker in "abcabc"] == [[3], [42], [62], [4], [43], [63]]


def test_a_stretch_is_cut_between_groups_where_that_is_possible() -> None:
    stretches = stretches_of(index_of(list(range(20)), [0] + [9] * 6 + [2] + [9] * 12))
    take(stretches, "a")
    assert take(stretches, "b") == [7]

    within_one = stretches_of(index_of(list(range(20)), [0] + [9] * 19))
    take(within_one, "a", 2)
    assert take(within_one, "b") == [11]


def test_a_worker_whose_stretch_is_done_steals_from_the_fullest() -> None:
    stretches = stretches_of(grouped(8, 10))
    take(stretches, "a", 1)
    take(stretches, "b", 1)
    take(stretches, "b", 30)
    # Its own is done up to 71; of the other the second half is next but for what is left of its own.
    assert take(stretches, "b", 9) == list(range(71, 80))
    assert take(stretches, "b", 1) == [20]
    assert take(stretches, "a", 1) == [1]


def test_the_last_record_goes_to_whoever_asks() -> None:
    stretches = stretches_of(grouped(1, 3))
    assert take(stretches, "a", 2) == [0, 1]
    assert take(stretches, "b") == [2]
    assert take(stretches, "a") == []


def test_what_a_lost_worker_had_of_the_order_is_the_next_ones_before_anything_is_stolen() -> None:
    stretches = stretches_of(grouped(8, 10))
    take(stretches, "a", 5)
    take(stretches, "b", 5)
    stretches.release("a")

    assert take(stretches, "c", 3) == [5, 6, 7]
    assert take(stretches, "b") == [45]


def test_records_that_are_settled_are_left_out_and_no_group_seems_to_go_on_across_them() -> None:
    stretches = stretches_of(grouped(4, 5), without=(5, 10, 11, 15, 16, 17, 18, 19))
    # 0-4, 6-9, 12-14: the first of each group is gone, and where one ends is known all the same.
    take(stretches, "a", 1)
    assert take(stretches, "b") == [6]
    assert (stretches.left, stretches.bytes_left) == (10, 1000)


def test_records_that_somebody_has_are_handed_out_to_nobody() -> None:
    stretches = stretches_of(grouped(2, 5))
    take(stretches, "a", 1)
    stretches.leave_out([1, 2, 5])

    assert take(stretches, "a") == [3]
    assert take(stretches, "b", 9) == [6, 7, 8, 9, 4]
    assert stretches.left == 0


@pytest.mark.parametrize("in_order", [True, False])
@settings(deadline=None)
@given(data=st.data())
def test_whoever_asks_and_ends_when_every_record_is_handed_out_once(in_order: bool, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 60))
    records = data.draw(st.permutations(range(count)))
    shared = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    lengths = data.draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))
    index = index_of(list(records) if in_order else [], shared if in_order else [], lengths)
    settled = tuple(data.draw(st.sets(st.integers(0, count - 1)))) if count else ()
    stretches = stretches_of(index, settled)

    taken: list[int] = []
    while stretches.left:
        worker = data.draw(st.sampled_from("abcd"))
        if data.draw(st.integers(0, 9)) == 0:
            stretches.release(worker)
        taken += take(stretches, worker, data.draw(st.integers(1, 7)))
        assert stretches.bytes_left == sum(lengths) - sum(lengths[record] for record in (*taken, *settled))

    assert Counter(taken) == Counter(set(range(count)) - set(settled))
