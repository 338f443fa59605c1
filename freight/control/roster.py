"""All that a control plane has in hand."""

from dataclasses import dataclass, field

from freight.control.jobrun import JobRun
from freight.control.pins import Pin
from freight.control.waiting import WaitingJob
from freight.control.workerrun import WorkerRun


@dataclass(slots=True)
class Roster:
    """All that the control plane has: jobs that are worked on, jobs that wait for their turn, workers, and pins."""

    open: dict[str, JobRun] = field(default_factory=dict[str, JobRun])
    waiting: dict[str, WaitingJob] = field(default_factory=dict[str, WaitingJob])
    workers: dict[str, WorkerRun] = field(default_factory=dict[str, WorkerRun])
    pins: dict[str, Pin] = field(default_factory=dict[str, Pin])

    def in_turn(self) -> list[JobRun | WaitingJob]:
        """Return the jobs in the order in which they have their turn: by priority, then by age."""
        jobs = [*self.open.values(), *self.waiting.values()]
        return sorted(jobs, key=lambda job: (-job.row.priority, job.row.created_at, job.row.id))

    def warm(self) -> list[WorkerRun]:
        """Return the workers that serve no job."""
        return [worker for worker in self.workers.values() if worker.job is None]

    def is_pinned(self, worker: WorkerRun) -> bool:
        """Return whether a worker is of a pinned model."""
        return any(pin.launch == worker.launch for pin in self.pins.values())

    def pin_failed(self, worker: WorkerRun, words: str) -> None:
        """Count a worker without a job that ended by itself against the pin that it was for."""
        for pin in self.pins.values():
            if pin.launch == worker.launch:
                pin.start_failed(worker.places(), words, worker.hopeless)

    def pin_is_up(self, worker: WorkerRun) -> None:
        """Forget the failures of the pin that a worker is for: its model can be started."""
        for pin in self.pins.values():
            if pin.launch == worker.launch:
                pin.troubles.clear()
