"""A form with a file in it, however it is cut into pieces on its way."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.api.fileform import FileForm
from freight.errors import UserError

BOUNDARY = b"cut-here"
KIND = f"multipart/form-data; boundary={BOUNDARY.decode()}"
# What was read: the file, its name and the fields; or what the form was refused for.
Read = tuple[bytes, str | None, dict[str, str]] | str


def form(*parts: tuple[str, bytes], end: bytes = b"--" + BOUNDARY + b"--\r\n") -> bytes:
    """Return a form of parts, each with what stands after form-data in its header, and its content."""
    made = b"".join(
        b"--" + BOUNDARY + b"\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + content + b"\r\n"
        for head, content in parts
    )
    return made + end


def read(pieces: Sequence[bytes]) -> Read:
    """Read a form that comes in pieces."""
    taken: list[bytes] = []

    def check(name: str, text: str) -> None:
        if text == "wrong":
            raise UserError(f"{name} is wrong")

    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def scenario() -> Read:
        reader = FileForm(KIND, ("purpose", "note"), check)
        async for piece in reader.file(body()):
            taken.append(piece)
        return b"".join(taken), reader.filename, reader.fields

    try:
        return asyncio.run(scenario())
    except UserError as error:
        return error.message


def cut(body: bytes, places: Sequence[int]) -> list[bytes]:
    """Return a body in pieces that begin at the places."""
    ends = sorted({0, len(body), *(place % (len(body) + 1) for place in places)})
    return [body[start:end] for start, end in pairwise(ends)]


LIKE_ENDS = st.sampled_from([b"\r\n--cut-here", b"\r\n--cut-her", b"\r\n", b"--", b"\r", b"\n--cut-here--", b"-"])
CONTENT = st.lists(st.binary(max_size=8) | LIKE_ENDS, max_size=8).map(b"".join)
PARTS = st.lists(
    st.tuples(
        st.sampled_from(['name="file"; filename="a"', 'name="file"', 'name="purpose"', 'name="note"', 'name="x"', ""]),
        st.sampled_from([b"batch", b"wrong", b"\xff", b""]) | CONTENT,
    ),
    max_size=4,
)  # fmt: skip
PLACES = st.lists(st.integers(0, 1000), max_size=12)


@given(PARTS, st.sampled_from([b"", b"--cut-here--", b"--cut-here--\r\n", b"--cut-here--\r\nand more"]), PLACES)
def test_form_reads_the_same_however_it_is_cut(parts: list[tuple[str, bytes]], end: bytes, places: list[int]) -> None:
    body = form(*parts, end=end)

    whole = read([body])

    assert read(cut(body, places)) == whole
    assert read([body[at : at + 1] for at in range(len(body))]) == whole


@given(st.binary(max_size=300).filter(lambda content: b"\r\n--" + BOUNDARY not in content), PLACES)
def test_file_comes_out_as_it_went_in(content: bytes, places: list[int]) -> None:
    body = form(('name="purpose"', b"batch"), ('name="file"; filename="a b"', content), ('name="note"', b"n"))

    assert read(cut(body, places)) == (content, "a b", {"purpose": "batch", "note": "n"})


@given(st.binary(max_size=200), PLACES)
def test_whatever_is_sent_is_a_form_or_refused_in_words(noise: bytes, places: list[int]) -> None:
    for body in (noise, form(end=noise), form(('name="file"', b"x"), end=noise)):
        assert read(cut(body, places))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (form(), "no file"),
        (form(('name="file"', b"x"), end=b""), "cut off"),
        (form(('name="file"', b"x"), ('name="file"', b"y")), "several files"),
        (form(('name="note"', b"1"), ('name="note"', b"2")), "several fields note"),
        (form(('name="note"', b"wrong")), "note is wrong"),
        (form(('name="note"', b"\xff")), "not UTF-8"),
        (form(('name="x"', b"x" * 70_000), ('name="file"', b"y")), "beside its file"),
        (form(('name="file"', b"y"), end=b"--cut-here--" + b"x" * 70_000), "beside its file"),
        (form(*[('name="x"', b"")] * 2000), "beside its file"),
        (form(('name="file"; filename="' + "x" * 70_000 + '"', b"y")), "broken"),
    ],
)
def test_what_is_wrong_with_a_form_is_said(body: bytes, words: str) -> None:
    for pieces in ([body], cut(body, range(0, len(body), 1000))):
        said = read(pieces)
        assert isinstance(said, str) and words in said


def test_field_that_is_wrong_is_told_before_the_file_comes() -> None:
    seen: list[bytes] = []

    async def body() -> AsyncIterator[bytes]:
        for piece in (form(('name="note"', b"wrong"), ('name="file"', b"x"), end=b""), b"more"):
            seen.append(piece)
            yield piece

    def check(name: str, text: str) -> None:
        raise UserError(f"{name}={text}")

    async def scenario() -> None:
        async for _ in FileForm(KIND, ("note",), check).file(body()):
            pass

    with pytest.raises(UserError, match="note=wrong"):
        asyncio.run(scenario())
    assert len(seen) == 1


@pytest.mark.parametrize(
    "kind",
    [
        None, "", "application/json", "multipart/form-data", "multipart/form-data; boundary=",
        "multipart/mixed; boundary=x", "multipart/form-data; boundary=" + "x" * 300,
    ],
)  # fmt: skip
def test_body_that_is_no_form_is_refused_at_once(kind: str | None) -> None:
    with pytest.raises(UserError):
        FileForm(kind, (), lambda name, text: None)
