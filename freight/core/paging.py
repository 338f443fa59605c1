"""Lists in pages: what comes after a place in a sorted list, whether or not what stood there is there still."""

import math
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final, TypeVar

from freight.errors import UserError

T = TypeVar("T")
# A place in a list: what is sorted by, then by the id.
Place = tuple[float, str]
MOST_PAGE: Final = 1000
PAGE: Final = 100
ALL: Final = 1 << 62
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def cursor_of(place: Place) -> str:
    """Return a place as text, for `after`."""
    return f"{place[0]!r}~{place[1]}"


def place_of(text: str) -> Place:
    """Return the place that `cursor_of` made a text of; raise UserError for another text."""
    number, tilde, name = text.partition("~")
    try:
        at = float(number) if tilde and number.isascii() and "_" not in number else math.nan
    except ValueError:
        at = math.nan
    if not math.isfinite(at):
        raise no_cursor(text)
    return at, name


def no_cursor(text: str) -> UserError:
    """Return the error of a text that is no place in a list."""
    return UserError(f"after: {text!r} is no cursor of this list", "pass what `next` said")


def page_of(
    things: Iterable[T], place: Callable[[T], Place], limit: int, after: str | None
) -> tuple[list[T], str | None]:
    """Return up to `limit` of the things that come after a place, sorted, and the place where the next page begins.

    That is None at the end. Raises UserError for an `after` that is no place.
    """
    since = None if after is None else place_of(after)
    left = sorted((each for each in things if since is None or place(each) > since), key=place)
    return left[:limit], cursor_of(place(left[limit - 1])) if len(left) > limit else None


def time_of(name: str, text: str) -> float:
    """Return the time that a parameter `name` says as RFC 3339, in seconds; raise UserError for another text."""
    try:
        if not _TIME.fullmatch(text):
            raise ValueError
        return datetime.fromisoformat(text.upper()).timestamp()
    except (ValueError, OverflowError):
        hint = "write it as 2030-01-31T12:00:00Z; in a URL, a + of the time zone is %2B"
        raise UserError(f"{name}: {text!r} is no time", hint) from None
