"""Reading HTTP answers out of the pieces in which they come, within limits. It does no I/O."""

import re
import zlib
from dataclasses import dataclass
from math import inf
from typing import Final

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

# An answer may have so many bytes, unpacked; no model writes as much.
MOST_ANSWER_BYTES: Final = 64_000_000
# So many may come of an answer without a byte of its body among them.
MOST_HEAD_BYTES: Final = 65_536
_READ: Final = frozenset(
    (b"x-request-id", b"retry-after", b"content-length", b"transfer-encoding", b"content-encoding", b"keep-alive")
)
_IDLE: Final = re.compile(rb"\btimeout\s*=\s*(\d{1,9})\b", re.IGNORECASE)
# As zlib wants to be told of them; a deflate stream comes with zlib's head or bare.
_GZIP, _ZLIB, _BARE = 31, 15, -15


@dataclass(frozen=True, slots=True)
class HttpReply:
    """What a server answered. `retry_after` is the header as it came; `request_id` is "" when it gave none."""

    status: int
    body: bytes
    request_id: str
    retry_after: str | None


class Unreachable(Exception):
    """No complete answer came; the text says why, in a few words and without the request."""


class NoAnswer(Unreachable):
    """The connection ended before a byte of the answer came."""


class NeverSent(Unreachable):
    """The server never saw the request: there was no connection to send it on."""


class TooLarge(Exception):
    """The answer has more bytes than are taken."""


class TookTooLong(Exception):
    """The request's own time limit ran out."""


class AnswerReader:
    """Reads the answers of one connection, one for each `expect`. `keeps`: another may follow the last.

    `idle_s`: for how many seconds the server keeps the connection without a request, as far as it says.
    """

    def __init__(self, most_bytes: int = MOST_ANSWER_BYTES) -> None:
        self._most_bytes = most_bytes
        self._parser = HttpResponseParser(self)
        # What servers get wrong without harm to anybody: lines that end with LF alone, odd bytes in a header.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        self.expect()

    def expect(self) -> None:
        """Make ready for the next answer."""
        self.keeps = False
        self.idle_s = inf
        self._reply: HttpReply | None = None
        self._problem: Unreachable | TooLarge | None = None
        self._head_bytes = self._silent_bytes = self._body_bytes = 0
        self._first = b""
        self._body: bytearray | None = None  # Once there is more than one piece.
        self._begin_head()

    def _begin_head(self) -> None:
        self._in_body = False
        self._is_framed = False  # Its head says where it ends.
        self._unpacker: _Unpacker | None = None
        self._request_id = ""
        self._retry_after: str | None = None

    def feed(self, data: bytes) -> HttpReply | None:
        """Take the next piece; return the answer once it is whole. Raises Unreachable or TooLarge, for good."""
        self._silent_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if self._reply is None:
                # Not the parser's own text, which might quote what the server sent.
                raise self._problem or _not_http(type(error).__name__) from error
            self.keeps = False  # Bytes that nobody asked for.
        if self._reply is None and self._silent_bytes > MOST_HEAD_BYTES:
            raise _not_http("no end of its head")
        return self._reply

    def end(self) -> HttpReply:
        """Return the answer that is whole by the connection's orderly end; raise Unreachable when none is."""
        if not self._in_body or self._is_framed:
            raise self.broken()
        self.on_message_complete()
        assert self._reply is not None
        self.keeps = False
        return self._reply

    def broken(self) -> Unreachable:
        """Return what to say when the connection is lost before the answer is whole."""
        if self._in_body:
            return Unreachable("the answer broke off")
        return (Unreachable if self._silent_bytes else NoAnswer)("the connection was closed")

    # The parser calls the rest. It drops what they raise, so that they leave it in `_problem`.

    def on_message_begin(self) -> None:
        """Refuse an answer to no request."""
        if self._reply is not None:
            raise _not_http("unasked")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note what is needed of a header."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MOST_HEAD_BYTES:
            raise self._refused(_not_http("its head is too long"))
        name = name.lower()
        # What comes after the body is not heeded.
        if name in _READ and not self._in_body:
            self._note(name, value.strip())

    def _note(self, name: bytes, value: bytes) -> None:
        match name:
            case b"x-request-id":
                self._request_id = self._request_id or value.decode(errors="replace")
            case b"retry-after":
                self._retry_after = self._retry_after or value.decode(errors="replace")
            case b"keep-alive":
                if said := _IDLE.search(value):
                    self.idle_s = float(said[1])
            case b"content-encoding":
                if value.lower() not in (b"", b"identity"):
                    self._unpacker = _Unpacker(value.lower(), self._unpacker)
            case b"transfer-encoding" if value.lower() != b"chunked":
                raise self._refused(_not_http("a transfer encoding that nobody asked for"))
            case _:
                self._is_framed = True

    def on_headers_complete(self) -> None:
        """Go on to the body, unless this is but word that the answer will come."""
        status = self._parser.get_status_code()
        if status < 100:
            raise self._refused(_not_http("no status"))
        self._in_body = status >= 200

    def on_body(self, piece: bytes) -> None:
        """Keep a piece of the body, unpacked."""
        if not self._in_body:
            return
        self._silent_bytes = 0
        if self._unpacker is not None:
            try:
                piece = self._unpacker.unpack(piece, self._most_bytes - self._body_bytes + 1)
            except (zlib.error, ValueError):
                raise self._refused(Unreachable("its answer cannot be unpacked")) from None
        self._body_bytes += len(piece)
        if self._body_bytes > self._most_bytes:
            raise self._refused(TooLarge())
        if self._body is not None:
            self._body += piece
        elif self._first:
            self._body = bytearray(self._first) + piece
        else:
            self._first = piece

    def on_message_complete(self) -> None:
        """Put the answer together."""
        if not self._in_body:
            self._begin_head()
            return
        if self._unpacker is not None and not self._unpacker.is_whole():
            raise self._refused(Unreachable("the answer broke off"))
        self.keeps = self._parser.should_keep_alive()
        body = self._first if self._body is None else bytes(self._body)
        self._reply = HttpReply(self._parser.get_status_code(), body, self._request_id, self._retry_after)
        self._first, self._body = b"", None

    def _refused(self, problem: Unreachable | TooLarge) -> Unreachable | TooLarge:
        self._problem = problem
        return problem


class _Unpacker:
    """Unpacks a body as it comes, whichever of its usual codings it has."""

    def __init__(self, coding: bytes, earlier: "_Unpacker | None") -> None:
        self._coding = coding if earlier is None else b"several"
        self._stream = None

    def unpack(self, piece: bytes, most_bytes: int) -> bytes:
        """Return at most so many bytes of what is in the next piece; raise ValueError or zlib.error when it is bad."""
        if self._stream is None:
            self._stream = zlib.decompressobj(self._format(piece))
        unpacked = self._stream.decompress(piece, most_bytes)
        if self._stream.unused_data:
            raise ValueError("something follows the body")
        return unpacked

    def _format(self, piece: bytes) -> int:
        if self._coding in (b"gzip", b"x-gzip"):
            return _GZIP
        if self._coding == b"deflate":
            return _ZLIB if piece[0] & 0xF == zlib.DEFLATED else _BARE
        raise ValueError("a coding that nobody asked for")

    def is_whole(self) -> bool:
        """Return whether nothing is missing."""
        return self._stream is None or self._stream.eof


def _not_http(why: str) -> Unreachable:
    return Unreachable(f"its answer is not HTTP ({why})")
