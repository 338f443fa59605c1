"""Who asks: found out before a request gets anywhere."""

import math
import re
from typing import Final
from urllib.parse import parse_qsl

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freight.api.front import refuse, transport_of
from freight.control.accounts import Accounts
from freight.control.streams import StreamBroken
from freight.core.account import Account
from freight.errors import FreightError, NotAllowed, TooMany, Unauthenticated

# In the state of a request: who asks.
ACCOUNT: Final = "freight.account"
_CHALLENGE: Final = "www-authenticate"
_BEARER: Final = re.compile(r"Bearer +([!-~]+) *", re.IGNORECASE)
_IN_QUERY: Final = frozenset({"access_token", "token", "api_key", "apikey", "api-key", "bearer", "authorization"})
# A JWT is known by its middle: looked for from each "eyJ" on to the next dot, it would take a long text seconds.
_LIKE_TOKEN: Final = re.compile(r"frt_[A-Za-z0-9_-]{43}|\.eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_SEND: Final = "send a token: Authorization: Bearer …"


class Authentication:
    """Lets in who is known: on the Unix socket its owner, on TCP who shows a good token."""

    def __init__(self, app: ASGIApp, accounts: Accounts) -> None:
        self._app = app
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] != "http":
            return  # Nothing else is spoken here.
        try:
            _check_query(scope)
            token = None if transport_of(scope) == "unix" else _token(scope)
            account = self._accounts.owner if token is None else await self._accounts.known(token)
            self._accounts.admit(account)
        except FreightError as error:
            status, headers = _refusal(error, scope)
            await refuse(scope, status, error.code, error.message, error.hint, headers)(scope, receive, send)
            return
        scope.setdefault("state", {})[ACCOUNT] = account
        if token is None:
            await self._app(scope, receive, send)
        else:
            watched = _WhileGood(self._accounts, token, receive, send)
            await self._app(scope, watched.receive, watched.send)


class _WhileGood:
    """What goes to and fro in one request, for as long as its token is not revoked: both may take hours."""

    def __init__(self, accounts: Accounts, token: str, receive: Receive, send: Send) -> None:
        self._accounts = accounts
        self._token = token
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        """Return what comes; raise Unauthenticated for more of a body whose token was revoked."""
        message = await self._receive()
        if message["type"] == "http.request" and self._accounts.is_revoked(self._token):
            raise Unauthenticated("the token was revoked meanwhile", _SEND)
        return message

    async def send(self, message: Message) -> None:
        """Send; raise StreamBroken for what is in the middle of a stream whose token was revoked."""
        if message.get("more_body") and self._accounts.is_revoked(self._token):
            raise StreamBroken
        await self._send(message)


def _token(scope: Scope) -> str:
    """Return the token that a request shows; raise Unauthenticated where there is none."""
    given = Headers(scope=scope).getlist("authorization")
    if not given:
        raise _NoToken("no token", _SEND)
    found = _BEARER.fullmatch(given[0]) if len(given) == 1 else None
    if found is None:
        raise Unauthenticated("the Authorization header is not a Bearer token", _SEND)
    return found[1]


async def account_of(request: Request) -> Account:
    """Return who asks; raise Unauthenticated where nobody has found out."""
    account = request.scope.get("state", {}).get(ACCOUNT)
    if account is None:
        raise _NoToken("no token", _SEND)
    return account


async def admin_of(request: Request) -> Account:
    """Return who asks; raise NotAllowed unless they are an admin."""
    account = await account_of(request)
    if not account.is_admin():
        raise NotAllowed("only admins may do this", "ask one")
    return account


class _NoToken(Unauthenticated):
    """Nothing was shown at all."""


class _InQuery(FreightError):
    code = "invalid_request"


def _check_query(scope: Scope) -> None:
    """Refuse a token in the URL: what is there ends in logs and histories."""
    query = scope.get("query_string", b"").decode("latin-1")
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key.lower() in _IN_QUERY or _LIKE_TOKEN.search(value) or _LIKE_TOKEN.search(key):
            raise _InQuery("a token must not be in the URL, where logs keep it", f"revoke it, and {_SEND}")


def _refusal(error: FreightError, scope: Scope) -> tuple[int, dict[str, str]]:
    """Return the status of a refusal, and its headers."""
    # What is still to come of a body that nobody reads would have to be waited for.
    sent = Headers(scope=scope)
    has_body = sent.get("content-length", "0") != "0" or "transfer-encoding" in sent
    headers = {"connection": "close"} if has_body else {}
    match error:
        case _NoToken():
            return 401, {_CHALLENGE: "Bearer", **headers}
        case Unauthenticated():
            return 401, {_CHALLENGE: 'Bearer error="invalid_token"', **headers}
        case TooMany():
            return 429, {**retry_after(error), **headers}
        case _InQuery():
            return 400, headers
        case _:
            return 503, {"retry-after": "5", **headers}


def retry_after(error: TooMany) -> dict[str, str]:
    """Return the header that says when to try again, where time alone will help; else that it will not."""
    if error.retry_after_s is None:
        return {"x-should-retry": "false"}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
