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
    `out_of_time` whether its time has run out, `broken` why it can never go on. `launch` is equal for jobs that one
    server can serve as it is.
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
    broken: str = ""
    name: str = ""
    launch: str = ""

    def places(self, devices: "tuple[DeviceView, ...]") -> tuple[str, ...]:
        """Return where its workers can be: on any device, or one at each URL of an endpoint."""
        return tuple(device.id for device in devices) if self.needs_device else self.sources


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
    """A worker of a job. `stopping`: it was told to leave the job and has not yet."""

    id: str
    source: str
    device: str | None
    stopping: bool = False

    def place(self) -> str:
        """Return what it keeps from others: its device, or its URL."""
        return self.device or self.source


@dataclass(frozen=True, slots=True)
class WarmView:
    """A worker that serves no job and keeps its server up, since `idle_since`. `model` is for showing."""

    id: str
    launch: str
    place: str
    model: str
    idle_since: float
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device of the pool. `held_by` names a holder that is none of the snapshot's workers; "" without one."""

    id: str
    held_by: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that the planner decides from; the jobs in the order in which they have their turn.

    A worker that serves no job stays for `keep_warm_s`.
    """

    jobs: tuple[JobView, ...]
    devices: tuple[DeviceView, ...]
    warm: tuple[WarmView, ...] = ()
    keep_warm_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker of a job on one of its sources, on a device if it needs one."""

    job: str
    source: str
    device: str | None


@dataclass(frozen=True, slots=True)
class Join:
    """Let a warm worker serve a job."""

    job: str
    worker: str


@dataclass(frozen=True, slots=True)
class StopWarm:
    """End a warm worker."""

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


JobAction = StartWorker | Join | StopWorkers | Suspend | Unsuspend | Finalize | Fail | TimeOut | Cancelled | Wait
Action = JobAction | StopWarm

_WORKING: Final = frozenset({State.QUEUED, State.STARTING, State.RUNNING})
_UNFINISHED: Final = _WORKING | {State.SUSPENDED}
_BREAKABLE: Final = _UNFINISHED | {State.FINALIZING}


def plan(snapshot: Snapshot, now: float) -> tuple[Action, ...]:
    """Return what to do now. `now` is in seconds, on the clock of the snapshot's times.

    Every waiting job's first worker goes before any job's further ones.
    """
    actions: list[Action] = []
    wanting: list[JobView] = []
    for job in snapshot.jobs:
        decided = _plan_state(job, snapshot)
        if decided is None:
            wanting.append(job)
        else:
            actions += decided
    board = _Board(snapshot, now)
    waiting = 0
    for job in (job for job in wanting if not job.live):
        first = board.give(job, 1)
        actions += first or [Wait(job.id, board.why(job, waiting))]
        waiting += not first
    for job in wanting:
        # More workers than records left would only load models for nothing.
        more = min(job.workers, job.left) - len(job.live) - board.given(job)
        if more > 0 and (job.live or board.given(job)):
            actions += board.give(job, more)
    return (*actions, *board.stops())


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
    """Return the last words of a job that has no worker and no place left to try; "" while it has."""
    worn_out = {trouble.place: trouble for trouble in job.troubles if trouble.count >= MOST_STARTS}
    places = job.places(snapshot.devices)
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


class _Board:
    """Who has which place, while places are given out."""

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        self._now = now
        self._devices = snapshot.devices
        self._keep_warm_s = snapshot.keep_warm_s
        self._held = {device.id: device.held_by for device in snapshot.devices if device.held_by}
        for job in snapshot.jobs:
            self._held.update({worker.place(): job.name or "this job" for worker in job.live})
        self._warm = list(snapshot.warm)
        self._held.update({worker.place: f"the warm model {worker.model}" for worker in snapshot.warm})
        self._given: dict[str, int] = {}
        self._evicted: list[WarmView] = []

    def given(self, job: JobView) -> int:
        """Return how many workers the job was given."""
        return self._given.get(job.id, 0)

    def give(self, job: JobView, most: int) -> list[Action]:
        """Give a job up to `most` workers: warm ones that fit it, then new ones on free places."""
        actions: list[Action] = []
        for worker in [w for w in self._warm if w.launch == job.launch and not w.stopping][:most]:
            self._warm.remove(worker)
            actions.append(Join(job.id, worker.id))
        troubled = {trouble.place for trouble in job.troubles if not trouble.is_over(self._now)}
        good = [place for place in job.places(self._devices) if place not in troubled]
        for place in [place for place in good if place not in self._held][: most - len(actions)]:
            self._held[place] = job.name or "a job ahead"
            source, device = (job.sources[0], place) if job.needs_device else (place, None)
            actions.append(StartWorker(job.id, source, device))
        self._given[job.id] = self.given(job) + len(actions)
        if len(actions) < most:
            self._evict(good)
        return actions

    def _evict(self, places: list[str]) -> None:
        """Have the warm worker that is idle for longest make room on one of the places, unless one does already."""
        there = [worker for worker in self._warm if worker.place in places]
        if there and not any(worker.stopping for worker in there):
            oldest = min(there, key=lambda worker: worker.idle_since)
            self._warm.remove(oldest)
            self._evicted.append(oldest)

    def stops(self) -> list[StopWarm]:
        """Return the ends of warm workers: those that make room, and those that nobody wanted for long enough."""
        tired = [w for w in self._warm if not w.stopping and self._now - w.idle_since >= self._keep_warm_s]
        return [StopWarm(worker.id) for worker in (*self._evicted, *tired)]

    def why(self, job: JobView, ahead: int) -> str:
        """Return why a job has no worker, with `ahead` jobs before it that have none either."""
        pausing = [t for t in job.troubles if t.count < MOST_STARTS and not t.is_over(self._now)]
        if pausing:
            # Not how long it still takes: a reason that changes all the time would be said all the time.
            return f"starting again {pausing[0].pause_s():g} s after this: {pausing[0].words}"
        before = [f"{ahead} job{'s' if ahead > 1 else ''} ahead"] if ahead else []
        holders: dict[str, list[str]] = {}
        for place in job.places(self._devices):
            if place in self._held:
                holders.setdefault(self._held[place], []).append(place)
        held = [f"{_listed(places)} held by {holder}" for holder, places in holders.items()]
        worn = [t for t in job.troubles if t.count >= MOST_STARTS and t.place not in self._held]
        failed = [f"on {trouble.place} it would not start: {trouble.words}" for trouble in worn]
        return "; ".join(before + held + failed) or "there is no device"


def _listed(places: list[str]) -> str:
    if len(places) == 1:
        return f"{places[0]} is"
    return f"{', '.join(places[:-1])} and {places[-1]} are" if len(places) < 4 else f"{len(places)} places are"
