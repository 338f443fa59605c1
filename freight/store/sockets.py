"""Unix sockets in folders whose path may be longer than a socket's can be."""

import os
import socket
import struct
from pathlib import Path
from typing import Final

from freight.errors import OperationError

MOST_SOCKET_PATH: Final = 107
_BACKLOG: Final = 1024


def reachable(path: Path) -> str:
    """Return a path of at most 107 bytes for the socket at `path`, good in this process alone."""
    if len(os.fsencode(path)) <= MOST_SOCKET_PATH:
        return str(path)
    return f"/proc/self/fd/{_folder(path.parent)}/{path.name}"


_folders: dict[Path, int] = {}


def _folder(folder: Path) -> int:
    """Return a descriptor of a folder, which stays open: the same one as long as the folder is."""
    fd = _folders.get(folder)
    if fd is not None and os.path.samestat(os.fstat(fd), folder.stat()):
        return fd
    if fd is not None:
        os.close(fd)
    _folders[folder] = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return _folders[folder]


def listen_at(path: Path) -> socket.socket:
    """Return a listening socket at `path`; one that nobody listens on any more is replaced.

    It appears once it can be connected to. Raises OperationError naming the process that listens there, or what
    keeps us from it.
    """
    holder = listener_pid(path)
    if holder is not None:
        raise OperationError(f"the socket {path} is in use by process {holder}", "end that process, then start again")
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        aside.unlink(missing_ok=True)
        listener.bind(reachable(aside))
        aside.chmod(0o600)
        listener.listen(_BACKLOG)
        aside.rename(path)
    except OSError as error:
        listener.close()
        aside.unlink(missing_ok=True)
        raise OperationError(
            f"cannot make the socket {path}: {error.strerror}", "free some space there, or see who may write to it"
        ) from error
    return listener


def listener_pid(path: Path) -> int | None:
    """Return the process that listens on the socket at `path`; None when nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(2.0)
            probe.connect(reachable(path))
            peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
        return struct.unpack("3i", peer)[0]
