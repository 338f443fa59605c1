"""The physics in real time: an event loop's clock, sped up, drives the step loop."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

from bench.simengine.physics import Engine, Physics, Request

# The event loop's own resolution: an earlier call would find that nothing is due yet.
_TICK_S: Final = 0.001


class Batch:
    """A step loop whose seconds pass `speed` times as fast as real ones.

    Steps are done when their time has come to matter: somebody arrives, leaves or looks, or a request ends.
    """

    def __init__(
        self,
        physics: Physics,
        speed: float,
        loop: asyncio.AbstractEventLoop,
        finished: Callable[[Request], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an idle one; it calls `finished` with each request that has ended."""
        self.core = Engine(physics)
        self._speed = speed
        self._loop = loop
        self._finished = finished
        # The loop's own clock would do, were it not coarser.
        self._real = clock
        self._epoch = clock()
        # The end of the last step begun; until then, who ends with it is due but not out.
        self._clock = 0.0
        self._due: list[Request] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, request: Request) -> None:
        """Take a request in: it may run from the next step on."""
        now = self._catch_up()
        if not self.core.in_flight and not self._due:
            self._clock = max(self._clock, now)
        self.core.add(request)
        self._plan(now)

    def drop(self, request: Request) -> None:
        """Forget a request whose client is gone."""
        now = self._catch_up()
        self.core.drop(request)
        self._plan(now)

    def look(self) -> Engine:
        """Return the engine as it stands now."""
        self._catch_up()
        return self.core

    def _catch_up(self) -> float:
        """Do every step that has begun by now, and let out who has ended; return the time."""
        now = (self._real() - self._epoch) * self._speed
        while self._clock < now:
            self._let_out()
            if not self.core.in_flight:
                break
            self._step(now)
        if self._clock <= now:
            self._let_out()
        return now

    def _step(self, until: float) -> None:
        seconds, self._due = self.core.step(self._clock, until)
        self._clock += seconds

    def _let_out(self) -> None:
        due, self._due = self._due, []
        for request in due:
            self._finished(request)

    def _plan(self, now: float) -> None:
        """Have the loop come back when the next request ends, or the next step begins that changes something."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake = self._clock
        if wake <= now:
            if not self.core.in_flight:
                return
            quiet = self.core.quiet_seconds()
            if not quiet:
                self._step(now)
            wake = self._clock + quiet
        elif not self._due and self.core.in_flight:
            # A step is under way that ends nobody: what follows it may be quiet as well.
            wake += self.core.quiet_seconds()
        delay_s = (wake - now) / self._speed
        self._timer = self._loop.call_later(math.ceil(delay_s / _TICK_S) * _TICK_S, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._plan(self._catch_up())
