"""A worker while the control plane has it, from its start to the proof that it is gone."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from freight.core.messages import Phase, Report
from freight.core.plan import WarmView
from freight.launchers.base import RunningWorker

if TYPE_CHECKING:
    from freight.control.jobrun import JobRun


@dataclass(slots=True)
class WorkerRun:
    """A worker. `job` is what it serves, None for a warm one; `number` its place among the job's workers, from 1.

    `launch` says which jobs its server can serve, `model` is that server's model for showing. `log` is where it
    writes. `attached` is False while it is an earlier control plane's and has not said yet what it holds; `since` is
    when it was adopted or became idle, on the monotonic clock. Times without a unit in their name are of day.
    """

    id: str
    source: str
    device: str | None
    folder: Path
    log: Path
    process: RunningWorker
    job: "JobRun | None" = None
    launch: str = ""
    model: str = ""
    number: int = 0
    started_at: float = 0.0
    attached: bool = True
    since: float = 0.0
    phase: Phase = Phase.LOADING
    note: str = ""
    log_tail: list[str] = field(default_factory=list[str])
    in_flight: int = 0
    pushed_back: bool = False
    hopeless: bool = False
    stopping: bool = False
    # What kills it when it does not end in time.
    deadline: asyncio.TimerHandle | None = None
    # What kills it when it does not let go of its job in time; None while it need not.
    release: asyncio.TimerHandle | None = None
    last_number: int = 0
    last_orders: bytes = b""
    # Held during an exchange: a report that comes again waits for the first one's orders.
    exchanging: asyncio.Lock = field(default_factory=asyncio.Lock)

    def place(self) -> str:
        """Return what trouble with starting it is counted by: its device, or its URL."""
        return self.device or self.source

    def note_report(self, report: Report) -> None:
        """Take over what a report says about the worker itself."""
        self.phase, self.note = report.phase, report.note
        self.in_flight, self.pushed_back = report.in_flight, report.pushed_back
        self.log_tail = report.log_tail or self.log_tail
        self.hopeless = report.hopeless

    def is_leaving(self) -> bool:
        """Return whether it was told to leave its job."""
        return self.stopping or self.release is not None

    def begin_release(self, timer: asyncio.TimerHandle) -> None:
        """Have it let go of its job."""
        self.release = timer

    def end_release(self) -> None:
        """It has let go of its job, or is gone."""
        if self.release is not None:
            self.release.cancel()
        self.release = None

    def warm_view(self) -> WarmView:
        """Return the worker as the planner sees it while it serves no job."""
        return WarmView(self.id, self.launch, self.place(), self.model, self.since, self.stopping)
