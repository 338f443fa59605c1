"""Devices on which something of a worker was left: nobody gets them until they are as they were before it came."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from freight.errors import WrongState
from freight.launchers.base import Launcher, Remains
from freight.store.catalog import Catalog
from freight.store.database import StorageFull
from freight.store.rows import QuarantineRow

log = logging.getLogger("freight.plane")

Write = Callable[..., Awaitable[Any]]


class Quarantine:
    """The devices of one control plane that are in quarantine, each looked at again every `retry_s`."""

    def __init__(
        self, catalog: Catalog, launcher: Launcher, write: Write, changed: asyncio.Event, retry_s: float
    ) -> None:
        self._catalog = catalog
        self._launcher = launcher
        self._write = write
        self._changed = changed
        self._retry_s = retry_s
        self._rows: dict[str, QuarantineRow] = {}
        self._looking: set[asyncio.Task[None]] = set()
        # Held while devices are looked at: a look that goes on would take again what is let go meanwhile.
        self._deciding = asyncio.Lock()

    def rows(self) -> dict[str, QuarantineRow]:
        """Return what is in quarantine, by device."""
        return dict(self._rows)

    def held_by(self, device: str) -> str:
        """Return what a device waits for; "" for one that is in no quarantine."""
        row = self._rows.get(device)
        return f"the quarantine ({row.words})" if row else ""

    async def enter(self, remains: Remains) -> None:
        """Keep a device from everybody."""
        row = QuarantineRow(remains.device, time.time(), remains.words, remains.pid, remains.hold)
        log.warning("%s is in quarantine: %s", remains.device, remains.words)
        await self._keep(row)
        self._watch(row.device)

    async def take_up(self) -> None:
        """Take up what an earlier control plane had in quarantine."""
        for row in await self._write(self._catalog.quarantined):
            self._rows[row.device] = row
            if await self._is_over(row):
                await self.end(row.device)
            else:
                self._watch(row.device)

    async def release(self, device: str) -> None:
        """Let a device go whatever is left on it; raise WrongState for one that is in no quarantine."""
        async with self._deciding:
            if device not in self._rows:
                raise WrongState(f"{device} is in no quarantine", "freight gpus shows which are")
            log.warning("%s is let out of quarantine by hand", device)
            self._launcher.let_go(device, self._rows[device].hold)
            await self.end(device)

    async def end(self, device: str) -> None:
        """Let a device be used again."""
        del self._rows[device]
        with suppress(StorageFull):  # It is looked at again after a restart.
            await self._write(self._catalog.end_quarantine, device)
        self._changed.set()

    def stop(self) -> None:
        """Look at no device any more."""
        for task in self._looking:
            task.cancel()

    async def _keep(self, row: QuarantineRow) -> None:
        self._rows[row.device] = row
        with suppress(StorageFull):
            await self._write(self._catalog.quarantine, row)

    def _watch(self, device: str) -> None:
        task = asyncio.create_task(self._look_again(device))
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _look_again(self, device: str) -> None:
        while device in self._rows:
            await asyncio.sleep(self._retry_s)
            async with self._deciding:
                row = self._rows.get(device)
                if row is not None and await self._is_over(row):
                    log.info("%s is as before, and out of quarantine", device)
                    await self.end(device)

    async def _is_over(self, row: QuarantineRow) -> bool:
        remains = await asyncio.to_thread(self._launcher.look_again, row.device, row.hold)
        if remains is not None and remains.words != row.words:
            await self._keep(QuarantineRow(row.device, row.since, remains.words, remains.pid, remains.hold))
        return remains is None
