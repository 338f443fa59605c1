"""How many requests a worker keeps in flight: enough to saturate its engine, and no more."""

from dataclasses import dataclass, field
from typing import Final

from freight.core.climb import Climb

OPAQUE_START: Final = 64
OPAQUE_MOST: Final = 2048
# Looks at the engine's metrics: while the window grows, while there is too little to send, and from then on.
_LOOK_S: Final = (0.25, 1.0, 2.0)
# A queue must bridge what ends at once: so many answers come before any of them can be followed by a request.
_BURST_S: Final = 0.1
# So long after a look that showed the engine's load, the answers alone do not move the window.
_SIGHTED_S: Final = 5.0
_LEAST_LOOKS: Final = 4
# A window that was pushed back stays at its top for so many rounds, and for twice as many after each next time.
_PATIENCE: Final = (8, 64)
# So long after push-back the window grows no faster than it creeps.
_WARY_S: Final = 10.0
# Of fewer replies a share says little.
_LEAST_REPLIES: Final = 64
# More than one preemption in so many answers costs more than is won by running more; one in so many does not.
_MANY: Final = 4
_FEW: Final = 16
# With less of the cache in use, preemption is over.
_ROOMY: Final = 0.75


@dataclass(slots=True)
class _Watch:
    """What was seen since the window was last moved."""

    looks: int = 0
    answers: int = 0
    running: int = 0
    most_running: int = 0
    least_waiting: int = 1 << 30
    preempted: int = 0


