"""Finding a window without knowing anything of the engine but when its answers come."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

# More in flight is worth it while throughput grows by this much: at first, when rates are of few answers, and later.
_GROWTH: Final = (1.15, 1.05)
_MANY_ANSWERS: Final = 768
# A rate over less time than this is chance.
_LEAST_S: Final = 0.5
# So many rounds at rest before more is tried again, as the work may have changed; twice as many after each vain try.
_REST_ROUNDS: Final = (2, 16)


class _Mode(Enum):
    RISING = auto()
    TRYING = auto()
    JUDGING = auto()
    SETTLING = auto()
    RESTING = auto()


_GROWING: Final = (_Mode.RISING, _Mode.TRYING)


@dataclass(slots=True)
class Climb:
    """The rounds of a window that looks for its size. A round is over when as many answers came as were in flight.

    At first each answer lets two requests follow, so that the window doubles in a round. A round's answers belong to
    requests that were sent in the one before: where they come no faster than those, the window before that was enough.
    """

    _mode: _Mode = _Mode.RISING
    # What was in flight when the round began.
    _base: int = 0
    _began: float | None = None
    _answers: int = 0
    _work: int = 0
    _was_full: bool = False
    _best: float = 0.0
    _rounds: int = 0
    _rest: int = _REST_ROUNDS[0]

    def answered(self, now: float, latency_s: float, limit: int, most: int, in_flight: int, work: int) -> int:
        """Return the window after an answer that came at `now`."""
        if self._began is None:
            self._began = now - latency_s
        if not self._base:
            self._base = limit
        if in_flight > limit + 1:
            # Those of a larger window are on their way out.
            self.restart(now)
            return limit
        self._answers += 1
        self._work += max(1, work)
        self._was_full |= in_flight >= self._base - self._base // 8
        if self._mode in _GROWING:
            aim = min(most, 2 * self._base)
            if self._was_full and limit < aim:
                limit += 1
            if limit < aim:
                return limit  # Too few were sent for more to show.
        is_quick = self._mode not in (_Mode.JUDGING, _Mode.RESTING)
        if self._answers < (self._base if is_quick else max(self._base, _MANY_ANSWERS)) or now - self._began < _LEAST_S:
            return limit
        rate = self._work / (now - self._began)
        self.restart(now)
        return self._judged(rate, limit, most)

    def restart(self, now: float) -> None:
        """Begin the round again: nothing was answered for a while, for reasons that have nothing to do with it."""
        self._began, self._answers, self._work, self._was_full = now, 0, 0, False

    def rest(self, limit: int) -> None:
        """Stay at `limit` for a while: how it came about is not known here."""
        self._mode, self._base, self._best = _Mode.SETTLING, limit, 0.0
        self._began, self._answers, self._work, self._was_full = None, 0, 0, False

    def _judged(self, rate: float, limit: int, most: int) -> int:
        has_grown = rate > self._best * _GROWTH[self._mode is not _Mode.RISING]
        if self._mode is _Mode.RISING:
            if has_grown:
                self._best, self._base = rate, limit
            else:
                self._mode, limit = _Mode.SETTLING, self._base
        elif self._mode is _Mode.SETTLING:
            self._mode, self._rounds = _Mode.RESTING, 0
        elif self._mode is _Mode.TRYING:
            self._mode = _Mode.JUDGING
        elif self._mode is _Mode.JUDGING:
            if has_grown:
                self._best, self._base, self._mode, self._rest = rate, limit, _Mode.TRYING, _REST_ROUNDS[0]
            else:
                limit, self._mode, self._rest = self._base, _Mode.SETTLING, min(_REST_ROUNDS[1], self._rest * 2)
        else:
            self._rounds += 1
            if has_grown or self._rounds >= self._rest:
                self._best, self._mode, self._rounds = rate, _Mode.TRYING, 0
        return limit
