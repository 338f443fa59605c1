"""A job of the service that nobody works on yet: known by its row alone, opened when its turn comes."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from freight.control.jobrun import JobOptions, JobRun, places_of
from freight.control.overtime import overtime
from freight.control.placing import needs_device
from freight.core.job import Totals
from freight.core.model import ModelSpec
from freight.core.snapshot import JobView, Need
from freight.store.rows import JobRow


@dataclass(slots=True)
class WaitingJob:
    """A job in the queue. `open` reads its index and results; `reason` is why it waits, `failure` why it cannot go on.

    `left` is the number of records to do, `twins` how many of them get the answer of another one, `ran_s` the running
    time that it has used up already, `need` what one of its workers takes.
    """

    row: JobRow
    model: ModelSpec
    options: JobOptions
    launch: str
    totals: Totals
    left: int
    ran_s: float
    open: Callable[["WaitingJob"], Awaitable[JobRun]]
    need: Need = field(default_factory=Need)
    reason: str = ""
    failure: str = ""
    twins: int = 0

    def view(self) -> JobView:
        """Return the job as the planner sees it."""
        return JobView(
            id=self.row.id,
            state=self.row.state,
            sources=places_of(self.model),
            needs_device=needs_device(self.model),
            workers=self.options.workers or 1,
            left=self.left,
            twins=self.twins,
            out_of_time=bool(overtime(self.row, self.options.timeout_s, self.ran_s)),
            broken=self.failure,
            name=self.row.name or "",
            user=self.row.user,
            launch=self.launch,
            need=self.need,
        )
