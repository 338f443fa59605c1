"""JSON as bytes: check it, find values in it and write into it without re-encoding anything.

A record's body must reach the engine byte for byte, and an answer must come back so. Decoding and
encoding again would change numbers, escapes and duplicate keys; these functions work on the text.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import msgspec

MAX_DEPTH: Final = 512

_STRING: Final = rb'"(?:[^"\\]|\\.)*+"'
_STRINGS: Final = re.compile(_STRING, re.DOTALL)
_TOKENS: Final = re.compile(_STRING + rb"|[\[\]{}:,]", re.DOTALL)
_NOT_BRACKETS: Final = bytes(c for c in range(256) if c not in b"[]{}")
_WHITESPACE: Final = b" \t\r\n"
# Escapes in the order they stand: a surrogate pair, a surrogate alone (group 1), any other.
_ESCAPES: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_REENCODE: Final = re.compile(_STRING + rb"|[ \t\r\n]+|-?Infinity|NaN", re.DOTALL)
# How strings and white space begin.
_KEPT: Final = b'"' + _WHITESPACE


class NotJson(Exception):
    """The bytes are not one strict JSON value: `reason`, and the character `column` (from 1) where known."""

    def __init__(self, reason: str, column: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.column = column


def without_lone_surrogates(text: bytes) -> bytes:
    r"""Return JSON of the same length in which every escape of a surrogate alone reads \ufffd.

    Such escapes are legal JSON, but no decoder here takes them.
    """

    def escape(match: re.Match[bytes]) -> bytes:
        return b"\\ufffd" if match.group(1) else match.group()

    return _ESCAPES.sub(escape, text)


def check(text: bytes) -> None:
    """Raise NotJson unless `text` is one strict JSON value: UTF-8, no NaN, at most 512 levels deep."""
    check_utf8(text)
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        explain(text)
    check_depth(text)


def check_utf8(text: bytes) -> None:
    """Raise NotJson, with the column, when `text` is not UTF-8."""
    if text.isascii():
        return
    try:
        text.decode()
    except UnicodeDecodeError as error:
        column = len(text[: error.start].decode()) + 1
        raise NotJson(f"byte 0x{text[error.start]:02x} is not UTF-8", column) from None


def check_depth(text: bytes) -> None:
    """Raise NotJson when `text`, valid JSON, nests deeper than 512 levels."""
    # Every level takes two bytes.
    if len(text) <= 2 * MAX_DEPTH or text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for byte in _STRINGS.sub(b"", text).translate(None, _NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > MAX_DEPTH:
            raise NotJson(f"nested deeper than {MAX_DEPTH} levels")


def explain(text: bytes) -> None:
    """Raise NotJson saying why a decoder refused `text`; return where only lone surrogates did."""
    try:
        check_utf8(text)
        msgspec.json.decode(without_lone_surrogates(text), type=msgspec.Raw)
    except RecursionError:
        raise NotJson(f"nested deeper than {MAX_DEPTH} levels") from None
    except msgspec.DecodeError as error:
        raise _located(text, str(error)) from None


def _located(text: bytes, fallback: str) -> NotJson:
    """Return the refusal in the standard library's words, which name the place."""

    def constant(name: str) -> NoReturn:
        raise NotJson(f"{name} is not JSON (use null)", _column(text, text.find(name.encode())))

    try:
        # Decoded here: from bytes it would guess an encoding, by their zeros.
        json.loads(text.decode(), parse_constant=constant, parse_int=str)
    except NotJson as error:
        return error
    except json.JSONDecodeError as error:
        words = "a byte order mark" if "BOM" in error.msg else error.msg.removesuffix(" at")
        return NotJson(words[:1].lower() + words[1:], error.pos + 1)
    except RecursionError:
        return NotJson(f"nested deeper than {MAX_DEPTH} levels")
    at = re.search(r"\(byte (\d+)\)", fallback)
    return NotJson(fallback.removeprefix("JSON is malformed: "), _column(text, int(at.group(1)) if at else -1))


def _column(text: bytes, offset: int) -> int | None:
    return None if offset < 0 else len(text[:offset].decode(errors="replace")) + 1


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an object: its key and the span of its value's bytes."""

    key: str
    start: int
    end: int


def members(text: bytes) -> Iterator[Member]:
    """Yield the members of `text`, a valid JSON object, in order; duplicate keys each once."""
    depth, key, value_start, last = 0, None, -1, b""
    for token in _TOKENS.finditer(text):
        mark = token.group()
        if mark in (b"{", b"["):
            depth += 1
        elif depth == 1 and mark == b":":
            key, value_start = text_of(last), token.end()
        elif depth == 1 and mark in (b",", b"}"):
            if key is not None:
                yield _member(text, key, value_start, token.start())
            key = None
            depth -= mark == b"}"
        elif mark in (b"}", b"]"):
            depth -= 1
        last = mark


def _member(text: bytes, key: str, start: int, end: int) -> Member:
    value = text[start:end]
    start += len(value) - len(value.lstrip(_WHITESPACE))
    return Member(key, start, start + len(value.strip(_WHITESPACE)))


def text_of(token: bytes) -> str:
    """Return the string that a JSON string token stands for; lone surrogates stay as they are."""
    return json.loads(token)


def one_line(text: bytes) -> bytes:
    """Return `text` as one line of strict JSON: its own bytes where they are that already.

    Otherwise the same value with white space between tokens taken out and NaN and Infinity as null.
    Raises NotJson when no such reading exists.
    """
    text = text.strip(_WHITESPACE)
    try:
        if b"\n" in text or b"\r" in text:
            raise NotJson("not one line")
        check(text)
        return text
    except NotJson:
        check_utf8(text)
        strict = _REENCODE.sub(lambda m: m.group() if m.group()[:1] in _KEPT else b"null", text)
        # Before white space goes: without it, [1 2] would read as [12].
        check(strict)
        return _REENCODE.sub(lambda m: b"" if m.group()[:1] in _WHITESPACE else m.group(), strict)


def encode_text(value: str) -> bytes:
    """Return `value` as a JSON string; lone surrogates become U+FFFD."""
    return msgspec.json.encode(value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def decode_any(text: bytes) -> Any:
    """Return `text`, valid JSON, as Python values; objects as lists of (key, value), so that no duplicate hides."""
    return json.loads(text, object_pairs_hook=Pairs, parse_int=str, parse_float=str)


class Pairs(list[tuple[str, Any]]):
    """A JSON object as the list of its members."""
