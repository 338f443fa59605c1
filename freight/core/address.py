"""Where a server listens, as users write it: HOST:PORT."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

_WRITTEN: Final = re.compile(r"(?:\[(?P<bracketed>[^\]]*)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")
_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_EXPECTED: Final = "expected HOST:PORT such as 127.0.0.1:8400, localhost:8400, [::1]:8400, or :8400 for all interfaces"


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port. The host is "" for all interfaces; port 0 is any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_for_all(self) -> bool:
        """Return whether it means all interfaces of the machine."""
        return self.host in ("", "0.0.0.0", "::")


def parse_address(text: str) -> Address:
    """Return the address that `text` names; raise ValueError for what is none."""
    match = _WRITTEN.fullmatch(text.strip())
    if match is None or int(match["port"]) > 65_535:
        raise ValueError(_EXPECTED)
    if match["bracketed"] is not None:
        return Address(_number(match["bracketed"], 6), int(match["port"]))
    host = match["host"]
    if re.fullmatch(r"[0-9.]+", host):
        host = _number(host, 4)
    elif host and not _NAME.fullmatch(host):
        raise ValueError(_EXPECTED)
    return Address(host.lower(), int(match["port"]))


def _number(text: str, version: int) -> str:
    try:
        number = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(_EXPECTED) from None
    if number.version != version:
        raise ValueError(_EXPECTED)
    return str(number)


def is_loopback(host: str) -> bool:
    """Return whether a host, as a URL names it, is this machine and no other."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
