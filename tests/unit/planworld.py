"""A small world in which jobs come, workers die and devices are taken: what happens there, by dice."""

import random
from collections import Counter
from dataclasses import dataclass, field

from freight.core.actions import (
    Action,
    Cancelled,
    Fail,
    Finalize,
    Join,
    PinWaits,
    StartPinned,
    StartWorker,
    StopWarm,
    StopWorkers,
    Suspend,
    TimeOut,
    Unsuspend,
    Wait,
)
from freight.core.job import FINAL, Event, State, advance
from freight.core.snapshot import (
    DeviceView,
    JobView,
    Need,
    Pacing,
    PinView,
    Snapshot,
    Trouble,
    WarmView,
    WorkerView,
)

WORKING = (State.QUEUED, State.STARTING, State.RUNNING)
MOST_JOBS = 9
OUT_OF_MEMORY = "out of memory\n  | the last line of its log"


@dataclass(frozen=True)
class Model:
    """A model of the world. `urls`: it is an endpoint. `is_broken`: it never comes up."""

    name: str
    need: Need
    urls: tuple[str, ...] = ()
    is_broken: bool = False


MODELS = (
    Model("tiny", Need(0)),
    Model("llama", Need(1, "disk")),
    Model("qwen", Need(1, "disk", staggers=True)),
    Model("phi", Need(1)),
    Model("wide", Need(2, "disk")),
    Model("huge", Need(4, "share", staggers=True)),
    Model("wrong", Need(1), is_broken=True),
    Model("wrong-wide", Need(2), is_broken=True),
    Model("endpoint", Need(), ("http://a", "http://b")),
    Model("other-endpoint", Need(), ("http://b", "http://c")),
)


@dataclass
class Worker:
    """A worker of the world: `job` is None while it serves none. `fails`: it will not come up."""

    id: str
    model: Model
    source: str
    devices: tuple[str, ...]
    job: str | None
    fails: bool
    is_loading: bool = True
    stopping: bool = False
    releasing: bool = False
    idle_since: float = 0.0

    def places(self) -> tuple[str, ...]:
        return self.devices or (self.source,)


@dataclass
class Job:
    """A job of the world."""

    id: str
    model: Model
    workers: int
    left: int
    priority: int = 0
    state: State = State.QUEUED
    blocked: str = ""
    broken: str = ""
    out_of_time: bool = False
    was_ready: bool = False
    troubles: dict[str, Trouble] = field(default_factory=dict[str, Trouble])

    def happened(self, event: Event) -> None:
        self.state = advance(self.state, event)


