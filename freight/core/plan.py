"""Who starts, who stops and who waits, and why: decided from a snapshot, done elsewhere."""

from dataclasses import dataclass
from typing import Final

from freight.core.job import State

# A worker that cannot start is tried this often in a row at one place, with these pauses in between.
MOST_STARTS: Final = 3
START_BACKOFF_S: Final = (1.0, 5.0)


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as the planner sees it.

    `workers` is the number asked for, `live` those that it has. `troubles` are the places where its workers would not
    start. `left` is the number of records not done. `blocked` is why it cannot go on by itself ("" when it can),
    `out_of_time` whether its time has run out.
    """

    id: str
    state: State
    sources: tuple[str, ...]
    needs_device: bool
    workers: int
    live: tuple["WorkerView", ...] = ()
    left: int = 0
    troubles: tuple["Trouble", ...] = ()
    blocked: str = ""
    out_of_time: bool = False


@dataclass(frozen=True, slots=True)
class Trouble:
    """A place (a device, or an endpoint's URL) where `count` starts in a row failed, the last at `at` with `words`."""

    place: str
    count: int
    at: float
    words: str

    def is_over(self, now: float) -> bool:
        """Return whether another start may be tried there."""
        return self.count < MOST_STARTS and now >= self.at + self.pause_s()

    def pause_s(self) -> float:
        """Return the pause after the last failure."""
        return START_BACKOFF_S[min(self.count, len(START_BACKOFF_S)) - 1]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker of a job. `stopping`: it was told to end and has not yet."""

    id: str
    source: str
    device: str | None
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device of the pool. `held_by` names its holder, a worker of ours or a stranger; "" when it is free."""

    id: str
    held_by: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that the planner decides from; the jobs in the order in which they were submitted."""

    jobs: tuple[JobView, ...]
    devices: tuple[DeviceView, ...]


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker of a job on one of its sources, on a device if it needs one."""

    job: str
    source: str
    device: str | None


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Tell all workers of a job to end."""

    job: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """The job cannot go on now."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unsuspend:
    """What kept the job is over."""

    job: str


@dataclass(frozen=True, slots=True)
class Finalize:
    """All records are done and no worker is left: write the output."""

    job: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The job cannot be done; nothing of it holds a device any more."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class TimeOut:
    """The job's time has run out; nothing of it holds a device any more."""

    job: str


@dataclass(frozen=True, slots=True)
class Wait:
    """The job waits, for this reason."""

    job: str
    reason: str


Action = StartWorker | StopWorkers | Suspend | Unsuspend | Finalize | Fail | TimeOut | Wait

_WORKING: Final = frozenset({State.QUEUED, State.STARTING, State.RUNNING})
_UNFINISHED: Final = _WORKING | {State.SUSPENDED}


def plan(snapshot: Snapshot, now: float) -> tuple[Action, ...]:
    """Return what to do now, for each job in turn. `now` is in seconds, on the clock of the snapshot's times."""
    free = [device.id for device in snapshot.devices if not device.held_by]
    actions: list[Action] = []
    for job in snapshot.jobs:
        actions += _plan_job(job, snapshot, free, now)
    return tuple(actions)


def _plan_job(job: JobView, snapshot: Snapshot, free: list[str], now: float) -> list[Action]:
    if job.out_of_time and job.state in _UNFINISHED:
        return _end(job, TimeOut(job.id))
    stuck = _stuck(job, snapshot)
    if job.state == State.SUSPENDED:
        return _plan_suspended(job, stuck)
    if job.state not in _WORKING:
        return []
    if job.left == 0:
        return _end(job, Finalize(job.id))
    if job.blocked or stuck:
        return [Suspend(job.id, job.blocked or stuck)]
    return _plan_starts(job, snapshot, free, now)


def _places(job: JobView, snapshot: Snapshot) -> tuple[str, ...]:
    """Return where workers of the job can be: on any device, or one at each URL of an endpoint."""
    return tuple(device.id for device in snapshot.devices) if job.needs_device else job.sources


def _stuck(job: JobView, snapshot: Snapshot) -> str:
    """Return the last words of a job that has no worker and no place left to try; "" while it has."""
    worn_out = {trouble.place: trouble for trouble in job.troubles if trouble.count >= MOST_STARTS}
    places = _places(job, snapshot)
    if job.live or not places or any(place not in worn_out for place in places):
        return ""
    return max(worn_out.values(), key=lambda trouble: trouble.at).words


def _plan_suspended(job: JobView, stuck: str) -> list[Action]:
    if stuck:
        # Nothing of it holds a device any more, so it may fail.
        return [Fail(job.id, stuck)]
    return [] if job.blocked else [Unsuspend(job.id)]


def _end(job: JobView, then: Action) -> list[Action]:
    if not job.live:
        return [then]
    return [] if all(worker.stopping for worker in job.live) else [StopWorkers(job.id)]


def _plan_starts(job: JobView, snapshot: Snapshot, free: list[str], now: float) -> list[Action]:
    troubled = {trouble.place for trouble in job.troubles if not trouble.is_over(now)}
    taken = {worker.source for worker in job.live}
    there = free if job.needs_device else [source for source in job.sources if source not in taken]
    # More workers than records left would only load models for nothing.
    wanted = max(0, min(job.workers, job.left) - len(job.live))
    chosen = [place for place in there if place not in troubled][:wanted]
    if job.needs_device:
        for place in chosen:
            free.remove(place)
        actions: list[Action] = [StartWorker(job.id, job.sources[0], place) for place in chosen]
    else:
        actions = [StartWorker(job.id, place, None) for place in chosen]
    if not job.live and not actions:
        actions.append(Wait(job.id, _why_waiting(job, snapshot, now)))
    return actions


def _why_waiting(job: JobView, snapshot: Snapshot, now: float) -> str:
    pausing = [trouble for trouble in job.troubles if trouble.count < MOST_STARTS and not trouble.is_over(now)]
    if pausing:
        # Not how long it still takes: a reason that changes all the time would be said all the time.
        return f"starting again {pausing[0].pause_s():g} s after this: {pausing[0].words}"
    held = "; ".join(f"{device.id} is held by {device.held_by or 'a job ahead'}" for device in snapshot.devices)
    return held or "there is no device"
