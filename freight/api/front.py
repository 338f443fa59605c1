"""What stands before the application on TCP: who may ask from where, and how much may be sent."""

import ipaddress
import re
from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec
from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freight.api.requestid import RequestIds
from freight.core.address import Address

# In the state of a request: "unix" or "tcp".
TRANSPORT: Final = "freight.transport"
HEALTH: Final = "/healthz"
_UPLOADS: Final = (("POST", "/api/uploads"), ("POST", "/v1/files"))
# What a form adds to the file in it.
FORM_BYTES: Final = 1 << 16
_AUTHORITY: Final = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>\d*))?")
_PORTS: Final = {"http": "80", "https": "443"}

Middleware = Callable[[ASGIApp], ASGIApp]


def is_upload(method: str, path: str) -> bool:
    """Return whether a request's body is a file."""
    return (method, path) in _UPLOADS


def transport_of(scope: Scope) -> str:
    """Return by which way a request came."""
    return scope.get("state", {}).get(TRANSPORT, "unix")


class OnTransport:
    """An application whose requests say by which way they came."""

    def __init__(self, app: ASGIApp, transport: str) -> None:
        self._app = app
        self._transport = transport

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        scope.setdefault("state", {})[TRANSPORT] = self._transport
        await self._app(scope, receive, send)


class Health:
    """GET /healthz: "ok" to anybody, as long as the service answers at all."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] != HEALTH:
            await self._app(scope, receive, send)
        elif scope["method"] in ("GET", "HEAD"):
            await PlainTextResponse("ok")(scope, receive, send)
        else:
            await PlainTextResponse("only GET", 405, {"allow": "GET, HEAD"})(scope, receive, send)


class KnownHosts:
    """Refuses requests made to a name that is not the service's, and those of other sites' pages, whatever the method.

    A page of elsewhere names itself in Origin, or its own name in Host.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "http" and (words := self._wrong(scope)) is not None:
            answer = refuse(scope, 403, "not_allowed", *words)
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _wrong(self, scope: Scope) -> tuple[str, str] | None:
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        named = _AUTHORITY.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if named is None or not self._is_ours(named["host"].lower(), scope):
            shown = f"the Host {hosts[0]!r} is" if len(hosts) == 1 else f"{len(hosts)} Host headers are"
            return f"{shown} not one that this service answers to", "add the name to server.hosts in its configuration"
        if any(not _is_same(origin, hosts[0]) for origin in origins) or len(origins) > 1:
            return "this service answers no web pages of other sites", "send no Origin"
        return None

    def _is_ours(self, host: str, scope: Scope) -> bool:
        if "*" in self._hosts or host in self._hosts:
            return True
        # The address that was connected to is ours; no name of another site's leads here by it.
        here = scope.get("server")
        return here is not None and _plain(host) == _plain(str(here[0]))


def known_hosts(address: Address, configured: Collection[str], own_name: str) -> frozenset[str]:
    """Return the names that the service answers to: those configured, else where it listens and localhost.

    One that listens on all interfaces answers to the machine's `own_name`, too.
    """
    if configured:
        names = {name.lower() for name in configured}
    else:
        names = {"localhost", address.host, *((own_name.lower(),) if address.is_for_all() else ())}
    return frozenset(f"[{name}]" if ":" in name and not name.startswith("[") else name for name in names if name)


def _plain(host: str) -> str:
    try:
        number = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return str(mapped or number)


def _is_same(origin: str, host: str) -> bool:
    """Return whether a page of `origin` came from `host`; who it is that encrypts does not matter."""
    scheme, _, authority = origin.lower().partition("://")
    port = _PORTS.get(scheme)
    return port is not None and authority.removesuffix(f":{port}") == host.lower().removesuffix(f":{port}")


class BodyLimits:
    """Refuses bodies that are too large: before they are sent where their length is known, else as they come.

    JSON may have `most` bytes, an upload what `file_limit` returns.
    """

    def __init__(self, app: ASGIApp, most: int, file_limit: Callable[[], int]) -> None:
        self._app = app
        self._most = most
        self._file_limit = file_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit, words = self._limit(scope)
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or int(length) > limit:
            answer = refuse(scope, 413, "too_large", words, "split it", {"connection": "close"})
            await answer(scope, receive, send)
            return
        await _Counted(limit, words, receive, send).answer(self._app, scope)

    def _limit(self, scope: Scope) -> tuple[int, str]:
        """Return how many bytes the body may have, and what to say of one that has more."""
        if not is_upload(scope["method"], scope["path"]):
            return self._most, f"the body has more than {self._most} bytes, the limit (server.max_body)"
        form = FORM_BYTES if scope["path"] == "/v1/files" else 0
        most = self._file_limit()
        return most + form, f"the file has more than {most} bytes, the limit (limits.file_bytes)"


class _TooLarge(HTTPException):
    pass


class _Counted:
    """One request whose body is counted as it comes."""

    def __init__(self, limit: int, words: str, receive: Receive, send: Send) -> None:
        self._limit = limit
        self._words = words
        self._receive = receive
        self._send = send
        self._count = 0
        self._is_answered = False

    async def answer(self, app: ASGIApp, scope: Scope) -> None:
        """Answer it."""
        try:
            await app(scope, self._counted, self._closing)
        except _TooLarge:
            if self._is_answered:
                raise
            await refuse(scope, 413, "too_large", self._words, "split it")(scope, self._receive, self._closing)

    async def _counted(self) -> Message:
        message = await self._receive()
        self._count += len(message.get("body", b""))
        if self._count > self._limit:
            # Whoever reads the body gives up what it has; the application may say so in its own way.
            raise _TooLarge(413, self._words)
        return message

    async def _closing(self, message: Message) -> None:
        self._is_answered = True
        if message["type"] == "http.response.start" and self._count > self._limit:
            message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
        await self._send(message)


class NobodyKnown:
    """Knows nobody: every request lacks what would show who asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse one request."""
        hint = "send a token: Authorization: Bearer …"
        answer = refuse(scope, 401, "unauthenticated", "no token", hint, {"www-authenticate": "Bearer"})
        await answer(scope, receive, send)


def refuse(
    scope: Scope,
    status: int,
    code: str,
    message: str,
    hint: str | None,
    headers: dict[str, str] | None = None,
    param: str | None = None,
) -> Response:
    """Return a refusal in the shape of the route's family."""
    error: dict[str, Any] = {"code": code, "message": message, "hint": hint}
    if scope["path"].startswith("/v1/"):
        words = f"{message}; {hint}" if hint else message
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": words, "type": kind, "param": param, "code": code}
    elif scope["path"].startswith("/resource_server/"):
        error = {"code": code, "message": message, "info": hint}
    return Response(msgspec.json.encode({"error": error}), status, headers, "application/json")


def front(
    app: ASGIApp,
    hosts: Collection[str],
    max_body: int,
    file_limit: Callable[[], int],
    authentication: Middleware = NobodyKnown,
) -> ASGIApp:
    """Return the application as it is on TCP; `authentication` finds out who asks, or refuses."""
    known = authentication(BodyLimits(app, max_body, file_limit))
    return RequestIds(Health(OnTransport(KnownHosts(known, hosts), "tcp")))
