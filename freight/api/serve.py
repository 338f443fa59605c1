"""The service as a program: its folder, its sockets, and its signals."""

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvicorn
import uvloop

from freight.api.app import make_app
from freight.api.exchange import EndsQuietly, ExchangeServer, QuietServer
from freight.config import Config
from freight.control.service import Service
from freight.control.servicefolder import ServiceFolder
from freight.control.streams import StreamBroken
from freight.errors import OperationError
from freight.launchers.systemd import gives_scopes
from freight.store.database import STORAGE_ERRORS
from freight.store.sockets import listen_at

log = logging.getLogger("freight.service")


def serve(settings: Callable[[], Config], data_folder: Path, say: Callable[[str], None]) -> None:
    """Run a service on a data folder until SIGINT, SIGTERM or a request ends it.

    `settings` is asked again for each submission; `say` gets the line that says where it listens. Raises FreightError
    where the folder, its contents or the settings forbid a start, or what made it impossible to go on.
    """
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr, level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    _raise_descriptor_limit()
    folder = ServiceFolder(data_folder)
    folder.claim()
    try:
        uvloop.run(_serve(folder, settings, say))
    except STORAGE_ERRORS as error:
        if isinstance(error, OperationError):
            raise
        raise OperationError(
            f"the data folder {data_folder} cannot be read or written: {error}",
            "restore it from a copy, or set FREIGHT_DATA to another folder on a local disk",
        ) from error
    finally:
        folder.release()


async def _serve(folder: ServiceFolder, settings: Callable[[], Config], say: Callable[[str], None]) -> None:
    service = Service(folder, settings, ExchangeServer)
    server = QuietServer(
        uvicorn.Config(
            EndsQuietly(make_app(service, service.stop), StreamBroken),
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=2,
        )
    )
    _take_signals(service, folder)
    answering: asyncio.Task[None] | None = None
    try:
        await service.start()
        answering = asyncio.create_task(server.serve(sockets=[listen_at(folder.api_socket)]))
        say(f"serving on {folder.api_socket} (pid {os.getpid()}, data {folder.path})")
        await service.run()
    finally:
        service.stop()
        server.should_exit = True
        if answering is not None:
            await asyncio.gather(answering, return_exceptions=True)
            folder.api_socket.unlink(missing_ok=True)
        await service.close()


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
