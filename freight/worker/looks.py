"""Looking at a server's metrics: how busy it is, for the window and for who asks."""

import asyncio
from collections.abc import Callable
from typing import Final

from freight.core.messages import Load
from freight.engines.base import Engine
from freight.engines.client import EngineClient
from freight.worker.driver import Driver

# A server that shows no load is asked again so seldom.
_SHUT_S: Final = (2.0, 30.0)
_IDLE_S: Final = 0.25

# A server in service: who drives it, how it is reached, and what kind it is.
InService = tuple[Driver, EngineClient, Engine]


class Looks:
    """Keeps `load`, what the server in service said of itself last; None where it does not say."""

    def __init__(self, in_service: Callable[[], InService | None]) -> None:
        """Look at whatever `in_service` returns at the time."""
        self.load: Load | None = None
        self._in_service = in_service

    async def run(self) -> None:
        """Look as often as the window has a use for; one request each time, and no second one before its answer."""
        shut_s, before = _SHUT_S[0], None
        while True:
            current = self._in_service()
            if current is None:
                self.load = None
                await asyncio.sleep(_IDLE_S)
                continue
            driver, client, engine = current
            if client is not before:
                shut_s, before = _SHUT_S[0], client
            await asyncio.sleep(driver.window.look_s())
            if await self._look(driver, client, engine):
                shut_s = _SHUT_S[0]
            else:
                await asyncio.sleep(shut_s)
                shut_s = min(_SHUT_S[1], shut_s * 2)

    async def _look(self, driver: Driver, client: EngineClient, engine: Engine) -> bool:
        """Look once; return whether the server says how busy it is."""
        metrics = await client.metrics()
        load = engine.load(metrics) if metrics is not None else None
        self.load = None if load is None else Load(load.running, load.waiting, load.cache_use)
        if load is not None:
            driver.looked(load)
        return load is not None
