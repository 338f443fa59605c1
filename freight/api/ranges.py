"""Downloads that can be taken in parts, and answers that are not sent again while they are the same."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import msgspec
from fastapi import Request, Response
from starlette.responses import Response as Bare

from freight.api.front import refuse
from freight.api.replies import ClosingResponse
from freight.control.streams import ResultStream
from freight.core.httprange import NoSuchRange, chosen, is_listed, is_same
from freight.core.view import DONE_HEADER, STATE_HEADER, TOTAL_HEADER

_JSON: Final = "application/json"
# What such a route answers beside 200, for its description.
IN_PARTS: Final[dict[int | str, dict[str, Any]]] = {
    206: {"description": "The part that Range asks for."},
    304: {"description": "If-None-Match names what is there."},
    416: {"description": "Nothing of the part that Range asks for is there."},
}
UNCHANGED: Final[dict[int | str, dict[str, Any]]] = {304: IN_PARTS[304]}


class Download(Protocol):
    """What is downloaded; `size`, `etag` and `part` are None where it is not known yet what it will be."""

    @property
    def pieces(self) -> Iterator[bytes]: ...
    @property
    def close(self) -> Callable[[], None]: ...
    @property
    def size(self) -> int | None: ...
    @property
    def etag(self) -> str | None: ...
    @property
    def part(self) -> Callable[[range], Iterator[bytes]] | None: ...


def download(request: Request, stream: ResultStream, media_type: str, headers: dict[str, str] | None = None) -> Bare:
    """Return results, or the part of them that is asked for; of a job that has not ended always all there is."""
    told = {DONE_HEADER: str(stream.done), TOTAL_HEADER: str(stream.total), STATE_HEADER: stream.state}
    return sent(request, stream, media_type, {**told, **(headers or {})})


def sent(request: Request, stream: Download, media_type: str, headers: dict[str, str]) -> Bare:
    """Return what is downloaded, or the part of it that is asked for; it is closed when it was sent, or is not."""
    try:
        answer, is_sent = _answer(request, stream, media_type, headers)
    except BaseException:
        stream.close()
        raise
    if not is_sent:
        stream.close()
    return answer


def _answer(request: Request, stream: Download, media_type: str, headers: dict[str, str]) -> tuple[Bare, bool]:
    """Return the answer, and whether it reads the stream."""
    is_head = request.method == "HEAD"
    if stream.etag is None or stream.size is None or stream.part is None:
        headers["accept-ranges"] = "none"
        if is_head:
            return _head(media_type, headers), False
        return ClosingResponse(stream.close, stream.pieces, headers=headers, media_type=media_type), True
    headers |= {"accept-ranges": "bytes", "etag": stream.etag}
    if is_listed(request.headers.get("if-none-match"), stream.etag):
        return Bare(status_code=304, headers=headers), False
    if is_head:
        return _head(media_type, {**headers, "content-length": str(stream.size)}), False
    try:
        part = _asked(request, stream.etag, stream.size)
    except NoSuchRange:
        headers |= {"content-range": f"bytes */{stream.size}"}
        words = f"the range {request.headers['range'][:100]!r} has none of the {stream.size} bytes"
        hint = f"ask for some of bytes 0 to {stream.size - 1}" if stream.size else "ask for the whole, which is empty"
        return refuse(request.scope, 416, "range_not_satisfiable", words, hint, headers), False
    if part is None:
        status, part = 200, range(stream.size)
    else:
        status = 206
        headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{stream.size}"
    headers["content-length"] = str(len(part))
    pieces = stream.part(part)
    return ClosingResponse(stream.close, pieces, status_code=status, headers=headers, media_type=media_type), True


def _asked(request: Request, etag: str, size: int) -> range | None:
    """Return the part that is asked for, None for the whole; raise NoSuchRange."""
    asked = request.headers.getlist("range")
    if not asked or not is_same(request.headers.get("if-range"), etag):
        return None
    return chosen(",".join(asked), size)


def _head(media_type: str, headers: dict[str, str]) -> Bare:
    answer = Bare(headers=headers, media_type=media_type)
    if "content-length" not in headers:
        del answer.headers["content-length"]  # Nobody knows it yet.
    return answer


def tagged(request: Request, value: object) -> Response:
    """Return an answer with an ETag; where If-None-Match names it, no more than that it is the same still."""
    body = msgspec.json.encode(value)
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"etag": etag, "cache-control": "private, no-cache"}
    if is_listed(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=_JSON)
