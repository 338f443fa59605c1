"""An input on its way to the service: a path, an open file, or pieces of bytes."""

import os
import stat
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias, cast

from freight.errors import OperationError, UserError, refusing

CHUNK_BYTES: Final = 1 << 20
Source: TypeAlias = BinaryIO | Iterable[bytes]
Input: TypeAlias = str | os.PathLike[str] | Source


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What is sent: where from, its name for showing, and its size in bytes where that is known.

    `check_unchanged` raises OperationError when it is a file that has changed since it was opened.
    """

    source: Source
    shown: str
    size: int | None
    check_unchanged: Callable[[], None] = lambda: None


@contextmanager
def outgoing(file: Input) -> Generator[Outgoing]:
    """Open what is to be sent; the block sends it."""
    if not isinstance(file, (str, os.PathLike)):
        yield Outgoing(file, _shown(file), size_of(file))
        return
    path = Path(file)
    hint = "name a JSON Lines file that you may read"
    with refusing(f"cannot read the input {path}", hint):
        opened = path.open("rb", buffering=0)
    with opened:
        before = os.fstat(opened.fileno())
        if stat.S_ISDIR(before.st_mode):
            raise UserError(f"the input {path} is a folder", hint)

        def check_unchanged() -> None:
            now = os.fstat(opened.fileno())
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise OperationError(f"{path} changed while it was sent; nothing was submitted", "submit it again")

        source = cast(BinaryIO, opened)
        yield Outgoing(source, str(file), size_of(source), check_unchanged)


def size_of(source: Source) -> int | None:
    """Return how many bytes there are to come; None where that is not known."""
    if isinstance(source, (bytes, bytearray)):
        return len(source)
    try:
        file = cast(BinaryIO, source)
        status = os.fstat(file.fileno())
        return status.st_size - file.tell() if stat.S_ISREG(status.st_mode) else None
    except (AttributeError, OSError, ValueError):
        return None


def pieces(source: Source, size: int | None) -> Iterator[bytes]:
    """Yield the bytes, and of a file whose size is known no more than that; raise OperationError when it is less."""
    if isinstance(source, (bytes, bytearray)):
        yield bytes(source)
        return
    read = getattr(source, "read", None)
    if read is None:
        yield from cast(Iterable[bytes], source)
        return
    left = size
    while left is None or left > 0:
        chunk = cast(bytes, read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES)))
        if not chunk:
            break
        yield chunk
        left = None if left is None else left - len(chunk)
    if left:
        raise OperationError(
            f"{_shown(source) or 'the input'} became shorter while it was sent; nothing was submitted",
            "submit it again",
        )


def _shown(source: Source) -> str:
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else ""
