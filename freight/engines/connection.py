"""One connection to a server: a request out, its answer in."""

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final, cast

from freight.engines.answers import AnswerReader, HttpReply, NeverSent, TookTooLong, TooLarge, Unreachable

# A longer body goes out in such pieces, each once there is room, so that it holds up nothing and is not copied.
PIECE_BYTES: Final = 262_144


class Connection(asyncio.Protocol):
    """Carries one exchange at a time. `gone` is called once it is good for no more, and again when it is closed.

    `keeps`: another exchange may follow the last one, unless it is idle for `idle_s` seconds before. `lost` is set once
    the socket is closed.
    """

    def __init__(self, most_bytes: int, gone: Callable[["Connection"], None]) -> None:
        self._gone = gone
        self._reader = AnswerReader(most_bytes)
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[HttpReply] | None = None
        # Set while what was written must drain first.
        self._room: asyncio.Future[None] | None = None
        self._is_sent = True
        self._why_not = NeverSent("the connection was closed")
        self._transport: asyncio.Transport
        self.keeps = False
        self.idle_s = inf
        self.lost = self._loop.create_future()

    def is_open(self) -> bool:
        """Return whether a request may be written."""
        return not self._transport.is_closing()

    async def exchange(self, head: bytes, body: bytes, timeout_s: float | None) -> HttpReply:
        """Send a request's head (and short body) and the rest of its body; return the answer.

        Raises Unreachable, TooLarge, or TookTooLong after `timeout_s`. Whatever it raises, cancellation too, the
        connection is closed then: the server shall know that nobody waits.
        """
        if not self.is_open():
            raise self._why_not
        answer = self._answer = self._loop.create_future()
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, self._time_is_up)
        self.keeps = False
        self._reader.expect()
        try:
            self._transport.write(head)
            if body:
                await self._send(body, answer)
            return await answer
        except BaseException:
            self._answer = None
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # Seen, also where a cancellation came together with it.
            self._transport.abort()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def _send(self, body: bytes, answer: asyncio.Future[HttpReply]) -> None:
        """Send a body as there is room for it, unless the server answers before it has all of it."""
        self._is_sent = False
        view = memoryview(body)
        for start in range(0, len(body), PIECE_BYTES):
            if self._room is not None:
                await self._room
            if answer.done():
                return
            self._transport.write(view[start : start + PIECE_BYTES])
        self._is_sent = True

    def break_off(self, why: Exception) -> None:
        """Close the connection at once; whoever waits for an answer gets `why`."""
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(why)
        self._transport.abort()

    def _time_is_up(self) -> None:
        self.break_off(TookTooLong())

    def _go_on(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _answered(self, reply: HttpReply) -> None:
        answer, self._answer = self._answer, None
        # A server that answers before it has read the request may take the rest of it for the next one.
        self.idle_s = self._reader.idle_s
        self.keeps = self._reader.keeps and self._is_sent and not self._transport.get_write_buffer_size()
        if answer is not None and not answer.done():
            answer.set_result(reply)
        if not self._is_sent:
            self._go_on()

    # The event loop calls the rest.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the same methods, and another ancestor.

    def data_received(self, data: bytes) -> None:
        """Read on; what comes without having been asked for ends the connection."""
        if self._answer is None:
            self._why_not = NeverSent("its answer is not HTTP (unasked)")
            self._gone(self)
            self._transport.abort()
            return
        try:
            reply = self._reader.feed(data)
        except (Unreachable, TooLarge) as error:
            self.break_off(error)
        else:
            if reply is not None:
                self._answered(reply)

    def eof_received(self) -> None:
        """The server closes, and so does the transport: that may be how its answer ends."""
        if self._answer is not None:
            try:
                self._answered(self._reader.end())
            except Unreachable as error:
                self.break_off(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed, by whomever."""
        self.lost.set_result(None)
        self._gone(self)
        if self._answer is not None:
            self.break_off(self._reader.broken())
        self._go_on()

    def pause_writing(self) -> None:
        """Wait with the rest of a body."""
        if self._room is None:
            self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        """Go on with it."""
        self._go_on()
