"""Workers as processes of this machine."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from freight.core.device import Device, Holder
from freight.errors import LauncherError, OutOfResources, UserError
from freight.launchers.base import WorkerPlace
from freight.launchers.locks import lock_device
from freight.store.processes import ProcessId, identify

# Set in the environment of a worker and, by inheritance, of all that it starts.
MARKER: Final = "FREIGHT_WORKER"
# What others may give back.
_SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
_CLEAR_POLL_S: Final = 0.02


class LocalWorker:
    """A worker process, the leader of a session of its own so that Ctrl-C does not reach it.

    `process` is None for one that another control plane started: its status goes to whoever adopted the process.
    """

    def __init__(self, worker: str, pid: int, process: subprocess.Popen[bytes] | None, lock: int | None) -> None:
        self.pid = pid
        self._worker = worker
        self._process = process
        self._lock = lock
        self._identity = identify(pid)
        self._exited = asyncio.Event()
        fd = os.pidfd_open(pid)
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            if process is not None:
                process.wait()
            self._exited.set()

        loop.add_reader(fd, ended)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the process."""
        return msgspec.to_builtins(self._identity)

    async def ended(self) -> int | None:
        """Wait for the worker's own process to end and return its exit status, None where that is not known."""
        await self._exited.wait()
        return None if self._process is None else self._process.returncode

    async def clear(self) -> None:
        """Kill whatever still carries the worker's marker until two sweeps find nothing; then let its device go."""
        empty = 0
        while empty < 2:
            left = await asyncio.to_thread(marked, self._worker)
            empty = 0 if left else empty + 1
            for process in left:
                _kill(process)
            await asyncio.sleep(_CLEAR_POLL_S)
        await self._exited.wait()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def kill(self) -> None:
        """End all its processes at once, without waiting."""
        for process in marked(self._worker):
            _kill(process)


class LocalLauncher:
    """The local machine. `devices` are those that a run may use. Workers `outlive` this process, or end with it."""

    def __init__(self, devices: Sequence[Device], locks: Path, outlive: bool = False) -> None:
        self._devices = devices
        self._locks = locks
        self._outlive = outlive
        self._held: dict[str, int] = {}

    def devices(self) -> Sequence[Device]:
        """Return the devices that this machine has for us."""
        return self._devices

    def take(self, device: Device) -> Holder | None:
        """Hold `device` host-wide for the next worker on it; return who holds it when it is taken."""
        taken = lock_device(device.id, self._locks)
        if isinstance(taken, Holder):
            return taken
        self._held[device.id] = taken
        return None

    def release(self, device: Device) -> None:
        """Let go of a device that was taken and on which no worker was started."""
        lock = self._held.pop(device.id, None)
        if lock is not None:
            os.close(lock)

    def start(self, place: WorkerPlace) -> LocalWorker:
        """Start a worker process; raise LauncherError when the machine refuses."""
        lock = self._held.pop(place.device.id) if place.device else None
        argv = [
            sys.executable, "-m", "freight.worker",
            "--control", str(place.control), "--worker", place.worker, "--folder", str(place.folder),
            "--log", str(place.log), *(() if self._outlive else ("--parent", str(os.getpid()))),
            *(() if lock is None else ("--keep-open", str(lock))),
        ]  # fmt: skip
        log = -1
        try:
            log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=() if lock is None else (lock,),
                env={**os.environ, MARKER: place.worker},
            )
        except OSError as error:
            if lock is not None:
                os.close(lock)
            raise _start_error(error) from error
        finally:
            if log >= 0:
                os.close(log)
        try:
            return LocalWorker(place.worker, process.pid, process, lock)
        except OSError as error:
            # It could not be watched, so it may not live.
            process.kill()
            process.wait()
            if lock is not None:
                os.close(lock)
            raise _start_error(error) from error

    def adopt(self, worker: str, identity: dict[str, Any]) -> LocalWorker | None:
        """Return a worker that an earlier control plane started; None when it does not run any more."""
        process = msgspec.convert(identity, ProcessId)
        if not process.is_running():
            return None
        try:
            adopted = LocalWorker(worker, process.pid, None, None)
        except ProcessLookupError:
            return None
        # Looked at again: the pid may have become another process's before it was held.
        return adopted if process.is_running() else None

    def sweep(self, worker: str) -> None:
        """End what is left of a worker that an earlier control plane started."""
        empty = 0
        while empty < 2:
            left = marked(worker)
            empty = 0 if left else empty + 1
            for process in left:
                _kill(process)
            time.sleep(_CLEAR_POLL_S)


def _start_error(error: OSError) -> LauncherError:
    words = f"cannot start a worker process: {error.strerror}"
    return OutOfResources(words) if error.errno in _SCARCE else LauncherError(words, transient=True)


def marked(worker: str) -> list[psutil.Process]:
    """Return the processes whose environment carries the worker's marker. Zombies have none."""
    needle = f"{MARKER}={worker}".encode()
    found: list[psutil.Process] = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if needle in Path(entry.path, "environ").read_bytes().split(b"\0"):
                found.append(psutil.Process(int(entry.name)))
        except (OSError, psutil.Error):
            continue
    return found


def _kill(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.Error:
        return


def local_devices(declared: Sequence[str] | None) -> list[Device]:
    """Return the devices of this machine's pool: those that the configuration declares, else (None) its CPU.

    Raises UserError for a declared device that this version cannot use.
    """
    if declared is not None and not declared:
        raise UserError("pools.local.devices is empty, so nothing could run", 'use "auto", or name a device as "cpu:0"')
    if declared is None:
        return [Device("cpu:0", "cpu")]
    for device in declared:
        if not re.fullmatch(r"cpu:\d+", device):
            raise UserError(f"pools.local.devices names {device}; this version has CPU devices only", 'use "cpu:0"')
    return [Device(device, "cpu") for device in dict.fromkeys(declared)]
