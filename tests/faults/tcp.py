"""A server on TCP in the test's own loop, and peers that mind no rules."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import psutil
import uvloop

from freight.api.auth import ACCOUNT
from freight.api.door import open_door
from freight.api.exchange import EndsQuietly
from freight.api.front import front
from freight.api.listener import TcpServer
from freight.config import load_config
from freight.core.account import Account, Role
from tests.harness import PATIENCE_S

HOST: Final = b"Host: localhost\r\n\r\n"
HEALTH: Final = b"GET /healthz HTTP/1.1\r\n" + HOST
HELLO: Final = b"GET /hello HTTP/1.1\r\n" + HOST
SHORT: Final = 'header_timeout = "1s"\nbody_idle_timeout = "1s"\nrequest_timeout = "2s"\nkeep_alive_timeout = "1s"'
FILE_BYTES: Final = 4_000_000
Scenario = Callable[[], Coroutine[Any, Any, None]]


def known(app: Any) -> Any:
    """Let everybody in."""

    async def let_in(scope: Any, receive: Any, send: Any) -> None:
        scope["state"][ACCOUNT] = Account("somebody", Role.ADMIN)
        await app(scope, receive, send)

    return let_in


class Echo:
    """Answers with the path and the body's size; /long with so many bytes, /wait once it is told to go on."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.begun = asyncio.Event()
        self.bytes_seen = 0
        self.left: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        size, path = 0, scope["path"]
        self.begun.set()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(path)
                return
            size += len(message["body"])
            self.bytes_seen = size
            if not message["more_body"]:
                break
        if path == "/wait":
            await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path == "/long":
            piece = b"x" * 65536
            for _ in range(int(parse_qs(scope["query_string"])[b"pieces"][0])):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": f"{path} {size}".encode()})


@asynccontextmanager
async def serving(
    folder: Path, app: Any, settings: str = "", authentication: Any = known
) -> AsyncGenerator[tuple[TcpServer, int]]:
    """Serve an application on TCP, by these settings; give the server and its port."""
    file = folder / "tcp.toml"
    file.write_text(f'[server]\nlisten = "127.0.0.1:0"\n{settings}\n')
    door = open_door(load_config({}, {}, {"FREIGHT_CONFIG": str(file)}), None)
    assert door is not None
    server = door.serve(EndsQuietly(front(app, {"localhost"}, door.max_body, lambda: FILE_BYTES, authentication)))
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        yield server, door.listeners[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task
        door.close()


def run(scenario: Scenario) -> None:
    """Run a scenario in a loop as the service's own."""

    async def patient() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario()

    uvloop.run(patient())


class Peer:
    """One connection of a client that minds no rules."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        """Send, as far as the other side lets us."""
        with suppress(OSError):
            for piece in pieces:
                self.writer.write(piece)
                await self.writer.drain()

    async def rest(self) -> bytes:
        """Return all that comes until the other side closes."""
        got = b""
        with suppress(OSError):
            while piece := await self.reader.read(65536):
                got += piece
        return got

    async def answer(self) -> bytes:
        """Return one answer of a known length, head and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if not lengths:
            return head + await self.reader.readuntil(b"0\r\n\r\n")
        return head + await self.reader.readexactly(int(lengths[0].partition(b":")[2]))

    async def close(self) -> None:
        """Hang up."""
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


@asynccontextmanager
async def peer(port: int, *pieces: bytes, **options: Any) -> AsyncGenerator[Peer]:
    """A connection on which some bytes were sent."""
    made = Peer(*await asyncio.open_connection("127.0.0.1", port, **options))
    try:
        await made.send(*pieces)
        yield made
    finally:
        await made.close()


async def exchanged(port: int, *pieces: bytes) -> bytes:
    """Send, and return all that comes back until the other side closes."""
    async with peer(port, *pieces) as made:
        return await made.rest()


async def drip(made: Peer, byte: bytes) -> None:
    """Send a byte now and then until the other side closes."""
    closed = asyncio.create_task(made.rest())
    while not closed.done():
        await made.send(byte)
        await asyncio.wait((closed,), timeout=0.1)


async def until(condition: Callable[[], object]) -> None:
    """Wait until something holds."""
    while not condition():  # noqa: ASYNC110, nothing tells us.
        await asyncio.sleep(0.01)


def resident() -> int:
    """Return the memory of this process, in bytes."""
    return psutil.Process().memory_info().rss
