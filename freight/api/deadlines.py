"""When a connection has kept the server waiting for too long. Pure: the time, in seconds, is an argument."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

# So many looks are taken at what a slow reader takes, in the time after which it is cut.
_LOOKS: Final = 8
# Less than this, in the time that a body may be idle, is as good as nothing.
LEAST_BYTES: Final = 1024


class Late(Enum):
    """What did not come in time."""

    HEAD = auto()
    BODY = auto()
    REQUEST = auto()
    NEXT = auto()
    TAKING = auto()
    GOODBYE = auto()


class Part(Enum):
    """What the peer is in the middle of sending."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a peer may take, in seconds.

    `head_s`: for a request's head, from the connection's start, or from its first byte on. `body_idle_s`: for the next
    kilobyte of a body that is expected, so that it cannot come by single bytes for ever. `request_s`: for a whole
    request that is no upload. `keep_alive_s`: without a request on a connection that had one. `send_idle_s`: without
    taking a byte of what it is sent. `goodbye_s`: in silence, to notice an answer that came before it had
    sent everything, and `goodbye_most_s` while it goes on sending.
    """

    head_s: float = 10.0
    body_idle_s: float = 30.0
    request_s: float = 30.0
    keep_alive_s: float = 75.0
    send_idle_s: float = 60.0
    goodbye_s: float = 5.0
    goodbye_most_s: float = 30.0


class Watch:
    """One connection's clock. It is told what happens, and tells by when something must happen next."""

    def __init__(self, deadlines: Deadlines, now: float) -> None:
        self._deadlines = deadlines
        # The first request's head is awaited from the start, whether or not a byte of it has come.
        self.part = Part.HEAD
        self._head_since = self._begun = self._heard_at = self._free_since = now
        self._is_upload = self._is_reading = self._is_over = False
        self._unanswered = 0
        self._heard = 0
        self._pending = self._taken = 0
        self._taken_at = now
        self._half_closed_at: float | None = None
        self._goodbye_at: float | None = None

    def request_begun(self, now: float) -> None:
        """The first byte of a request has come."""
        if self.part is Part.NOTHING:
            self.part, self._head_since = Part.HEAD, now
        self._begun = now

    def head_ended(self, now: float, *, is_upload: bool, is_awaited: bool) -> None:
        """The head has come. `is_awaited` is false where the peer waits to be told to go on."""
        self.part, self._heard_at, self._heard = Part.BODY, now, 0
        self._is_upload, self._is_reading = is_upload, is_awaited
        self._unanswered += 1

    def body_came(self, now: float, size: int) -> None:
        """So many bytes of the body have come."""
        self._heard += size
        if self._heard >= LEAST_BYTES:
            self._heard_at, self._heard = now, 0

    def request_ended(self) -> None:
        """All of the request has come."""
        self.part = Part.NOTHING

    def reading(self, is_reading: bool, now: float) -> None:
        """The server has stopped reading, or reads again: what it does not read cannot be late."""
        if is_reading and not self._is_reading:
            # The time of its own that the server took is not the peer's.
            self._begun += max(0.0, now - self._heard_at)
            self._heard_at, self._heard = now, 0
        self._is_reading = is_reading

    def answered(self, now: float) -> None:
        """A request's answer has been written."""
        self._unanswered -= 1
        if not self._unanswered:
            self._free_since = self._head_since = now

    def sent(self, now: float, taken: int, pending: int) -> None:
        """So many bytes of answers have been taken so far; so many more are waiting to be."""
        if taken > self._taken or (pending and not self._pending):
            self._taken_at = now
        self._taken, self._pending = taken, pending

    def half_closed(self, now: float) -> None:
        """The peer sends no more; it may wait for its answer."""
        self.part, self._half_closed_at = Part.NOTHING, now

    def goodbye(self, now: float) -> None:
        """The last answer has been written, and the peer, which was sending, is given time to see it."""
        self._goodbye_at = self._heard_at = now
        self._is_over = True

    def heard_in_vain(self, now: float) -> None:
        """Something came that nobody reads any more."""
        self._heard_at = now

    def over(self) -> None:
        """The connection is closed once all that was written is taken."""
        self._goodbye_at, self._is_over = None, True

    def due(self) -> tuple[float, Late] | None:
        """Return by when what must happen; None while the server itself is what is waited for."""
        return min(self._awaited(), default=None, key=lambda one: one[0])

    def look_at(self, now: float) -> float | None:
        """Return when to look again whether all is in time."""
        due = self.due()
        if due is None:
            return None
        return min(due[0], now + self._deadlines.send_idle_s / _LOOKS) if self._pending else due[0]

    def late(self, now: float) -> Late | None:
        """Return what should have happened by now."""
        due = self.due()
        return due[1] if due is not None and due[0] <= now else None

    def _awaited(self) -> list[tuple[float, Late]]:
        limits, awaited = self._deadlines, list[tuple[float, Late]]()
        if self._pending:
            awaited.append((self._taken_at + limits.send_idle_s, Late.TAKING))
        if self._goodbye_at is not None:
            until = min(self._goodbye_at + limits.goodbye_most_s, self._heard_at + limits.goodbye_s)
            awaited.append((until, Late.GOODBYE))
        if self._is_over:
            return awaited
        if self._half_closed_at is not None:
            # Whether it has only half closed cannot be told while nothing is sent.
            awaited.append((max(self._half_closed_at, self._taken_at) + limits.head_s, Late.TAKING))
        elif self.part is Part.BODY:
            if self._is_reading:
                awaited.append((self._heard_at + limits.body_idle_s, Late.BODY))
                if not self._is_upload:
                    awaited.append((self._begun + limits.request_s, Late.REQUEST))
        elif not self._unanswered:
            if self.part is Part.HEAD:
                awaited.append((self._head_since + limits.head_s, Late.HEAD))
            else:
                awaited.append((self._free_since + limits.keep_alive_s, Late.NEXT))
        return awaited
