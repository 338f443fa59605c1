"""What all parts of the service work with."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from freight.config import Config
from freight.control.jobrun import EngineLimits, JobRun
from freight.control.plane import ControlPlane
from freight.control.servicefolder import ServiceFolder
from freight.control.waiting import WaitingJob
from freight.core.device import Device
from freight.store.catalog import Catalog
from freight.store.rows import JobRow

_T = TypeVar("_T")


@dataclass(slots=True)
class Checking:
    """A job whose input is being read. `ended` is set when that is over; `refused` says why there is no job then."""

    row: JobRow
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    refused: Exception | None = None


@dataclass(slots=True)
class Context:
    """The service's folder, databases, threads and control plane.

    `catalog` is written to by the one thread of `writer`; `reader` is a second connection, for the one thread of
    `looker`, so that no one who asks waits for the disk. `scanners` read whole inputs, `threads` do everything else
    that takes time. `devices` are those of the machine's pool.
    """

    folder: ServiceFolder
    catalog: Catalog
    reader: Catalog
    writer: ThreadPoolExecutor
    looker: ThreadPoolExecutor
    threads: ThreadPoolExecutor
    scanners: ThreadPoolExecutor
    plane: ControlPlane
    settings: Callable[[], Config]
    devices: tuple[Device, ...]
    limits: EngineLimits
    checking: dict[str, Checking] = field(default_factory=dict[str, Checking])
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def write(self, call: Callable[..., _T], *args: object) -> _T:
        """Call what writes to a database."""
        return await asyncio.get_running_loop().run_in_executor(self.writer, call, *args)

    async def look(self, call: Callable[..., _T], *args: object) -> _T:
        """Call what reads the catalog by `reader`."""
        return await asyncio.get_running_loop().run_in_executor(self.looker, call, *args)

    async def in_thread(self, call: Callable[..., _T], *args: object) -> _T:
        """Call what takes time."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, call, *args)

    def in_hand(self, job: str) -> JobRun | WaitingJob | Checking | None:
        """Return an unfinished job as it is in memory; None for one that is not."""
        roster = self.plane.roster
        return roster.open.get(job) or roster.waiting.get(job) or self.checking.get(job)
