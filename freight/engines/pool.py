"""The connections to one server: kept while they are good, closed when they are not."""

import asyncio
from typing import Final

from freight.engines.answers import HttpReply, NeverSent, NoAnswer, Unreachable
from freight.engines.base import Address
from freight.engines.connection import Connection
from freight.engines.dialing import Dialer, site_of

CONNECT_TIMEOUT_S: Final = 30.0
# Most servers close what was idle for 5 s, some for 2 s, and few say so. A request that crosses with that is lost, and
# may cost a record a try.
KEPT_S: Final = 1.5
# So long before a server would close it a connection is not used any more.
_MARGIN_S: Final = 0.5
# A server that closes a connection without having said so loses the next request on it: this many go out on connections
# of their own then.
_DISTRUST: Final = 1000
# Up to this a body goes out in one write with the head.
_SHORT_BYTES: Final = 65_536
_CLOSED: Final = "the connection was closed here"


class Pool:
    """As many connections to one server as there are requests; the one used last is used first."""

    def __init__(self, address: Address, most_bytes: int, content_type: str = "application/json") -> None:
        self._site = site_of(address)
        self._dialer = Dialer(self._site)
        self._most_bytes = most_bytes
        self._content_type = content_type
        self._heads: dict[str, bytes] = {}
        self._open: set[Connection] = set()
        # Until when each may be used again, the longest idle first.
        self._idle: dict[Connection, float] = {}
        self._dialing: set[asyncio.Timeout] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._distrusted = 0
        self._is_closed = False

    async def get(self, path: str, timeout_s: float | None) -> HttpReply:
        """Fetch a path. Raises as `post` does."""
        return await self._exchange(self._site.head("GET", path) + b"\r\n", b"", timeout_s)

    async def post(self, path: str, body: bytes, timeout_s: float | None) -> HttpReply:
        """Send a body and return the whole answer, whatever its status. A redirect is not followed.

        Raises Unreachable (NeverSent where the server cannot have seen the request), TooLarge, and TookTooLong
        after `timeout_s`; all but the answer close the connection.
        """
        head = self._heads.get(path)
        if head is None:
            head = self._site.head("POST", path) + f"Content-Type: {self._content_type}\r\nContent-Length: ".encode()
            self._heads[path] = head
        if len(body) <= _SHORT_BYTES:
            return await self._exchange(b"%b%d\r\n\r\n%b" % (head, len(body), body), b"", timeout_s)
        return await self._exchange(b"%b%d\r\n\r\n" % (head, len(body)), body, timeout_s)

    async def _exchange(self, head: bytes, body: bytes, timeout_s: float | None) -> HttpReply:
        if self._is_closed:
            raise NeverSent(_CLOSED)
        loop = asyncio.get_running_loop()
        connection = self._kept(loop.time())
        was_kept = connection is not None
        if connection is None:
            began = loop.time()
            connection = await self._connected(timeout_s)
            if timeout_s is not None:
                timeout_s -= loop.time() - began
        try:
            reply = await connection.exchange(head, body, timeout_s)
        except NoAnswer:
            self._distrusted = _DISTRUST if was_kept else self._distrusted
            raise
        if self._distrusted:
            self._distrusted -= 1
            connection.break_off(Unreachable(_CLOSED))
        elif connection.keeps and connection.is_open():
            self._keep(connection, loop.time())
        else:
            connection.break_off(Unreachable(_CLOSED))
        return reply

    def _kept(self, now: float) -> Connection | None:
        """Return a connection that may be used again; None without one."""
        while self._idle:
            connection, until = self._idle.popitem()
            if now < until and connection.is_open():
                return connection
            connection.break_off(Unreachable(_CLOSED))
        return None

    def _keep(self, connection: Connection, now: float) -> None:
        self._idle[connection] = now + min(KEPT_S, connection.idle_s - _MARGIN_S)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEPT_S, self._close_old)

    def _close_old(self) -> None:
        """Close what was idle for long: a server's connections are not ours to hold for nothing."""
        loop = asyncio.get_running_loop()
        self._sweep = None
        while self._idle:
            oldest, until = next(iter(self._idle.items()))
            if loop.time() < until:
                self._sweep = loop.call_at(until, self._close_old)
                return
            del self._idle[oldest]
            oldest.break_off(Unreachable(_CLOSED))

    async def _connected(self, timeout_s: float | None) -> Connection:
        # A server that takes no connection is to blame itself, whatever time the request had.
        scope = asyncio.timeout(CONNECT_TIMEOUT_S if timeout_s is None else min(timeout_s, CONNECT_TIMEOUT_S))
        try:
            async with scope:
                self._dialing.add(scope)
                try:
                    connection = await self._dialer.dial(self._made)
                finally:
                    self._dialing.discard(scope)
        except TimeoutError as error:
            if self._is_closed:
                raise NeverSent(_CLOSED) from error
            raise NeverSent("no answer in time") from error
        if self._is_closed:
            connection.break_off(Unreachable(_CLOSED))
            raise NeverSent(_CLOSED)
        if not connection.lost.done():
            self._open.add(connection)
        return connection

    def _made(self) -> Connection:
        return Connection(self._most_bytes, self._gone)

    def _gone(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        if connection.lost.done():
            self._open.discard(connection)

    async def aclose(self) -> None:
        """Close all connections, and break off what is under way on them."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        now = asyncio.get_running_loop().time()
        for scope in self._dialing:
            if not scope.expired():
                scope.reschedule(now)
        closing = [connection.lost for connection in self._open]
        for connection in list(self._open):
            connection.break_off(Unreachable(_CLOSED))
        self._idle.clear()
        if closing:
            await asyncio.wait(closing)
