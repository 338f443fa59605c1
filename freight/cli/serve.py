"""`freight serve` and `freight stop`: the service's life."""

import os
import select
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from freight.cli.parameters import service_options
from freight.cli.service import Service
from freight.config import data_folder
from freight.core.address import parse_address
from freight.errors import NoServer, OperationError, UserError

if TYPE_CHECKING:
    from freight.client.sync import Client
    from freight.core.view import ServerInfo

STOP_S: Final = 120.0
_POLL_S: Final = 0.1


@click.command()
@click.option("--listen", metavar="HOST:PORT", help="Listen there, too, on TCP.")
@click.option("--background", is_flag=True, help="Start it in the background, and return once it answers.")
def serve(listen: str | None, background: bool) -> None:
    """Run the service: it queues jobs, runs them, and keeps their results in the data folder.

    It listens on a Unix socket in the data folder, for its owner alone, and runs until it is told to stop, by
    `freight stop` or Ctrl-C. Unfinished jobs go on at the next start. With --listen, as in 127.0.0.1:8400,
    [::1]:8400 or :8400 for all interfaces, it listens there, too, for all who have a token.

    Exit status: 1 the data folder or the address is in use by another; 2 a setting is wrong.
    """
    from freight.cli.settings import settings
    from freight.control.settingscheck import check_settings

    if listen is not None:
        try:
            parse_address(listen)
        except ValueError as error:
            raise UserError(f"--listen is {listen!r}: {error}", "without it, the Unix socket is all there is") from None
    check_settings(settings())  # What is wrong with them is said here, not in the background.
    if background:
        _serve_in_background(listen)
        return
    from freight.api.serve import serve as run

    run(settings, data_folder(), _say, listen)


def _serve_in_background(listen: str | None) -> None:
    from freight.cli.local import own_client, start_in_background

    with own_client() as client:
        with suppress(NoServer):
            info = client.version()
            raise OperationError(
                f"the data folder {info.data_folder} is in use by process {info.pid}", "stop it with: freight stop"
            )
        start_in_background(client, () if listen is None else ("--listen", listen))


@click.command()
@service_options()
def stop(service: Service) -> None:
    """Stop the service and wait until it has ended. Unfinished jobs are kept and go on at its next start.

    Where none runs, workers that a killed service left behind are ended.

    Exit status: 0 none runs any more; 1 it did not end within two minutes.
    """
    from freight.client.sync import Client

    with Client(service.server) as client:
        if not client.is_local:
            raise UserError(
                f"the service at {client.server} cannot be stopped from here", "run `freight stop` on its own machine"
            )
        info = stop_service(client)
        if info is not None:
            _say(f"stopped (pid {info.pid}); unfinished jobs go on at the next start")
            return
        left = "" if client.is_named else ended_leftovers(data_folder())
        _say(f"no service is running{left}")


def stop_service(client: "Client") -> "ServerInfo | None":
    """Ask the service to stop, and return who it was once it has ended; None when none was running."""
    from freight.client.calls import ConnectionLost

    try:
        info = client.version()
        process = _open_process(info.pid)
        try:
            with suppress(ConnectionLost):
                client.stop()
            _await_end(client, info, process)
        finally:
            if process is not None:
                os.close(process)
    except NoServer:
        return None
    return info


def ended_leftovers(folder: Path) -> str:
    """End workers that outlived a killed service; return what there is to say about it."""
    from freight.control.leftovers import end_leftovers

    count = end_leftovers(folder)
    if not count:
        return ""
    return f"; ended {count} workers that were left" if count > 1 else "; ended a worker that was left"


def _open_process(pid: int | None) -> int | None:
    try:
        return None if pid is None else os.pidfd_open(pid)
    except OSError:
        return None  # It lives where its number means nothing here, or is gone already.


def _await_end(client: "Client", info: "ServerInfo", process: int | None) -> None:
    """Return once the process is gone and answers no more; raise OperationError when that takes too long."""
    began = time.monotonic()
    is_said = False
    while (process is not None and not select.select([process], [], [], _POLL_S)[0]) or _answers(client, info.pid):
        waited = time.monotonic() - began
        if waited > STOP_S:
            raise OperationError(
                f"the service (pid {info.pid}) has not ended after {STOP_S:g} s",
                f"see {info.data_folder}/serve.log; kill {info.pid} ends it at once, and loses nothing",
            )
        if waited > 1 and not is_said and sys.stderr.isatty():
            _say(f"waiting for the service (pid {info.pid}) to end its workers")
            is_said = True
        if process is None:
            time.sleep(_POLL_S)


def _answers(client: "Client", pid: int | None) -> bool:
    try:
        return client.version().pid == pid
    except NoServer:
        return False
    except OperationError:
        return True  # It is about to end.


def _say(text: str) -> None:
    click.echo(text, err=True)
