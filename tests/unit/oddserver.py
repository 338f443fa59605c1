"""A server of which a test decides every byte, for the client of model servers."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 20
PATH = "/v1/chat/completions"
LARGE = b"0123456789abcdef" * 625_000
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Line:
    """One connection of a client, from the server's side."""

    def __init__(self, server: "Odd", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.reader = reader
        self.writer = writer

    async def request(self) -> bytes:
        """Return the next request, head and body; b"" once the client has closed."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            try:
                line = await self.reader.readline()
            except ConnectionError:
                return b""
            if not line:
                return b""
            head += line
        lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        return head + (await self.reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b"")

    async def say(self, *pieces: bytes) -> None:
        """Send some pieces, each as soon as the one before is with the kernel."""
        with suppress(ConnectionError):
            for piece in pieces:
                self.writer.write(piece)
                await self.writer.drain()

    async def closed(self) -> None:
        """Return once the client has closed, or is not heard of any more."""
        with suppress(ConnectionError):
            await self.reader.read()


Play = Callable[[Line], Awaitable[None]]
# Runs a test's coroutine.
Run = Callable[[Coroutine[Any, Any, None]], None]


class Odd:
    """A server that runs: where it is, its connections so far, and what its plays have noted, requests mostly."""

    def __init__(self) -> None:
        self.url = ""
        self.lines: list[Line] = []
        self.heard: list[bytes] = []
        self._news = asyncio.Event()

    def note(self, heard: bytes) -> None:
        """Add to what was heard."""
        self.heard.append(heard)
        self._news.set()

    async def hears(self, count: int) -> None:
        """Return once so much has been heard."""
        while len(self.heard) < count:
            self._news.clear()
            await self._news.wait()


def answers(*each: bytes) -> Play:
    """Return a play that gives these answers, one to a request, and the last of them to all that follow."""

    async def play(line: Line) -> None:
        heard = line.server.heard
        while request := await line.request():
            line.server.note(request)
            await line.say(each[min(len(heard), len(each)) - 1])

    return play


def once(*pieces: bytes) -> Play:
    """Return a play that answers one request in these pieces and then closes the connection."""

    async def play(line: Line) -> None:
        line.server.note(await line.request())
        await line.say(*pieces)

    return play


def speaking_first(words: bytes) -> Play:
    """Return a play that does not wait for a request."""

    async def play(line: Line) -> None:
        await line.say(words)
        await line.closed()

    return play


async def silent(line: Line) -> None:
    """Take one request, and never answer."""
    line.server.note(await line.request())
    await line.closed()


@asynccontextmanager
async def odd_server(
    play: Play, host: str = "127.0.0.1", socket: Path | None = None, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[Odd]:
    """Run a server for as long as the block takes, in which `play` is had with each connection."""
    odd = Odd()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        line = Line(odd, reader, writer)
        odd.lines.append(line)
        try:
            with suppress(asyncio.CancelledError):
                await play(line)
        finally:
            writer.close()
            with suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()

    if socket is not None:
        server = await asyncio.start_unix_server(serve, socket)
        odd.url = "http://localhost"
    else:
        server = await asyncio.start_server(serve, host, 0, ssl=tls)
        shown = f"[{host}]" if ":" in host else host
        odd.url = f"{'https' if tls else 'http'}://{shown}:{server.sockets[0].getsockname()[1]}"
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield odd
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
