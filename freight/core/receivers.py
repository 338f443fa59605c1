"""Who may get webhooks: servers that the settings list, at addresses that anybody may reach or that are listed too.

An entry is `[http://|https://]HOST[:PORT][=NETWORK]`, https and its usual port unless it says otherwise: `hooks.lab`,
`http://hooks.lab:9000=10.0.0.0/8`, `https://10.0.0.7:8443`. A server may have several entries.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

_PORTS: Final = {"https": 443, "http": 80}
_HOST: Final = r"(?P<host>[a-z0-9_.-]{1,253}|\[[0-9a-f]{0,4}:[0-9a-f:.]{1,40}\])(?::(?P<port>[0-9]{1,5}))?"
# Where a host ends so, it is an address: 127.1, 2130706433 and 0x7f.1 are spellings of one that only some readers know.
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_ENTRY: Final = re.compile(rf"(?:(?P<scheme>https?)://)?{_HOST}(?:=(?P<network>[0-9a-f:./]+))?", re.IGNORECASE)
# Nothing that one parser of URLs may read otherwise than another: no user, fragment, backslash, space, other alphabet.
_URL: Final = re.compile(rf"(?P<scheme>https?)://{_HOST}(?:[/?][!\"$-\[\]-~]*)?", re.IGNORECASE)
_MOST_URL: Final = 2048
# All unicast addresses of the Internet so far, and those that stand for an IPv4 address behind a translator.
_GLOBAL_6: Final = ip_network("2000::/3")
_TRANSLATED: Final = ip_network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class Server:
    """Where a URL points: `host` is in lower case, an IPv6 address without its brackets."""

    scheme: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Receiver:
    """A server that may get webhooks, at addresses of `network`; where that is None, at public ones."""

    server: Server
    network: IPv4Network | IPv6Network | None

    def has(self, address: IPv4Address | IPv6Address) -> bool:
        """Return whether the server may be reached at an address."""
        return is_public(address) if self.network is None else address in self.network


def receiver(entry: str) -> Receiver:
    """Return what an entry of the settings allows; raise ValueError for one that means nothing."""
    match = _ENTRY.fullmatch(entry.strip())
    if match is None:
        raise ValueError(f"{entry!r} is not HOST, HOST:PORT or http://HOST:PORT, with =ADDRESS or not")
    server = _server(match)
    if match["network"]:
        return Receiver(server, ip_network(match["network"]))
    try:
        return Receiver(server, ip_network(server.host))
    except ValueError:
        return Receiver(server, None)


def server_of(url: str) -> Server:
    """Return the server of a URL; raise ValueError for one to which nothing is sent."""
    match = _URL.fullmatch(url)
    if match is None or len(url) > _MOST_URL:
        raise ValueError(f"expected https://HOST/PATH, at most {_MOST_URL} plain characters, no user or fragment")
    return _server(match)


def _server(match: re.Match[str]) -> Server:
    scheme = (match["scheme"] or "https").lower()
    port = int(match["port"] or _PORTS[scheme])
    if not 1 <= port <= 65535:
        raise ValueError(f"there is no port {port}")
    host = match["host"].lower().strip("[]")
    if ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]):
        host = str(ip_address(host))
    return Server(scheme, host, port)


def named(server: Server, receivers: Sequence[Receiver]) -> tuple[Receiver, ...]:
    """Return the entries that allow a server; none means that it gets nothing."""
    return tuple(each for each in receivers if each.server == server)


def allowed(addresses: Sequence[str], entries: Sequence[Receiver]) -> list[str]:
    """Return those of a server's addresses at which one of its entries lets it be reached."""
    return [address for address in addresses if any(entry.has(ip_address(address)) for entry in entries)]


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address is on the Internet: not of this machine, link or site, and for one receiver."""
    if isinstance(address, IPv6Address):
        if address in _TRANSLATED:
            return is_public(IPv4Address(int(address) & 0xFFFF_FFFF))
        if address not in _GLOBAL_6 or (address.sixtofour is not None and not is_public(address.sixtofour)):
            return False
    return address.is_global and not address.is_multicast
