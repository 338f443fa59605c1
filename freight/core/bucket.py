"""How many requests somebody may make: a bucket that fills with time."""

from dataclasses import dataclass
from typing import Final

# A bucket holds what comes in so many seconds, so that a page that asks for several things at once gets them.
BURST_S: Final = 2.0


@dataclass(slots=True)
class Bucket:
    """What one user may still ask for: `level` requests at the time `at`."""

    level: float
    at: float

    def take(self, rate: float, now: float) -> float:
        """Take one request out of a bucket that fills by `rate` a second; return 0, else the seconds until it can."""
        self.level = min(rate * BURST_S, self.level + max(0.0, now - self.at) * rate)
        self.at = max(self.at, now)
        if self.level < 1:
            return (1 - self.level) / rate
        self.level -= 1
        return 0.0

    def is_full(self, rate: float, now: float) -> bool:
        """Return whether it is as good as new."""
        return self.level + (now - self.at) * rate >= rate * BURST_S


class Buckets:
    """A bucket for each user who has asked lately."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._of: dict[str, Bucket] = {}
        self._most = 1000

    def take(self, user: str, now: float) -> float:
        """Count a request of a user; return 0, else the seconds after which it may be made."""
        bucket = self._of.get(user)
        if bucket is None:
            self._tidy(now)
            bucket = self._of[user] = Bucket(self.rate * BURST_S, now)
        return bucket.take(self.rate, now)

    def _tidy(self, now: float) -> None:
        if len(self._of) >= self._most:
            self._of = {user: kept for user, kept in self._of.items() if not kept.is_full(self.rate, now)}
            self._most = max(1000, 2 * len(self._of))
