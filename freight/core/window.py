"""How many requests a worker keeps in flight: enough to saturate its engine, and no more."""

from dataclasses import dataclass, field
from statistics import median
from typing import Final

OPAQUE_START: Final = 64
OPAQUE_MOST: Final = 2048
# A window is worth doubling while throughput still grows by this much.
_GROWTH: Final = 1.05


@dataclass(slots=True)
class Window:
    """The number of requests to keep in flight, `limit`. All times in seconds.

    An open window doubles while throughput, measured over two median latencies, grows. Push-back
    halves any window and closes it: from then on it creeps back up to where it was.
    """

    limit: int
    most: int
    is_open: bool = False
    _began: float | None = None
    _latencies: list[float] = field(default_factory=list[float])
    _best_rate: float = 0.0
    _shrunk_at: float = -1e9

    @classmethod
    def fixed(cls, size: int) -> "Window":
        """Return a window of `size`, as the user asked for."""
        return cls(size, size)

    @classmethod
    def known(cls, slots: int) -> "Window":
        """Return the window of an engine that runs `slots` requests at once: a few more, so that none idles."""
        size = slots + max(2, slots // 4)
        return cls(size, size)

    @classmethod
    def opaque(cls) -> "Window":
        """Return the window of an engine of which nothing is known."""
        return cls(OPAQUE_START, OPAQUE_MOST, is_open=True)

    def succeeded(self, now: float, latency_s: float, in_flight: int) -> None:
        """Take note of an answer; the window may grow."""
        if self._began is None:
            self._began = now - latency_s
        self._latencies.append(latency_s)
        if self.limit >= self.most:
            self._restart(now, keep=256)
            return
        span = now - self._began
        if len(self._latencies) < self.limit or span < 2 * median(self._latencies):
            return
        rate = len(self._latencies) / span
        if not self.is_open:
            self.limit = min(self.most, self.limit + max(1, self.most // 8))
        elif rate > self._best_rate * _GROWTH and in_flight + 1 >= self.limit:
            self._best_rate = rate
            self.limit = min(self.most, self.limit * 2)
        self._restart(now, keep=0)

    def pushed_back(self, now: float) -> None:
        """Halve the window: the engine said that it has too much. Once a second at most: one wave, one halving."""
        if now - self._shrunk_at < 1.0:
            return
        self._shrunk_at = now
        if self.is_open:
            # A closed window keeps its top: a long burst of push-back must not pin it at 1 for good.
            self.most = self.limit
            self.is_open = False
        self.limit = max(1, self.limit // 2)
        self._best_rate = 0.0
        self._restart(now, keep=0)

    def _restart(self, now: float, keep: int) -> None:
        if len(self._latencies) > keep:
            self._began = now
            self._latencies.clear()
