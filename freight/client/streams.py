"""Answers that come bit by bit: results and logs."""

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

import httpx

from freight.client.address import Address
from freight.client.transport import speaking
from freight.core.view import DONE_HEADER, TOTAL_HEADER


class LineSplitter:
    r"""Makes lines of pieces. JSON Lines end at \n alone."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the lines that the piece completes, without their ends."""
        first, *more = chunk.split(b"\n")
        self._rest.append(first)
        for piece in more:
            yield b"".join(self._rest)
            self._rest = [piece]

    def rest(self) -> Iterator[bytes]:
        """Yield the last line, if nothing ended it."""
        if last := b"".join(self._rest):
            yield last


def _count(response: httpx.Response, header: str) -> int:
    text = response.headers.get(header, "")
    return int(text) if text.isascii() and text.isdigit() else 0


class Stream:
    """Bytes as they come. Close it, or use it in a `with` block, unless it is read to its end."""

    def __init__(self, response: httpx.Response, address: Address) -> None:
        self._response = response
        self._address = address

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes as they come; raise OperationError when the connection breaks."""
        with speaking(self._address):
            yield from self._response.iter_bytes()

    def __iter__(self) -> Iterator[bytes]:
        splitter = LineSplitter()
        for chunk in self.chunks():
            yield from splitter.feed(chunk)
        yield from splitter.rest()

    def close(self) -> None:
        """Ask for no more."""
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ResultStream(Stream):
    """A job's results, line by line: `done` of `total` records have one so far.

    `etag` names these very bytes, None for those of a job that has not ended; `is_rest` says that they are only what
    was asked for of them.
    """

    def __init__(self, response: httpx.Response, address: Address) -> None:
        super().__init__(response, address)
        self.done = _count(response, DONE_HEADER)
        self.total = _count(response, TOTAL_HEADER)
        self.etag: str | None = response.headers.get("etag")
        self.is_rest = response.status_code == 206


class AsyncStream:
    """Bytes as they come. Close it, or use it in an `async with` block, unless it is read to its end."""

    def __init__(self, response: httpx.Response, address: Address) -> None:
        self._response = response
        self._address = address

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes as they come; raise OperationError when the connection breaks."""
        with speaking(self._address):
            async for chunk in self._response.aiter_bytes():
                yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        splitter = LineSplitter()
        async for chunk in self.chunks():
            for line in splitter.feed(chunk):
                yield line
        for line in splitter.rest():
            yield line

    async def close(self) -> None:
        """Ask for no more."""
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncResultStream(AsyncStream):
    """A job's results, line by line: `done` of `total` records have one so far. More is in `ResultStream`."""

    def __init__(self, response: httpx.Response, address: Address) -> None:
        super().__init__(response, address)
        self.done = _count(response, DONE_HEADER)
        self.total = _count(response, TOTAL_HEADER)
        self.etag: str | None = response.headers.get("etag")
        self.is_rest = response.status_code == 206
