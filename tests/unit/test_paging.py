"""Lists in pages: each thing once, in order, whatever comes and goes meanwhile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.core.paging import Place, cursor_of, page_of, place_of, time_of
from freight.errors import UserError

PLACES = st.tuples(st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5))


def itself(place: Place) -> Place:
    return place


@given(PLACES)
def test_cursor_says_where_it_is(place: Place) -> None:
    assert place_of(cursor_of(place)) == place


@pytest.mark.parametrize("text", ["", "x", "1", "~", "x~y", "nan~a", "inf~a", "-inf~a", "1_0~a", "1e999~a", "١~a"])
def test_text_that_is_no_cursor_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match=r"after: .* is no cursor"):
        place_of(text)


@given(st.lists(PLACES, unique=True), st.integers(1, 5))
def test_pages_hold_each_thing_once_in_order(things: list[Place], limit: int) -> None:
    seen: list[Place] = []
    after: str | None = None
    for _ in range(len(things) + 1):
        page, after = page_of(things, itself, limit, after)
        assert len(page) <= limit
        seen += page
        if after is None:
            break
    assert (seen, after) == (sorted(things), None)


def test_list_goes_on_after_what_is_gone() -> None:
    things = [(float(number), "a") for number in range(6)]
    page, after = page_of(things, itself, 2, None)
    assert page == things[:2]
    left = [*things[:1], *things[2:]]
    assert page_of(left, itself, 2, after) == (things[2:4], cursor_of(things[3]))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:00:01Z", 1.0),
        ("1970-01-01t00:00:01.5z", 1.5),
        ("1970-01-01 01:00:00+01:00", 0.0),
        ("1970-01-01T00:00:00.123456789Z", 0.123456),
    ],
)
def test_times_are_read_as_rfc_3339(text: str, seconds: float) -> None:
    assert time_of("created_after", text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "", "now", "1970-01-01", "1970-01-01T00:00:00", "19700101T000000Z", "1970-13-01T00:00:00Z", "0",
        "1970-01-01T00:00:00 01:00", "1970-W01-1T00:00:00Z", "1970-01-01T25:00:00Z", "1970-01-01T00:00:00Z\n",
        "1970-01-01T00:00:00+99:99",
    ],
)  # fmt: skip
def test_what_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match=r"created_after: .* is no time"):
        time_of("created_after", text)
