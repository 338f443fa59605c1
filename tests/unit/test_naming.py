"""Names of jobs."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.control.naming import check_name, readable_name
from freight.errors import UserError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


@given(st.sampled_from(LETTERS), st.text(LETTERS + "_.-", max_size=63))
def test_letters_digits_and_three_marks_make_a_name(first: str, rest: str) -> None:
    check_name(first + rest)


@given(st.text(max_size=70))
def test_nothing_else_makes_a_name(text: str) -> None:
    good = 0 < len(text) <= 64 and text[0] in LETTERS and not set(text) - set(LETTERS + "_.-")
    if good:
        check_name(text)
    else:
        with pytest.raises(UserError, match="cannot be a job's name"):
            check_name(text)


@pytest.mark.parametrize("bad", ["", ".", "..", "-a", "_a", ".a", "a/b", "a b", "a\n", "é", "٣", "a" * 65])
def test_a_name_that_could_mislead_is_refused_with_the_rule(bad: str) -> None:
    with pytest.raises(UserError) as refused:
        check_name(bad)

    assert "64" in (refused.value.hint or "")


@given(st.integers())
def test_readable_names_are_names(seed: int) -> None:
    name = readable_name(random.Random(seed).choice, lambda name: False)

    check_name(name)
    assert re.fullmatch(r"[a-z]+-[a-z]+-[2-9][a-z2-9]", name)


@given(st.integers())
def test_readable_names_avoid_those_that_are_taken(seed: int) -> None:
    first = readable_name(random.Random(seed).choice, lambda name: False)

    assert readable_name(random.Random(seed).choice, {first}.__contains__) != first
