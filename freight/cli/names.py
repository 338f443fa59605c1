"""What shells complete: jobs' names, from the service that runs, and models. Quick, and silent where it fails."""

import http.client
import json
import socket
from typing import Any, Final, cast
from urllib.parse import urlencode, urlsplit

from freight.client.address import Address, Reach, find_service
from freight.errors import FreightError

TIMEOUT_S: Final = 0.1
_PATH: Final = "/api/names"
_MOST_BYTES: Final = 1 << 20
# Of a thousand names each: what a shell shows of more is of no use, and everything takes time.
_MOST_PAGES: Final = 5
_PAGE: Final = "1000"


class _UnixConnection(http.client.HTTPConnection):
    """A connection over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("freight", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


def model_names() -> list[str]:
    """Return the registered models and their aliases; none where the settings are wrong."""
    from freight.cli.settings import settings

    try:
        models = settings().models
    except FreightError:
        return []
    return [*models, *(alias for entry in models.values() for alias in entry.aliases)]


def job_names(server: str | None) -> list[str]:
    """Return the names of the service's jobs; none where it does not answer."""
    try:
        address = find_service(server, None)
        reach = Reach(address.socket) if address.socket else None
        try:
            return _pages(address, reach)
        finally:
            if reach is not None:
                reach.close()
    except (FreightError, OSError, ValueError, TypeError, http.client.HTTPException):
        return []


def _pages(address: Address, reach: Reach | None) -> list[str]:
    names: list[str] = []
    params = {"limit": _PAGE}
    for _ in range(_MOST_PAGES):
        page: Any = json.loads(_get(address, reach, urlencode(params)))
        if not isinstance(page, dict):
            return []
        found = cast("dict[str, Any]", page)
        names += [str(name) for name in found.get("names", [])]
        if not found.get("next"):
            break
        params["after"] = str(found["next"])
    return names


def _get(address: Address, reach: Reach | None, query: str) -> bytes:
    headers = {"Authorization": f"Bearer {address.token}"} if address.token else {}
    url = urlsplit(address.url)
    if reach is not None:
        connection: http.client.HTTPConnection = _UnixConnection(reach.path)
    else:
        secure = url.scheme.lower() == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(url.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"{url.path}{_PATH}?{query}", headers=headers)
        response = connection.getresponse()
        body = response.read(_MOST_BYTES)
        return body if response.status == 200 else b"{}"
    finally:
        connection.close()
