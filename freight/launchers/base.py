"""What the control plane asks of any place where workers run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from freight.core.device import Device, Holder


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker to start: its id, the control plane's socket, its folder and its log, its device (None: needs none)."""

    worker: str
    control: Path
    folder: Path
    log: Path
    device: Device | None


class RunningWorker(Protocol):
    """A worker that was started."""

    pid: int

    def identity(self) -> dict[str, Any]:
        """Return what another control plane can adopt it by, as JSON."""
        ...

    async def ended(self) -> int | None:
        """Wait for the worker's own process to end and return its exit status, None where that is not known."""
        ...

    async def clear(self) -> None:
        """End whatever is left of it, wait until all is gone, and let its device go."""
        ...

    def kill(self) -> None:
        """End all its processes at once, without waiting."""
        ...


class Launcher(Protocol):
    """One kind of place for workers."""

    def devices(self) -> Sequence[Device]:
        """Return the devices that this place has."""
        ...

    def take(self, device: Device) -> Holder | None:
        """Hold `device` for the next worker on it; return who holds it when it is taken."""
        ...

    def release(self, device: Device) -> None:
        """Let go of a device that was taken and on which no worker runs."""
        ...

    def start(self, place: WorkerPlace) -> RunningWorker:
        """Start a worker on a device that was taken; raise LauncherError when that fails."""
        ...

    def adopt(self, worker: str, identity: dict[str, Any]) -> RunningWorker | None:
        """Return a worker that an earlier control plane started; None when it does not run any more."""
        ...

    def sweep(self, worker: str) -> None:
        """End what is left of a worker that an earlier control plane started."""
        ...
