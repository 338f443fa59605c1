"""Folders for Unix sockets, whose paths must be short."""

import tempfile
from pathlib import Path
from typing import Final

from freight.errors import LauncherError, OperationError
from freight.store.sockets import MOST_SOCKET_PATH

RUNTIME_PREFIX: Final = "freight-"
# The socket on which a control plane hears its workers.
CONTROL_SOCKET: Final = "control.sock"
# A worker's folder and its socket's name come after the path of the folder for sockets.
_MOST_FOLDER_PATH: Final = MOST_SOCKET_PATH - len("/0123456789ab/engine.sock")


def runtime_folder() -> Path:
    """Return a new folder of mode 0700 for sockets, with a short path, on a local file system.

    Raises OperationError where there is no place for one.
    """
    problem = "its path is too long for sockets"
    for parent in (None, "/tmp"):
        try:
            folder = Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX, dir=parent))
        except OSError as error:
            # TMPDIR may be gone by now, as that of a batch job or a login is at its end.
            problem = error.strerror or str(error)
            continue
        if len(str(folder).encode()) <= _MOST_FOLDER_PATH:
            return folder
        folder.rmdir()
    raise OperationError(
        f"there is no folder for temporary files to be had: {problem}", "set TMPDIR to a short local one"
    )


def make_private(*folders: Path) -> None:
    """Make folders of mode 0700 for a worker, where they are not there; raise LauncherError when that fails."""
    try:
        for folder in folders:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LauncherError(f"cannot make a worker's folder: {error.strerror}", transient=True) from error
