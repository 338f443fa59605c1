"""All that a control plane has in hand."""

from dataclasses import dataclass, field

from freight.control.jobrun import JobRun
from freight.control.waiting import WaitingJob
from freight.control.workerrun import WorkerRun


@dataclass(slots=True)
class Roster:
    """All that the control plane has: jobs that are worked on, jobs that wait for their turn, and workers."""

    open: dict[str, JobRun] = field(default_factory=dict[str, JobRun])
    waiting: dict[str, WaitingJob] = field(default_factory=dict[str, WaitingJob])
    workers: dict[str, WorkerRun] = field(default_factory=dict[str, WorkerRun])

    def in_turn(self) -> list[JobRun | WaitingJob]:
        """Return the jobs in the order in which they have their turn: by priority, then by age."""
        jobs = [*self.open.values(), *self.waiting.values()]
        return sorted(jobs, key=lambda job: (-job.row.priority, job.row.created_at, job.row.id))

    def warm(self) -> list[WorkerRun]:
        """Return the workers that serve no job and have their server up."""
        return [worker for worker in self.workers.values() if worker.job is None and worker.attached]
