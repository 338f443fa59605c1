"""What the clients have from httpx: how they are set up, and what its exceptions mean here."""

import errno
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import httpx

from freight.client.address import Address
from freight.client.calls import ConnectionLost
from freight.errors import FreightError, NoServer, NotAllowed, OperationError

CONNECT_S: Final = 10.0
_AWAY: Final = (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED)


def settings(address: Address, timeout_s: float) -> dict[str, Any]:
    """Return what a client of httpx is made with, but for its transport.

    Nothing is taken from the environment: a proxy must not see the records.
    """
    headers = {"Authorization": f"Bearer {address.token}"} if address.token else {}
    return {"base_url": address.url, "headers": headers, "timeout": limits(timeout_s), "trust_env": False}


def tls(address: Address) -> ssl.SSLContext | bool:
    """Return how a server proves who it is: by the system's certificates, read only where they are needed."""
    return ssl.create_default_context() if address.url.lower().startswith("https:") else False


def limits(timeout_s: float | None) -> httpx.Timeout:
    """Return the time limits of a request whose answer may take so long."""
    return httpx.Timeout(timeout_s, connect=CONNECT_S)


@contextmanager
def speaking(address: Address) -> Generator[None]:
    """Turn what goes wrong between here and the service into errors of Freight's."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise unreachable(address, error) from error
    except httpx.TimeoutException as error:
        raise ConnectionLost(
            f"the service at {address.shown} does not answer in time", "it may be busy: try again, or see its log"
        ) from error
    except httpx.TransportError as error:
        raise ConnectionLost(
            f"the connection to the service at {address.shown} broke: {str(error).rstrip('.') or type(error).__name__}",
            _after_a_break(address),
        ) from error
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
        raise OperationError(
            f"cannot talk to the service at {address.shown}: {error}", "check --server, or FREIGHT_SERVER"
        ) from error


def unreachable(address: Address, error: BaseException) -> FreightError:
    """Return the error of a service that cannot be connected to."""
    cause = _system_error(error)
    if cause is not None and cause.errno in (errno.EACCES, errno.EPERM) and address.socket:
        return NotAllowed(
            f"may not use the service's socket {address.shown}: {cause.strerror}", "it is another user's; name your own"
        )
    if address.socket:
        why = "" if cause is None or cause.errno in _AWAY else f" ({cause.strerror or cause})"
        return NoServer(f"no Freight service answers at {address.shown}{why}", "start one with: freight serve")
    if isinstance(cause, ssl.SSLError):
        return _untrusted(address, cause)
    return NoServer(
        f"no Freight service answers at {address.shown}: {cause.strerror if cause else 'not in time'}",
        "check --server, or FREIGHT_SERVER, and that the service runs",
    )


def _after_a_break(address: Address) -> str:
    """Return what to look at after a connection broke."""
    if address.url.lower().startswith("http:") and address.socket is None:
        return "does it speak https? Then write https://; else it may have been stopped"
    return "the service may have been stopped: freight ps"


def _untrusted(address: Address, error: ssl.SSLError) -> NoServer:
    """Return the error of a service with which no encrypted connection can be made."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return NoServer(
            f"the certificate of the service at {address.shown} is not trusted: {error.verify_message.rstrip('.')}",
            "name its certificate, or that of its authority, in SSL_CERT_FILE, and ask by a name that is in it",
        )
    return NoServer(
        f"no encrypted connection to {address.shown} can be made: {error.reason or error}",
        "does it speak http? Then write http://",
    )


def _system_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
