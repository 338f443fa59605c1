"""Starting workers: the intent on disk first, then the process, then which process it is."""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from freight.control.jobrun import EngineLimits, JobRun
from freight.control.pins import Pin
from freight.control.roster import Roster
from freight.control.workerrun import WorkerRun
from freight.core.actions import StartPinned, StartWorker
from freight.core.device import Device
from freight.core.job import State
from freight.core.messages import Setup
from freight.core.model import ModelSpec
from freight.core.snapshot import Need, Pacing
from freight.errors import LauncherError, OperationError, OutOfResources
from freight.launchers.base import Launcher, WorkerPlace
from freight.store.catalog import Catalog
from freight.store.database import StorageFull

# A device that somebody else holds is tried again this often, and one that is idle looked at while jobs wait.
_STRANGER_S: Final = 1.0
_LOOK_S: Final = 2.0
# But sooner for a job that came since: it may be why a warm worker would have to go.
_LOOK_ANEW_S: Final = 0.1
_LOOK_PATIENCE_S: Final = 3.0
# Makes a worker's folder, given its job (None: a pinned model's) and its id; returns that and the path of its log.
MakePlaces = Callable[[JobRun | None, str], tuple[Path, Path]]
Write = Callable[..., Awaitable[Any]]


class Starts:
    """Starts the workers of one control plane. `is_shared`: what breaks one job ends that one alone."""

    def __init__(
        self,
        catalog: Catalog,
        launcher: Launcher,
        control: Path,
        write: Write,
        changed: asyncio.Event,
        roster: Roster,
        make_places: MakePlaces,
        is_shared: bool,
        watch: Callable[[WorkerRun], None],
    ) -> None:
        self._catalog = catalog
        self._launcher = launcher
        self._control = control
        self._write = write
        self._changed = changed
        self._roster = roster
        self._make_places = make_places
        self._is_shared = is_shared
        self._watch = watch
        self._strangers: dict[str, tuple[str, float]] = {}
        self._staggered_at = float("-inf")
        # Who uses devices without us, as of the last look at them.
        self._seen: dict[str, str] = {}
        self._looked_at = float("-inf")
        self._looked_for: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        # The jobs that waited when devices were last looked at, if that was due. One that has come since is planned
        # after the next time: what it would do now is decided on devices as they were.
        self.noticed: set[str] = set()

    def stranger(self, device: str, now: float) -> str:
        """Return who uses a device without us, or held it when it was last tried, not long ago; "" for nobody."""
        who, at = self._strangers.get(device, ("", now))
        return self._seen.get(device) or (who if now - at < _STRANGER_S else "")

    async def look_around(self, now: float) -> None:
        """While jobs wait, look now and then at the devices that are not in use here: somebody else may use them.

        Returns when that is seen, so that no warm worker ends for room that is a stranger's; a driver that does not
        answer is waited for only a moment.
        """
        jobs = [*self._roster.open.values(), *self._roster.waiting.values()]
        waiting = self.noticed = {job.row.id for job in jobs if job.row.state is State.QUEUED}
        pause_s = _LOOK_S if waiting <= self._looked_for else _LOOK_ANEW_S
        if (
            (waiting or self._seen)
            and now >= self._looked_at + pause_s
            and (self._looking is None or self._looking.done())
        ):
            self._looked_at, self._looked_for = now, waiting
            self._looking = asyncio.create_task(self._look())
            await asyncio.wait((self._looking,), timeout=_LOOK_PATIENCE_S)

    async def _look(self) -> None:
        busy = {device for worker in self._roster.workers.values() for device in worker.devices}
        idle = [device for device in self._launcher.devices() if device.is_gpu() and device.id not in busy]
        seen = {device.id: await asyncio.to_thread(self._launcher.stranger, device) for device in idle}
        busy = {device for worker in self._roster.workers.values() for device in worker.devices}
        found = {device: str(holder) for device, holder in seen.items() if holder is not None and device not in busy}
        if found != self._seen:
            self._seen = found
            self._changed.set()

    def pacing(self, most_loads: int) -> Pacing:
        """Return how many servers are being loaded, and from where."""
        loading = [worker.store for worker in self._roster.workers.values() if worker.loading_since is not None]
        return Pacing(tuple(store for store in loading if store), most_loads, self._staggered_at)

    async def start(self, job: JobRun, action: StartWorker) -> None:
        """Start a worker of a job; what keeps it from starting is counted against its place."""
        places = action.devices or (action.source,)
        try:
            await self._start(_Wanted(action.source, action.devices, job.launch, job.model, job.need, job))
        except (StorageFull, OutOfResources) as error:
            job.found_full(time.monotonic(), error.message)
        except (LauncherError, OperationError) as error:
            if not self._is_shared and isinstance(error, OperationError):
                raise
            job.start_failed(places, error.message, _is_hopeless(error), time.monotonic())

    async def start_pinned(self, pin: Pin, action: StartPinned, limits: EngineLimits) -> None:
        """Start a worker that has a pinned model's server up."""
        assert pin.model is not None
        wanted = _Wanted(action.source, action.devices, pin.launch, pin.model, pin.need, None, pin.setup(limits))
        try:
            await self._start(wanted)
        except (LauncherError, OperationError) as error:
            pin.start_failed(action.devices, error.message, _is_hopeless(error))

    async def _start(self, wanted: "_Wanted") -> None:
        devices = [device for device in self._launcher.devices() if device.id in wanted.devices]
        if devices and not self._take(devices):
            return
        worker = self._launcher.worker_id()
        folder = None
        try:
            folder, log = self._make_places(wanted.job, worker)
            await self._launch(wanted, WorkerPlace(worker, self._control, folder, log, tuple(devices)))
        except (LauncherError, OperationError):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            self._launcher.release(devices)
            raise
        if wanted.need.staggers:
            self._staggered_at = time.monotonic()

    def _take(self, devices: list[Device]) -> bool:
        """Hold devices for the next worker on them; where that fails, note who or what is in the way."""
        try:
            taken = self._launcher.take(devices)
        except (OperationError, OSError) as error:
            if not self._is_shared:
                raise
            words = f"a lock that cannot be opened ({error})"
            self._strangers.update({device.id: (words, time.monotonic()) for device in devices})
            return False
        if taken is not None:
            device, holder = taken
            self._strangers[device] = (str(holder), time.monotonic())
        return taken is None

    async def _launch(self, wanted: "_Wanted", place: WorkerPlace) -> None:
        described: dict[str, Any] = {"key": wanted.launch, "model": wanted.model.name, "store": wanted.need.store}
        now, worker, job = time.time(), place.worker, wanted.job
        devices = tuple(device.id for device in place.devices)
        number = await self._write(
            self._catalog.worker_starts, worker, job.row.id if job else None, wanted.source, str(place.folder), now,
            devices, str(place.log), described,
        )  # fmt: skip
        try:
            process = self._launcher.start(place)
        except LauncherError as error:
            await self._write(self._catalog.worker_ended, worker, error.message, time.time())
            raise
        run = WorkerRun(
            worker, wanted.source, devices, place.folder, place.log, process, job, wanted.launch, wanted.model.name,
            number, now, setup=wanted.setup, since=time.monotonic(), store=wanted.need.store,
        )  # fmt: skip
        # Known from its first moment: it may report before anything more is written.
        self._roster.workers[worker] = run
        if job is not None:
            job.workers[worker] = run
        self._watch(run)
        self._changed.set()
        with suppress(StorageFull):  # It cannot be adopted then; it is found by its id, and ended.
            await self._write(self._catalog.worker_runs, worker, process.identity())


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A worker to start: for a job, or with the `setup` of a pinned model for none."""

    source: str
    devices: tuple[str, ...]
    launch: str
    model: ModelSpec
    need: Need
    job: JobRun | None
    setup: Setup | None = None


def _is_hopeless(error: LauncherError | OperationError) -> bool:
    return isinstance(error, LauncherError) and not error.transient
