"""How long a connection may keep the server waiting: the clock alone, with times made up."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.api.deadlines import LEAST_BYTES, Deadlines, Late, Part, Watch

LIMITS = Deadlines(head_s=10, body_idle_s=30, request_s=60, keep_alive_s=75, send_idle_s=64, goodbye_s=5)


def watch(*, answered: bool = False, upload: bool | None = None) -> Watch:
    """Return the clock of a connection made at 0: it has had one request, at 1, or is sending one."""
    made = Watch(LIMITS, 0)
    if answered or upload is not None:
        made.request_begun(1)
        made.head_ended(1, is_upload=upload is True, is_awaited=True)
    if answered:
        made.request_ended()
        made.answered(1)
    return made


def test_silent_connection_is_late_when_no_head_has_come() -> None:
    assert watch().due() == (10, Late.HEAD)


def test_head_that_comes_by_single_bytes_is_late_all_the_same() -> None:
    made = watch()
    made.request_begun(9)
    assert made.late(9.9) is None
    assert made.late(10) is Late.HEAD


def test_idle_connection_may_be_kept_and_its_next_head_has_the_whole_time() -> None:
    made = watch(answered=True)
    assert made.due() == (76, Late.NEXT)
    made.request_begun(70)
    assert made.due() == (80, Late.HEAD)


def test_head_that_came_during_an_answer_is_late_only_after_it() -> None:
    made = watch(upload=False)
    made.request_ended()
    made.request_begun(2)
    assert made.due() is None
    made.answered(50)
    assert made.due() == (60, Late.HEAD)


def test_whoever_waits_for_its_answer_is_not_late() -> None:
    made = watch(upload=False)
    made.request_ended()
    assert made.due() is None
    assert made.look_at(1000) is None


def test_body_is_late_when_it_stops_coming() -> None:
    made = watch(upload=True)
    assert made.due() == (31, Late.BODY)
    made.body_came(20, LEAST_BYTES)
    assert made.due() == (50, Late.BODY)


def test_upload_may_take_for_ever_and_other_requests_may_not() -> None:
    upload, other = watch(upload=True), watch(upload=False)
    for now in range(2, 60):
        upload.body_came(now, LEAST_BYTES)
        other.body_came(now, LEAST_BYTES)
    assert upload.due() == (89, Late.BODY)
    assert other.due() == (61, Late.REQUEST)


@given(st.lists(st.integers(1, 30), max_size=30))
def test_body_that_comes_by_single_bytes_is_late(pauses: list[int]) -> None:
    made, now = watch(upload=True), 1
    for pause in pauses:
        now += pause
        if made.late(now):
            break
        made.body_came(now, 1)
    assert made.due() == (31, Late.BODY)


def test_time_in_which_the_server_does_not_read_is_not_the_peers() -> None:
    made = watch(upload=False)
    made.reading(False, 2)
    assert made.due() is None
    made.reading(True, 101)
    assert made.due() == (131, Late.BODY)
    made.body_came(130, LEAST_BYTES)
    assert made.due() == (160, Late.BODY)


def test_peer_that_waits_to_be_told_to_send_its_body_is_not_late() -> None:
    made = Watch(LIMITS, 0)
    made.request_begun(1)
    made.head_ended(1, is_upload=True, is_awaited=False)
    assert made.due() is None
    made.reading(True, 40)
    assert made.due() == (70, Late.BODY)


def test_reader_that_takes_nothing_is_late_and_one_that_takes_a_byte_is_not() -> None:
    made = watch(upload=False)
    made.request_ended()
    made.sent(10, 0, 1000)
    assert made.due() == (74, Late.TAKING)
    made.sent(60, 1, 2000)
    assert made.due() == (124, Late.TAKING)
    made.sent(123, 1, 3000)
    assert made.late(124) is Late.TAKING


def test_reader_that_has_taken_all_is_waited_for_anew() -> None:
    made = watch(upload=False)
    made.request_ended()
    made.sent(10, 0, 10)
    made.sent(20, 10, 0)
    assert made.due() is None
    made.sent(500, 10, 10)
    assert made.due() == (564, Late.TAKING)


def test_looks_are_taken_often_enough_while_answers_wait_to_be_taken() -> None:
    made = watch(upload=False)
    made.request_ended()
    made.sent(10, 0, 1000)
    assert made.look_at(10) == 18
    assert made.look_at(70) == 74


def test_half_closed_connection_is_kept_as_long_as_its_answer_goes_out() -> None:
    made = watch(upload=False)
    made.request_ended()
    made.half_closed(2)
    assert made.due() == (12, Late.TAKING)
    made.sent(9, 0, 0)
    assert made.due() == (12, Late.TAKING)
    made.sent(10, 0, 5)
    made.sent(11, 3, 2)
    assert made.due() == (21, Late.TAKING)


def test_peer_that_still_sends_has_a_while_to_notice_its_answer() -> None:
    made = watch(upload=True)
    made.goodbye(3)
    assert made.due() == (8, Late.GOODBYE)
    made.heard_in_vain(7)
    assert made.due() == (12, Late.GOODBYE)
    for now in range(12, 40, 4):
        made.heard_in_vain(now)
    assert made.due() == (33, Late.GOODBYE)
    made.over()
    assert made.due() is None


@pytest.mark.parametrize("end", [Watch.over, lambda made: made.goodbye(3)], ids=["over", "goodbye"])
def test_connection_that_is_closing_is_cut_when_nothing_is_taken(end: Callable[[Watch], None]) -> None:
    made = watch(upload=True)
    made.sent(2, 0, 7)
    end(made)
    made.over()
    assert made.due() == (66, Late.TAKING)


def test_parts_follow_each_other() -> None:
    made = watch()
    assert made.part is Part.HEAD
    made.head_ended(1, is_upload=False, is_awaited=True)
    assert made.part is Part.BODY
    made.request_ended()
    assert made.part is Part.NOTHING
    made.request_begun(2)
    assert made.part is Part.HEAD
