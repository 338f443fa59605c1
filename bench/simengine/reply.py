"""One HTTP reply as a value, and the error bodies made of it."""

import json
from typing import Final

import msgspec

JSON_TYPE: Final = b"application/json"
HTML_TYPE: Final = b"text/html; charset=utf-8"
TEXT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

_REASONS: Final[dict[int, bytes]] = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    404: b"Not Found",
    405: b"Method Not Allowed",
    413: b"Content Too Large",
    429: b"Too Many Requests",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
}

_ERROR_TYPES: Final[dict[int, str]] = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}

_encode = msgspec.json.Encoder().encode


class Reply(msgspec.Struct, frozen=True):
    """Status, body and headers of one answer, with the tokens it is charged for."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON_TYPE
    # Whole header lines, each ended by CRLF.
    headers: bytes = b""
    # Bytes that Content-Length promises beyond the body; the connection then closes early.
    missing_bytes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def wire_bytes(self, *, keep_alive: bool) -> bytes:
        """Return the reply as HTTP/1.1 bytes."""
        return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b%b\r\n%b" % (
            self.status,
            _REASONS[self.status],
            self.content_type,
            len(self.body) + self.missing_bytes,
            self.headers,
            b"" if keep_alive else b"Connection: close\r\n",
            self.body,
        )


def dump(value: object) -> bytes:
    """Return `value` as compact JSON; a lone surrogate in it becomes its escape."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def error_reply(
    status: int, message: str, *, param: str | None = None, code: str | None = None, headers: bytes = b""
) -> Reply:
    """Return an error in OpenAI's shape."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code or str(status)}
    return Reply(dump({"error": error}), status=status, headers=headers)
