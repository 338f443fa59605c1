"""Speaking to a model server over HTTP."""

import math
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Final

import msgspec

from freight.engines.answers import MOST_ANSWER_BYTES, HttpReply, NeverSent, TookTooLong, TooLarge, Unreachable
from freight.engines.base import Address
from freight.engines.pool import Pool

__all__ = (
    "MOST_ANSWER_BYTES",
    "EngineClient",
    "HttpReply",
    "NeverSent",
    "TooLarge",
    "TookTooLong",
    "Unreachable",
    "retry_after_s",
)

PROBE_TIMEOUT_S: Final = 5.0
# A server that asks for more is asked again after this.
MOST_RETRY_AFTER_S: Final = 600.0


class EngineClient:
    """One pool of connections to one server."""

    def __init__(self, address: Address) -> None:
        self._pool = Pool(address, MOST_ANSWER_BYTES)

    async def __aenter__(self) -> "EngineClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; what is under way on them breaks off."""
        await self._pool.aclose()

    async def post(self, path: str, body: bytes, timeout_s: float | None) -> HttpReply:
        """Send one request and return the whole answer; raise Unreachable, TookTooLong or TooLarge."""
        return await self._pool.post(path, body, timeout_s)

    async def get(self, path: str) -> HttpReply:
        """Fetch a path; raise Unreachable also when it takes longer than PROBE_TIMEOUT_S."""
        try:
            return await self._pool.get(path, PROBE_TIMEOUT_S)
        except TooLarge as error:
            raise Unreachable("its answer is far too long") from error
        except TookTooLong as error:
            raise Unreachable("no answer in time") from error

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


def _is_trouble(status: int) -> bool:
    return status >= 500 or status == 429


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
    except (ValueError, OverflowError):
        return None
