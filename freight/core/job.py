"""The life of a job, in one table. Everything that names a state or an event takes it from here."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# In which order a job's records may run.
ORDERS: Final = ("auto", "input")


class State(StrEnum):
    """Where a job stands. The values are what users, the database and the APIs see."""

    VALIDATING = "VALIDATING"
    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    FINALIZING = "FINALIZING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLING = "CANCELLING"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"
    SUSPENDED = "SUSPENDED"


class Event(StrEnum):
    """What can happen to a job."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    WORKER_GRANTED = "worker granted"
    WORKER_READY = "worker ready"
    WORKERS_LOST = "workers lost"
    LAST_RECORD_DONE = "last record done"
    OUTPUT_WRITTEN = "output written"
    BLOCKED = "blocked"
    UNBLOCKED = "unblocked"
    STARTS_EXHAUSTED = "starts exhausted"
    BROKE = "broke"
    CANCEL_ASKED = "cancel asked"
    WORKERS_GONE = "workers gone"
    TIME_RAN_OUT = "time ran out"
    CONTROL_STOPPED = "control plane stopped"
    CONTINUED = "continued"
    RETRIED = "errors retried"


class Note(StrEnum):
    """What the timeline of a job tells beside its events: it changes no state."""

    LOADING = "model loading"
    LOADED = "model loaded"


FINAL: Final = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED, State.TIMED_OUT})

_UNFINISHED: Final = (State.QUEUED, State.STARTING, State.RUNNING, State.SUSPENDED, State.FINALIZING)

NEXT: Final[dict[tuple[State, Event], State]] = {
    (State.VALIDATING, Event.ACCEPTED): State.QUEUED,
    (State.VALIDATING, Event.REFUSED): State.FAILED,
    (State.VALIDATING, Event.CANCEL_ASKED): State.CANCELLING,
    (State.VALIDATING, Event.CONTROL_STOPPED): State.VALIDATING,
    (State.QUEUED, Event.WORKER_GRANTED): State.STARTING,
    (State.STARTING, Event.WORKER_READY): State.RUNNING,
    (State.STARTING, Event.WORKERS_LOST): State.QUEUED,
    (State.RUNNING, Event.WORKERS_LOST): State.QUEUED,
    # The last answer may already be on disk when a job starts: resumed, or every line was bad.
    (State.QUEUED, Event.LAST_RECORD_DONE): State.FINALIZING,
    (State.STARTING, Event.LAST_RECORD_DONE): State.FINALIZING,
    (State.RUNNING, Event.LAST_RECORD_DONE): State.FINALIZING,
    (State.FINALIZING, Event.OUTPUT_WRITTEN): State.COMPLETED,
    **{(s, Event.BLOCKED): State.SUSPENDED for s in _UNFINISHED if s != State.SUSPENDED},
    (State.SUSPENDED, Event.UNBLOCKED): State.QUEUED,
    (State.SUSPENDED, Event.STARTS_EXHAUSTED): State.FAILED,
    # Its own files cannot be read or written any more; other jobs go on.
    **{(s, Event.BROKE): State.FAILED for s in _UNFINISHED},
    **{(s, Event.CANCEL_ASKED): State.CANCELLING for s in (*_UNFINISHED, State.CANCELLING)},
    (State.CANCELLING, Event.WORKERS_GONE): State.CANCELLED,
    **{(s, Event.TIME_RAN_OUT): State.TIMED_OUT for s in _UNFINISHED},
    **{(s, Event.CONTROL_STOPPED): State.QUEUED for s in _UNFINISHED},
    (State.CANCELLING, Event.CONTROL_STOPPED): State.CANCELLING,
    (State.FAILED, Event.CONTINUED): State.QUEUED,
    (State.CANCELLED, Event.CONTINUED): State.QUEUED,
    (State.TIMED_OUT, Event.CONTINUED): State.QUEUED,
    **{(s, Event.RETRIED): State.QUEUED for s in (*sorted(FINAL), State.QUEUED)},
}


def running_s(events: Sequence[tuple[float, str, str]], until: float) -> float:
    """Return the seconds for which a job has run since it was last submitted, resumed or retried.

    `events` are (time, event or note, the state it led to), in order; `until` is the time now, in the same seconds.
    """
    total = 0.0
    for place, (at, event, state) in enumerate(events):
        if event in (Event.ACCEPTED, Event.CONTINUED, Event.RETRIED):
            total = 0.0
        if state in (State.STARTING, State.RUNNING):
            total += max(0.0, (events[place + 1][0] if place + 1 < len(events) else until) - at)
    return total


class IllegalTransition(Exception):
    """An event came that its job's state does not allow: a bug in the control plane."""


def advance(state: State, event: Event) -> State:
    """Return the state after `event`; raise IllegalTransition, changing nothing."""
    try:
        return NEXT[state, event]
    except KeyError:
        raise IllegalTransition(f"event '{event}' in state {state}") from None


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over a job's results. `done` includes `failed`; tokens are sums over answers."""

    done: int = 0
    failed: int = 0
    cut: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    def plus(self, other: "Totals") -> "Totals":
        """Return the sum, field by field."""
        return Totals(
            self.done + other.done,
            self.failed + other.failed,
            self.cut + other.cut,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
        )
