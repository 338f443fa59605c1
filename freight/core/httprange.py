"""Parts of what is downloaded, and whether it is still the same: the headers of RFC 9110, and nothing of HTTP's."""

import re
from typing import Final

_UNIT: Final = re.compile(r"\s*bytes\s*=(?P<ranges>.*)", re.IGNORECASE | re.ASCII | re.DOTALL)
_RANGE: Final = re.compile(r"(?P<first>[0-9]*)-(?P<last>[0-9]*)")
_TAG: Final = re.compile(r'(?:W/)?("[\x21\x23-\x7e\x80-\xff]*")')
# Numbers of more digits are beyond the end of any file.
_MOST_DIGITS: Final = 18
_BEYOND: Final = 10**_MOST_DIGITS


class NoSuchRange(Exception):
    """None of the bytes that are asked for is there."""


def chosen(header: str | None, size: int) -> range | None:
    """Return which of `size` bytes a Range header asks for; None for all of them.

    A header that is not understood, or that asks for several ranges, asks for all. Raises NoSuchRange.
    """
    match = _RANGE.fullmatch(_only(header)) if header is not None else None
    if match is None or match[0] == "-":
        return None
    if not match["first"]:
        return _ending(_number(match["last"]), size)
    first = _number(match["first"])
    last = _number(match["last"]) if match["last"] else _BEYOND
    if last < first:
        return None
    if first >= size:
        raise NoSuchRange
    return range(first, min(last + 1, size))


def _ending(count: int, size: int) -> range | None:
    """Return the last `count` bytes."""
    if not count:
        raise NoSuchRange
    # There is no way to name a part of nothing.
    return range(max(0, size - count), size) if size else None


def _only(header: str) -> str:
    """Return the one range that a header asks for, "" where it is not one."""
    unit = _UNIT.fullmatch(header)
    ranges = [each for part in unit["ranges"].split(",") if (each := part.strip(" \t"))] if unit else []
    return ranges[0] if len(ranges) == 1 else ""


def _number(digits: str) -> int:
    digits = digits.lstrip("0")
    return int(digits or "0") if len(digits) <= _MOST_DIGITS else _BEYOND


def is_listed(header: str | None, etag: str) -> bool:
    """Return whether an If-None-Match header names what has this ETag, strong or weak."""
    if header is None:
        return False
    opaque = etag.removeprefix("W/")
    return header.strip() == "*" or opaque in _TAG.findall(header)


def is_same(header: str | None, etag: str) -> bool:
    """Return whether an If-Range header, where there is one, names what has this ETag, which must be a strong one."""
    return header is None or (header.strip() == etag and etag.startswith('"'))
