"""The workers' one call, as a bare ASGI application: the hot path has no framework in it."""

from collections.abc import Awaitable, Callable
from typing import Any

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


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
