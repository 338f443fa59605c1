"""What the planner decides on, for others to do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker of a job on one of its sources, on devices if it needs them."""

    job: str
    source: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Let a warm worker serve a job."""

    job: str
    worker: str


@dataclass(frozen=True, slots=True)
class StartPinned:
    """Start a worker of a pinned model, which serves no job yet."""

    model: str
    source: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopWarm:
    """End a worker that serves no job."""

    worker: str


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Tell all workers of a job to leave it."""

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
class Cancelled:
    """The job was cancelled, and nothing of it runs any more."""

    job: str


@dataclass(frozen=True, slots=True)
class Wait:
    """The job waits, for this reason."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class PinWaits:
    """A pinned model has fewer workers than it is to have, for this reason; "" when it has all."""

    model: str
    reason: str


JobAction = StartWorker | Join | StopWorkers | Suspend | Unsuspend | Finalize | Fail | TimeOut | Cancelled | Wait
PinAction = StartPinned | StopWarm | PinWaits
Action = JobAction | PinAction
