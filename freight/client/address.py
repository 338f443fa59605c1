"""Where the service is, and what shows it who asks. Light: shell completion imports this."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from freight.config import data_folder
from freight.errors import UserError, refusing
from freight.store.sockets import MOST_SOCKET_PATH

SOCKET: Final = Path("run", "api.sock")
_UNIX: Final = "unix://"


@dataclass(frozen=True, slots=True)
class Address:
    """A service: its base URL and, where it is on this machine, the path of its Unix socket.

    `is_named` says that the user chose it, so that nothing may be started in its place.
    """

    url: str
    socket: Path | None
    token: str | None = field(repr=False)
    is_named: bool

    @property
    def shown(self) -> str:
        """The address in the user's words."""
        return str(self.socket) if self.socket else self.url


def own_socket() -> Path:
    """Return the socket of the user's own service."""
    return data_folder() / SOCKET


def find_service(server: str | None, token: str | None) -> Address:
    """Return the service to talk to: as named, else by FREIGHT_SERVER, else the user's own.

    Raises UserError for an address that can be none, and for a token that cannot be read or sent.
    """
    named = server or os.environ.get("FREIGHT_SERVER") or None
    found = _token(token)
    if named is None:
        return Address("http://freight", own_socket(), found, False)
    if named.startswith(_UNIX):
        path = named.removeprefix(_UNIX)
        if not path.startswith("/"):
            raise UserError(f"the server {named!r} has no absolute path", "write it as in unix:///run/freight/api.sock")
        return Address("http://freight", Path(path), found, True)
    if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", named, re.IGNORECASE):
        raise UserError(
            f"the server {named!r} is no address", "write it as in http://host:8400 or unix:///run/freight/api.sock"
        )
    return Address(named.rstrip("/"), None, found, True)


def _token(given: str | None) -> str | None:
    source, token = "the token", given or os.environ.get("FREIGHT_TOKEN")
    file = os.environ.get("FREIGHT_TOKEN_FILE")
    if not token and file:
        source = f"the token in {file} (FREIGHT_TOKEN_FILE)"
        with refusing(f"cannot read {source}", "name a file that you may read, or unset FREIGHT_TOKEN_FILE"):
            token = Path(file).read_text(encoding="utf-8")
    token = (token or "").strip()
    # The token itself is never shown.
    if not re.fullmatch(r"[!-~]*", token):
        raise UserError(f"{source} holds characters that no token has", "copy it again, on one line")
    return token or None


class Reach:
    """A path to a socket that the kernel takes, whatever the length of its own, while this is open."""

    def __init__(self, socket: Path) -> None:
        self._fd: int | None = None
        self.path = str(socket)
        if len(os.fsencode(socket)) > MOST_SOCKET_PATH:
            self._fd = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self.path = f"/proc/self/fd/{self._fd}/{socket.name}"

    def close(self) -> None:
        """Let go of it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
