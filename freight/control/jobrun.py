"""One job while the control plane has it: its input, its queue, its workers and how it gets on."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from freight.control.destination import Destination
from freight.control.dispatcher import Dispatcher
from freight.control.inputs import InputFile
from freight.control.intake import Index
from freight.control.output import Written
from freight.control.overtime import overtime
from freight.control.placing import need_of, needs_device
from freight.control.workerrun import WorkerRun
from freight.core.job import State, Totals
from freight.core.messages import Phase, Report, Setup
from freight.core.model import ModelSpec
from freight.core.progress import Progress
from freight.core.snapshot import MOST_STARTS, JobView, Need, Trouble, WorkerView
from freight.engines.registry import engine_of
from freight.store.results import Results
from freight.store.rows import JobRow

# A server that Freight did not start cannot be watched for standing still, so its records have a limit.
ENDPOINT_TIMEOUT_S: Final = 3600.0
_RATE_WINDOW_S: Final = 30.0
_FULL_PAUSE_S: Final = (2.0, 30.0)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a job is to be run. Times in seconds, 0 for none.

    `concurrency` is 0 for automatic, `workers` 0 for all that fit. `gpus` are those of one worker, 0 for the CPU.
    `order` is "auto" or "input".
    """

    workers: int = 0
    timeout_s: float = 0.0
    record_timeout_s: float = 0.0
    concurrency: int = 0
    gpus: int = 0
    order: str = "auto"
    dedupe: bool = False


def places_of(model: ModelSpec) -> tuple[str, ...]:
    """Return the sources of a model's workers: one model, or the URLs of an endpoint, a worker each."""
    return tuple(model.entry.sources()) or ("",)


def launch_of(model: ModelSpec, endpoints: Iterable[int], concurrency: int, gpus: int) -> str:
    """Return a text that is equal for jobs that one running server can serve as it is."""
    # The variables may be secrets, and this is kept: their digest is part of the identity, too.
    entry = msgspec.structs.replace(model.entry, aliases=[], batch=False, groups=[], env={})
    shape = engine_of(entry.engine).shape(model, frozenset(endpoints), concurrency)
    # With the identity: the same path may lead to another file by now.
    identity = {key: value for key, value in model.identity.items() if key != "aliases"}
    return msgspec.json.encode([model.name, entry, identity, shape, gpus]).decode()


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """When a model server is given up or restarted, and when a job without success is suspended. Seconds.

    `media_hosts` are those from which a server may fetch, `stage` where a model is copied to first ("": nowhere).
    """

    start_stall_s: float
    start_timeout_s: float
    stall_s: float
    suspend_after_s: float
    media_hosts: tuple[str, ...] = ()
    stage: str = ""

    def setup(self, model: ModelSpec, source: str, gpus: int) -> Setup:
        """Return what a worker is told that has a model's server up for jobs to come."""
        return Setup(
            job="",
            model=model,
            source=source,
            endpoints=[],
            concurrency=0,
            record_timeout_s=0.0,
            stall_s=self.stall_s,
            start_stall_s=self.start_stall_s,
            start_timeout_s=self.start_timeout_s,
            gpus=gpus,
            media_hosts=list(self.media_hosts),
            stage=self.stage,
        )


