"""A worker while the control plane has it, from its start to the proof that it is gone."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from freight.core.messages import Load, Phase, Report, Setup
from freight.core.snapshot import WarmView
from freight.launchers.base import RunningWorker

if TYPE_CHECKING:
    from freight.control.jobrun import JobRun


@dataclass(slots=True)
class WorkerRun:
    """A worker. `job` is what it serves, None for a warm one; `number` its place among the job's workers, from 1.

    `setup` is what a worker is told that was started for no job, to keep a pinned model up.
    `launch` says which jobs its server can serve, `model` is that server's model for showing. `log` is where it
    writes. `attached` is False while it is an earlier control plane's and has not said yet what it holds; `since` is
    when it was adopted or became idle, on the monotonic clock. Times without a unit in their name are of day.
    """

    id: str
    source: str
    devices: tuple[str, ...]
    folder: Path
    log: Path
    process: RunningWorker
    job: "JobRun | None" = None
    launch: str = ""
    model: str = ""
    number: int = 0
    started_at: float = 0.0
    setup: Setup | None = None
    attached: bool = True
    since: float = 0.0
    phase: Phase = Phase.LOADING
    note: str = ""
    # When its server began to load, on the monotonic clock, None once that is over; and from which file system.
    loading_since: float | None = field(default_factory=time.monotonic)
    store: str = ""
    load: Load | None = None
    log_tail: list[str] = field(default_factory=list[str])
    in_flight: int = 0
    pushed_back: bool = False
    hopeless: bool = False
    stopping: bool = False
    # For how long, in seconds, no report has come.
    silent_s: float = 0.0
    # What kills it when it does not end in time.
    deadline: asyncio.TimerHandle | None = None
    # What kills it when it does not let go of its job in time; None while it need not.
    release: asyncio.TimerHandle | None = None
    last_number: int = 0
    last_orders: bytes = b""
    # Held during an exchange: a report that comes again waits for the first one's orders.
    exchanging: asyncio.Lock = field(default_factory=asyncio.Lock)

    def places(self) -> tuple[str, ...]:
        """Return what trouble with starting it is counted by: its devices, or its URL."""
        return self.devices or (self.source,)

    def place(self) -> str:
        """Return its devices or its URL for showing."""
        return " ".join(self.places())

    def note_report(self, report: Report) -> None:
        """Take over what a report says about the worker itself."""
        if report.phase is Phase.LOADING and not (self.phase is Phase.LOADING and self.attached):
            self.loading_since = time.monotonic()
        self.phase, self.note, self.load = report.phase, report.note, report.load
        self.in_flight, self.pushed_back = report.in_flight, report.pushed_back
        self.log_tail = report.log_tail or self.log_tail
        self.hopeless = report.hopeless

    def end_loading(self) -> float | None:
        """Return how long its server took to come up, in seconds, once: the first time that it is seen to be up."""
        if self.loading_since is None or self.phase not in (Phase.READY, Phase.IDLE):
            return None
        took_s, self.loading_since = time.monotonic() - self.loading_since, None
        return took_s

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
        ends = self.stopping or self.phase in (Phase.FAILED, Phase.STOPPED)
        is_up = self.phase is Phase.IDLE
        return WarmView(
            self.id, self.launch, self.places(), self.model, self.since, ends, is_up or not self.attached, self.attached
        )
