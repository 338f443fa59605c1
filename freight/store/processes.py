"""The identity of a process, which a pid alone is not: pids are used again."""

import os
import socket
from pathlib import Path

import msgspec


class ProcessId(msgspec.Struct, frozen=True):
    """A process of some host: `boot` tells one boot from another, `started` is in clock ticks since then."""

    host: str
    boot: str
    pid: int
    started: int

    def is_local(self) -> bool:
        """Return whether the process is of this host, since it was last started: names alone are used again."""
        return self.host == socket.gethostname() and self.boot == _boot()

    def is_running(self) -> bool:
        """Return whether this very process still runs here."""
        return self.is_local() and start_ticks(self.pid) == self.started


def this_process() -> ProcessId:
    """Return the identity of the calling process."""
    return identify(os.getpid())


def identify(pid: int) -> ProcessId:
    """Return the identity of a process of this host; its `started` is 0 when it is gone."""
    return ProcessId(socket.gethostname(), _boot(), pid, start_ticks(pid) or 0)


def start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot; None when it does not run or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name, in parentheses, may itself hold parentheses and spaces.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
