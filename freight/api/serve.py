"""The service as a program: its folder, its sockets, and its signals."""

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import uvicorn
import uvloop
from starlette.types import ASGIApp

from freight.api.app import make_app
from freight.api.auth import Authentication
from freight.api.door import Door, open_door
from freight.api.exchange import EndsQuietly, ExchangeServer, QuietServer
from freight.api.front import Health, OnTransport, front, known_hosts
from freight.api.requestid import RequestIds, name_requests
from freight.config import Config
from freight.control.accounts import Accounts
from freight.control.lastgood import LastGood
from freight.control.service import Service
from freight.control.servicefolder import ServiceFolder
from freight.control.settingscheck import missing_folders
from freight.control.streams import StreamBroken
from freight.errors import OperationError
from freight.launchers.systemd import gives_scopes
from freight.store.database import STORAGE_ERRORS
from freight.store.sockets import listen_at

log = logging.getLogger("freight.service")

_THREADS: Final = 32


def serve(
    settings: Callable[[], Config], data_folder: Path, say: Callable[[str], None], listen: str | None = None
) -> None:
    """Run a service on a data folder until SIGINT, SIGTERM or a request ends it.

    `settings` is asked again for each submission, and what is wrong with them then changes nothing; `say` gets the
    lines that say where it listens. `listen` is where it listens on TCP, instead of where the settings say. Raises
    FreightError where the folder, its contents or the settings forbid a start, or what made it impossible to go on.
    """
    _begin_log()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    _raise_descriptor_limit()
    folder = ServiceFolder(data_folder)
    folder.claim()
    try:
        kept = LastGood(settings)
        # In a thread of its own: a folder may lie on a server that does not answer.
        threading.Thread(target=_warn, args=(kept(),), daemon=True).start()
        uvloop.run(_serve(folder, kept, say, listen))
    except STORAGE_ERRORS as error:
        if isinstance(error, OperationError):
            raise
        raise OperationError(
            f"the data folder {data_folder} cannot be read or written: {error}",
            "restore it from a copy, or set FREIGHT_DATA to another folder on a local disk",
        ) from error
    finally:
        folder.release()


def _warn(config: Config) -> None:
    for words in missing_folders(config):
        log.warning("%s", words)


def _begin_log() -> None:
    handler = logging.StreamHandler(sys.stderr)
    name_requests(handler)
    logging.basicConfig(
        format="%(asctime)s %(name)s %(levelname)s %(request)s%(message)s", handlers=[handler], level=logging.INFO
    )


async def _serve(
    folder: ServiceFolder, settings: Callable[[], Config], say: Callable[[str], None], listen: str | None
) -> None:
    # Some wait for the disks of users, of which one may be slow, or dead.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "freight-disk"))
    door = open_door(settings(), listen)
    service: Service | None = None
    servers: list[uvicorn.Server] = []
    answering: list[asyncio.Task[None]] = []
    try:
        service = Service(folder, settings, ExchangeServer)
        _take_signals(service, folder)
        app = make_app(service, service.stop)
        await service.start()
        servers.append(_on_unix(app, service.accounts))
        answering.append(asyncio.create_task(servers[0].serve(sockets=[listen_at(folder.api_socket)])))
        say(f"serving on {folder.api_socket} (pid {os.getpid()}, data {folder.path})")
        if door is not None:
            server = door.serve(EndsQuietly(_on_tcp(app, service.accounts, door, settings), StreamBroken))
            servers.append(server)
            answering.append(asyncio.create_task(server.serve()))
            say(f"serving on {server.url}")
        await service.run()
    finally:
        if service is not None:
            service.stop()
        for server in servers:
            server.should_exit = True
        if answering:
            await asyncio.gather(*answering, return_exceptions=True)
            folder.api_socket.unlink(missing_ok=True)
        if door is not None:
            door.close()
        if service is not None:
            await service.close()


def _on_unix(app: ASGIApp, accounts: Accounts) -> uvicorn.Server:
    config = uvicorn.Config(
        EndsQuietly(RequestIds(Health(OnTransport(Authentication(app, accounts), "unix"))), StreamBroken),
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=2,
    )
    return QuietServer(config)


def _on_tcp(app: ASGIApp, accounts: Accounts, door: Door, settings: Callable[[], Config]) -> ASGIApp:
    hosts = known_hosts(door.address, door.hosts, socket.gethostname())
    return front(
        app, hosts, door.max_body, lambda: settings()["limits.file_bytes"], lambda app: Authentication(app, accounts)
    )


def _raise_descriptor_limit() -> None:
    """Allow as many open files as the system lets this process have: each waiting client and each job takes some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65_536), hard)
        )


def _take_signals(service: Service, folder: ServiceFolder) -> None:
    """The first signal ends the service cleanly, the second at once, with all its workers.

    But a SIGTERM of systemd's, which restarts or stops it, leaves workers that have scopes of their own to the next.
    """
    asked = False

    def end() -> None:
        nonlocal asked
        if asked:
            service.kill()
            os._exit(130)
        asked = True
        service.stop()

    def leave() -> None:
        # As if killed, which loses nothing: what was not acknowledged comes again from the workers.
        log.info("ended by systemd; workers go on, and `freight stop` ends them")
        folder.api_socket.unlink(missing_ok=True)
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # What whoever started us ignores stays ignored, as with nohup.
        if signal.getsignal(number) is signal.SIG_IGN:
            continue
        asyncio.get_running_loop().add_signal_handler(
            number, leave if number == signal.SIGTERM and gives_scopes() else end
        )
