"""A model server that leaves a process behind: it forks a grandchild that calls setsid, then becomes another program.

    python -m tests.faults.forker --folder FOLDER --token TOKEN [--clear-environment] -- PROGRAM …

The grandchild closes all files, minds no signal that can be minded, and has TOKEN for its name; with
--clear-environment it has no environment. It and PROGRAM hold a lock on a file for each device that was handed to this
process, so that a server which is started on a device before all of an earlier one is gone notices, and notes it.
"""

import argparse
import fcntl
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

from freight.launchers.processes import MARKER

NOTES: Final = "notes"
_SLEEP_S: Final = "3600"


def forker_command(folder: Path, token: str, clear: bool, command: list[str], python: str) -> list[str]:
    """Return the command line of a model server `command` that leaves a grandchild behind."""
    cleared = ["--clear-environment"] if clear else []
    return [python, "-m", "tests.faults.forker", "--folder", str(folder), "--token", token, *cleared, "--", *command]


def notes(folder: Path, kind: str) -> list[list[str]]:
    """Return what was noted of one kind: `server` (pid, worker), `grandchild` (pid, worker), or `clash`."""
    file = folder / NOTES
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.split()[1:] for line in lines if line.split()[0] == kind]


def main() -> None:
    """Fork the grandchild, and become the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--clear-environment", action="store_true")
    parser.add_argument("program", nargs="+")
    args = parser.parse_args()
    worker = os.environ.get(MARKER, "none")
    held = [_hold(args.folder, device, worker) for device in _devices()]
    _note(args.folder, "server", os.getpid(), worker)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            _become_grandchild(args.folder, args.token, args.clear_environment, worker, held)
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    # Closed by the grandchild when it has become what it is to be.
    os.read(reading, 1)
    os.execvp(args.program[0], args.program)


def _devices() -> list[str]:
    """Return the names of the device locks that were handed down to this process."""
    links: set[str] = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.add(fd.readlink().name)
    return sorted(link for link in links if link.startswith("freight-") and link.endswith(".lock"))


def _hold(folder: Path, device: str, worker: str) -> int:
    fd = os.open(folder / f"{device}.tree", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(fd, True)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 200, 0).decode()
        _note(folder, "clash", os.getpid(), f"{worker} on {device}, which was held for {holder}")
    os.ftruncate(fd, 0)
    os.pwrite(fd, worker.encode(), 0)
    return fd


def _become_grandchild(folder: Path, token: str, clear: bool, worker: str, held: list[int]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _note(folder, "grandchild", os.getpid(), worker)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    # Those that this program opened itself are closed by what comes next.
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):
            if fd > 2 and fd not in held and os.get_inheritable(fd):
                os.close(fd)
    sleep = shutil.which("sleep")
    assert sleep is not None
    os.execve(sleep, [token, _SLEEP_S], {} if clear else os.environ)


def _note(folder: Path, kind: str, pid: int, worker: str) -> None:
    with (folder / NOTES).open("a") as file:
        file.write(f"{kind} {pid} {worker}\n")


def named(token: str) -> list[int]:
    """Return the processes that have `token` for their name."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().split(b"\0")[0] == token.encode():
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    main()
