"""What shells complete: jobs' names, from the service that runs, and models. Quick, and silent where it fails."""

import http.client
import json
import socket
from typing import Final, cast
from urllib.parse import urlsplit

import click
from click.shell_completion import CompletionItem

from freight.client.address import Address, Reach, find_service
from freight.errors import FreightError

TIMEOUT_S: Final = 0.1
_PATH: Final = "/api/names"
_MOST_BYTES: Final = 1 << 20


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


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the jobs that go on from what was typed."""
    return [CompletionItem(name) for name in _job_names(ctx.params.get("server")) if name.startswith(incomplete)]


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the models that go on from what was typed, or where there are none have the shell complete a file."""
    from freight.cli.settings import settings

    try:
        models = settings().models
    except FreightError:
        models = {}
    names = [*models, *(alias for entry in models.values() for alias in entry.aliases)]
    found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def _job_names(server: str | None) -> list[str]:
    try:
        address = find_service(server, None)
        reach = Reach(address.socket) if address.socket else None
        try:
            names = json.loads(_get(address, reach))
        finally:
            if reach is not None:
                reach.close()
    except (FreightError, OSError, ValueError, http.client.HTTPException):
        return []
    return [str(name) for name in cast("list[object]", names)] if isinstance(names, list) else []


def _get(address: Address, reach: Reach | None) -> bytes:
    headers = {"Authorization": f"Bearer {address.token}"} if address.token else {}
    url = urlsplit(address.url)
    if reach is not None:
        connection: http.client.HTTPConnection = _UnixConnection(reach.path)
    else:
        secure = url.scheme.lower() == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(url.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("GET", url.path + _PATH, headers=headers)
        response = connection.getresponse()
        body = response.read(_MOST_BYTES)
        return body if response.status == 200 else b"[]"
    finally:
        connection.close()