class World:
    """Jobs, workers, pins and devices, and a clock that is moved by hand."""

    def __init__(self, seed: int, gpu_count: int | None = None) -> None:
        self.dice = random.Random(seed)
        self.now = 0.0
        count = gpu_count or self.dice.randint(1, 8)
        self.gpus = tuple(f"g{n}" for n in range(count))
        self.cpus = tuple(f"cpu:{n}" for n in range(self.dice.randint(1, 2)))
        self.models = [model for model in MODELS if model.need.gpus <= count]
        self.bad = {(model.name, device) for model in MODELS for device in self.gpus if self.dice.random() < 0.03}
        self.keep_warm_s = self.dice.choice((0.0, 5.0, 1000.0))
        self.most_loads = self.dice.choice((1, 2, 4))
        self.jobs: dict[str, Job] = {}
        self.submitted = 0
        self.workers: dict[str, Worker] = {}
        self.pins: dict[str, int] = {}
        self.pin_troubles: dict[str, dict[str, Trouble]] = {}
        # Device -> who, for strangers and for what is left of our own.
        self.strangers: dict[str, str] = {}
        self.staggered_at = float("-inf")
        self.calm = False
        self.made = 0
        self.ends: Counter[State] = Counter()

    def of(self, job: str) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.job == job]

    def label(self, place: str) -> str:
        return f"GPU {place[1:]}" if place.startswith("g") else place

    # What the planner sees.

    def view(self, job: Job) -> JobView:
        live = tuple(WorkerView(w.id, w.source, w.devices, w.stopping or w.releasing) for w in self.of(job.id))
        return JobView(
            id=job.id, state=job.state, sources=job.model.urls or ("model",), needs_device=not job.model.urls,
            workers=job.workers, live=live, left=job.left, troubles=tuple(job.troubles.values()),
            blocked=job.blocked, out_of_time=job.out_of_time, broken=job.broken, name=job.id, launch=job.model.name,
            need=job.model.need, was_ready=job.was_ready,
        )  # fmt: skip

    def snapshot(self) -> Snapshot:
        jobs = sorted(self.jobs.values(), key=lambda job: -job.priority)
        devices = [
            *(DeviceView(g, self.strangers.get(g, ""), True, self.label(g)) for g in self.gpus),
            *(DeviceView(c, self.strangers.get(c, "")) for c in self.cpus),
        ]
        warm = [
            WarmView(w.id, w.model.name, w.places(), w.model.name, w.idle_since, w.stopping)
            for w in self.workers.values()
            if w.job is None
        ]
        pins = [
            PinView(
                m.name, m.name, self.pins[m.name], "model", m.need, tuple(self.pin_troubles.get(m.name, {}).values())
            )
            for m in self.models
            if m.name in self.pins
        ]
        loading = [w.model.need.store for w in self.workers.values() if w.is_loading]
        pacing = Pacing(tuple(loading), self.most_loads, self.staggered_at, stagger_s=2.0)
        return Snapshot(
            tuple(self.view(job) for job in jobs), tuple(devices), tuple(warm), self.keep_warm_s, tuple(pins), pacing
        )

    # What is done for the planner.

    def do(self, action: Action) -> None:
        match action:
            case StartWorker(job=job, source=source, devices=devices):
                self.start(self.jobs[job].model, source, devices, job)
            case StartPinned(model=name, source=source, devices=devices):
                self.start(next(model for model in self.models if model.name == name), source, devices, None)
            case Join(job=job, worker=worker):
                warm = self.workers[worker]
                assert warm.job is None and not warm.stopping
                assert warm.model is self.jobs[job].model
                warm.job = job
            case StopWarm(worker=worker):
                assert self.workers[worker].job is None and not self.workers[worker].stopping
                self.workers[worker].stopping = True
            case StopWorkers(job=job):
                for each in self.of(job):
                    self.let_go(each)
            case Wait() | PinWaits():
                assert isinstance(action, PinWaits) or action.reason
            case _:
                self.move(action)

    def move(self, action: Suspend | Unsuspend | Finalize | Fail | TimeOut | Cancelled) -> None:
        job = self.jobs[action.job]
        match action:
            case Suspend(reason=reason):
                assert reason
                job.happened(Event.BLOCKED)
            case Unsuspend():
                job.happened(Event.UNBLOCKED)
            case Finalize():
                job.happened(Event.LAST_RECORD_DONE)
                job.happened(Event.OUTPUT_WRITTEN)
            case Fail(reason=reason):
                assert reason
                job.happened(Event.STARTS_EXHAUSTED if job.state is State.SUSPENDED else Event.BROKE)
            case TimeOut():
                job.happened(Event.TIME_RAN_OUT)
            case Cancelled():
                job.happened(Event.WORKERS_GONE)
        if job.state in FINAL:
            assert not self.of(job.id), f"{action} while a worker lives"
            self.ends[job.state] += 1
            del self.jobs[job.id]

    def start(self, model: Model, source: str, devices: tuple[str, ...], job: str | None) -> None:
        kind = () if model.urls else self.gpus if model.need.gpus else self.cpus
        assert len(devices) == len(set(devices)) == (0 if model.urls else model.need.devices)
        assert set(devices) <= set(kind), f"{devices} are of the wrong kind"
        assert self.strangers.keys().isdisjoint(devices), f"{devices} are not free"
        self.made += 1
        fails = model.is_broken or any((model.name, device) in self.bad for device in devices)
        worker = Worker(f"w{self.made}", model, source, devices, job, fails)
        for other in self.workers.values():
            assert set(other.places()).isdisjoint(worker.places()), f"{worker} where {other} is"
        self.workers[worker.id] = worker
        if model.need.staggers:
            self.staggered_at = self.now

    def let_go(self, worker: Worker) -> None:
        if worker.stopping or worker.releasing:
            return
        name = worker.model.name
        wanted = name in self.pins or any(j.model.name == name and j.state is State.QUEUED for j in self.jobs.values())
        if not worker.is_loading and (self.keep_warm_s or wanted):
            worker.releasing = True
        else:
            worker.stopping = True

    def follow(self) -> None:
        """Move the jobs by what their workers have come to."""
        for job in self.jobs.values():
            workers = self.of(job.id)
            live = [worker for worker in workers if not (worker.stopping or worker.releasing)]
            if job.state is State.QUEUED and live:
                job.happened(Event.WORKER_GRANTED)
            if job.state is State.STARTING and not all(worker.is_loading for worker in live):
                job.happened(Event.WORKER_READY)
                job.was_ready = True
            if job.state in (State.STARTING, State.RUNNING) and not workers and job.left:
                job.happened(Event.WORKERS_LOST)

    # What happens by itself.

    def happen(self) -> None:
        """Let one thing happen: in two of three cases to a worker, else anything."""
        if self.workers and self.dice.random() < 0.67:
            self.live(self.dice.choice(list(self.workers.values())))
        else:
            self.befall()

    def live(self, worker: Worker) -> None:
        """Let a worker come up, work, leave or end."""
        if worker.stopping:
            self.end(worker)
        elif worker.releasing:
            worker.job, worker.releasing, worker.idle_since = None, False, self.now
        elif worker.is_loading:
            if worker.fails:
                self.kill(worker)
            else:
                worker.is_loading = False
                worker.idle_since = self.now
                if worker.job is None:
                    self.pin_troubles.pop(worker.model.name, None)
        elif worker.job is not None and self.jobs[worker.job].state is State.RUNNING:
            job = self.jobs[worker.job]
            job.left = max(0, job.left - self.dice.randint(1, 5))
            for place in worker.places():
                job.troubles.pop(place, None)

    def end(self, worker: Worker) -> None:
        del self.workers[worker.id]
        if not self.calm and worker.devices and self.dice.random() < 0.03:
            self.strangers[worker.devices[0]] = f"quarantine: process {self.made} is left of {worker.id}"

    def kill(self, worker: Worker) -> None:
        self.end(worker)
        if worker.stopping or worker.releasing:
            return
        name = worker.model.name
        troubles = self.jobs[worker.job].troubles if worker.job is not None else self.pin_troubles.setdefault(name, {})
        for place in worker.places():
            count = troubles[place].count + 1 if place in troubles else 1
            troubles[place] = Trouble(place, count, self.now, OUT_OF_MEMORY)

    def befall(self) -> None:
        """Let something come from outside."""
        job = self.dice.choice(list(self.jobs.values())) if self.jobs else None
        match self.dice.randrange(20):
            case 0 | 1 | 2 | 3 | 4 | 5:
                self.submit()
            case 6 if self.workers:
                # It hangs and is killed, or dies.
                self.kill(self.dice.choice(list(self.workers.values())))
            case 7 | 8:
                self.intrude()
            case 9 | 10 if self.strangers:
                del self.strangers[self.dice.choice(list(self.strangers))]
            case 11 | 12:
                self.pin_or_unpin()
            case 13 if job:
                job.blocked = "no space left"
            case 14 | 15:
                self.unblock()
            case 16 if job:
                job.happened(Event.CANCEL_ASKED)
            case 17 if job and self.dice.random() < 0.2:
                job.broken = "its input changed"
            case 18 if job and self.dice.random() < 0.2:
                job.out_of_time = True

    def submit(self, model: Model | None = None, left: int | None = None) -> Job | None:
        if len(self.jobs) >= MOST_JOBS:
            return None
        self.submitted += 1
        job = Job(
            f"job{self.submitted}",
            model or self.dice.choice(self.models),
            self.dice.choice((1, 1, 2, 5)),
            self.dice.choice((0, 1, 10, 30)) if left is None else left,
            0 if model else self.dice.choice((0, 0, 0, 1)),
        )
        self.jobs[job.id] = job
        return job

    def intrude(self) -> None:
        """Let a stranger take a device on which nothing is."""
        used = {place for worker in self.workers.values() for place in worker.places()}
        free = [device for device in (*self.gpus, *self.cpus) if device not in used and device not in self.strangers]
        if free:
            self.strangers[self.dice.choice(free)] = f"process {self.dice.randint(2, 9)} (user bob: python)"

    def pin_or_unpin(self) -> None:
        model = self.dice.choice([model for model in self.models if not model.urls])
        if self.pins.pop(model.name, None) is None and len(self.pins) < 2:
            self.pins[model.name] = self.dice.choice((1, 1, 2))
            self.pin_troubles.pop(model.name, None)

    def unblock(self) -> None:
        for job in self.jobs.values():
            job.blocked = ""

    def calm_down(self) -> None:
        """End all that goes wrong."""
        self.calm = True
        self.unblock()
        self.strangers.clear()
        self.pins.clear()

    def live_all(self) -> None:
        """Let most workers get on with what they do."""
        for worker in list(self.workers.values()):
            if self.dice.random() < 0.6:
                self.live(worker)
