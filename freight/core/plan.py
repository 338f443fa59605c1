"""Who starts, who stops and who waits, and why: decided from a snapshot, done elsewhere."""

from dataclasses import dataclass
from typing import Final

from freight.core.job import State

# A worker that cannot start is tried this often in a row, with these pauses in between.
MOST_STARTS: Final = 3
START_BACKOFF_S: Final = (1.0, 5.0, 15.0)


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as the planner sees it.

    `workers` is the number asked for, `live` the ids of those that it has; `failed_starts` counts failures in a
    row, the last at `failed_at`; `last_words` is what the last one said. `left` is the number of records not done.
    `blocked` is why it cannot go on by itself ("" when it can), `out_of_time` whether its time has run out.
    """

    id: str
    state: State
    sources: tuple[str, ...]
    needs_device: bool
    workers: int
    live: tuple["WorkerView", ...] = ()
    left: int = 0
    failed_starts: int = 0
    failed_at: float = 0.0
    last_words: str = ""
    blocked: str = ""
    out_of_time: bool = False


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
    if job.state == State.SUSPENDED:
        return _plan_suspended(job)
    if job.state not in _WORKING:
        return []
    if job.left == 0:
        return _end(job, Finalize(job.id))
    if job.blocked or job.failed_starts >= MOST_STARTS:
        return [Suspend(job.id, job.blocked or job.last_words)]
    return _plan_starts(job, snapshot, free, now)


def _plan_suspended(job: JobView) -> list[Action]:
    if job.failed_starts >= MOST_STARTS:
        # Its devices first: a job fails only when nothing of it holds one.
        return _end(job, Fail(job.id, job.last_words))
    return [] if job.blocked else [Unsuspend(job.id)]


def _end(job: JobView, then: Action) -> list[Action]:
    if not job.live:
        return [then]
    return [] if all(worker.stopping for worker in job.live) else [StopWorkers(job.id)]


def _plan_starts(job: JobView, snapshot: Snapshot, free: list[str], now: float) -> list[Action]:
    pause_s = START_BACKOFF_S[min(job.failed_starts, len(START_BACKOFF_S)) - 1]
    if job.failed_starts and now < job.failed_at + pause_s:
        # Not how long it still takes: a reason that changes all the time would be said all the time.
        return [] if job.live else [Wait(job.id, f"starting again {pause_s:g} s after this: {job.last_words}")]
    actions: list[Action] = []
    # More workers than records left would only load models for nothing.
    wanted = min(job.workers, job.left) - len(job.live)
    if job.needs_device:
        for _ in range(min(max(0, wanted), len(free))):
            actions.append(StartWorker(job.id, job.sources[0], free.pop(0)))
    else:
        # An endpoint's URL is one worker.
        taken = {worker.source for worker in job.live}
        rest = [source for source in job.sources if source not in taken]
        actions += [StartWorker(job.id, source, None) for source in rest[: max(0, wanted)]]
    if not job.live and not actions:
        held = "; ".join(f"{device.id} is held by {device.held_by or 'a job ahead'}" for device in snapshot.devices)
        actions.append(Wait(job.id, held or "there is no device"))
    return actions
