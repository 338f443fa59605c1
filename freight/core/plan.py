"""Who starts, who stops and who waits, and why: decided from a snapshot, done elsewhere."""

from typing import Final

from freight.core.actions import (
    Action,
    Cancelled,
    Fail,
    Finalize,
    PinWaits,
    StopWorkers,
    Suspend,
    TimeOut,
    Unsuspend,
    Wait,
)
from freight.core.board import Board
from freight.core.job import State
from freight.core.snapshot import JobView, Snapshot, is_hopeless

_WORKING: Final = frozenset({State.QUEUED, State.STARTING, State.RUNNING})
_UNFINISHED: Final = _WORKING | {State.SUSPENDED}
_BREAKABLE: Final = _UNFINISHED | {State.FINALIZING}


def plan(snapshot: Snapshot, now: float) -> tuple[Action, ...]:
    """Return what to do now. `now` is in seconds, on the clock of the snapshot's times.

    Every waiting job's first worker goes before the pinned models, and these before any job's further workers.
    """
    actions: list[Action] = []
    wanting: list[JobView] = []
    for job in snapshot.jobs:
        decided = _plan_state(job, snapshot)
        if decided is None:
            wanting.append(job)
        else:
            actions += decided
    board = Board(snapshot, now)
    firsts = [(job, board.give(job, 1)) for job in wanting if not job.live]
    pinned = [board.keep(pin) for pin in snapshot.pins]
    further: list[Action] = []
    for job in wanting:
        # More workers than requests left would only load models for nothing.
        more = min(job.workers, job.left - job.twins) - len(job.live) - board.given(job)
        if more > 0 and (job.live or board.given(job)):
            further += board.give(job, more)
    # Why somebody waits is looked up last, when all places have been given out.
    for job, first in firsts:
        actions += first or [Wait(job.id, board.why(job))]
    for pin, started in zip(snapshot.pins, pinned, strict=True):
        actions += [*started, PinWaits(pin.model, board.why_pinned(pin))]
    return (*actions, *further, *board.stops())


def _plan_state(job: JobView, snapshot: Snapshot) -> list[Action] | None:
    """Return what the job's own state asks for; None when it may have workers."""
    ending = _ending(job)
    if ending is not None:
        return _end(job, ending)
    stuck = _stuck(job, snapshot)
    if job.state == State.SUSPENDED:
        return _plan_suspended(job, stuck)
    if job.state in _WORKING and (job.blocked or stuck):
        return [Suspend(job.id, job.blocked or stuck)]
    return None if job.state in _WORKING else []


def _ending(job: JobView) -> Action | None:
    """Return what ends the job, once none of its workers is left; None while it goes on."""
    if job.state == State.CANCELLING:
        return Cancelled(job.id)
    if job.broken and job.state in _BREAKABLE:
        return Fail(job.id, job.broken)
    if job.left == 0 and job.state in _WORKING:
        return Finalize(job.id)
    # What has all its records done only waits for its results file, which takes no running time.
    return TimeOut(job.id) if job.out_of_time and job.left and job.state in _UNFINISHED else None


def _stuck(job: JobView, snapshot: Snapshot) -> str:
    """Return the last words of a job that has no worker that lives on and may not try again; "" while it may."""
    if any(not worker.stopping for worker in job.live) or not job.troubles:
        return ""
    places = job.places(snapshot.devices)
    # Each URL of an endpoint is a server of its own, so all of them are tried.
    needed, was_ready = (job.need.devices, job.was_ready) if job.needs_device else (1, True)
    if not is_hopeless(job.troubles, places, needed, was_ready):
        return ""
    return max(job.troubles, key=lambda trouble: trouble.at).words


def _plan_suspended(job: JobView, stuck: str) -> list[Action]:
    if stuck:
        # It fails when nothing of it holds a device any more.
        return [] if job.live else [Fail(job.id, stuck)]
    return [] if job.blocked else [Unsuspend(job.id)]


def _end(job: JobView, then: Action) -> list[Action]:
    if not job.live:
        return [then]
    return [] if all(worker.stopping for worker in job.live) else [StopWorkers(job.id)]
