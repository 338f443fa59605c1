"""Where a server is, and getting a connection to it."""

import asyncio
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

from freight.engines.answers import NeverSent
from freight.engines.base import Address
from freight.engines.connection import Connection

# An address of a host that has several gets so long before the next is tried.
_ONE_OF_SEVERAL_S: Final = 3.0
_FULL_QUEUE_S: Final = 0.02
# What a name means is looked up again after this.
_NAME_S: Final = 10.0
_PORTS: Final = {"http": 80, "https": 443}
_AS_THEY_ARE: Final = "/%:@!$&'()*+,;=~"

Make = Callable[[], Connection]


@dataclass(frozen=True, slots=True)
class Site:
    """A server, as its URL names it: `prefix` comes before every path, `headers` are those of every request."""

    host: str
    port: int
    is_tls: bool
    socket_path: str | None
    prefix: str
    headers: bytes

    def head(self, method: str, path: str) -> bytes:
        """Return a request's first line and the headers that all have, without the empty line at their end."""
        return f"{method} {self.prefix}{quote(path, _AS_THEY_ARE)} HTTP/1.1\r\n".encode() + self.headers


def site_of(address: Address) -> Site:
    """Return the server at an address; raise ValueError when its URL or key is none."""
    parts = urlsplit(address.url)
    if parts.scheme not in _PORTS:
        raise ValueError("a URL that is neither http nor https")
    host = (parts.hostname or "").encode("ascii" if (parts.hostname or "").isascii() else "idna").decode()
    usual = _PORTS[parts.scheme]
    port = parts.port or usual
    shown = f"[{host.partition('%')[0]}]" if ":" in host else host
    headers = [f"Host: {shown}" if port == usual else f"Host: {shown}:{port}", "User-Agent: freight", "Accept: */*"]
    headers.append("Accept-Encoding: identity")
    if address.api_key:
        headers.append(f"Authorization: Bearer {address.api_key}")
    if not all(header.isprintable() for header in headers):
        raise ValueError("a key that no header can hold")
    return Site(
        host=host,
        port=port,
        is_tls=parts.scheme == "https",
        socket_path=address.socket_path,
        prefix=quote(parts.path, _AS_THEY_ARE),
        headers="".join(header + "\r\n" for header in headers).encode("latin-1"),
    )


class Dialer:
    """Makes connections to one site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._trust: ssl.SSLContext | None = None
        self._hosts: list[str] = [site.host] if _is_address(site.host) else []
        self._found_at: float | None = None
        self._finding: asyncio.Task[None] | None = None

    async def dial(self, make: Make) -> Connection:
        """Return a new connection; raise NeverSent, which says why there is none."""
        try:
            if self._site.socket_path is not None:
                return await self._dial_path(make, self._site.socket_path)
            return await self._dial_any(make, await self._addresses())
        except (OSError, ValueError) as error:
            raise NeverSent(_why(error)) from error

    async def _dial_path(self, make: Make, path: str) -> Connection:
        """Connect to a Unix socket; unlike TCP's, one whose queue is full says so at once, and is asked again."""
        while True:
            try:
                return (await asyncio.get_running_loop().create_unix_connection(make, path))[1]
            except BlockingIOError:
                await asyncio.sleep(_FULL_QUEUE_S)

    async def _dial_any(self, make: Make, hosts: list[str]) -> Connection:
        loop = asyncio.get_running_loop()
        site = self._site
        trust, name = (self._context(), site.host.rstrip(".")) if site.is_tls else (None, None)
        for left, host in zip(range(len(hosts) - 1, -1, -1), hosts, strict=True):
            try:
                async with asyncio.timeout(_ONE_OF_SEVERAL_S if left else None):
                    _, connection = await loop.create_connection(make, host, site.port, ssl=trust, server_hostname=name)
            except OSError:
                if not left:
                    raise
            else:
                # The others need not find out again which of them do not answer.
                if host in self._hosts:
                    self._hosts.remove(host)
                    self._hosts.insert(0, host)
                return connection
        raise OSError("the host has no address")

    def _context(self) -> ssl.SSLContext:
        if self._trust is None:
            self._trust = ssl.create_default_context()
            self._trust.set_alpn_protocols(["http/1.1"])
        return self._trust

    async def _addresses(self) -> list[str]:
        """Return the host's addresses; who asks while they are being found waits for the same answer."""
        loop = asyncio.get_running_loop()
        if self._hosts and (self._found_at is None or loop.time() - self._found_at < _NAME_S):
            return list(self._hosts)
        if self._finding is None:
            self._finding = asyncio.create_task(self._find())
            self._finding.add_done_callback(self._found)
        await asyncio.shield(self._finding)
        return list(self._hosts)

    async def _find(self) -> None:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._site.host, self._site.port, type=socket.SOCK_STREAM)
        self._found_at = loop.time()
        addresses = dict.fromkeys(str(address[0]) for *_, address in found)
        # The one that answered last comes first.
        self._hosts = sorted(addresses, key=lambda address: address not in self._hosts[:1])

    def _found(self, finding: asyncio.Task[None]) -> None:
        self._finding = None
        if not finding.cancelled():
            finding.exception()  # Seen, also where everybody who asked has gone.


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _why(error: Exception) -> str:
    match error:
        case socket.gaierror() | UnicodeError():
            return "its host name cannot be resolved"
        case ssl.SSLError():
            return "its certificate is not accepted, or it does not speak TLS"
        case OSError(errno=int(number)):
            return os.strerror(number).lower()
        case TimeoutError():
            return "no answer in time"
        case _:
            return str(error).lower() or "the connection was closed"
