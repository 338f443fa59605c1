"""`freight run`: a control plane with one job that ends with it, its state beside the output."""

import asyncio
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from freight.config import Config
from freight.control.dispatcher import Dispatcher
from freight.control.inputs import InputFile, Sample, inspect, open_input
from freight.control.intake import Index, Limits, Problem, scan, sha256_of
from freight.control.jobrun import EngineLimits, JobOptions, JobRun, Progress
from freight.control.output import put_in_place, rows, write_aside
from freight.control.resolve import choose_model, resolve
from freight.control.service import ControlPlane, Listen
from freight.control.statefolder import INPUT_KEY, StateFolder, written
from freight.core.job import FINAL, Event, State, Totals
from freight.core.model import ModelSpec
from freight.core.record import Rules
from freight.errors import Interrupted, OperationError, UserError
from freight.launchers.local import LocalLauncher, local_devices
from freight.launchers.locks import lock_folder
from freight.store.catalog import JobRow
from freight.store.database import DamagedError
from freight.store.results import Failure, Results

MOST_LISTED: Final = 20
_ENDPOINT_PAUSE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What `freight run` was asked for. `file` is a path or "-"."""

    file: str
    output: str
    model: str | None
    options: JobOptions
    strict: bool = False
    ignore_record_model: bool = False
    fresh: bool = False
    force: bool = False
    retry_errors: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: the job's state and reason, its counts, and its failures, the commonest first.

    `already_done`: an earlier run had finished it; `note` says what is odd about that.
    """

    state: State
    reason: str
    total: int
    totals: Totals
    failures: tuple[Failure, ...] = ()
    already_done: bool = False
    note: str = ""

    def exit_status(self, fail_on_errors: bool) -> int:
        """Return the exit status that the outcome has for a shell."""
        if self.state is not State.COMPLETED:
            return 1
        return 6 if fail_on_errors and self.totals.failed else 0


class Console(Protocol):
    """Where a run says what it does."""

    def note(self, text: str) -> None:
        """Say one line."""
        ...

    def show(self, progress: Progress) -> None:
        """Show how the job stands."""
        ...


