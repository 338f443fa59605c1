"""Workers as processes of this machine."""

import asyncio
import errno
import logging
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from freight.core.device import Device, Holder, Usage
from freight.errors import LauncherError, OutOfResources
from freight.launchers.base import Remains, WorkerPlace
from freight.launchers.cgroup import Group, find_group, group_of, make_group
from freight.launchers.hold import Hold, Holds, Looks, read_hold
from freight.launchers.processes import KEEPS_MARKER, MARKER, kill, marked
from freight.launchers.standby import Standby, open_log
from freight.launchers.systemd import scope_path, scope_prefix
from freight.store.processes import ProcessId, identify

log = logging.getLogger("freight.launchers")

# What others may give back.
_SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
_CLEAR_POLL_S: Final = 0.02
_DEVICE_POLL_S: Final = 0.2


class WorkerIdentity(msgspec.Struct, frozen=True):
    """What another control plane adopts a worker by: its process, its control group ("": none), its devices."""

    process: ProcessId
    group: str = ""
    holds: tuple[Hold, ...] = ()


class LocalWorker:
    """A worker process, the leader of a session of its own so that Ctrl-C does not reach it.

    `process` is None for one that another control plane started: its status goes to whoever adopted the process.
    """

    def __init__(
        self,
        worker: str,
        pid: int,
        process: subprocess.Popen[bytes] | None,
        holds: Holds,
        held: tuple[Hold, ...],
        group: Group | None,
    ) -> None:
        self.pid = pid
        self._worker = worker
        self._process = process
        self._holds = holds
        self._held = held
        self._group = group
        self._identity = WorkerIdentity(identify(pid), str(group.path) if group else "", held)
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
        """Return what another control plane can adopt it by."""
        return msgspec.to_builtins(self._identity)

    async def ended(self) -> int | None:
        """Wait for the worker's own process to end and return its exit status, None where that is not known."""
        await self._exited.wait()
        return None if self._process is None else self._process.returncode

    async def clear(self, within_s: float) -> tuple[Remains, ...]:
        """Kill whatever is left of the worker, and wait until its devices are as they were before.

        Returns the devices of which that could not be seen within `within_s`; they stay held here.
        """
        until = time.monotonic() + within_s
        empty = 0
        while empty < 2 and time.monotonic() < until:
            left = await asyncio.to_thread(_try_to_end, self._worker, self._group)
            empty = 0 if left else empty + 1
            if empty < 2:
                await asyncio.sleep(_CLEAR_POLL_S)
        if empty == 2:
            await self._exited.wait()
            if self._group is not None:
                self._group.remove()
        held = self._held
        while True:
            remains = await asyncio.to_thread(self._holds.look_again, held)
            if not remains or time.monotonic() >= until:
                return remains
            held = _still(held, remains)
            await asyncio.sleep(_DEVICE_POLL_S)

    def kill(self) -> None:
        """End all its processes at once, without waiting."""
        _try_to_end(self._worker, self._group)


