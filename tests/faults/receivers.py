"""Receivers of webhooks that behave as a test wants, and a desk that sends to them from a real catalog."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from freight.control.posting import Names, Post
from freight.control.webhooks import Webhooks, WebhookSettings
from freight.core.job import State
from freight.core.webhook import Letter, letter_of
from freight.store.catalog import Catalog
from freight.store.database import Sharing, transaction
from freight.store.folder import Locking
from freight.store.outbox import Outbox

_T = TypeVar("_T")

PATIENCE_S: Final = 30.0
SECRET: Final = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
# What a receiver does with a request: writes an answer, or does not.
Behaviour = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Request:
    """One request, as it came over the wire."""

    line: str
    headers: dict[str, str]
    body: str


@dataclass
class Receiver:
    """A server whose every answer is the test's. `most` is how many requests were with it at one time."""

    port: int
    requests: list[Request] = field(default_factory=list[Request])
    now: int = 0
    most: int = 0

    def entry(self) -> str:
        """Return the entry of the settings that allows it."""
        return f"http://127.0.0.1:{self.port}"

    def url(self) -> str:
        """Return where its letters go."""
        return f"{self.entry()}/in/token?key=k"


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def answer(status: int, *headers: str) -> Behaviour:
    """Answer at once."""

    async def behave(_: Request, writer: asyncio.StreamWriter) -> None:
        lines = (f"HTTP/1.1 {status} Words", "Content-Length: 0", *headers, "", "")
        writer.write("\r\n".join(lines).encode())

    return behave


async def silent(_: Request, writer: asyncio.StreamWriter) -> None:
    """Say nothing until the caller has gone."""
    while not writer.transport.is_closing():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def drip(_: Request, writer: asyncio.StreamWriter) -> None:
    """Begin an answer and never come to the end of its headers."""
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while not writer.transport.is_closing():
        writer.write(b"X-More: 1\r\n")
        await asyncio.sleep(0.01)


async def endless(_: Request, writer: asyncio.StreamWriter) -> None:
    """Answer well, with a body that has no end."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not writer.transport.is_closing():
        writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
        await asyncio.sleep(0.001)


async def garbage(_: Request, writer: asyncio.StreamWriter) -> None:
    """Answer something that is not HTTP."""
    writer.write(b"\x00\x01 canary-of-a-receiver \r\n\r\n")


async def hang_up(_: Request, writer: asyncio.StreamWriter) -> None:
    """Close the connection."""


@asynccontextmanager
async def receiving(
    *behaviours: Behaviour, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[Receiver]:
    """Run a receiver whose first requests are answered as said, and all others as the last of them."""
    receiver = Receiver(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        receiver.now += 1
        receiver.most = max(receiver.most, receiver.now)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            line, *lines = head.split("\r\n")[:-2]
            headers = {name.lower(): value for name, value in (each.split(": ", 1) for each in lines)}
            body = (await reader.readexactly(int(headers["content-length"]))).decode()
            request = Request(line, headers, body)
            receiver.requests.append(request)
            await behaviours[min(len(receiver.requests), len(behaviours)) - 1](request, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # Callers may go when they like.
        finally:
            receiver.now -= 1
            writer.close()

    server = await asyncio.start_server(serve, host, port, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()


class Clock:
    """The time of day, as the test sets it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Desk:
    """Webhooks on a catalog of its own, with jobs "a" and "b". `settings` may be changed at any time."""

    catalog: Catalog
    outbox: Outbox
    webhooks: Webhooks
    clock: Clock
    settings: WebhookSettings
    writer: ThreadPoolExecutor

    async def write(self, call: Callable[..., _T], *args: Any) -> _T:
        """Call what uses the catalog, in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self.writer, call, *args)

    async def put(self, url: str, epoch: int = 0, job: str = "a", state: State = State.COMPLETED) -> Letter:
        """Queue a letter as the end of a job does."""
        letter = letter_of(job, epoch, state, url, self.clock.now)
        assert letter is not None

        def in_transaction() -> None:
            with transaction(self.catalog._connection):
                self.outbox.put(letter)

        await self.write(in_transaction)
        return letter

    async def waiting(self) -> list[Letter]:
        """Return the letters that are on disk."""

        def look() -> list[Letter]:
            found: list[Letter] = []
            while (letter := self.outbox.next([each.id for each in found])) is not None:
                found.append(letter)
            return found

        return await self.write(look)

    async def attempted(self, attempts: int) -> Letter:
        """Wait until the one letter has failed so often, and return it."""
        async with asyncio.timeout(PATIENCE_S):
            while [each.attempts for each in await self.waiting()] != [attempts]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return (await self.waiting())[0]

    async def emptied(self) -> None:
        """Wait until no letter is left."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.waiting():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def skip_to(self, at: float) -> None:
        """Let it be `at`."""
        self.clock.now = at
        self.webhooks.wake()

    async def timeline(self, job: str = "a") -> list[tuple[str, str]]:
        """Return what the timeline of a job says."""
        return [(row.event, row.detail) for row in await self.write(self.catalog.events, job)]

    def change_secrets(self, text: str) -> None:
        """Write the file of secrets anew."""
        Path(self.settings.secret_file).write_text(text)

    @asynccontextmanager
    async def delivering(self) -> AsyncGenerator[None]:
        """Deliver for as long as the block takes; it must end at once, without an error."""
        stopping = asyncio.Event()
        running = asyncio.create_task(self.webhooks.run(stopping))
        try:
            yield
        finally:
            stopping.set()
            async with asyncio.timeout(PATIENCE_S):
                await running


@asynccontextmanager
async def desk(
    folder: Path,
    *hosts: str,
    resolve: Callable[[str, int], Awaitable[list[str]]] | None = None,
    timeout_s: float = 10.0,
    trust: ssl.SSLContext | None = None,
    clock: Clock | None = None,
) -> AsyncGenerator[Desk]:
    """Open the catalog in a folder, new or as it was left, with these entries in webhooks.hosts."""
    secret = folder / "secret"
    if not secret.exists():
        secret.write_text(SECRET)
    clock = clock or Clock()
    writer = ThreadPoolExecutor(1)
    names = Names()
    catalog = Catalog(folder / "catalog.db", Locking.LOCAL, Sharing.WRITER)
    for job in {"a", "b"} - {row.id for row in catalog.jobs()}:
        catalog.add(job, {}, 1, None, clock.now)
    outbox = Outbox(catalog._connection)
    post = Post(resolve or names.resolve, timeout_s, trust)
    settings = WebhookSettings(hosts, str(secret))

    async def write(call: Callable[..., Any], *args: Any) -> Any:
        return await opened.write(call, *args)

    webhooks = Webhooks(outbox, write, lambda: opened.settings, post, clock, lambda: 0.0)
    opened = Desk(catalog, outbox, webhooks, clock, settings, writer)
    try:
        yield opened
    finally:
        writer.shutdown()
        names.close()
        catalog.close()
