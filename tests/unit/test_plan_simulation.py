"""A small world in which jobs come, workers die and devices are taken, planned for step by step from a seed."""

import random
from dataclasses import dataclass, field

import pytest

from freight.core.job import FINAL, Event, State, advance
from freight.core.plan import (
    Cancelled,
    DeviceView,
    Fail,
    Finalize,
    JobView,
    Join,
    Snapshot,
    StartWorker,
    StopWarm,
    StopWorkers,
    Suspend,
    TimeOut,
    Trouble,
    Unsuspend,
    Wait,
    WarmView,
    WorkerView,
    plan,
)

SEEDS = range(30)
FAULTY_STEPS = 300
MOST_CALM_STEPS = 3000
DEVICES = ("gpu0", "gpu1", "gpu2")
URLS = ("http://a", "http://b")
WORKING = (State.QUEUED, State.STARTING, State.RUNNING)


@dataclass
class Worker:
    """A worker of the world: `job` is None while it is warm."""

    id: str
    place: str
    launch: str
    job: str | None
    source: str
    ready: bool = False
    stopping: bool = False
    releasing: bool = False
    idle_since: float = 0.0


@dataclass
class Job:
    """A job of the world."""

    id: str
    launch: str
    needs_device: bool
    workers: int
    left: int
    state: State = State.QUEUED
    blocked: str = ""
    broken: str = ""
    out_of_time: bool = False
    troubles: dict[str, Trouble] = field(default_factory=dict[str, Trouble])
    reason: str = ""

    def happened(self, event: Event) -> None:
        self.state = advance(self.state, event)