class LocalLauncher:
    """The local machine, with the devices that a run may use. Workers `outlive` this process, or end with it.

    `standby` becomes the first worker, where that needs no device.
    """

    def __init__(self, looks: Looks, locks: Path, outlive: bool = False, standby: Standby | None = None) -> None:
        self._standby = standby
        self._has_named = False  # Its id was given out.
        self._looks = looks
        self._outlive = outlive
        self._holds = Holds(looks, locks)
        if outlive:
            # Now, as the first time asks systemd, which may take a moment.
            scope_prefix("first")

    def devices(self) -> Sequence[Device]:
        """Return the devices that this machine has for us."""
        return self._looks.devices()

    def usage(self, device: Device) -> Usage | None:
        """Return what is on a device now; None where it cannot say."""
        return self._looks.usage(device)

    def stranger(self, device: Device) -> Holder | None:
        """Return who uses a device without having asked any Freight; None when nobody does."""
        return self._holds.stranger(device)

    def take(self, devices: Sequence[Device]) -> tuple[str, Holder] | None:
        """Hold all the devices host-wide, or none: then return one that is taken, and who has it."""
        return self._holds.take(devices)

    def release(self, devices: Sequence[Device]) -> None:
        """Let go of devices that were taken and on which no worker was started."""
        self._holds.let_go([device.id for device in devices])

    def worker_id(self) -> str:
        """Return the id of the worker that is started next; it is another one each time."""
        if self._standby is not None and not self._has_named and self._standby.is_waiting():
            self._has_named = True
            return self._standby.worker
        return uuid.uuid4().hex[:12]

    def start(self, place: WorkerPlace) -> LocalWorker:
        """Start a worker process; raise LauncherError when the machine refuses."""
        locks = self._holds.locks_of([device.id for device in place.devices])
        prefix = scope_prefix(place.worker) if self._outlive else []
        made = None if prefix else make_group(place.worker)
        scope = scope_path(place.worker) if prefix else None
        group = made if scope is None else Group(scope)
        held = self._holds.begin(place.worker, place.devices, group)
        arguments = [
            "--control", str(place.control), "--worker", place.worker, "--folder", str(place.folder),
            "--log", str(place.log), *(() if self._outlive else ("--parent", str(os.getpid()))),
            *(() if made is None else ("--cgroup", str(made.path))),
            *(word for lock in locks for word in ("--keep-open", str(lock))),
        ]  # fmt: skip
        own = {**self._looks.environment(place.devices), **KEEPS_MARKER, MARKER: place.worker}
        process = None
        try:
            process = None if place.devices else self._told(place, arguments, own)
            if process is None:
                argv = [*prefix, sys.executable, "-m", "freight.worker", *arguments]
                process = _popen(argv, {**os.environ, **own}, place.log, locks)
            return LocalWorker(place.worker, process.pid, process, self._holds, held, group)
        except OSError as error:
            if process is not None:
                # It could not be watched, so it may not live.
                process.kill()
                process.wait()
            if made is not None:
                made.remove()
            words = f"cannot start a worker process: {error.strerror}"
            raise (OutOfResources(words) if error.errno in _SCARCE else LauncherError(words, transient=True)) from error

    def _told(self, place: WorkerPlace, arguments: list[str], own: dict[str, str]) -> "subprocess.Popen[bytes] | None":
        """Have the process that stands by be a worker; None where there is none for this one."""
        standby = self._standby
        if standby is None or standby.worker != place.worker or not standby.is_waiting():
            return None
        os.close(open_log(place.log))  # Where that cannot be, it is said here.
        return standby.tell(arguments, own)

    def adopt(self, worker: str, identity: dict[str, Any]) -> LocalWorker | None:
        """Return a worker that an earlier control plane started; None when it does not run any more."""
        known = msgspec.convert(identity, WorkerIdentity)
        if not known.process.is_running():
            return None
        try:
            group = find_group(Path(known.group)) if known.group else None
            adopted = LocalWorker(worker, known.process.pid, None, self._holds, known.holds, group)
        except ProcessLookupError:
            return None
        # Looked at again: the pid may have become another process's before it was held.
        return adopted if known.process.is_running() else None

    def sweep(self, worker: str, identity: dict[str, Any] | None, within_s: float) -> tuple[Remains, ...]:
        """End what is left of a worker that an earlier control plane started; `identity` is what it kept of it.

        Returns its devices that are not as before after `within_s`; they stay held here.
        """
        known = msgspec.convert(identity, WorkerIdentity) if identity else None
        # Of one whose start was not written down to its end there may be a group all the same.
        group = group_of(worker) if known is None else find_group(Path(known.group)) if known.group else None
        until = time.monotonic() + within_s
        empty = 0
        while empty < 2:
            empty = 0 if _try_to_end(worker, group) else empty + 1
            if time.monotonic() >= until:
                break
            time.sleep(_CLEAR_POLL_S)
        if group is not None:
            group.remove()
        held = known.holds if known else ()
        while True:
            remains = self._holds.look_again(held)
            if not remains or time.monotonic() >= until:
                return remains
            held = _still(held, remains)
            time.sleep(_DEVICE_POLL_S)

    def look_again(self, device: str, hold: dict[str, Any]) -> Remains | None:
        """Look at a device on which something was left; None when it is as before, and then it is let go."""
        return next(iter(self._holds.look_again([read_hold(hold)])), None)

    def let_go(self, device: str, hold: dict[str, Any]) -> None:
        """Let go of a device whatever is left on it; raise OperationError where that cannot be done."""
        self._holds.free(read_hold(hold))


def _popen(
    argv: list[str], environment: dict[str, str], log: Path, locks: tuple[int, ...]
) -> "subprocess.Popen[bytes]":
    output = open_log(log)
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, pass_fds=locks,
            env=environment,
        )  # fmt: skip
    finally:
        os.close(output)


def _still(held: Sequence[Hold], remains: Sequence[Remains]) -> tuple[Hold, ...]:
    """Return the holds on devices that are not as before: the others are let go, and may be somebody's by now."""
    left = {found.device for found in remains}
    return tuple(hold for hold in held if hold.device in left)


def _try_to_end(worker: str, group: Group | None) -> bool:
    """Do as `end_all`; where nothing can be looked for now, as without a free descriptor, something may be left."""
    try:
        return end_all(worker, group)
    except OSError as error:
        log.warning("what is left of worker %s cannot be looked for: %s", worker, error.strerror)
        return True


def end_all(worker: str, group: Group | None) -> bool:
    """Kill all that is left of a worker, and return whether there was anything."""
    left = marked(worker)
    is_empty = group is None or group.is_empty()
    if group is not None and not is_empty:
        # One by one, too: in a scope that is another user's the group itself cannot be ended.
        left += group.processes()
        group.kill()
    for process in left:
        kill(process)
    return bool(left) or not is_empty
