"""The log of a worker, which its model server writes to as well."""

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

log = logging.getLogger("freight.worker")

TAIL_LINES: Final = 20
MOST_BYTES: Final = 64_000_000
KEPT_LINES: Final = 1000
_LOOK_S: Final = 1.0


async def keep_short(log_file: Path) -> None:
    """Cut the log whenever it grows long: a server gone wrong must not fill the disk with its output."""
    while True:
        await asyncio.sleep(_LOOK_S)
        _cut(log_file)


def _cut(log_file: Path) -> None:
    with suppress(OSError):
        if log_file.stat().st_size > MOST_BYTES:
            kept = tail(log_file, lines=KEPT_LINES, most_bytes=MOST_BYTES // 4)
            # All who write to it append, so that it may be cut under them.
            os.truncate(log_file, 0)
            log.warning("the log was cut; its last lines were:\n%s", "\n".join(kept))


def tail(log_file: Path, lines: int = TAIL_LINES, most_bytes: int = 65_536) -> list[str]:
    """Return the last lines of a log; none when it cannot be read."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