class JobRun:
    """A job that is being run."""

    def __init__(
        self, row: JobRow, file: InputFile, index: Index, results: Results, dispatcher: Dispatcher,
        model: ModelSpec, options: JobOptions, limits: EngineLimits, folder: Path, output: Destination | None,
        force: bool, ran_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.row = row
        self.file = file
        self.index = index
        self.results = results
        self.dispatcher = dispatcher
        self.model = model
        self.options = options
        self.limits = limits
        self.folder = folder
        # None where the results stay with the service until somebody fetches them.
        self.output = output
        # Whether an output that is not Freight's own may be replaced.
        self.force = force
        # What makes it impossible to go on, as far as this job is concerned.
        self.failure: Exception | None = None
        # Writes its results file, for a service; nothing else is done to it meanwhile.
        self.finishing: asyncio.Task[None] | None = None
        self.workers: dict[str, WorkerRun] = {}
        self.troubles: dict[str, Trouble] = {}
        self.was_ready = False
        self.blocked = ""
        self.wait_reason = ""
        now = time.monotonic()
        self.last_success = now
        self._full_reason = ""
        self._full_until = 0.0
        self._full_pause_s = _FULL_PAUSE_S[0]
        self.ran_s = ran_s
        self._ticked_at = now
        self._marks: list[tuple[float, Totals]] = [(now, dispatcher.totals)]

    @cached_property
    def launch(self) -> str:
        """What is equal for jobs that one running server can serve as it is."""
        return launch_of(self.model, self.index.endpoints_used(), self.options.concurrency, self.options.gpus)

    @cached_property
    def need(self) -> Need:
        """What one of its workers takes of a machine."""
        return need_of(self.model, self.options.gpus)

    def setup(self, source: str) -> Setup:
        """Return what a worker of this job is told to run."""
        return msgspec.structs.replace(
            self.limits.setup(self.model, source, self.options.gpus),
            job=self.row.id,
            endpoints=sorted(self.index.endpoints_used()),
            concurrency=self.options.concurrency,
            record_timeout_s=self.options.record_timeout_s or (0.0 if needs_device(self.model) else ENDPOINT_TIMEOUT_S),
        )

    def note_report(self, worker: WorkerRun, report: Report, now: float) -> None:
        """Take over what a report says about a worker; its results are the dispatcher's."""
        worker.note_report(report)
        if report.done:
            self.last_success = now
            for place in worker.places():
                self.troubles.pop(place, None)
        self.was_ready = self.was_ready or report.phase is Phase.READY
        if report.phase is Phase.LOADING:
            self.last_success = now

    def tick(self, now: float) -> None:
        """Take note of the time: for rates, for the job's running time, and for what may have become unblocked."""
        if self.row.state in (State.STARTING, State.RUNNING) and self.dispatcher.left:
            self.ran_s += now - self._ticked_at
        self._ticked_at = now
        self._check_blocked(now)
        self._marks.append((now, self.dispatcher.totals))
        while len(self._marks) > 2 and now - self._marks[1][0] > _RATE_WINDOW_S:
            self._marks.pop(0)

    def start_failed(self, places: Iterable[str], words: str, hopeless: bool, now: float) -> None:
        """Count a worker that would not start, or ended by itself, against its places; `hopeless`: for good."""
        count_failure(self.troubles, places, words, hopeless, now)

    def found_full(self, now: float, what: str) -> None:
        """Something did not fit on the disk, as `what` says: try again after a pause that grows."""
        self._full_reason = what
        self._full_until = now + self._full_pause_s
        self._full_pause_s = min(_FULL_PAUSE_S[1], self._full_pause_s * 2)

    def waits_for_room(self, now: float) -> bool:
        """Return whether the disk was full not long ago."""
        return now < self._full_until

    def _check_blocked(self, now: float) -> None:
        """Decide whether the job can go on by itself: there is room on disk, and its servers take records."""
        pushed_back = bool(self.workers) and all(worker.pushed_back for worker in self.workers.values())
        if self.dispatcher.blocked or self.waits_for_room(now):
            self.blocked = self.dispatcher.blocked or self._full_reason
        elif pushed_back and now - self.last_success >= self.limits.suspend_after_s:
            note = next((worker.note for worker in self.workers.values() if worker.note), "it is overloaded")
            self.blocked = f"no success for {_minutes(self.limits.suspend_after_s)}: {note}"
        else:
            self.blocked = ""

    def overtime(self) -> str:
        """Return which time of the job's has run out; "" while it has time left."""
        return overtime(self.row, self.options.timeout_s, self.ran_s)

    def view(self) -> JobView:
        """Return the job as the planner sees it."""
        live = tuple(WorkerView(w.id, w.source, w.devices, w.is_leaving()) for w in self.workers.values())
        sources = places_of(self.model)
        return JobView(
            id=self.row.id,
            state=self.row.state,
            sources=sources,
            needs_device=needs_device(self.model),
            workers=self.options.workers or (1 << 30 if needs_device(self.model) else len(sources)),
            live=live,
            left=self.dispatcher.left,
            twins=self.dispatcher.twins_left,
            troubles=tuple(self.troubles.values()),
            blocked=self.blocked,
            out_of_time=bool(self.overtime()),
            name=self.row.name or "",
            user=self.row.user,
            launch=self.launch,
            need=self.need,
            was_ready=self.was_ready,
            broken=str(self.failure) if self.failure else "",
        )

    def progress(self, now: float) -> Progress:
        """Return how the job stands."""
        (then, before), totals = self._marks[0], self.dispatcher.totals
        span = max(now - then, 1e-9)
        return Progress(
            state=self.row.state.value,
            reason=self.row.reason or self.wait_reason or self._worker_note(),
            total=self.index.records,
            totals=totals,
            input_rate=(totals.input_tokens - before.input_tokens) / span,
            output_rate=(totals.output_tokens - before.output_tokens) / span,
            record_rate=(totals.done - before.done) / span,
            in_flight=sum(worker.in_flight for worker in self.workers.values()),
        )

    def counts(self) -> dict[str, int]:
        """Return what the catalog keeps of the results."""
        return counts_of(self.dispatcher.totals)

    def outcome(self, written: Written, before: dict[str, Any] | None) -> dict[str, Any]:
        """Return what the catalog keeps: the counts, and the marks of the output and of what it replaces."""
        outputs = [msgspec.to_builtins(written), *([before] if before else [])]
        return {"outputs": outputs, **self.counts()}

    def _worker_note(self) -> str:
        """Return what a worker waits for, where that is why the job does not get on."""
        starting = self.row.state is State.STARTING
        return next((w.note for w in self.workers.values() if w.note and (starting or w.pushed_back)), "")


def count_failure(troubles: dict[str, Trouble], places: Iterable[str], words: str, hopeless: bool, now: float) -> None:
    """Count a failed start against its places; `hopeless`: another one would fail as well."""
    for place in places:
        before = troubles.get(place)
        count = MOST_STARTS if hopeless else (before.count if before else 0) + 1
        troubles[place] = Trouble(place, count, now, words)


def counts_of(totals: Totals) -> dict[str, int]:
    """Return totals as the catalog keeps them."""
    return asdict(totals)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"