class EmbeddedRun:
    """One `freight run`, from its arguments to its outcome."""

    def __init__(self, request: RunRequest, config: Config, console: Console, listen: Listen) -> None:
        self._request = request
        self._listen = listen
        self._config = config
        self._console = console
        self._output = Path(request.output).absolute()
        self._state = StateFolder(self._output, request.output)
        self._writer = ThreadPoolExecutor(1, "freight-writer")
        self._reader = ThreadPoolExecutor(2, "freight-reader")
        self._interrupted = False
        self._in_threads = 0
        self._plane: ControlPlane | None = None
        self._main: asyncio.Task[Any] | None = None

    def interrupt(self) -> None:
        """Stop cleanly: finished records are kept, and the same command goes on later."""
        self._interrupted = True
        if self._plane is not None:
            self._plane.stop()
        elif self._main is not None and not self._in_threads:
            self._main.cancel()

    def kill(self) -> None:
        """Stop at once, with all that was started."""
        if self._plane is not None:
            self._plane.kill()

    async def run(self) -> Outcome:
        """Run the job and return how it ended; raise FreightError for what kept it from that."""
        self._main = asyncio.current_task()
        check_output(self._request)
        try:
            await self._in_thread(self._state.claim, self._pause)
            with ExitStack() as stack:
                return await self._prepare(stack)
        except asyncio.CancelledError:
            raise Interrupted("interrupted before any record ran") from None
        except DamagedError as error:
            raise OperationError(
                f"the state folder {self._state.shown} is damaged: {error}",
                "the input and the output are untouched; start over with --fresh",
            ) from error
        finally:
            self._state.close()
            self._writer.shutdown()
            self._reader.shutdown()

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        if self._interrupted:
            raise Interrupted("interrupted while waiting for the state folder")

    async def _in_thread(self, call: Any, *args: Any) -> Any:
        # What runs in a thread cannot be cancelled: it looks at `_interrupted` itself, and is waited for.
        self._in_threads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, call, *args)
        finally:
            self._in_threads -= 1
            if self._interrupted:
                raise Interrupted("interrupted before any record ran")

    async def _prepare(self, stack: ExitStack) -> Outcome:
        file = await self._in_thread(open_input, self._request.file, self._keep_stream)
        stack.callback(file.close)
        sample = await self._in_thread(inspect, file, self._config["limits.record_bytes"], lambda: self._interrupted)
        self._say_budgets(sample)
        typed, why = choose_model(self._request.model, next(iter(sample.models), None), self._config)
        if why:
            self._console.note(why)
        model = await resolve(typed, self._config, self._request.ignore_record_model, self._wait_for_endpoint)
        self._check_options(model)
        check_models(file.shown, model, sample)
        launcher = LocalLauncher(local_devices(self._config.local_devices()), lock_folder())
        self._state.sweep(launcher)
        previous = await self._previous(file, model)
        if isinstance(previous, Outcome):
            return previous
        return await self._run_job(stack, file, model, launcher, previous)

    def _keep_stream(self, source: int) -> Path:
        if os.isatty(source):
            self._console.note("reading records from the terminal; end with Ctrl-D")
        return self._state.keep_stream(source, lambda: self._interrupted)

    def _say_budgets(self, sample: Sample) -> None:
        if sample.small_budgets:
            self._console.note(
                f"note: {sample.small_budgets} of the first {sample.records} records allow fewer than 512 tokens, "
                "which a reasoning model may spend thinking"
            )

    async def _wait_for_endpoint(self, problem: str) -> None:
        self._console.note(f"waiting for {problem} (Ctrl-C to stop)")
        await asyncio.sleep(_ENDPOINT_PAUSE_S)

    def _check_options(self, model: ModelSpec) -> None:
        """Raise UserError for what this machine cannot give the model."""
        if model.entry.gpus:
            raise UserError(
                f"model {model.name} asks for {model.entry.gpus} GPUs per worker; this machine has CPU devices only",
                "set gpus = 0 in its entry to run it on the CPU",
            )

    async def _previous(self, file: InputFile, model: ModelSpec) -> "Outcome | _Start":
        """Return what the state folder and the output leave to do, or the outcome when there is nothing left."""
        request, row = self._request, self._state.job()
        ours = row is not None and (mark := written(row)) is not None and mark.matches(self._output)
        may_replace = request.force or ours
        if row is not None and not request.fresh:
            kept = await self._continued(row, file, model, ours)
            if isinstance(kept, Outcome):
                return kept
            row = kept
        elif row is not None:
            self._state.forget(row)
            row = None
        if self._output.exists() and not may_replace:
            raise UserError(
                f"the output {request.output} exists and is not Freight's, or was changed since",
                "choose another output, or use --force to replace it",
            )
        return _Start(row, may_replace)

    async def _continued(self, row: JobRow, file: InputFile, model: ModelSpec, ours: bool) -> Outcome | JobRow | None:
        """Return the job to go on with, None to begin anew, or the outcome of one that is done."""
        sha256 = await self._in_thread(sha256_of, file, lambda: self._interrupted)
        spec = job_spec(sha256, model, self._request)
        differences = [
            f"{key}: {row.spec.get(key)!r} before, {value!r} now"
            for key, value in spec.items()
            if row.spec.get(key) != value
        ]
        if differences and self._has_answers(row):
            raise UserError(
                f"{self._state.shown} belongs to another run; what differs:\n  " + "\n  ".join(differences),
                "run the earlier command to go on with it, use --fresh to start over, or choose another output",
            )
        if differences or row.state is State.VALIDATING:
            self._state.forget(row)
            return None
        if row.state is State.COMPLETED:
            return self._completed(row, ours)
        if row.state in FINAL:
            return self._happened(row, Event.CONTINUED)
        row = row if row.state is State.QUEUED else self._happened(row, Event.CONTROL_STOPPED)
        return self._happened(row, Event.RETRIED) if self._request.retry_errors else row

    def _has_answers(self, row: JobRow) -> bool:
        if row.state is State.COMPLETED:
            return True
        if not self._state.has_results(row.id):
            return False
        results = self._state.open_results(row.id)
        try:
            return results.has_answers()
        finally:
            results.close()

    def _completed(self, row: JobRow, ours: bool) -> Outcome | JobRow | None:
        assert row.outcome is not None and row.records is not None
        totals = Totals(done=row.outcome["done"], failed=row.outcome["failed"])
        if self._request.retry_errors and totals.failed:
            return self._happened(row, Event.RETRIED)
        outcome = Outcome(row.state, "", row.records, totals, self._failures(row), already_done=True)
        if ours:
            return outcome
        if self._output.exists():
            return replace(outcome, note=f"{self._request.output} was changed since Freight wrote it")
        if not self._state.has_results(row.id):
            self._console.note(f"{self._request.output} is gone; running the file again")
            self._state.forget(row)
            return None
        self._write_again(row, row.records)
        return replace(outcome, note=f"{self._request.output} was gone and is written again")

    def _failures(self, row: JobRow) -> tuple[Failure, ...]:
        if not self._state.has_results(row.id):
            return ()
        results = self._state.open_results(row.id)
        try:
            return tuple(results.failures())
        finally:
            results.close()

    def _write_again(self, row: JobRow, records: int) -> None:
        results = self._state.open_results(row.id)
        try:
            aside = self._state.job_folder(row.id) / "output.partial"
            write_aside(aside, row.id, rows(results, records, _nothing_missing), records)
            put_in_place(aside, self._output, replace=False)
        finally:
            results.close()

    def _happened(self, row: JobRow, event: Event) -> JobRow:
        return self._state.catalog.happened(row, event, time.time())

    async def _run_job(
        self, stack: ExitStack, file: InputFile, model: ModelSpec, launcher: LocalLauncher, start: "_Start"
    ) -> Outcome:
        job = start.row.id if start.row else str(uuid.uuid4())
        results = self._state.open_results(job)
        stack.callback(results.close)
        index = await self._intake(file, model, results, start.row.epoch if start.row else 0)
        row = start.row or self._add(job, job_spec(index.sha256, model, self._request), index)
        dispatcher = Dispatcher(file, index, results, row, self._writer, self._reader)
        run = JobRun(
            row, file, index, results, dispatcher, model, self._request.options, _limits(self._config),
            self._state.job_folder(job), self._output, start.may_replace,
        )  # fmt: skip
        await self._drive(run, launcher)
        outcome = Outcome(run.row.state, run.row.reason, index.records, dispatcher.totals, tuple(results.failures()))
        if run.row.state is State.COMPLETED and not dispatcher.totals.failed:
            stack.callback(self._state.drop_results, job)
            stack.callback(results.close)
        return outcome

    def _add(self, job: str, spec: dict[str, Any], index: Index) -> JobRow:
        row = self._state.catalog.add(job, spec, time.time())
        self._state.catalog.set_records(job, index.records)
        return self._happened(row, Event.ACCEPTED)

    async def _intake(self, file: InputFile, model: ModelSpec, results: Results, epoch: int) -> Index:
        """Check the whole file; bad lines become results, or with --strict refuse the file."""
        hosts = frozenset(host.lower() for host in self._config["media.hosts"])
        rules = Rules(model.fits, hosts, model.name)
        limits = Limits(self._config["limits.record_bytes"], None, self._config["limits.file_bytes"])
        strict: list[Problem] = []

        def keep(problems: list[Problem]) -> None:
            if self._request.strict:
                strict.extend(problems)
            else:
                self._writer.submit(results.put, [problem.line() for problem in problems], epoch).result()

        index: Index = await self._in_thread(scan, file, rules, limits, keep, lambda: self._interrupted)
        if strict:
            raise UserError(listing(file.shown, strict), "correct these lines, or leave out --strict")
        return index

    async def _drive(self, run: JobRun, launcher: LocalLauncher) -> None:
        plane = ControlPlane(self._state.catalog, launcher, self._state.lock, self._writer, self._listen)
        await plane.start()
        self._plane = plane
        try:
            if self._interrupted:
                plane.stop()
            await plane.run(run, self._console.show)
        finally:
            await plane.close()
        if run.row.state not in FINAL:
            raise Interrupted(
                f"interrupted with {run.dispatcher.totals.done} of {run.index.records} records done, all of them kept",
            )


