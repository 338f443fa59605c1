"""Reading answers: whatever the pieces they come in, within limits, and nothing that is not theirs."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.engines.answers import MOST_HEAD_BYTES, AnswerReader, HttpReply, TooLarge, Unreachable

SECRET = b"the-record-itself"
HEAD = b"HTTP/1.1 200 OK\r\n"
TEXT = b'{"text":"' + b"words and words " * 40 + b'"}'


def with_length(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/1.1 " + status, *headers, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*chunks: bytes, headers: bytes = b"", trailer: bytes = b"") -> bytes:
    sent = b"".join(b"%x;note=a\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return HEAD + headers + b"Transfer-Encoding: chunked\r\n\r\n" + sent + b"0\r\n" + trailer + b"\r\n"


def open_ended(body: bytes) -> bytes:
    return HEAD + b"\r\n" + body


def bare_deflate(text: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(text) + packer.flush()


# What is sent, the answer in it, and whether the connection is good for another.
GOOD: dict[str, tuple[bytes, HttpReply, bool]] = {
    "with a length": (with_length(TEXT), HttpReply(200, TEXT, "", None), True),
    "headers that are kept": (
        with_length(b"no", b"RETRY-after:  7 ", b"X-Request-ID: r-1", status=b"429 Too Many Requests"),
        HttpReply(429, b"no", "r-1", "7"),
        True,
    ),
    "in chunks": (chunked(TEXT[:5], TEXT[5:]), HttpReply(200, TEXT, "", None), True),
    "a header after the chunks": (
        chunked(b"ok", trailer=b"X-Request-Id: x\r\n"),
        HttpReply(200, b"ok", "", None),
        True,
    ),
    "no text": (b"HTTP/1.1 204 No Content\r\n\r\n", HttpReply(204, b"", "", None), True),
    "not modified": (b"HTTP/1.1 304 x\r\nContent-Length: 9\r\n\r\n", HttpReply(304, b"", "", None), True),
    "empty": (with_length(b"", b"Content-Encoding: gzip"), HttpReply(200, b"", "", None), True),
    "word ahead": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nX-Request-Id: early\r\n\r\n" + with_length(b"ok"),
        HttpReply(200, b"ok", "", None),
        True,
    ),
    "no reason, lines of LF": (b"HTTP/1.1 200\nContent-Length: 2\n\nok", HttpReply(200, b"ok", "", None), True),
    "to be closed": (with_length(b"ok", b"Connection: close"), HttpReply(200, b"ok", "", None), False),
    "old": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", HttpReply(200, b"ok", "", None), False),
    "old and kept": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        HttpReply(200, b"ok", "", None),
        True,
    ),
    "gzip": (with_length(gzip.compress(TEXT), b"Content-Encoding: gzip"), HttpReply(200, TEXT, "", None), True),
    "deflate": (with_length(zlib.compress(TEXT), b"Content-Encoding: Deflate"), HttpReply(200, TEXT, "", None), True),
    "bare deflate": (
        with_length(bare_deflate(TEXT), b"Content-Encoding: deflate"),
        HttpReply(200, TEXT, "", None),
        True,
    ),
    "unpacked": (with_length(b"ok", b"Content-Encoding: identity"), HttpReply(200, b"ok", "", None), True),
    "an upgrade that is offered": (
        with_length(b"ok", b"Connection: upgrade", b"Upgrade: h2c"),
        HttpReply(200, b"ok", "", None),
        True,
    ),
}
# Those whose end is the connection's.
OPEN_ENDED = (open_ended(TEXT), b"HTTP/1.0 200 OK\r\n\r\n" + TEXT)
GZIPPED = gzip.compress(TEXT)
BAD: dict[str, bytes] = {
    "another protocol": b"220 " + SECRET + b"\r\n",
    "no version": b"HTTP/x 200 OK\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 17\r\n\r\n" + SECRET,
    "a length and chunks": HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n11\r\n" + SECRET,
    "a length that is none": HEAD + b"Content-Length: " + SECRET + b"\r\n\r\n",
    "a chunk's length that is none": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + SECRET + b"\r\n",
    "a transfer encoding that nobody asked for": HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + SECRET,
    "a switch of protocols": b"HTTP/1.1 101 x\r\nConnection: upgrade\r\nUpgrade: " + SECRET + b"\r\n\r\n" + SECRET,
    "a long header": HEAD + b"X-Long: " + SECRET * (MOST_HEAD_BYTES // 16),
    "many headers": HEAD + (b"X-Long: " + SECRET + b"\r\n") * (MOST_HEAD_BYTES // 20),
    "a long head that ends": HEAD + (b"X-Long: " + SECRET + b"\r\n") * (MOST_HEAD_BYTES // 20) + b"\r\n",
    "a long head with its body": HEAD
    + (b"X-Long: " + SECRET + b"\r\n") * (MOST_HEAD_BYTES // 20)
    + b"Content-Length: 2\r\n\r\nok",
    "no status": b"HTTP/1.1 099 x\r\nContent-Length: 0\r\n\r\n",
    "empty lines only": b"\r\n" * MOST_HEAD_BYTES,
    "word ahead without end": b"HTTP/1.1 102 Processing\r\n\r\n" * (MOST_HEAD_BYTES // 24),
    "headers after the chunks without end": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Long: "
    + SECRET * 40_000,
}
UNPACKED_BADLY: dict[str, bytes] = {
    "brotli": with_length(SECRET, b"Content-Encoding: br"),
    "twice": with_length(GZIPPED, b"Content-Encoding: gzip, gzip"),
    "twice, in two headers": with_length(GZIPPED, b"Content-Encoding: gzip", b"Content-Encoding: gzip"),
    "not packed": with_length(SECRET, b"Content-Encoding: gzip"),
    "something after it": with_length(GZIPPED + SECRET, b"Content-Encoding: gzip"),
}


def read(sent: bytes, cuts: list[int], most_bytes: int = 1_000_000) -> tuple[HttpReply | None, bool]:
    """Feed an answer cut at these places; return what was read, and whether the connection is good for more."""
    reader = AnswerReader(most_bytes)
    places = sorted({0, len(sent), *(cut % len(sent) for cut in cuts)})
    reply = None
    for start, end in pairwise(places):
        assert reply is None
        reply = reader.feed(sent[start:end])
    return reply, reader.keeps


@given(st.sampled_from(sorted(GOOD)), st.lists(st.integers(0, 5_000), max_size=30))
def test_answer_is_the_same_whatever_pieces_it_comes_in(name: str, cuts: list[int]) -> None:
    sent, reply, keeps = GOOD[name]
    assert read(sent, cuts) == (reply, keeps)


@pytest.mark.parametrize("name", GOOD)
def test_answer_may_come_byte_by_byte_and_another_may_follow(name: str) -> None:
    sent, reply, keeps = GOOD[name]
    assert read(sent, list(range(len(sent)))) == (reply, keeps)
    if keeps:
        reader = AnswerReader()
        for _ in range(3):
            reader.expect()
            assert (reader.feed(sent), reader.keeps) == (reply, True)
        reader.expect()
        assert reader.feed(with_length(b"last")) == HttpReply(200, b"last", "", None)


@pytest.mark.parametrize("form", [with_length, chunked])
def test_long_answer_may_come_in_many_pieces(form: Callable[[bytes], bytes]) -> None:
    sent = form(TEXT * 1000)
    reply, keeps = read(sent, list(range(0, len(sent), 1000)))
    assert (reply, keeps) == (HttpReply(200, TEXT * 1000, "", None), True)


@pytest.mark.parametrize("sent", OPEN_ENDED)
def test_answer_without_a_length_ends_with_the_connection(sent: bytes) -> None:
    reader = AnswerReader()
    assert reader.feed(sent) is None
    assert reader.end() == HttpReply(200, TEXT, "", None)
    assert not reader.keeps


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"", "the connection was closed"),
        (HEAD, "the connection was closed"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "the connection was closed"),
        (with_length(TEXT)[:-1], "the answer broke off"),
        (chunked(TEXT)[:-2], "the answer broke off"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", "the answer broke off"),
        (HEAD + b"Content-Encoding: gzip\r\n\r\n" + GZIPPED[:-1], "the answer broke off"),
    ],
)
def test_part_of_an_answer_is_none(sent: bytes, words: str) -> None:
    reader = AnswerReader()
    assert reader.feed(sent) is None
    with pytest.raises(Unreachable, match=words):
        reader.end()


def test_packed_answer_of_which_a_part_is_missing_is_none() -> None:
    with pytest.raises(Unreachable, match="broke off"):
        read(with_length(GZIPPED[:-9], b"Content-Encoding: gzip"), [])


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_http_is_refused_and_not_quoted(name: str) -> None:
    sent = BAD[name]
    for piece_bytes in (262_144, 1000):
        reader = AnswerReader()
        with pytest.raises(Unreachable, match="its answer is not HTTP") as raised:
            for start in range(0, len(sent), piece_bytes):
                assert reader.feed(sent[start : start + piece_bytes]) is None
        assert SECRET.decode() not in str(raised.value)


@pytest.mark.parametrize("name", UNPACKED_BADLY)
def test_what_cannot_be_unpacked_is_refused_and_not_quoted(name: str) -> None:
    with pytest.raises(Unreachable, match="its answer cannot be unpacked") as raised:
        read(UNPACKED_BADLY[name], [])
    assert SECRET.decode() not in str(raised.value)


@pytest.mark.parametrize("form", [with_length, chunked, open_ended])
def test_answer_beyond_the_limit_is_too_large_and_one_at_it_is_not(form: Callable[[bytes], bytes]) -> None:
    reader = AnswerReader(1000)
    reply = reader.feed(form(b"x" * 1000))
    assert (reply or reader.end()).body == b"x" * 1000
    with pytest.raises(TooLarge):
        read(form(b"x" * 1001), [], 1000)


@pytest.mark.parametrize("packed", [gzip.compress, zlib.compress])
def test_limit_holds_for_what_is_unpacked_and_no_more_is_unpacked_than_that(packed: Callable[[bytes], bytes]) -> None:
    coding = b"Content-Encoding: " + (b"gzip" if packed is gzip.compress else b"deflate")
    reply, _ = read(with_length(packed(b"x" * 1000), coding), [], 1000)
    assert reply is not None
    assert reply.body == b"x" * 1000
    with pytest.raises(TooLarge):
        read(with_length(packed(b"x" * 1001), coding), [], 1000)
    bomb = with_length(packed(b"x" * 50_000_000), coding)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            read(bomb, [], 1000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("more", [b"x", with_length(SECRET), b"HTTP/1.1 100 Continue\r\n\r\n"])
@pytest.mark.parametrize("first", [with_length(b"ok"), with_length(b"ok", b"Connection: close"), chunked(b"ok")])
def test_bytes_after_an_answer_end_the_connection_and_are_not_the_next_answer(first: bytes, more: bytes) -> None:
    assert read(first + more, []) == (HttpReply(200, b"ok", "", None), False)
