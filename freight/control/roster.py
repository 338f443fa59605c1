"""All that a control plane has in hand."""

from collections import Counter
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

    # The jobs that were being worked on when turns were looked at last, and the number of each user's last turn.
    served: set[str] = field(default_factory=set[str])
    turns: dict[str, int] = field(default_factory=dict[str, int])
    turn: int = 0

    def in_turn(self) -> list[JobRun | WaitingJob]:
        """Return the jobs in the order in which they have their turn: by priority, then one user after another.

        A job's rank among its user's is the number of those that go before it: what is worked on, and what is older.
        The lowest rank goes first, so that users who have few running jobs catch up; among equals the user whose last
        turn is the longest ago, then the oldest job. One user's jobs are always in the order in which they came.
        """
        self._note_turns()
        running = Counter(job.row.user for job in self.open.values())
        ranked: list[tuple[tuple[int, int, int, float, str], JobRun | WaitingJob]] = []
        older: Counter[tuple[str, int]] = Counter()
        older_open: Counter[tuple[str, int]] = Counter()
        for job in sorted([*self.open.values(), *self.waiting.values()], key=_age):
            user, priority = job.row.user, job.row.priority
            is_open = job.row.id in self.open
            rank = older[user, priority] + running[user] - older_open[user, priority] - is_open
            ranked.append(((-priority, rank, self.turns.get(user, 0), job.row.created_at, job.row.id), job))
            older[user, priority] += 1
            older_open[user, priority] += is_open
        ranked.sort(key=lambda each: each[0])
        return [job for _, job in ranked]

    def _note_turns(self) -> None:
        for job in self.open.values():
            if job.row.id not in self.served:
                self.turn += 1
                self.turns[job.row.user] = self.turn
        self.served = set(self.open)
        # Who has nothing here waits for nothing, and is the first again; so this cannot grow without end.
        users = {job.row.user for job in (*self.open.values(), *self.waiting.values())}
        if len(self.turns) > 1000 + len(users):
            self.turns = {user: turn for user, turn in self.turns.items() if user in users}

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


def _age(job: JobRun | WaitingJob) -> tuple[float, str]:
    return job.row.created_at, job.row.id
