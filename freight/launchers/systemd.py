"""Under systemd: each worker in a scope of its own, so that a restart of the service does not end it.

A service's own stop ends all that is in its control group. `systemd-run --scope` moves itself out of there and then
becomes the command: pid, open files and environment stay as they are.
"""

import functools
import logging
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from freight.launchers.cgroup import check_name, folder_of

log = logging.getLogger("freight.launchers")

UNIT_PREFIX: Final = "freight-worker-"
# When the machine shuts down, SIGTERM comes first; a server that hangs may not hold up the shutdown for longer.
STOP_S: Final = 45
_ASK_S: Final = 15.0
_MEMBERSHIP: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Service:
    """The service that a process belongs to: its control group, its slice, and whether a user's manager runs it."""

    path: PurePosixPath
    slice: str
    user: bool


def scope_prefix(worker: str) -> list[str]:
    """Return the words to put before a worker's command so that it runs in a scope of its own.

    None where this process is no service of systemd's, or systemd lets it have no scopes; the log says so then. The
    first call asks systemd, which may take a moment. Raises ValueError for a worker that cannot name a unit.
    """
    check_name(worker)
    service = own_service()
    if service is None or not gives_scopes():
        return []
    return [
        *_command(service.user),
        f"--unit={UNIT_PREFIX}{worker}", f"--slice={service.slice}", f"--description=Freight worker {worker}",
        "--property=Delegate=yes", f"--property=TimeoutStopSec={STOP_S}", "--",
    ]  # fmt: skip


def scope_path(worker: str) -> Path | None:
    """Return the control group of the scope that a worker has after `scope_prefix`; None without cgroup v2.

    The worker need not enter it. It comes to be just before systemd-run becomes the worker, counts as empty until then,
    and is removed by systemd when the last process in it has ended.
    """
    check_name(worker)
    service = own_service()
    beside = folder_of(service.path.parent) if service is not None else None
    return None if beside is None else beside / f"{UNIT_PREFIX}{worker}.scope"


def gives_scopes() -> bool:
    """Return whether this process is a service of systemd's whose workers get scopes, and so outlive its end."""
    service = own_service()
    return service is not None and _can_scope(service.user)


def own_service() -> Service | None:
    """Return the service that this process belongs to; None where it belongs to none."""
    try:
        return service_of(_MEMBERSHIP.read_text())
    except OSError:
        return None


def service_of(membership: str) -> Service | None:
    """Return the service that the text of /proc/PID/cgroup tells of; None where the innermost unit is none.

    The environment is not asked: INVOCATION_ID is handed down to what runs in a session, too.
    """
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if (number == "0" or controllers == "name=systemd") and (service := _innermost(PurePosixPath(path))):
            return service
    return None


def _innermost(path: PurePosixPath) -> Service | None:
    for unit in (path, *path.parents):
        if unit.suffix in (".service", ".scope"):
            # A user's manager is a service, too, but one that starts workers in units of its own.
            if unit.suffix == ".scope" or unit.name.startswith("user@"):
                return None
            outer = [part for part in unit.parts[:-1] if part.endswith((".slice", ".service"))]
            slice_name = outer[-1] if outer and outer[-1].endswith(".slice") else "-.slice"
            return Service(unit, slice_name, any(part.startswith("user@") for part in outer))
    return None


@functools.cache
def _can_scope(user: bool) -> bool:
    """Return whether systemd lets this process have scopes: a system service with User= needs a polkit rule."""
    if shutil.which("systemd-run") is None:
        return False
    try:
        # systemd-run only fails, and is never waited for, where it cannot reach systemd.
        asked = subprocess.run(
            [*_command(user), "--", "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_ASK_S,
            check=False,
        )
        said = asked.stderr.decode(errors="replace").strip() if asked.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    else:
        if asked.returncode == 0:
            return True
    log.warning(
        "workers will end when this service is stopped or restarted: systemd gives them no scope (%s)",
        said,
    )
    return False


def _command(user: bool) -> list[str]:
    kind = ["--user"] if user else ["--system"]
    return ["systemd-run", "--scope", *kind, "--quiet", "--collect", "--no-ask-password"]
