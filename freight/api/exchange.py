"""The workers' one call, as a bare ASGI application: the hot path has no framework in it."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn

from freight.store.sockets import listen_at

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


App = Callable[[Any, Any, Any], Awaitable[None]]


class EndsQuietly:
    """An application whose requests may be cancelled at the server's end, or raise one of `broken`.

    That is no error worth a traceback. A response that was begun is broken off, so that its reader does not take it
    for whole.
    """

    def __init__(self, app: App, *broken: type[Exception]) -> None:
        self._app = app
        self._broken = broken

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with suppress(asyncio.CancelledError, *self._broken):
            await self._app(scope, receive, send)


class ExchangeApp:
    """POST /exchange: a report in, orders out. `exchange` does the work on the encoded messages."""

    def __init__(self, exchange: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] != "/exchange" or scope["method"] != "POST":
            await _answer(send, 404, b"")
            return
        pieces: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        await _answer(send, 200, await self._exchange(b"".join(pieces)))


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/msgpack"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class ExchangeServer:
    """Serves the workers' call on a Unix socket, in this event loop, and leaves signals to the command."""

    def __init__(self, path: Path, exchange: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._path = path
        config = uvicorn.Config(
            EndsQuietly(ExchangeApp(exchange)),
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._listener: socket.socket | None = None

    async def start(self) -> None:
        """Begin to listen."""
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        self._listener = listen_at(self._path)
        # Without the server's own loop, which looks ten times a second whether it is to end: `stop` says so.
        await self._server.startup(sockets=[self._listener])

    async def stop(self) -> None:
        """Stop listening, with all answers sent."""
        if self._listener is None:
            return
        if self._server.server_state.connections:
            await self._server.shutdown(sockets=[self._listener])
        else:
            for server in self._server.servers:
                server.close()
            self._listener.close()
        self._listener = None
        self._path.unlink(missing_ok=True)


class QuietServer(uvicorn.Server):
    """A server inside a program that has signal handlers of its own."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Take no signals: the command has handlers of its own."""
        yield