@dataclass(slots=True)
class Window:
    """The number of requests to keep in flight, `limit`. All times in seconds.

    Where the engine says how many requests run and wait in it (`looked`), the window is what runs and a small queue:
    it doubles while nothing waits, and then follows what runs. Where it does not, the answers' own rate tells.
    Push-back halves any window; from then on it creeps back up to where it was.
    """

    limit: int
    most: int
    is_open: bool = False
    is_fixed: bool = False
    # Nothing is known yet of how many run at once.
    _is_rising: bool = False
    # The cache is full before the slots are.
    _is_squeezed: bool = False
    _had_room: int = 0
    _was_full: bool = True
    _running: int = 0
    _preemptions: int | None = None
    _watch: _Watch = field(default_factory=_Watch)
    _climb: Climb = field(default_factory=Climb)
    _sighted_at: float = -1e9
    _burst: int = 0
    _burst_began: float = -1e9
    _burst_now: int = 0
    # Push-back: since when it is counted, and with it the answers, in this stretch and the one before.
    _shrunk_at: float = -1e9
    _counted_since: float = -1e9
    _replies: list[int] = field(default_factory=lambda: [0, 0])
    _refusals: list[int] = field(default_factory=lambda: [0, 0])
    _calm: int = 0
    _is_creeping: bool = False
    # Where `most` was before any push-back, and how often the window must be answered at its top to go there again.
    _first_most: int = 0
    _patience: int = _PATIENCE[0]

    @classmethod
    def fixed(cls, size: int) -> "Window":
        """Return a window of `size`, as the user asked for."""
        return cls(size, size, is_fixed=True)

    @classmethod
    def known(cls, slots: int) -> "Window":
        """Return the window of an engine that runs `slots` requests at once: a few more, so that none idles."""
        size = slots + max(2, slots // 4)
        return cls(size, size)

    @classmethod
    def opaque(cls) -> "Window":
        """Return the window of an engine of which nothing is known."""
        return cls(OPAQUE_START, OPAQUE_MOST, is_open=True, _is_rising=True)

    def look_s(self) -> float:
        """Return how long to wait until the next look at the engine's metrics."""
        growing, waiting, steady = _LOOK_S
        if not self._is_rising:
            return steady
        return growing if self._was_full else waiting

    def looked(
        self,
        now: float,
        in_flight: int,
        running: int,
        waiting: int,
        preemptions: int | None = None,
        cache_use: float | None = None,
    ) -> None:
        """Take note of what the engine says of itself.

        Requests that run and that wait, how often any was preempted so far, and the share of the cache in use.
        """
        preempted = self._preempted(preemptions)
        rose, self._running = running - self._running, running
        if self.is_fixed or running + waiting < in_flight - in_flight // 4:
            return  # What is in flight is elsewhere: before the engine, or in another.
        self._sighted_at = now
        if in_flight > self.limit + self.limit // 8:
            self._watch = _Watch()  # What it did under a larger window says nothing of this one.
            return
        watch = self._watch
        watch.looks += 1
        watch.running += running
        watch.most_running = max(watch.most_running, running)
        watch.least_waiting = min(watch.least_waiting, waiting)
        watch.preempted += preempted
        self._was_full = in_flight >= self.limit - self.limit // 8
        if not preempted and cache_use is not None and cache_use < _ROOMY:
            self._is_squeezed = False
        # What is taken in before the next look does not count as waiting.
        has_room = waiting <= (max(0, rose) if self._is_rising else 0)
        if has_room and not self._is_squeezed and not preempted:
            self._has_room(now, in_flight, running + waiting)
        else:
            self._had_room = 0
            self._follow()

    def _has_room(self, now: float, in_flight: int, inside: int) -> None:
        """The engine would run more: double, but only by a quarter where what runs at most was known."""
        if not self._was_full or inside < in_flight - in_flight // 4 or now - self._shrunk_at < _WARY_S:
            return
        self._had_room += 1
        if (self._is_rising and not self._is_creeping) or self._had_room > 2:
            self._is_rising = self.is_open
            self._move(self.limit * 2)
        else:
            self._move(self.limit + max(1, self.limit // 4))

    def _follow(self) -> None:
        """Once all that ran has been answered, hold what runs at most and a queue."""
        watch = self._watch
        if watch.looks < _LEAST_LOOKS or watch.answers < max(8, watch.most_running):
            return
        self._is_rising = False
        if watch.preempted * _MANY > watch.answers:
            # The cache is full before the slots are, and what was preempted has to be read again.
            self._is_squeezed = True
            self.limit = max(1, min(self.limit, watch.running // watch.looks) * 15 // 16)
        elif self._is_squeezed:
            if watch.preempted * _FEW < watch.answers:
                self._is_squeezed = watch.least_waiting == 0
                self.limit = min(self.most, self.limit + max(1, self.limit // 16))
        elif watch.least_waiting > 0 and not self._is_creeping:
            self._move(watch.most_running + self._queue(watch.most_running))
        self._burst //= 2
        self._watch = _Watch()

    def _queue(self, running: int) -> int:
        """Return how many to hold beyond those that run: as many again as end at once."""
        # What runs for one step only is not seen to run.
        return max(2, running // 8, self._burst) + max(0, self._burst - running)

    def _move(self, limit: int) -> None:
        self.limit = max(1, min(self.most, limit))
        self._watch = _Watch()

    def _preempted(self, preemptions: int | None) -> int:
        before, self._preemptions = self._preemptions, preemptions
        # A server that was restarted counts from 0.
        return 0 if preemptions is None or before is None else max(0, preemptions - before)

    def succeeded(self, now: float, latency_s: float, in_flight: int, work: int = 1) -> None:
        """Take note of an answer that took `work` tokens to make; the window may grow."""
        self._watch.answers += 1
        self._count(now, self._replies)
        if now - self._burst_began > _BURST_S:
            self._burst_began, self._burst_now = now, 0
        self._burst_now += 1
        self._burst = max(self._burst, self._burst_now)
        if self._is_creeping:
            self._creep()
        elif self.is_open and now - self._sighted_at > _SIGHTED_S:
            self.limit = self._climb.answered(now, latency_s, self.limit, self.most, in_flight, work)

    def resumed(self, now: float) -> None:
        """Take note that the engine was gone, and is back: what was measured meanwhile says nothing."""
        self._watch = _Watch()
        self._climb.restart(now)
        self._sighted_at = now if self._sighted_at > 0 else self._sighted_at

    def pushed_back(self, now: float) -> None:
        """Halve the window: the engine said that it has too much. Once a second at most: one wave, one halving.

        Where few of its replies say so, that is not because of the window.
        """
        self._count(now, self._refusals)
        if now - self._shrunk_at < 1.0 or sum(self._refusals) * 8 < sum(self._replies):
            return
        self._shrunk_at = now
        if not self._is_creeping:
            # It keeps its top: a long burst of push-back must not pin it at 1 for good.
            self._first_most = max(self._first_most, self.most)
            self.most = self.limit
        elif self.limit * 8 >= self.most * 7:
            # It came back to where it was, and that was too much again: stay just below.
            self.most = max(1, self.limit - max(1, self.limit // 8))
        self._is_creeping, self._calm = True, 0
        self.limit = max(1, self.limit // 2)

    def _creep(self) -> None:
        """Grow by an eighth of the top in a round; once there, and all is well for long, the top is open again."""
        self._calm += 1
        if self.limit < self.most:
            if self._calm >= self.limit:
                self._calm = 0
                self.limit = min(self.most, self.limit + max(1, self.most // 8))
        elif self._calm >= self.limit * self._patience:
            self.most, self._calm = self._first_most, 0
            # A closed window has nothing else to bring it back to its top.
            self._is_creeping = not self.is_open and self.limit < self.most
            self._patience = min(_PATIENCE[1], self._patience * 2)
            self._climb.rest(self.limit)

    def _count(self, now: float, counts: list[int]) -> None:
        """Count a reply. A stretch is a second, and on a slow engine as long as so many replies take."""
        enough = max(_LEAST_REPLIES, self.limit)
        if now - self._counted_since > 1.0 and self._replies[0] + self._refusals[0] >= enough:
            for each in (self._replies, self._refusals):
                each[:] = 0, each[0]
            self._counted_since = now
        counts[0] += 1
