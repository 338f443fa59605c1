"""A name for each request: in its answer, and in every line of the log that it causes."""

import logging
import re
import uuid
from contextvars import ContextVar
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = "x-request-id"
# What a client calls its request is taken over where it can do no harm in a line of a log.
_SANE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")
_TOKEN: Final = re.compile(r"frt[_-]|eyJ", re.IGNORECASE)
_current: ContextVar[str] = ContextVar("freight.request", default="")


class RequestIds:
    """Gives each request an id: the client's own, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist(HEADER)
        is_sane = len(given) == 1 and _SANE.fullmatch(given[0]) and not _TOKEN.search(given[0])
        request = given[0] if is_sane else uuid.uuid4().hex

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", []), (HEADER.encode(), request.encode())]
                message = {**message, "headers": headers}
            await send(message)

        before = _current.set(request)
        try:
            await self._app(scope, receive, named)
        finally:
            _current.reset(before)


def name_requests(handler: logging.Handler) -> None:
    """Let a handler's format say %(request)s: "[ID] " in what a request causes, else ""."""
    handler.addFilter(_add_request)


def _add_request(record: logging.LogRecord) -> bool:
    request = _current.get()
    record.request = f"[{request}] " if request else ""
    return True
