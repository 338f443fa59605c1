"""One TCP connection: uvicorn's protocol on httptools, with deadlines and limits that it has not."""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, TypeGuard

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from freight.api.deadlines import Deadlines, Late, Part, Watch
from freight.api.requestid import HEADER

MOST_HEAD_BYTES: Final = 32 << 10
MOST_HEADERS: Final = 100
# Requests that may wait behind the one that is being answered.
MOST_PIPELINED: Final = 16
# Input is parsed in pieces, so that no more than one is read beyond a limit.
_PIECE_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for every connection. `is_upload` says of a method and a path whether their body may take its time."""

    deadlines: Deadlines = field(default_factory=Deadlines)
    is_upload: Callable[[str, str], bool] = lambda _method, _path: False


class Refused(Exception):
    """A request is not taken: with which status, and why."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.words = words


def refusal(status: int, words: str) -> bytes:
    """Return an answer for those whose request never reaches the application; the connection ends with it."""
    body = words.encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "server: freight",
        "content-type: text/plain; charset=utf-8",
        f"content-length: {len(body)}",
        f"{HEADER}: {uuid.uuid4().hex}",
        "connection: close",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


class Wire(asyncio.Transport):
    """A transport that counts what is written to it, and asks how to hang up. `waits` is told that bytes wait."""

    def __init__(self, inner: asyncio.Transport, hang_up: Callable[[], None], waits: Callable[[], None]) -> None:
        super().__init__()
        self._inner = inner
        self._hang_up = hang_up
        self._waits = waits
        self._written = 0
        self.is_hung_up = False

    def pending(self) -> int:
        """Return how many bytes wait to be taken."""
        return self._inner.get_write_buffer_size()

    def taken(self) -> int:
        """Return how many bytes have been taken."""
        return self._written - self.pending()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, or keep until it can be sent."""
        self._inner.write(data)
        self._written += len(data)
        if self.pending():
            self._waits()

    def close(self) -> None:
        """Hang up, as the connection sees fit."""
        if not self.is_hung_up:
            self.is_hung_up = True
            self._hang_up()

    def end(self) -> None:
        """Close, once all that was written is taken."""
        self.is_hung_up = True
        self._inner.close()

    def end_sending(self) -> None:
        """Let the peer know that nothing more comes, where that can be said without closing."""
        if self._inner.can_write_eof():
            self._inner.write_eof()

    def is_closing(self) -> bool:
        """Return whether it is closed, or about to be."""
        return self.is_hung_up or self._inner.is_closing()

    def abort(self) -> None:
        """Close at once, whatever was not sent."""
        self.is_hung_up = True
        self._inner.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what the transport knows."""
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Read no more for now."""
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._inner.resume_reading()


class WatchedFlow(FlowControl):
    """Tells when reading stops and goes on."""

    def __init__(self, wire: Wire, tell: Callable[[bool], None]) -> None:
        super().__init__(wire)
        self._tell = tell

    def pause_reading(self) -> None:
        """Read no more for now."""
        super().pause_reading()
        self._tell(False)

    def resume_reading(self) -> None:
        """Read again; called by whoever wants more of a body."""
        super().resume_reading()
        self._tell(True)


class Connection(HttpToolsProtocol):
    """A connection that is closed when its peer is late, sends too much of a head, or what is no HTTP.

    `gone` is called at its end.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        rules: Rules,
        gone: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, state, {}, loop)
        self._rules = rules
        self._gone = gone
        self._watch = Watch(rules.deadlines, loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._answering: RequestResponseCycle | None = None
        # Bytes that came and were neither a whole head nor a body.
        self._stray = 0
        self._has_heard = False
        self._is_deaf = False
        self._refused: Refused | None = None

    def cut(self) -> None:
        """Close at once, whatever is under way."""
        self._wire.abort()

    # What the transport tells.

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begin to wait for a request."""
        self._wire = Wire(transport, self._hang_up, self._bytes_wait)
        super().connection_made(self._wire)
        self.flow = WatchedFlow(self._wire, self._reads)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless nothing more is heard on this connection."""
        self._has_heard = True
        for start in range(0, len(data), _PIECE_BYTES):
            if self._is_deaf:
                if self._wire.is_hung_up:
                    self._watch.heard_in_vain(self.loop.time())
                break
            self._feed(data[start : start + _PIECE_BYTES])
        self._arm()

    def _feed(self, piece: bytes) -> None:
        self._stray += len(piece)
        assert self.parser is not None  # It goes with the connection.
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            # Nothing is upgraded to. What follows the request may be of the other protocol.
            self._hear_no_more()
        except httptools.HttpParserError:
            self._refuse(self._refused or Refused(400, "this is no HTTP request that can be understood\n"))
        else:
            if self._stray > MOST_HEAD_BYTES + _PIECE_BYTES:
                is_body = self._watch.part is Part.BODY
                self._refuse(Refused(400, "too much between the parts of a body\n") if is_body else _too_long())

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Keep the connection for the answers to whole requests; else it closes."""
        newest = self.cycle
        if self.scheme == "https" or self._wire.is_hung_up or not _is_unanswered(newest) or newest.more_body:
            return False
        self._hear_no_more()
        self._watch.half_closed(self.loop.time())
        self._arm()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Let whoever answers know that nobody listens."""
        if self._timer is not None:
            self._timer.cancel()
        self._wire.is_hung_up = True
        self._disconnect()
        super().connection_lost(exc)
        self._gone()

    # What the parser tells.

    def on_message_begin(self) -> None:
        """A request begins."""
        if len(self.pipeline) >= MOST_PIPELINED:
            raise self._refusing(400, "too many requests at once\n")
        super().on_message_begin()
        self._head_bytes = 0
        self._watch.request_begun(self.loop.time())

    def on_url(self, url: bytes) -> None:
        """Some of the request's target has come."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has come; what comes after a body is dropped."""
        if self._watch.part is Part.BODY:
            return
        self._count(len(name) + len(value))
        if len(self.headers) >= MOST_HEADERS:
            raise self._refusing(431, f"more than {MOST_HEADERS} headers\n")
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refused = _too_long()
            raise self._refused

    def on_headers_complete(self) -> None:
        """A head is whole: have it answered."""
        self._stray = 0
        if not self.url.startswith((b"/", b"http://", b"https://")):
            raise self._refusing(400, "the target is no path\n")
        super().on_headers_complete()
        self._watch.head_ended(
            self.loop.time(),
            is_upload=self._rules.is_upload(self.scope["method"], self.scope["path"]),
            is_awaited=not self.expect_100_continue and not self.flow.read_paused,
        )

    def on_body(self, body: bytes) -> None:
        """Some of a body has come."""
        self._stray = 0
        self._watch.body_came(self.loop.time(), len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        super().on_message_complete()
        self._watch.request_ended()

    # Answers.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def sent(message: Any) -> None:
                # The rest of a body that nobody read cannot be told from the next request.
                if message["type"] == "http.response.start" and cycle.more_body:
                    cycle.keep_alive = False
                await send(message)

            await app(scope, receive, sent)

        super()._start_asgi_task(cycle, answer)

    def on_response_complete(self) -> None:
        """An answer is whole: go on with the next request."""
        self._watch.answered(self.loop.time())
        super().on_response_complete()
        self._unset_keepalive_if_required()  # The watch has that deadline, too.
        self._arm()

    def _refusing(self, status: int, words: str) -> Refused:
        self._refused = Refused(status, words)
        return self._refused

    def _refuse(self, refused: Refused) -> None:
        """Answer what can be no request, and hear no more; answers to whole requests before it are finished."""
        self._is_deaf = True
        newest = self.cycle
        if _is_unanswered(newest):
            if not newest.more_body:
                self._hear_no_more()
                return
            is_next = newest is self._answering and not newest.response_started
            self._disconnect()
            if not is_next:
                self._wire.close()
                return
        self._wire.write(refusal(refused.status, refused.words))
        self._wire.close()

    def _hear_no_more(self) -> None:
        """Close once all requests that came are answered."""
        self._is_deaf = True
        if _is_unanswered(self.cycle):
            self.cycle.keep_alive = False
        else:
            self._wire.close()

    def _disconnect(self) -> None:
        for cycle in (self._answering, self.cycle):
            if _is_unanswered(cycle):
                cycle.disconnected = True
                cycle.message_event.set()

    def _hang_up(self) -> None:
        """Close; but a peer that is sending still would not see the answer, were it not given time to."""
        is_sending = self._watch.part is not Part.NOTHING or self.flow.read_paused
        self._is_deaf = True
        if is_sending and self._has_heard:
            self._watch.goodbye(self.loop.time())
            self._wire.end_sending()
            self.flow.resume_reading()
        else:
            self._end()
        self._arm()

    def _end(self) -> None:
        self._watch.over()
        self._wire.end()

    # Deadlines.

    def _reads(self, is_reading: bool) -> None:
        self._watch.reading(is_reading, self.loop.time())
        self._arm()

    def _bytes_wait(self) -> None:
        self._watch.sent(self.loop.time(), self._wire.taken(), self._wire.pending())
        self._arm()

    def _arm(self) -> None:
        """See to it that a look is taken in time. A timer that comes too early does no harm."""
        at = self._watch.look_at(self.loop.time())
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self.loop.call_at(at, self._look), at

    def _look(self) -> None:
        self._timer = None
        now = self.loop.time()
        self._watch.sent(now, self._wire.taken(), self._wire.pending())
        late = self._watch.late(now)
        if late is Late.TAKING:
            self._wire.abort()
        elif late in (Late.NEXT, Late.GOODBYE):
            self._end()
        elif late is not None:
            self._tell_late()
        self._arm()

    def _tell_late(self) -> None:
        is_next = not _is_unanswered(self.cycle) or (self.cycle is self._answering and not self.cycle.response_started)
        self._is_deaf = True
        self._disconnect()
        if self._has_heard and is_next:
            self._wire.write(refusal(408, "the request did not come in time\n"))
        self._end()


def _too_long() -> Refused:
    return Refused(431, f"a head of more than {MOST_HEAD_BYTES} bytes\n")


def _is_unanswered(cycle: RequestResponseCycle | None) -> TypeGuard[RequestResponseCycle]:
    # None before the first request.
    return cycle is not None and not cycle.response_complete
