"""Faults by chance: a share of the requests is refused, reset, left hanging or answered late."""

from collections.abc import Sequence
from random import Random
from typing import Final

from bench.simengine.markers import Deed, Link
from bench.simengine.reply import Reply, error_reply

RETRY_AT_ONCE: Final = b"Retry-After: 0\r\n"


class Hang:
    """What a request gets that is never answered."""


class Slow:
    """What a request gets that is answered late."""


HANG: Final = Hang()
SLOW: Final = Slow()
Fault = Reply | Deed | Hang | Slow


def _reset(link: Link) -> None:
    link.reset()


FAULTS: Final[dict[str, Fault]] = {
    "429": error_reply(429, "rate limit reached by chance", headers=RETRY_AT_ONCE),
    "503": error_reply(503, "overloaded by chance", headers=RETRY_AT_ONCE),
    "reset": _reset,
    "hang": HANG,
    "slow": SLOW,
}


class Chance:
    """Draws what goes wrong, request by request, as they arrive."""

    def __init__(self, shares: Sequence[tuple[str, float]], seed: int) -> None:
        """Draw each named fault for its share of the requests."""
        self._shares = [(FAULTS[name], share) for name, share in shares]
        self._random = Random(seed)

    def draw(self) -> Fault | None:
        """Return the next request's fault, or None for most."""
        roll = self._random.random()
        for fault, share in self._shares:
            if roll < share:
                return fault
            roll -= share
        return None
