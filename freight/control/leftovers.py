"""Ending what a killed service left running."""

import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from freight.control.servicefolder import ServiceFolder
from freight.control.sockets import RUNTIME_PREFIX
from freight.errors import FreightError
from freight.launchers.base import Launcher, Remains
from freight.launchers.devices import find_devices
from freight.launchers.local import LocalLauncher
from freight.launchers.locks import lock_folder
from freight.store.catalog import Catalog
from freight.store.database import Sharing
from freight.store.rows import WorkerRow

# How long the end of one worker may take.
_SWEEP_S: Final = 10.0


def sweep_worker(row: WorkerRow, launcher: Launcher, within_s: float) -> tuple[Remains, ...]:
    """End what is left of a worker, and remove its folder for sockets; return its devices that are not as before."""
    remains = launcher.sweep(row.id, row.process, within_s)
    folder = Path(row.folder)
    if folder.name.startswith(RUNTIME_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
    return remains


def end_leftovers(data_folder: Path) -> int:
    """End the workers that outlived a service which was killed; return how many. None may run on the folder.

    Raises OperationError where a service owns the folder.
    """
    folder = ServiceFolder(data_folder)
    if not folder.catalog.exists():
        return 0
    folder.claim()
    try:
        catalog: Catalog = folder.open_catalog(Sharing.WRITER)
        try:
            launcher = LocalLauncher(find_devices(None, {}), lock_folder())
            workers = catalog.live_workers()
            for row in workers:
                sweep_worker(row, launcher, _SWEEP_S)
                with suppress(FreightError):  # The next service finds out for itself.
                    catalog.worker_ended(row.id, "ended after its service was gone", time.time())
            return len(workers)
        finally:
            catalog.close()
    finally:
        folder.release()
