"""Speaking to a model server over HTTP."""

import io
import math
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Final

import aiohttp
import msgspec

from freight.engines.base import Address

# An answer may have so many bytes, unpacked; no model writes as much.
MOST_ANSWER_BYTES: Final = 64_000_000
PROBE_TIMEOUT_S: Final = 5.0
# A server that asks for more is asked again after this.
MOST_RETRY_AFTER_S: Final = 600.0
_CONNECT_TIMEOUT_S: Final = 30.0
_ONE_PIECE_BYTES: Final = 1 << 20
_HEADERS: Final = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True)
class HttpReply:
    """What a server answered. `retry_after` is the header as it came; `request_id` is "" when it gave none."""

    status: int
    body: bytes
    request_id: str
    retry_after: str | None


class Unreachable(Exception):
    """No complete answer came; the text says why, in a few words and without the request."""


class NeverSent(Unreachable):
    """No connection could be made, so that the server never saw the request."""


class TooLarge(Exception):
    """The answer has more than MOST_ANSWER_BYTES."""


class TookTooLong(Exception):
    """The request's own time limit ran out."""


class EngineClient:
    """One pool of connections to one server."""

    def __init__(self, address: Address) -> None:
        self._base = address.url
        headers = dict(_HEADERS)
        if address.api_key:
            headers["Authorization"] = f"Bearer {address.api_key}"
        connector = (
            aiohttp.UnixConnector(address.socket_path, limit=0)
            if address.socket_path
            else aiohttp.TCPConnector(limit=0)
        )
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, auto_decompress=True)

    async def __aenter__(self) -> "EngineClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def post(self, path: str, body: bytes, timeout_s: float | None) -> HttpReply:
        """Send one request and return the whole answer; raise Unreachable, TookTooLong or TooLarge."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        # A large body goes out in pieces, so that it does not hold up the event loop.
        data = body if len(body) <= _ONE_PIECE_BYTES else io.BytesIO(body)
        self._check_open()
        try:
            # A redirect would take the record to a server that nobody named.
            async with self._session.post(
                self._base + path, data=data, timeout=timeout, allow_redirects=False
            ) as response:
                return HttpReply(
                    response.status,
                    await _read(response),
                    response.headers.get("x-request-id", ""),
                    response.headers.get("Retry-After"),
                )
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise TookTooLong from error
            # What died for one record is not to be blamed on those that came too late.
            kind = NeverSent if isinstance(error, aiohttp.ClientConnectorError) else Unreachable
            raise kind(_why(error)) from error

    async def get(self, path: str) -> HttpReply:
        """Fetch a path; raise Unreachable also when it takes longer than PROBE_TIMEOUT_S."""
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        self._check_open()
        try:
            async with self._session.get(self._base + path, timeout=timeout, allow_redirects=False) as response:
                return HttpReply(response.status, await _read(response), "", None)
        except TooLarge as error:
            raise Unreachable("its answer is far too long") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unreachable(_why(error)) from error

    def _check_open(self) -> None:
        if self._session.closed:
            raise Unreachable("the connection was closed here")

    async def problem(self) -> str | None:
        """Probe the server's health; return why it cannot serve now, or None when it can.

        Servers without /health are judged by /v1/models: any answer but a server error will do.
        """
        try:
            reply = await self.get("/health")
            if not (200 <= reply.status < 300 or _is_trouble(reply.status)):
                reply = await self.get("/v1/models")
        except Unreachable as error:
            return str(error)
        return f"its health check answers {reply.status}" if _is_trouble(reply.status) else None

    async def model_ids(self) -> frozenset[str] | None:
        """Return the ids that /v1/models lists; None when the server has no such list.

        Raises Unreachable when it does not answer, or answers with a server error.
        """
        reply = await self.get("/v1/models")
        if _is_trouble(reply.status):
            raise Unreachable(f"/v1/models answers {reply.status}")
        if reply.status in (401, 403):
            raise PermissionError(f"/v1/models answers {reply.status}")
        if not 200 <= reply.status < 300:
            return None
        try:
            listed: Any = msgspec.json.decode(reply.body)
            return frozenset(str(entry["id"]) for entry in listed["data"])
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
            return None

    async def metrics(self) -> str | None:
        """Return the server's Prometheus text; None when it has none or does not answer."""
        try:
            reply = await self.get("/metrics")
        except Unreachable:
            return None
        return reply.body.decode(errors="replace") if reply.status == 200 else None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > MOST_ANSWER_BYTES:
            response.close()
            raise TooLarge
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _is_trouble(status: int) -> bool:
    return status >= 500 or status == 429


def _why(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its host name cannot be resolved"
    if isinstance(error, aiohttp.ClientConnectorError):
        return (error.strerror or str(error)).lower()
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer broke off"
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionError):
        return "the connection was closed"
    # Not the error's own text, which may quote what the server sent.
    return f"its answer is not HTTP ({type(error).__name__})"


def retry_after_s(header: str | None, now: float) -> float | None:
    """Return the seconds that a Retry-After header asks for (`now` in seconds since the epoch); None without one."""
    if not header:
        return None
    try:
        seconds = max(0.0, float(header))
        return min(seconds, MOST_RETRY_AFTER_S) if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        return min(max(0.0, parsedate_to_datetime(header).timestamp() - now), MOST_RETRY_AFTER_S)
    except ValueError:
        return None