class World:
    """Jobs, workers and devices, and a clock that is moved by hand."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = 0.0
        self.jobs: dict[str, Job] = {}
        self.workers: dict[str, Worker] = {}
        self.strangers: set[str] = set()
        self.keep_warm_s = self.dice.choice((0.0, 5.0, 1000.0))
        self.made = 0

    def of(self, job: str) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.job == job]

    def view(self, job: Job) -> JobView:
        live = tuple(
            WorkerView(w.id, w.source, w.place if job.needs_device else None, w.stopping or w.releasing)
            for w in self.of(job.id)
        )
        return JobView(
            id=job.id, state=job.state, sources=("model",) if job.needs_device else URLS,
            needs_device=job.needs_device, workers=job.workers, live=live, left=job.left,
            troubles=tuple(job.troubles.values()), blocked=job.blocked, out_of_time=job.out_of_time,
            broken=job.broken, name=job.id, launch=job.launch,
        )  # fmt: skip

    def snapshot(self) -> Snapshot:
        jobs = tuple(self.view(job) for job in self.jobs.values() if job.state not in FINAL)
        warm = tuple(
            WarmView(w.id, w.launch, w.place, w.launch, w.idle_since, w.stopping)
            for w in self.workers.values()
            if w.job is None
        )
        views = tuple(DeviceView(d, "a stranger" if d in self.strangers else "") for d in DEVICES)
        return Snapshot(jobs, views, warm, self.keep_warm_s)

    def step(self) -> None:
        """Move the clock, plan, check the plan, and do what it says."""
        self.now += self.dice.choice((0.25, 1.0))
        snapshot = self.snapshot()
        actions = plan(snapshot, self.now)
        self.check_turns(snapshot, actions)
        for action in actions:
            self.do(action)
        self.check_reasons(snapshot, actions)
        for job in self.jobs.values():
            self.follow(job)

    def check_turns(self, snapshot: Snapshot, actions: tuple[object, ...]) -> None:
        """No place may go past a job that waits for its first worker and could be there."""
        served = {action.job for action in actions if isinstance(action, (StartWorker, Join))}
        first: set[str] = set()
        for action in actions:
            if not isinstance(action, StartWorker):
                continue
            place = action.device or action.source
            is_first = action.job not in first and not self.of(action.job)
            first.add(action.job)
            for view in snapshot.jobs:
                if view.id == action.job and is_first:
                    break
                good = [p for p in view.places(snapshot.devices) if p not in self.troubled(view)]
                waits = view.state in WORKING and not (view.live or view.blocked or view.left == 0)
                ends = view.broken or view.out_of_time
                assert not (waits and not ends and place in good and view.id not in served), (view, action)

    def troubled(self, view: JobView) -> set[str]:
        return {trouble.place for trouble in view.troubles if not trouble.is_over(self.now)}

    def check_reasons(self, snapshot: Snapshot, actions: tuple[object, ...]) -> None:
        """Whatever may have a worker and has none was given one, was suspended, or is told why."""
        told = {getattr(action, "job", "") for action in actions}
        for view in snapshot.jobs:
            if view.state in WORKING and not view.live:
                assert view.id in told, view
                assert self.jobs[view.id].reason or not self.waits(actions, view.id), view

    @staticmethod
    def waits(actions: tuple[object, ...], job: str) -> bool:
        return any(isinstance(action, Wait) and action.job == job for action in actions)

    def do(self, action: object) -> None:
        match action:
            case StartWorker(job=job, source=source, device=device):
                self.start(self.jobs[job], source, device)
            case Join(job=job, worker=worker):
                warm = self.workers[worker]
                assert warm.job is None and not warm.stopping
                assert warm.launch == self.jobs[job].launch
                warm.job, warm.ready = job, False
            case StopWarm(worker=worker):
                assert self.workers[worker].job is None and not self.workers[worker].stopping
                self.workers[worker].stopping = True
            case StopWorkers(job=job):
                for each in self.of(job):
                    self.let_go(each)
            case Wait(job=job, reason=reason):
                assert reason
                self.jobs[job].reason = reason
            case _:
                self.move(action)

    def move(self, action: object) -> None:
        match action:
            case Suspend(job=job, reason=reason):
                assert reason
                self.jobs[job].happened(Event.BLOCKED)
            case Unsuspend(job=job):
                self.jobs[job].happened(Event.UNBLOCKED)
            case Finalize(job=job):
                self.jobs[job].happened(Event.LAST_RECORD_DONE)
                self.jobs[job].happened(Event.OUTPUT_WRITTEN)
            case Fail(job=job, reason=reason):
                assert reason
                suspended = self.jobs[job].state is State.SUSPENDED
                self.jobs[job].happened(Event.STARTS_EXHAUSTED if suspended else Event.BROKE)
            case TimeOut(job=job):
                self.jobs[job].happened(Event.TIME_RAN_OUT)
            case Cancelled(job=job):
                self.jobs[job].happened(Event.WORKERS_GONE)
            case _:
                raise AssertionError(action)
        job = getattr(action, "job", "")
        assert self.jobs[job].state not in FINAL or not self.of(job), f"{action} while a worker lives"

    def start(self, job: Job, source: str, device: str | None) -> None:
        place = device or source
        assert place not in self.strangers
        assert all(worker.place != place for worker in self.workers.values()), f"{place} is given twice"
        assert (device is not None) == job.needs_device
        self.made += 1
        worker = f"w{self.made}"
        self.workers[worker] = Worker(worker, place, job.launch, job.id, source)

    def let_go(self, worker: Worker) -> None:
        wanted = any(j.launch == worker.launch and j.state is State.QUEUED for j in self.jobs.values())
        if worker.ready and (self.keep_warm_s or wanted):
            worker.releasing = True
        else:
            worker.stopping = True

    def follow(self, job: Job) -> None:
        live = [worker for worker in self.of(job.id) if not (worker.stopping or worker.releasing)]
        if job.state is State.QUEUED and live:
            job.happened(Event.WORKER_GRANTED)
        if job.state is State.STARTING and any(worker.ready for worker in live):
            job.happened(Event.WORKER_READY)
        if job.state in (State.STARTING, State.RUNNING) and not self.of(job.id) and job.left:
            job.happened(Event.WORKERS_LOST)

    def life(self) -> None:
        """Let workers load, work, leave and end."""
        for worker in list(self.workers.values()):
            if self.dice.random() < 0.4:
                continue
            if worker.stopping:
                del self.workers[worker.id]
            elif worker.releasing:
                worker.job, worker.releasing, worker.idle_since = None, False, self.now
            elif worker.job is not None and not worker.ready:
                worker.ready = True
            elif worker.job is not None and self.jobs[worker.job].state is State.RUNNING:
                job = self.jobs[worker.job]
                job.left = max(0, job.left - self.dice.randint(1, 5))
                job.troubles.pop(worker.place, None)

    def fault(self) -> None:
        """Let one thing come or go wrong."""
        unfinished = [job for job in self.jobs.values() if job.state not in FINAL]
        job = self.dice.choice(unfinished) if unfinished else None
        match self.dice.randrange(12):
            case 0 | 1 | 2:
                self.submit()
            case 3 | 4 if self.workers:
                self.kill(self.dice.choice(list(self.workers.values())))
            case 5:
                free = [d for d in DEVICES if all(worker.place != d for worker in self.workers.values())]
                self.strangers = set(self.dice.sample(free, self.dice.randint(0, len(free))))
            case 6 if job:
                job.blocked = self.dice.choice(("", "no space left"))
            case 7 if job:
                job.happened(Event.CANCEL_ASKED)
            case 8 if job and self.dice.random() < 0.3:
                job.broken = "its input changed"
            case 9 if job and self.dice.random() < 0.3:
                job.out_of_time = True

    def submit(self) -> None:
        name = f"job{len(self.jobs)}"
        launch = self.dice.choice(("llama", "qwen", "endpoint"))
        self.jobs[name] = Job(
            name, launch, launch != "endpoint", self.dice.choice((1, 1, 2, 5)), self.dice.choice((0, 1, 30))
        )

    def kill(self, worker: Worker) -> None:
        del self.workers[worker.id]
        if worker.job is not None and not (worker.stopping or worker.releasing):
            job = self.jobs[worker.job]
            count = job.troubles[worker.place].count + 1 if worker.place in job.troubles else 1
            job.troubles[worker.place] = Trouble(worker.place, count, self.now, "out of memory")

    def calm(self) -> None:
        """End all that is wrong for a while."""
        self.strangers = set()
        for job in self.jobs.values():
            job.blocked = ""


@pytest.mark.parametrize("seed", SEEDS)
def test_no_place_is_given_twice_and_every_job_ends_once_faults_stop(seed: int) -> None:
    print(f"seed {seed}")
    world = World(seed)
    for _ in range(FAULTY_STEPS):
        world.fault()
        world.life()
        world.step()
    world.calm()
    steps = 0
    while left := [job for job in world.jobs.values() if job.state not in FINAL]:
        world.life()
        world.step()
        steps += 1
        assert steps < MOST_CALM_STEPS, left

    assert len(world.jobs) > 20
    ends = {job.state for job in world.jobs.values()}
    assert ends >= {State.COMPLETED, State.CANCELLED}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_is_served_before_those_that_came_after_it_have_ended(seed: int) -> None:
    """One device, jobs of many models that keep coming: each begins in its turn."""
    print(f"seed {seed}")
    world = World(seed)
    world.strangers = set(DEVICES[1:])
    begun: list[str] = []
    for number in range(FAULTY_STEPS):
        if number % 20 == 0:
            world.jobs[f"job{number}"] = Job(
                f"job{number}", world.dice.choice(("llama", "qwen")), True, world.dice.choice((1, 3)), 10
            )
        world.life()
        world.step()
        begun += [job.id for job in world.jobs.values() if job.state is State.RUNNING and job.id not in begun]

    assert len(begun) > 5
    assert begun == list(world.jobs)[: len(begun)]