@dataclass(frozen=True, slots=True)
class _Start:
    """What a run begins with: the job to go on with, and whether it may replace what stands at the output."""

    row: JobRow | None
    may_replace: bool


def _nothing_missing(index: int) -> tuple[bytes | None, str, str]:
    raise AssertionError(f"record {index} of a completed job has no result")


def _limits(config: Config) -> EngineLimits:
    return EngineLimits(
        config["engines.start_stall"],
        config["engines.start_timeout"],
        config["engines.stall"],
        config["engines.suspend_after"],
    )


def job_spec(sha256: str, model: ModelSpec, request: RunRequest) -> dict[str, Any]:
    """Return what makes two runs the same, in words that a refusal can name."""
    return {
        INPUT_KEY: sha256,
        **model.identity,
        "--ignore-record-model": request.ignore_record_model,
    }


def check_output(request: RunRequest) -> None:
    """Raise UserError for an output that could never be written."""
    shown = request.output
    output = Path(shown).absolute()
    folder = output.parent
    if not folder.is_dir():
        raise UserError(f"the folder of the output {shown} does not exist", f"make it first: mkdir -p {folder}")
    if output.is_dir():
        raise UserError(f"the output {shown} is a folder", "name a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to the folder of the output {shown}", "choose another folder for -o")
    source = Path(request.file)
    if request.file != "-" and output.exists() and source.exists() and output.samefile(source):
        raise UserError(f"the output {shown} is the input file itself", "name another output")


def check_models(shown: str, model: ModelSpec, sample: Sample) -> None:
    """Raise UserError when every record of the sample asks for another model than the job's."""
    if model.fits is None or not sample.models:
        return
    others = [name for name in sample.models if name is not None and name not in model.fits]
    if len(others) == len(sample.models):
        named = ", ".join(sorted({repr(name) for name in others})[:3])
        raise UserError(
            f"{shown}: all of the first {len(others)} records ask for model {named}, and this job runs {model.name}",
            f"use --ignore-record-model, or give {model.name} that alias: freight models add … --alias {others[0]}",
        )


def listing(shown: str, problems: list[Problem]) -> str:
    """Return the bad lines of a file as text, in order, and how many more there are."""
    ordered = sorted(problems, key=lambda problem: problem.number)
    lines = [f"{shown}, line {p.number}: {p.rejection.code}: {p.rejection.message}" for p in ordered[:MOST_LISTED]]
    more = len(ordered) - MOST_LISTED
    return "\n".join([*lines, f"… and {more} more"] if more > 0 else lines)
