"""The settings of the service on TCP, made into what they mean."""

import socket
import ssl
from dataclasses import dataclass

from freight.api.connection import Rules
from freight.api.deadlines import Deadlines
from freight.api.exchange import App
from freight.api.front import is_upload
from freight.api.listener import Caps, TcpServer, listen_on, load_tls
from freight.config import Config
from freight.core.address import Address, parse_address


@dataclass(frozen=True, slots=True)
class Door:
    """Where the service listens, and what holds there. Nobody is let in before `serve`."""

    address: Address
    listeners: list[socket.socket]
    tls: ssl.SSLContext | None
    rules: Rules
    caps: Caps
    hosts: tuple[str, ...]
    max_body: int

    def serve(self, app: App) -> TcpServer:
        """Return a server of an application."""
        return TcpServer(app, self.listeners, self.rules, self.caps, self.tls)

    def close(self) -> None:
        """Listen no more."""
        for listener in self.listeners:
            listener.close()


def open_door(config: Config, listen: str | None) -> Door | None:
    """Listen where `listen` says, else the settings; None where neither says so.

    Raises FreightError naming the setting that forbids that.
    """
    named = "--listen" if listen is not None else "server.listen"
    text: str = config["server.listen"] if listen is None else listen
    if not text:
        return None
    tls = load_tls(config["server.tls_cert"], config["server.tls_key"])
    address = parse_address(text)
    deadlines = Deadlines(
        head_s=config["server.header_timeout"],
        body_idle_s=config["server.body_idle_timeout"],
        request_s=config["server.request_timeout"],
        keep_alive_s=config["server.keep_alive_timeout"],
        send_idle_s=config["server.send_timeout"],
    )
    return Door(
        address,
        listen_on(address, named),
        tls,
        Rules(deadlines, is_upload),
        Caps(config["server.max_connections"], config["server.max_peer_connections"]),
        config["server.hosts"],
        config["server.max_body"],
    )
