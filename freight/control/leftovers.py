"""Ending what a killed service left running."""

import shutil
import time
from contextlib import suppress
from pathlib import Path

from freight.control.servicefolder import ServiceFolder
from freight.control.sockets import RUNTIME_PREFIX
from freight.errors import FreightError
from freight.launchers.base import Launcher
from freight.launchers.local import LocalLauncher
from freight.launchers.locks import lock_folder
from freight.store.catalog import Catalog, WorkerRow
from freight.store.database import Sharing


def sweep_worker(row: WorkerRow, launcher: Launcher) -> None:
    """End what is left of a worker, and remove its folder for sockets."""
    launcher.sweep(row.id)
    folder = Path(row.folder)
    if folder.name.startswith(RUNTIME_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


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
            launcher = LocalLauncher((), lock_folder())
            workers = catalog.live_workers()
            for row in workers:
                sweep_worker(row, launcher)
                with suppress(FreightError):  # The next service finds out for itself.
                    catalog.worker_ended(row.id, "ended after its service was gone", time.time())
            return len(workers)
        finally:
            catalog.close()
    finally:
        folder.release()
