"""Finding the service that a command talks to, and starting one in the background where none runs."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import click

from freight.client.address import own_socket
from freight.client.sync import Client
from freight.config import data_folder
from freight.core.view import API_VERSION, ServerInfo
from freight.errors import FreightError, NoServer, NotAllowed, OperationError, UserError, refusing

LOG: Final = "serve.log"
START_S: Final = 60.0
# So long is another process given to answer that was first to start.
_RIVAL_S: Final = 3.0
_POLL_S: Final = 0.03
_LOG_BYTES: Final = 1 << 16


def connect(server: str | None, token: str | None = None, no_start: bool = False) -> Client:
    """Return a client of the service, which answers; start one where the user named none and none runs.

    Raises NoServer when none answers and none may be started.
    """
    client = Client(server, token)
    try:
        info = client.version()
    except NoServer:
        if client.is_named or no_start:
            client.close()
            raise
        info = start_in_background(client)
    except BaseException:
        client.close()
        raise
    if info.api_version != API_VERSION:
        raise OperationError(
            f"the service at {client.server} is Freight {info.version} and speaks version {info.api_version} of the "
            f"API; this command speaks version {API_VERSION}",
            "use the same version of Freight there and here; freight stop ends an old service",
        )
    return client


def own_client(timeout_s: float = 120.0) -> Client:
    """Return a client of the user's own service, whatever FREIGHT_SERVER says."""
    return Client(f"unix://{own_socket()}", timeout_s=timeout_s)


def start_in_background(client: Client, options: Sequence[str] = ()) -> ServerInfo:
    """Start a service that outlives this command; return who answers, and say so unless it was another's doing.

    `options` are those of `freight serve`.

    Raises the error that the service itself gave when it did not start.
    """
    folder = data_folder()
    with _starting(folder):
        with suppress(NoServer):
            return client.version()  # Another command has just started one.
        log = folder / LOG
        mark = log.stat().st_size if log.exists() else 0
        child = _launch(folder, log, options)
        try:
            info = _await_answer(client, child, log, mark)
        except KeyboardInterrupt:
            child.terminate()
            raise
    if info.pid == child.pid:
        click.echo(
            f"started a Freight service in the background (pid {info.pid}, data {info.data_folder}; "
            "stop it with: freight stop)",
            err=True,
        )
    return info


@contextmanager
def _starting(folder: Path) -> Generator[None]:
    """Make the data folder, and let one command at a time start a service in it."""
    with refusing(f"cannot write to the data folder {folder}", "set FREIGHT_DATA to a folder of your own"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / LOG, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # Not every file system has locks; then the service's own sorts it out.
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _launch(folder: Path, log: Path, options: Sequence[str]) -> "subprocess.Popen[bytes]":
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "freight", "serve", *options],
            cwd="/",  # It must not hold the user's folder, nor lose its own when that is removed.
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    except OSError as error:
        raise OperationError(
            f"cannot start {sys.executable}: {error.strerror}", "start it with: freight serve"
        ) from error
    finally:
        os.close(output)


def _environment(folder: Path) -> dict[str, str]:
    """Return this environment with its paths made absolute."""
    environment = {**os.environ, "FREIGHT_DATA": str(folder)}
    if config := os.environ.get("FREIGHT_CONFIG"):
        environment["FREIGHT_CONFIG"] = str(Path(config).absolute())
    paths = [str(Path(part or ".").absolute()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    package = Path(__file__).resolve().parents[2]
    if package == Path.cwd():  # Run from the source folder, perhaps without being installed.
        paths.insert(0, str(package))
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _await_answer(client: Client, child: "subprocess.Popen[bytes]", log: Path, mark: int) -> ServerInfo:
    until = time.monotonic() + START_S
    ended_at: float | None = None
    while True:
        status = child.poll()
        with suppress(NoServer):
            return client.version()
        now = time.monotonic()
        if status is not None:
            error = _start_error(status, log, mark)
            ended_at = ended_at or now
            # It may be that another was first to start, and does not answer yet.
            if isinstance(error, UserError) or now > ended_at + _RIVAL_S or not _is_taken(error):
                raise error
        elif now > until:
            raise OperationError(
                f"the service that was started (pid {child.pid}) does not answer after {START_S:g} s",
                f"it goes on starting: try again later, or see {log}",
            )
        time.sleep(_POLL_S)


def _is_taken(error: FreightError) -> bool:
    return "in use" in error.message


def _start_error(status: int, log: Path, mark: int) -> FreightError:
    """Return what kept the service from starting, in its own words."""
    said = _said(log, mark)
    message = next((line.removeprefix("error: ") for line in said if line.startswith("error: ")), "")
    hint = next((line.removeprefix("hint: ") for line in said if line.startswith("hint: ")), None)
    if not message and shutil.disk_usage(log.parent).free < _LOG_BYTES:
        message, hint = f"no space left in the data folder {log.parent}", "free some space"
    if not message:
        message, hint = f"it ended with status {status}: {said[-1] if said else 'it said nothing'}", f"see {log}"
    kind = {2: UserError, 4: NotAllowed, 5: NoServer}.get(status, OperationError)
    return kind(f"the Freight service could not be started: {message}", hint)


def _said(log: Path, mark: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(mark)
            return file.read(_LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
