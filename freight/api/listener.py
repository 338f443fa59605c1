"""The service on TCP: its sockets, its certificate, and how many connections it takes."""

import asyncio
import errno
import ipaddress
import logging
import resource
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import uvicorn

from freight.api.connection import Connection, Rules, refusal
from freight.api.exchange import App, QuietServer
from freight.core.address import Address
from freight.errors import FreightError, OperationError, UserError

log = logging.getLogger("freight.service")

_BACKLOG: Final = 1024
# So many connections are taken before others get their turn.
_AT_ONCE: Final = 64
# A host may have a name for IPv6 on a machine that has none.
_NOT_HERE: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
_OUT_OF: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S: Final = 1.0
# For the end of TLS.
_GOODBYE_S: Final = 5.0
# Those that were turned away may read why for so long; so many at a time.
_TURNED_AWAY_S: Final = 1.0
_MOST_TURNED_AWAY: Final = 128
_FULL: Final = "too many connections; try again later\n"
# Descriptors that connections leave to jobs.
_DESCRIPTORS_LEFT: Final = 0.25


@dataclass(frozen=True, slots=True)
class Caps:
    """How many connections there may be: of all peers together, and of one."""

    total: int = 2000
    per_peer: int = 1000


def listen_on(address: Address, named: str) -> list[socket.socket]:
    """Return sockets that listen at an address: one for each that its host has.

    `named` is what the user calls it: --listen, or a setting. Raises UserError for what is no address of this machine,
    OperationError for one that is taken.
    """
    try:
        found = socket.getaddrinfo(address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(
            f"{named} is {address}: {address.host} has no address: {reason}", "name this machine, or an address of it"
        ) from error
    listeners: list[socket.socket] = []
    port, problem = address.port, None
    for family, host in sorted({(family, str(place[0])) for family, _, _, _, place in found}):
        try:
            listeners.append(_bound(family, host, port))
            # All listen on the port that the first was given.
            port = listeners[0].getsockname()[1]
        except OSError as error:
            problem = error
            if error.errno not in _NOT_HERE:
                break
    if not listeners or (problem is not None and problem.errno not in _NOT_HERE):
        for listener in listeners:
            listener.close()
        raise _no_listener(address, named, problem)
    return listeners


def _bound(family: int, host: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _no_listener(address: Address, named: str, problem: OSError | None) -> FreightError:
    said = f"{named} is {address}: cannot listen there: {problem.strerror if problem else 'no such address'}"
    if problem is not None and problem.errno == errno.EADDRINUSE:
        return OperationError(said, "end what listens there, or choose another port")
    if problem is not None and problem.errno == errno.EACCES:
        return UserError(said, "ports below 1024 are the system's: choose another")
    return UserError(said, "name an address of this machine, such as 127.0.0.1:8400")


def load_tls(cert: str, key: str) -> ssl.SSLContext | None:
    """Return what makes connections encrypted by the certificate and key in these files; None where none is named.

    The key may be in the certificate's file. Raises UserError naming the setting of a file that is of no use.
    """
    if not cert:
        if key:
            raise UserError("server.tls_key is set, and server.tls_cert is not", "name the certificate's file, too")
        return None
    for setting, path in (("server.tls_cert", cert), ("server.tls_key", key or cert)):
        try:
            with Path(path).open("rb"):
                pass
        except OSError as error:
            raise UserError(f"{setting} is {path}: cannot read it: {error.strerror}", "name a PEM file") from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key or None, _no_password)
    except (ssl.SSLError, OSError) as error:
        raise _no_tls(cert, key, error) from error
    return context


def _no_password() -> str:
    raise UserError(
        "the key of server.tls_key is locked with a password", "give a key without one, for its owner alone"
    )


def _no_tls(cert: str, key: str, error: OSError) -> UserError:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    why = f" ({reason})" if reason else ""
    if reason == "KEY_VALUES_MISMATCH":
        words = f"the key in {key or cert} (server.tls_key) is not that of the certificate in {cert} (server.tls_cert)"
        return UserError(words, "name the key that the certificate was made for")
    try:
        # The certificate's file alone tells which of the two is bad.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cert)
    except (ssl.SSLError, OSError):
        return UserError(f"server.tls_cert is {cert}: it holds no certificate in PEM{why}", "name a PEM file")
    named = f"server.tls_key is {key}" if key else f"server.tls_cert is {cert}, and server.tls_key is not set"
    return UserError(f"{named}: there is no usable key in PEM{why}", "name the file of the certificate's key")


def peer_of(host: str) -> str:
    """Return whom an address counts for: an IPv6 network of 64 bits is one peer."""
    number = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(number, ipaddress.IPv4Address):
        return str(number)
    if number.ipv4_mapped is not None:
        return str(number.ipv4_mapped)
    return str(ipaddress.ip_network((number, 64), strict=False))


class Acceptor:
    """Takes connections on listening sockets, and turns away those over the caps.

    `connect` makes a connection's protocol, given what to call at its end. Caps hold from the first byte of a TLS
    handshake on, which must be over within `handshake_s`.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        connect: Callable[[Callable[[], None]], asyncio.Protocol],
        caps: Caps,
        tls: ssl.SSLContext | None,
        handshake_s: float,
    ) -> None:
        self._listeners = listeners
        self._connect = connect
        self._caps = caps
        self._tls = tls
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._count: Counter[str] = Counter()
        self._total = 0
        self._turned_away: deque[socket.socket] = deque()
        self._settling: set[asyncio.Task[None]] = set()
        self._is_open = True
        for listener in listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Take no more connections."""
        if self._is_open:
            self._is_open = False
            for listener in self._listeners:
                self._loop.remove_reader(listener)
                listener.close()
            for task in self._settling:
                task.cancel()
            while self._turned_away:
                self._turned_away.popleft().close()

    async def wait_closed(self) -> None:
        """Wait until no connection is being made."""
        await asyncio.gather(*self._settling, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, (host, *_) = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in _OUT_OF:
                    # Those that wait would wake us without end.
                    log.warning("cannot take connections for now: %s", error.strerror)
                    self._loop.remove_reader(listener)
                    self._loop.call_later(_PAUSE_S, self._go_on, listener)
                return
            self._take(accepted, peer_of(host))

    def _go_on(self, listener: socket.socket) -> None:
        if self._is_open:
            self._loop.add_reader(listener, self._accept, listener)

    def _take(self, accepted: socket.socket, peer: str) -> None:
        accepted.setblocking(False)
        if self._total >= self._caps.total or self._count[peer] >= self._caps.per_peer:
            self._turn_away(accepted)
            return
        self._count[peer] += 1
        self._total += 1
        task = self._loop.create_task(self._settle(accepted, peer))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, accepted: socket.socket, peer: str) -> None:
        """Give a connection to its protocol, once its TLS handshake is done."""
        is_made = is_gone = False

        def gone() -> None:
            nonlocal is_gone
            if is_gone:
                return
            is_gone = True
            self._total -= 1
            self._count[peer] -= 1
            if not self._count[peer]:
                del self._count[peer]

        def made() -> asyncio.Protocol:
            return self._connect(gone)

        limits: dict[str, Any] = {}
        if self._tls is not None:
            limits = {"ssl": self._tls, "ssl_handshake_timeout": self._handshake_s, "ssl_shutdown_timeout": _GOODBYE_S}
        try:
            with suppress(OSError):
                _notice_the_dead(accepted)
            # A handshake that fails, as that of a port scan does, is nothing to speak of.
            with suppress(OSError, ssl.SSLError):
                await self._loop.connect_accepted_socket(made, accepted, **limits)
                is_made = True
        finally:
            if not is_made:
                accepted.close()
                gone()

    def _turn_away(self, accepted: socket.socket) -> None:
        """Say that there are too many; a peer whose request is on its way may still read that."""
        if self._tls is not None or len(self._turned_away) >= _MOST_TURNED_AWAY:
            accepted.close()
            return
        with suppress(OSError):
            accepted.send(refusal(503, _FULL))
            accepted.shutdown(socket.SHUT_WR)
        self._turned_away.append(accepted)
        self._loop.call_later(_TURNED_AWAY_S, self._forget, accepted)

    def _forget(self, accepted: socket.socket) -> None:
        if accepted in self._turned_away:
            self._turned_away.remove(accepted)
        accepted.close()


def _notice_the_dead(accepted: socket.socket) -> None:
    """Have the system notice a peer that is gone without a word, even where nothing is sent for hours."""
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
        accepted.setsockopt(socket.IPPROTO_TCP, option, seconds)


class TcpServer(QuietServer):
    """An application on TCP. Answers that are under way at its end have `stop_s` to finish."""

    def __init__(
        self,
        app: App,
        listeners: Sequence[socket.socket],
        rules: Rules,
        caps: Caps,
        tls: ssl.SSLContext | None = None,
        stop_s: int = 10,
    ) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            headers=[("server", "freight")],
            timeout_graceful_shutdown=stop_s,
        )
        super().__init__(config)
        self.listeners = listeners
        self._rules = rules
        self._caps = Caps(min(caps.total, _affordable()), caps.per_peer)
        self._tls = tls

    @property
    def url(self) -> str:
        """Where it is to be found."""
        host, port = self.listeners[0].getsockname()[:2]
        return f"{'https' if self._tls else 'http'}://{Address(host, port)}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        loop = asyncio.get_running_loop()

        def connect(gone: Callable[[], None]) -> asyncio.Protocol:
            return Connection(self.config, self.server_state, self._rules, gone, loop)

        self.acceptor = Acceptor(self.listeners, connect, self._caps, self._tls, self._rules.deadlines.head_s)
        self.servers = [cast(Any, self.acceptor)]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and end those there are: at once where nothing is being answered."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            cast(Connection, connection).cut()


def _affordable() -> int:
    """Return how many connections the limit of open files allows for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else max(1, int(soft * (1 - _DESCRIPTORS_LEFT)))
