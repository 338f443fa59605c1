"""A worker's line to its control plane."""

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from freight.core.messages import Orders, Report
from freight.engines.answers import Unreachable
from freight.engines.base import Address
from freight.engines.pool import Pool
from freight.errors import OperationError
from freight.store.sockets import reachable

log = logging.getLogger("freight.worker")

_RETRY_S: Final = 0.2


class ControlPlaneGone(OperationError):
    """No control plane has answered for so long that none is expected any more."""


class ControlLink:
    """Brings reports to whoever listens on the Unix socket `control`. `orphan_s` is how long a silence may last."""

    def __init__(self, control: str, orphan_s: float) -> None:
        self.orphan_s = orphan_s
        self._pool = Pool(
            Address("http://control", reachable(Path(control))), sys.maxsize, content_type="application/msgpack"
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()

    async def exchange(self, report: Report) -> Orders:
        """Bring a report and return the orders; go on trying until it is answered, so that nothing is lost.

        Raises ControlPlaneGone when nobody has answered for `orphan_s` seconds.
        """
        encoded = msgspec.msgpack.encode(report)
        silent_since: float | None = None
        while True:
            try:
                reply = await self._pool.post("/exchange", encoded, None)
                if reply.status == 200:
                    return msgspec.msgpack.decode(reply.body, type=Orders)
                log.warning("the control plane answers %d", reply.status)
            except Unreachable as error:
                log.debug("no answer from the control plane: %s", error)
            silent_since = silent_since or time.monotonic()
            silent_s = time.monotonic() - silent_since
            if silent_s > self.orphan_s:
                raise ControlPlaneGone(f"no control plane for {silent_s:.0f} s; this worker ends")
            await asyncio.sleep(_RETRY_S)
