"""HTTP/1.1 on one connection: bytes in, whole requests to the engine, replies out."""

import asyncio
import socket
import struct
from typing import Final, cast

import httptools

from bench.simengine.engine import UNAUTHORIZED, Engine, Job
from bench.simengine.pages import page
from bench.simengine.reply import Reply, error_reply

MAX_BODY_BYTES: Final = 128 << 20
# Closing with a zero linger time sends a TCP reset instead of an orderly end.
_NO_LINGER: Final = struct.pack("ii", 1, 0)


class Connection(asyncio.Protocol):
    """One client connection; requests may be pipelined, and are answered as they are ready."""

    def __init__(self, engine: Engine) -> None:
        """Make a connection that belongs to `engine`; nothing is read yet."""
        self.jobs: set[Job] = set()
        self._engine = engine
        key = engine.options.api_key
        self._wanted_key = None if key is None else f"Bearer {key}".encode()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self.on_message_begin()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport to answer on."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the jobs of this client, as engines do when a client leaves."""
        self._transport = None
        while self.jobs:  # Forgetting one may let another end.
            self._engine.forget(self.jobs.pop())

    def data_received(self, data: bytes) -> None:
        """Parse what came; whole requests are passed on from within. A mute engine reads and says nothing."""
        if self._engine.mute:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # The request itself was passed on; the upgrade is declined by ignoring it.
        except httptools.HttpParserCallbackError:
            raise  # A fault of this program, raised within a callback; the loop prints it.
        except httptools.HttpParserError as error:
            self.send(error_reply(400, f"not HTTP: {error}"), keep_alive=False)

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Forget the request before."""
        self._url = b""
        self._key: bytes | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Take the next piece of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take the two headers that matter here."""
        lowered = name.lower()
        if lowered == b"authorization":
            self._key = value
        elif lowered == b"expect" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Take the next piece of the body; past the limit, refuse it and close."""
        self._body_bytes += len(body)
        if self._body_bytes <= MAX_BODY_BYTES:
            self._body.append(body)
        else:
            self._body.clear()
            self.send(error_reply(413, f"body is over {MAX_BODY_BYTES} bytes"), keep_alive=False)

    def on_message_complete(self) -> None:
        """Pass the whole request on."""
        if self._transport is None or self._transport.is_closing():
            return
        path = self._url.partition(b"?")[0].decode("latin-1")
        keep_alive = self._parser.should_keep_alive()
        authorized = self._wanted_key is None or self._key == self._wanted_key
        method = self._parser.get_method()
        if method == b"POST":
            pieces = self._body
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self._body = []
            self._engine.post(self, path, body, authorized=authorized, keep_alive=keep_alive)
        elif method != b"GET":
            self.send(error_reply(405, "only GET and POST are served"), keep_alive=False)
        elif authorized or path == "/health":
            self.send(page(self._engine, path), keep_alive=keep_alive)
            if path == "/health":
                self._engine.health_answered()
        else:
            self.send(UNAUTHORIZED, keep_alive=keep_alive)

    # What the engine calls.

    def send(self, reply: Reply, *, keep_alive: bool) -> None:
        """Write `reply`; close after it when asked to, or when it promises bytes it lacks."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(reply.wire_bytes(keep_alive=keep_alive))
        if reply.missing_bytes or not keep_alive:
            self._transport.close()

    def reset(self) -> None:
        """Close at once, with a TCP reset where there is TCP."""
        if self._transport is None:
            return
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()
