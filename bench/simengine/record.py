"""The record file: every POST body received, byte for byte, in order of arrival.

One entry is: path length (8 bytes, big endian), path, body length (8 bytes, big endian), body.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

LENGTH_BYTES: Final = 8


def _read_part(file: BinaryIO) -> bytes | None:
    """Return the next length-prefixed part, or None when the file ends within it."""
    prefix = file.read(LENGTH_BYTES)
    if len(prefix) < LENGTH_BYTES:
        return None
    length = int.from_bytes(prefix, "big")
    remaining = os.fstat(file.fileno()).st_size - file.tell()
    # Compared before reading: a torn or foreign prefix may name an absurd length.
    return file.read(length) if length <= remaining else None


def _whole_entries(file: BinaryIO) -> Iterator[tuple[str, bytes, int]]:
    """Yield path, body and end offset of each entry up to the first torn one."""
    while True:
        path = _read_part(file)
        body = None if path is None else _read_part(file)
        if path is None or body is None:
            return
        yield path.decode(), body, file.tell()


def read_record(path: str | os.PathLike[str]) -> list[tuple[str, bytes]]:
    """Return (path, body) of every entry recorded whole; a torn tail is left out."""
    with Path(path).open("rb") as file:
        return [(where, body) for where, body, _ in _whole_entries(file)]


class Recorder:
    """Appends received bodies to a record file, one write each."""

    def __init__(self, path: str) -> None:
        """Open `path` for appending and cut a torn tail off, if no other process records there."""
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # Every recorder holds the shared lock for life, so the exclusive one means: alone here.
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(self._fd, _end_of_last_whole(path))
        except BlockingIOError:
            pass
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def append(self, path: str, body: bytes) -> None:
        """Write one entry; once this returns, a SIGKILL of this process does not lose it.

        Raises OSError when the disk took only a part of it.
        """
        where = path.encode()
        entry = b"".join(
            (len(where).to_bytes(LENGTH_BYTES, "big"), where, len(body).to_bytes(LENGTH_BYTES, "big"), body)
        )
        written = os.write(self._fd, entry)
        if written != len(entry):
            raise OSError(f"record file took {written} of {len(entry)} bytes")


def _end_of_last_whole(path: str) -> int:
    """Return the offset at which the last whole entry of the file ends."""
    with Path(path).open("rb") as file:
        return max((end for _, _, end in _whole_entries(file)), default=0)
