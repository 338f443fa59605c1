"""Sending one letter to its receiver: by whichever name, only to an address that was checked."""

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from freight.core.receivers import Receiver, allowed, named, server_of
from freight.core.webhook import Attempt, Letter

TIMEOUT_S: Final = 10.0
_RESOLVERS: Final = 8

Resolve = Callable[[str, int], Awaitable[list[str]]]


class Refused(Exception):
    """Nothing was sent; the text says why."""


class Names:
    """Finds the addresses of hosts, in threads of its own: a name server that is silent holds up nothing else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_RESOLVERS, "freight-names")
        self._going: dict[tuple[str, int], asyncio.Future[list[str]]] = {}

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host; who asks while the same question is open waits for that answer."""
        key = (host, port)
        going = self._going.get(key)
        if going is None:
            going = asyncio.get_running_loop().run_in_executor(self._threads, _addresses, host, port)
            self._going[key] = going
            going.add_done_callback(lambda _: self._over(key))
        return await asyncio.shield(going)

    def _over(self, key: tuple[str, int]) -> None:
        future = self._going.pop(key)
        if not future.cancelled():
            future.exception()  # Seen, also where everybody who asked has gone.

    def close(self) -> None:
        """Answer no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class _Pinned(AbstractResolver):
    """Knows one host, at addresses that were found and checked before."""

    def __init__(self, host: str, addresses: Sequence[str]) -> None:
        self._host = host
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        if host != self._host:
            raise OSError(f"another host than was checked: {host}")
        return [_result(host, port, address) for address in self._addresses]

    async def close(self) -> None:
        """Do nothing: there is nothing to let go."""


def _result(host: str, port: int, address: str) -> ResolveResult:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=flags)


class Post:
    """Sends letters. `resolve` finds a host's addresses; `trust` is for servers with certificates of their own."""

    def __init__(self, resolve: Resolve, timeout_s: float = TIMEOUT_S, trust: ssl.SSLContext | None = None) -> None:
        self._resolve = resolve
        self._timeout_s = timeout_s
        self._trust: ssl.SSLContext | bool = trust or True

    async def send(self, letter: Letter, headers: dict[str, str], receivers: Sequence[Receiver]) -> Attempt:
        """Make one attempt; whatever the receiver does, it is over within the time limit.

        Raises Refused where the receivers that are allowed now do not have the letter's.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._send(letter, headers, receivers)
        except TimeoutError:
            return Attempt(None, f"no answer within {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Attempt(None, _why(error))

    async def _send(self, letter: Letter, headers: dict[str, str], receivers: Sequence[Receiver]) -> Attempt:
        server = server_of(letter.url)
        entries = named(server, receivers)
        if not entries:
            raise Refused("webhooks.hosts does not list it any more")
        addresses = allowed(await self._resolve(server.host, server.port), entries)
        if not addresses:
            raise Refused("its host's address is neither public nor listed with it in webhooks.hosts")
        # A connection of its own, to just these addresses: what the name means a moment later changes nothing.
        connector = aiohttp.TCPConnector(
            resolver=_Pinned(server.host, addresses), use_dns_cache=False, force_close=True, ssl=self._trust
        )
        # No proxy from the environment, no cookies, no redirect: each would take the letter elsewhere.
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=False,
            ) as session,
            session.post(letter.url, data=letter.body.encode(), headers=headers, allow_redirects=False) as response,
        ):
            # The body is not read: it has nothing to say, and may have no end.
            response.close()
            return _attempt(response)


def _attempt(response: aiohttp.ClientResponse) -> Attempt:
    words = f"it answers {response.status}"
    if 300 <= response.status < 400:
        words += ", and redirects are not followed"
    return Attempt(response.status, words, response.headers.get("Retry-After"))


def _why(error: Exception) -> str:
    match error:
        case socket.gaierror():
            return "its host name cannot be resolved"
        case aiohttp.ClientSSLError():
            return "its certificate is not accepted, or it does not speak TLS"
        case aiohttp.ClientConnectorError():
            # Not its own text, which holds the address.
            return os.strerror(error.errno).lower() if error.errno else "no connection"
        case aiohttp.ServerDisconnectedError() | ConnectionError():
            return "the connection was closed"
        case _:
            # Not the error's own text, which may quote what the server sent.
            return f"its answer is not HTTP ({type(error).__name__})"
