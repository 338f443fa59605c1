"""Ranges and ETags as RFC 9110 has them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.core.httprange import NoSuchRange, chosen, is_listed, is_same

SIZE = 100
BYTES = bytes(range(SIZE))


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", range(0, 1)),
        ("bytes=0-99", range(SIZE)),
        ("bytes=10-19", range(10, 20)),
        ("bytes=10-", range(10, SIZE)),
        ("bytes=99-", range(99, SIZE)),
        ("bytes=10-1000", range(10, SIZE)),
        (f"bytes=10-{'9' * 5000}", range(10, SIZE)),
        ("bytes=-1", range(99, SIZE)),
        ("bytes=-100", range(SIZE)),
        ("bytes=-1000", range(SIZE)),
        (f"bytes=-{'9' * 5000}", range(SIZE)),
        ("Bytes=10-19", range(10, 20)),
        ("bytes= 10-19 ", range(10, 20)),
        ("bytes=10-19,", range(10, 20)),
        (f"bytes={'0' * 5000}10-19", range(10, 20)),
    ],
)
def test_one_range_is_what_it_names(header: str, expected: range) -> None:
    assert chosen(header, SIZE) == expected


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", f"bytes={'9' * 5000}-", "bytes=-0", "bytes=-00"])
def test_range_beyond_the_end_is_none(header: str) -> None:
    with pytest.raises(NoSuchRange):
        chosen(header, SIZE)


@pytest.mark.parametrize(
    "header",
    [
        None, "", "bytes", "bytes=", "bytes=-", "bytes=,", "bytes=a-b", "bytes=1", "bytes=20-10", "bytes=1-2,4-5",
        "bytes=1-2-3", "bytes=--1", "bytes=+1-2", "bytes=1 - 2", "lines=1-2", "bytes:1-2", "bytes=1-2;", "bytes=١-٢",
        "bytes=0x1-0x2", "bytes=1.0-2", "bytes=1_0-20",
    ],
)  # fmt: skip
def test_what_is_not_one_range_asks_for_all(header: str | None) -> None:
    assert chosen(header, SIZE) is None


def test_nothing_has_no_parts() -> None:
    assert chosen("bytes=-5", 0) is None
    with pytest.raises(NoSuchRange):
        chosen("bytes=0-", 0)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 200))
def test_range_gives_the_bytes_between_its_ends(first: int, last: int, size: int) -> None:
    try:
        part = chosen(f"bytes={first}-{last}", size)
    except NoSuchRange:
        assert first >= size
        return
    whole = bytes(size)
    if last < first:
        assert part is None
    else:
        assert part is not None and part.step == 1
        assert len(whole[part.start : part.stop]) == len(part) == len(whole[first : last + 1]) > 0


@given(st.one_of(st.text(), st.text("bytes=-,0123456789 ").map(lambda text: f"bytes={text}")), st.integers(0, 200))
def test_any_header_gives_a_part_or_all_or_nothing(header: str, size: int) -> None:
    try:
        part = chosen(header, size)
    except NoSuchRange:
        return
    assert part is None or (0 <= part.start < part.stop <= size)


def test_if_none_match_names_by_any_of_its_tags() -> None:
    for header in ('"a"', 'W/"a"', '"b", "a"', '"b",W/"a" , "c"', "*", ' "a" '):
        assert is_listed(header, '"a"')
        assert is_listed(header, 'W/"a"')
    for other in (None, "", '"b"', "a", '"ab"', '"A"', "'a'"):
        assert not is_listed(other, '"a"')


def test_if_range_names_by_the_very_same_strong_tag() -> None:
    assert is_same(None, '"a"')
    assert is_same('"a"', '"a"')
    for header in ('W/"a"', '"b"', "*", '"a", "b"', "Wed, 21 Oct 2015 07:28:00 GMT", ""):
        assert not is_same(header, '"a"')
    assert not is_same('W/"a"', 'W/"a"')
