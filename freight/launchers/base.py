"""What the control plane asks of any place where workers run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from freight.core.device import Device, Holder, Usage


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker to start: its id, the control plane's socket, its folder and its log, and the devices that it needs."""

    worker: str
    control: Path
    folder: Path
    log: Path
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left on a device after the worker there was ended: in words, and by a process of it where one is known.

    `hold` is what the launcher needs to look again, also after a restart of the control plane, as JSON.
    """

    device: str
    words: str
    pid: int | None
    hold: dict[str, Any]


class RunningWorker(Protocol):
    """A worker that was started."""

    pid: int

    def identity(self) -> dict[str, Any]:
        """Return what another control plane can adopt it by, as JSON."""
        ...

    async def ended(self) -> int | None:
        """Wait for the worker's own process to end and return its exit status, None where that is not known."""
        ...

    async def clear(self, within_s: float) -> tuple[Remains, ...]:
        """End whatever is left of it, wait until all is gone and its devices are as before it came, and let these go.

        Returns the devices of which that could not be seen within `within_s`: the launcher goes on holding them.
        """
        ...

    def kill(self) -> None:
        """End all its processes at once, without waiting."""
        ...


class Launcher(Protocol):
    """One kind of place for workers."""

    def devices(self) -> Sequence[Device]:
        """Return the devices that this place has."""
        ...

    def usage(self, device: Device) -> Usage | None:
        """Return what is on a device now; None where it cannot say."""
        ...

    def stranger(self, device: Device) -> Holder | None:
        """Return who uses a device without having asked any Freight; None when nobody does."""
        ...

    def take(self, devices: Sequence[Device]) -> tuple[str, Holder] | None:
        """Hold all the devices for the next worker on them, or none: then return one that is taken, and who has it."""
        ...

    def release(self, devices: Sequence[Device]) -> None:
        """Let go of devices that were taken and on which no worker runs."""
        ...

    def worker_id(self) -> str:
        """Return the id that the next worker to be started is to have: another one each time."""
        ...

    def start(self, place: WorkerPlace) -> RunningWorker:
        """Start a worker on devices that were taken; raise LauncherError when that fails."""
        ...

    def adopt(self, worker: str, identity: dict[str, Any]) -> RunningWorker | None:
        """Return a worker that an earlier control plane started; None when it does not run any more."""
        ...

    def sweep(self, worker: str, identity: dict[str, Any] | None, within_s: float) -> tuple[Remains, ...]:
        """End what is left of a worker that an earlier control plane started; `identity` is what it kept of it.

        Returns its devices that are not as before after `within_s`: the launcher holds them.
        """
        ...

    def look_again(self, device: str, hold: dict[str, Any]) -> Remains | None:
        """Look at a device on which something was left; None when it is as before, and then it is let go."""
        ...

    def let_go(self, device: str, hold: dict[str, Any]) -> None:
        """Let go of a device whatever is left on it; raise OperationError where that cannot be done."""
        ...
