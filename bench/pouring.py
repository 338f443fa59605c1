"""Sends a body of any size to a service on TCP, as fast as it is taken, and minds the answer only when it comes."""

import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

_PIECE_BYTES = 1 << 20
_PATIENCE_S = 60
_BOUNDARY = "----poured"


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request was answered: its status, its body, and how many bytes of the request's body had been taken."""

    status: int
    body: bytes
    taken: int


def pour(url: str, path: str, token: str, size: int, *, chunked: bool, form: bool = False) -> Answer:
    """Send `size` bytes of JSON Lines, in chunks or with their length first; in a form as OpenAI's files are sent.

    Sending ends where the service answers or hangs up.
    """
    parts = urlsplit(url)
    before, after = _form() if form else (b"", b"")
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(before) + size + len(after)}"
    kind = f"multipart/form-data; boundary={_BOUNDARY}" if form else "application/jsonl"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: {kind}\r\n{framing}\r\nConnection: close\r\n\r\n"
    )
    with socket.create_connection((parts.hostname or "", parts.port or 0), _PATIENCE_S) as connection:
        connection.sendall(head.encode())
        taken = 0
        with suppress(ConnectionError):
            for piece in _pieces(before, size, after):
                if select.select((connection,), (), (), 0)[0]:
                    break
                connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
                taken += len(piece)
            else:
                connection.sendall(b"0\r\n\r\n" if chunked else b"")
        status, body = _answer(connection)
    return Answer(status, body, taken)


def _form() -> tuple[bytes, bytes]:
    def part(what: str) -> str:
        return f"--{_BOUNDARY}\r\nContent-Disposition: form-data; {what}\r\n\r\n"

    before = part('name="purpose"') + "batch\r\n" + part('name="file"; filename="poured.jsonl"')
    return before.encode(), f"\r\n--{_BOUNDARY}--\r\n".encode()


def _pieces(before: bytes, size: int, after: bytes) -> Iterator[bytes]:
    line = b'{"custom_id":"poured","body":{"prompt":"%b"}}\n'
    piece = (line % (b"x" * (1024 - len(line) + 2))) * (_PIECE_BYTES // 1024)
    if before:
        yield before
    for start in range(0, size, len(piece)):
        yield piece[: size - start]
    if after:
        yield after


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    """Return the status and the body of what comes until the other side hangs up."""
    got = b""
    with suppress(ConnectionError):
        while piece := connection.recv(_PIECE_BYTES):
            got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0, body
