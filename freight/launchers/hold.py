"""Holding devices: locks that the whole host respects, and the proof that a device is as before a worker came."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from freight.core.device import Device, Holder, Usage
from freight.errors import OperationError
from freight.launchers.base import Remains
from freight.launchers.cgroup import Group, find_group
from freight.launchers.locks import break_lock, lock_device
from freight.launchers.processes import marked

# Memory that a driver may keep back, beside what was in use before: bytes, or a share of the whole.
_SLACK_BYTES: Final = 256_000_000
_SLACK_SHARE: Final = 0.02
# A GPU on which somebody computes and that has so much of its memory in use is somebody's.
_BUSY_SHARE: Final = 0.1


class Looks(Protocol):
    """What can say how a device stands."""

    def devices(self) -> Sequence[Device]:
        """Return the devices."""
        ...

    def usage(self, device: Device) -> Usage | None:
        """Return what is on a device now; None where it cannot say."""
        ...

    def environment(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return the variables that make a program use these devices alone."""
        ...


class Hold(msgspec.Struct, frozen=True):
    """One worker's hold on one device: `baseline` are the bytes of its memory that were in use before, if known.

    `group` is the worker's control group, "" where it has none.
    """

    worker: str
    device: str
    baseline: int | None
    group: str = ""


class Holds:
    """The devices that this process holds, for workers or because something is left on them."""

    def __init__(self, looks: Looks, locks: Path) -> None:
        self._looks = looks
        self._locks = locks
        self._held: dict[str, int] = {}

    def take(self, devices: Sequence[Device]) -> tuple[str, Holder] | None:
        """Hold all the devices, or none: then return one that is taken, and who has it."""
        taken: list[str] = []
        for device in devices:
            holder = self._take(device.id)
            if holder is None:
                taken.append(device.id)
                holder = self.stranger(device)
            if holder is not None:
                # Only what was had by this: others may be held here already, for a worker that is being started.
                self.let_go(taken)
                return device.id, holder
        return None

    def _take(self, device: str) -> Holder | None:
        if device in self._held:
            return Holder(os.getpid(), "this service")
        taken = lock_device(device, self._locks)
        if isinstance(taken, Holder):
            return taken
        self._held[device] = taken
        return None

    def stranger(self, device: Device) -> Holder | None:
        """Return who computes on a device without having asked us, unless it is hardly used by that."""
        usage = self._looks.usage(device)
        if usage is None or not usage.holders:
            return None
        is_idle = usage.memory_used is not None and usage.memory_used < _BUSY_SHARE * (device.memory or 0)
        return None if is_idle else usage.holders[0]

    def begin(self, worker: str, devices: Sequence[Device], group: Group | None) -> tuple[Hold, ...]:
        """Return the holds of a worker that is to run on devices that were taken, each as it is before."""
        path = str(group.path) if group else ""
        return tuple(Hold(worker, device.id, self._used(device), path) for device in devices)

    def locks_of(self, devices: Sequence[str]) -> tuple[int, ...]:
        """Return the open locks of devices that are held here, for a worker to share."""
        return tuple(self._held[device] for device in devices if device in self._held)

    def let_go(self, devices: Sequence[str]) -> None:
        """Let go of devices; those that are not held here stay as they are."""
        for device in devices:
            lock = self._held.pop(device, None)
            if lock is not None:
                os.close(lock)

    def free(self, hold: Hold) -> None:
        """Let go of a device although something is left on it: a process of its worker's may have its lock, too.

        Raises OperationError where that cannot be taken away. What somebody else has taken meanwhile stays theirs.
        """
        self.let_go([hold.device])
        holder = self._take(hold.device)
        self.let_go([hold.device])
        if holder is not None and self._left(hold) is not None:
            break_lock(hold.device, self._locks, holder)

    def look_again(self, holds: Sequence[Hold]) -> tuple[Remains, ...]:
        """Look at devices after their worker; return what is left there. Where nothing is they are let go.

        Where something is, they are held here from now on. One that somebody else has taken meanwhile is theirs.
        """
        found = [remains for hold in holds if (remains := self._look(hold)) is not None]
        self.let_go([hold.device for hold in holds if hold.device not in {remains.device for remains in found}])
        return tuple(found)

    def _look(self, hold: Hold) -> Remains | None:
        try:
            self._take(hold.device)
            # Where its lock is not to be had, a process of the worker may be the one that has it.
            return self.remains(hold) if hold.device in self._held else self._left(hold)
        except (OSError, OperationError) as error:
            return Remains(hold.device, f"it cannot be looked at: {error}", None, msgspec.to_builtins(hold))

    def remains(self, hold: Hold) -> Remains | None:
        """Return what is left of a worker on its device; None when that is as it was before."""
        left = self._left(hold)
        device = self._device(hold.device)
        usage = self._looks.usage(device) if device is not None and left is None else None
        if device is None or usage is None or usage.memory_used is None or hold.baseline is None:
            return left
        over = usage.memory_used - hold.baseline
        if over <= max(_SLACK_BYTES, _SLACK_SHARE * (device.memory or 0)):
            return None
        words = f"{over / 1e9:.1f} GB more of its memory are in use than before"
        holder = usage.holders[0] if usage.holders else None
        if holder is not None:
            words += f", by {holder}"
        return Remains(hold.device, words, holder.pid if holder else None, msgspec.to_builtins(hold))

    def _left(self, hold: Hold) -> Remains | None:
        """Return what is left of a worker's processes."""
        group = find_group(hold.group) if hold.group else None
        left = marked(hold.worker) or (group.processes() if group else [])
        if not left:
            return None
        words = f"process {left[0].pid} of the worker there does not end"
        return Remains(hold.device, words, left[0].pid, msgspec.to_builtins(hold))

    def _used(self, device: Device) -> int | None:
        usage = self._looks.usage(device)
        return None if usage is None else usage.memory_used

    def _device(self, wanted: str) -> Device | None:
        return next((device for device in self._looks.devices() if device.id == wanted), None)


def read_hold(hold: dict[str, Any]) -> Hold:
    """Return a hold that was kept as JSON."""
    return msgspec.convert(hold, Hold)
