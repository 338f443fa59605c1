"""`freight run`: a control plane with one job that ends with it, its state beside the output."""

import asyncio
import os
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from freight.config import Config
from freight.control.checks import check_models, engine_limits, intake_limits, intake_rules, listing, policy_of
from freight.control.continuation import (
    AlreadyDone,
    Asked,
    Decision,
    Earlier,
    GoOn,
    Standing,
    StartOver,
    WriteAgain,
    decide,
)
from freight.control.destination import FileAt
from freight.control.dispatcher import FULL_RETRY_S, Dispatcher
from freight.control.inputs import InputChanged, InputFile, Sample, inspect, open_input
from freight.control.intake import Index, Problem, Wishes, scan, sha256_of
from freight.control.jobrun import JobOptions, JobRun
from freight.control.keptindex import keep_index, kept_index
from freight.control.output import ASIDE, put_in_place, rows, write_aside
from freight.control.pins import Pin, pin_of
from freight.control.placing import check_gpus, check_place, needs_device
from freight.control.plane import ControlPlane, Listen
from freight.control.resolve import choose_model, find_entry, resolve
from freight.control.sockets import CONTROL_SOCKET, make_private, runtime_folder
from freight.control.statefolder import INPUT_KEY, SAME, StateFolder, standing
from freight.core.job import FINAL, Event, State, Totals
from freight.core.model import EngineName, ModelSpec
from freight.core.progress import Outcome, Progress
from freight.errors import FreightError, Interrupted, OperationError, UserError, refusing
from freight.launchers.base import Remains
from freight.launchers.devices import find_devices
from freight.launchers.local import LocalLauncher
from freight.launchers.locks import lock_folder
from freight.launchers.standby import Standby
from freight.store.database import STORAGE_ERRORS, StorageFull
from freight.store.results import Results
from freight.store.rows import JobRow

# SQLite takes paths of 512 bytes; the state folder's part comes after the output's.
MOST_OUTPUT_PATH: Final = 400
IGNORE_KEY: Final = "--ignore-record-model"
DEDUPE_KEY: Final = "--dedupe"
_T = TypeVar("_T")
_ENDPOINT_PAUSE_S: Final = 2.0
# A smaller input is checked before a worker that is started first could do anything.
_LONG_BYTES: Final = 4_000_000


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What `freight run` was asked for. `file` is a path or "-"; `gpus` None is what the model's entry says."""

    file: str
    output: str
    model: str | None
    options: JobOptions
    gpus: int | None = None
    strict: bool = False
    ignore_record_model: bool = False
    fresh: bool = False
    force: bool = False
    retry_errors: bool = False


class Console(Protocol):
    """Where a run says what it does."""

    def note(self, text: str) -> None:
        """Say one line."""
        ...

    def show(self, progress: Progress) -> None:
        """Show how the job stands."""
        ...


class EmbeddedRun:
    """One `freight run`, from its arguments to its outcome. `standby` may become its first worker."""

    def __init__(
        self, request: RunRequest, config: Config, console: Console, listen: Listen, standby: Standby | None = None
    ) -> None:
        self._request = request
        self._standby = standby
        self._listen = listen
        self._config = config
        self._console = console
        self._output = output_path(request)
        self._state = StateFolder(self._output, request.output)
        self._writer = ThreadPoolExecutor(1, "freight-writer")
        self._reader = ThreadPoolExecutor(2, "freight-reader")
        self._interrupted = False
        self._in_threads = 0
        self._plane: ControlPlane | None = None
        self._runtime: Path | None = None
        # What an earlier run that was killed left on devices.
        self._remains: list[Remains] = []
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
        if self._standby is not None:
            self._standby.close()
        if self._plane is not None:
            self._plane.kill()
        if self._runtime is not None:
            shutil.rmtree(self._runtime, ignore_errors=True)

    async def run(self) -> Outcome:
        """Run the job and return how it ended; raise FreightError for what kept it from that."""
        self._main = asyncio.current_task()
        try:
            await self._in_thread(self._state.claim, self._pause)
            self._state.open(self._request.fresh)
            with ExitStack() as stack:
                return await self._prepare(stack)
        except asyncio.CancelledError:
            raise Interrupted("interrupted before any record ran") from None
        except FreightError:
            raise
        except STORAGE_ERRORS as error:
            raise OperationError(
                f"the state folder {self._state.shown} cannot be read: {error}",
                "the input and the output are untouched; restore the folder, or start over with --fresh",
            ) from error
        finally:
            self._state.close()
            self._writer.shutdown()
            self._reader.shutdown()

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        if self._interrupted:
            raise Interrupted("interrupted while waiting for the state folder")

    async def _in_thread(self, call: Callable[..., _T], *args: object) -> _T:
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
        row = self._state.job()
        sha256 = await self._in_thread(sha256_of, file, lambda: self._interrupted) if row else ""
        stands = await self._in_thread(standing, row, self._output)
        if row is not None and self._is_plainly_done(row, typed, sha256, stands):
            return self._already_done(row, "")
        check_gpus(*find_entry(typed, self._config), self._request.gpus)
        model = await resolve(typed, self._config, self._request.ignore_record_model, self._wait_for_endpoint)
        check_models(file.shown, model, sample)
        devices = find_devices(self._config.local_devices(), os.environ)
        launcher = LocalLauncher(devices, lock_folder(), standby=self._standby)
        gpus = check_place("the run", model, self._request.gpus, launcher.devices())
        self._remains = await self._in_thread(self._state.sweep, launcher, self._config["devices.release_timeout"])
        same = self._same(sha256, model.identity)
        request = self._request
        asked = Asked(request.fresh, request.force, request.retry_errors)
        decision = decide(None if request.fresh else self._earlier(row), same, asked, stands, request.output)
        described = same | {"typed": typed}
        return await self._follow(decision, row, _Prepared(stack, file, sample, model, launcher, gpus, described))

    def _is_plainly_done(self, row: JobRow, typed: str, sha256: str, stands: Standing) -> bool:
        """Return whether the same command was finished before: then its server need not be there any more."""
        request = self._request
        _, entry = find_entry(typed, self._config)
        return (
            entry.engine is EngineName.ENDPOINT
            and row.state is State.COMPLETED
            and stands is Standing.OURS
            and not (request.fresh or request.retry_errors)
            and row.spec["typed"] == typed
            and _same_before(row).items() >= self._same(sha256, {}).items()
        )

    def _same(self, sha256: str, identity: dict[str, str]) -> dict[str, Any]:
        """Return what makes two runs the same, the model's identity with it, in words that a refusal can name."""
        return {
            INPUT_KEY: sha256,
            **identity,
            IGNORE_KEY: self._request.ignore_record_model,
            DEDUPE_KEY: self._request.options.dedupe,
            "media.hosts": sorted(self._config["media.hosts"]),
            "limits.record_bytes": self._config["limits.record_bytes"],
        }

    def _earlier(self, row: JobRow | None) -> Earlier | None:
        if row is None:
            return None
        has_results = self._state.has_results(row.id)
        answered = row.state is State.COMPLETED or (has_results and self._look(row, Results.has_answers))
        return Earlier(row.state, _same_before(row), (row.outcome or {}).get("failed", 0), answered, has_results)

    def _look(self, row: JobRow, ask: Callable[[Results], _T]) -> _T:
        results = self._state.open_results(row.id)
        try:
            return ask(results)
        finally:
            results.close()

    async def _follow(self, decision: Decision, row: JobRow | None, prepared: "_Prepared") -> Outcome:
        """Do what was decided about the earlier run."""
        match decision:
            case AlreadyDone(note=note):
                assert row is not None
                return self._already_done(row, note)
            case WriteAgain(note=note):
                assert row is not None
                await self._in_thread(self._write_again, row)
                return self._already_done(row, note)
            case StartOver(note=note):
                if note:
                    self._console.note(note)
                if row is not None:
                    # What stands at the output stays known for ours.
                    prepared.outputs.extend((row.outcome or {}).get("outputs", []))
                    self._state.forget(row)
                return await self._run_job(prepared, None)
            case GoOn(events=events):
                assert row is not None
                for event in events:
                    row = await self._in_thread(self._patiently, self._happened, row, event)
                return await self._run_job(prepared, row)

    def _already_done(self, row: JobRow, note: str) -> Outcome:
        assert row.outcome is not None and row.records is not None
        totals = Totals(done=row.outcome["done"], failed=row.outcome["failed"])
        failures = self._look(row, Results.failures) if self._state.has_results(row.id) else []
        return Outcome(row.state, "", row.records, totals, tuple(failures), already_done=True, note=note)

    def _write_again(self, row: JobRow) -> None:
        records = row.records or 0
        aside = self._state.job_folder(row.id) / ASIDE
        self._look(row, lambda results: write_aside(aside, row.id, rows(results, records, _nothing_missing), records))
        put_in_place(aside, self._output, replace=self._request.force)

    def _happened(self, row: JobRow, event: Event) -> JobRow:
        return self._state.catalog.happened(row, event, time.time())

    def _patiently(self, call: Callable[..., _T], *args: object) -> _T:
        """Write to a database, and while there is no room wait for it. For threads."""
        while True:
            try:
                return self._writer.submit(call, *args).result()
            except StorageFull as error:
                self._console.note(f"{State.SUSPENDED}: {error.message}; waiting for room (Ctrl-C to stop)")
                self._pause(FULL_RETRY_S)

    def _keep_stream(self, source: int) -> Path:
        if os.isatty(source):
            self._console.note("reading records from the terminal; end with Ctrl-D")
        return self._state.keep_stream(source, lambda: self._interrupted)

    def _say_budgets(self, sample: Sample) -> None:
        note = sample.budget_note()
        if note:
            self._console.note(note)

    async def _wait_for_endpoint(self, problem: str) -> None:
        self._console.note(f"waiting for {problem} (Ctrl-C to stop)")
        await asyncio.sleep(_ENDPOINT_PAUSE_S)

    async def _run_job(self, prepared: "_Prepared", earlier: JobRow | None) -> Outcome:
        job = earlier.id if earlier else str(uuid.uuid4())
        results = self._state.open_results(job)
        prepared.stack.callback(results.close)
        runtime = self._runtime = runtime_folder()
        self._state.note_runtime(runtime)
        plane = self._plane_of(job, runtime, prepared.launcher)
        await plane.start()
        self._plane = plane
        try:
            # What an earlier run was not able to give back before it was stopped.
            await plane.apply.quarantine.take_up()
            for left in self._remains:
                await plane.apply.quarantine.enter(left)
            run = await self._checked(plane, prepared, results, job, earlier)
            try:
                if self._interrupted:
                    plane.stop()
                await plane.run(run, self._console.show)
            finally:
                await run.dispatcher.close()
        finally:
            await plane.apply.end_workers()
            await plane.close()
            shutil.rmtree(runtime, ignore_errors=True)
        return self._outcome(run)

    def _plane_of(self, job: str, runtime: Path, launcher: LocalLauncher) -> ControlPlane:
        """Return a control plane for the one job; its workers' sockets are in `runtime`."""
        logs = self._state.job_folder(job) / "workers"

        def make_places(_: JobRun | None, worker: str) -> tuple[Path, Path]:
            make_private(runtime / worker, logs)
            return runtime / worker, logs / f"{worker}.log"

        return ControlPlane(
            self._state.catalog, launcher, self._state.lock, self._writer, self._listen, runtime / CONTROL_SOCKET,
            make_places, policy_of(self._config),
        )  # fmt: skip

    async def _checked(
        self, plane: ControlPlane, prepared: "_Prepared", results: Results, job: str, earlier: JobRow | None
    ) -> JobRun:
        """Return the job with all of its input checked, ready to run."""
        file, folder = prepared.file, self._state.job_folder(job)
        index = await self._index(plane, prepared, results, job, earlier)
        row = earlier or await self._in_thread(self._add, job, prepared, index)
        return JobRun(
            row, file, index, results, Dispatcher(file, index, results, row, self._writer, self._reader),
            prepared.model, replace(self._request.options, gpus=prepared.gpus), engine_limits(self._config), folder,
            FileAt(self._output, folder / ASIDE), self._request.force,
        )  # fmt: skip

    def _outcome(self, run: JobRun) -> Outcome:
        totals, records = run.dispatcher.totals, run.index.records
        if run.row.state not in FINAL:
            raise Interrupted(f"interrupted with {totals.done} of {records} records done, all of them kept")
        failures = run.results.failures(run.row.retried)
        if run.row.state is State.COMPLETED and not totals.failed:
            run.results.close()
            self._state.drop_results(run.row.id)
        return Outcome(run.row.state, run.row.reason, records, totals, tuple(failures))

    def _add(self, job: str, prepared: "_Prepared", index: Index) -> JobRow:
        outcome = {"outputs": prepared.outputs, "done": 0, "failed": 0} if prepared.outputs else None
        catalog = self._state.catalog
        row = self._patiently(catalog.add, job, prepared.spec(index), index.records, outcome, time.time())
        return self._patiently(self._happened, row, Event.ACCEPTED)

    async def _index(
        self, plane: ControlPlane, prepared: "_Prepared", results: Results, job: str, earlier: JobRow | None
    ) -> Index:
        """Check the whole file, unless an earlier run of the same file on the same model has done so.

        Where that takes a while, the model's servers come up meanwhile.
        """
        folder, ordered = self._state.job_folder(job), self._request.options.order == "auto"
        described = prepared.described
        if earlier is not None and earlier.spec["typed"] == described["typed"]:
            kept = await self._in_thread(kept_index, folder, described[INPUT_KEY], ordered, self._request.strict)
            if kept is not None:
                return kept
        work = self._intake(prepared.file, prepared.model, results, earlier.epoch if earlier else 0)
        try:
            if needs_device(prepared.model) and prepared.file.size >= _LONG_BYTES:
                index = await plane.warm_up(self._pin(prepared), work)
            else:
                index = await work
        except InputChanged as error:
            if earlier is not None:
                raise
            # There is nothing yet that could go on.
            raise OperationError(
                f"{prepared.file.shown} changed while it was being checked; no record has run",
                "run the same command again once the file is complete",
            ) from error
        await self._in_thread(keep_index, folder, index, ordered)
        return index

    def _pin(self, prepared: "_Prepared") -> Pin:
        """Return what keeps up the servers that the job will need as far as the sample tells."""
        model, sample, options = prepared.model, prepared.sample, self._request.options
        # No more than there are records for, which of those of the sample may all be the same.
        workers = 1 if options.dedupe else min(options.workers or sample.records, sample.records)
        return pin_of(model.name, workers, model, prepared.gpus, sample.endpoints, options.concurrency)

    async def _intake(self, file: InputFile, model: ModelSpec, results: Results, epoch: int) -> Index:
        """Check the whole file; bad lines become results, or with --strict refuse the file."""
        rules, limits = intake_rules(self._config, model), intake_limits(self._config)
        strict: list[Problem] = []

        def keep(problems: list[Problem]) -> None:
            if self._request.strict:
                strict.extend(problems)
            else:
                self._patiently(results.put, [problem.line() for problem in problems], epoch)

        wishes = Wishes(self._request.options.order == "auto", self._request.options.dedupe)
        index = await self._in_thread(scan, file, rules, limits, keep, lambda: self._interrupted, wishes)
        if strict:
            raise UserError(listing(file.shown, strict), "correct these lines, or leave out --strict")
        return index


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a job needs to run, what of it goes into its spec, and the marks of outputs that earlier runs wrote."""

    stack: ExitStack
    file: InputFile
    sample: Sample
    model: ModelSpec
    launcher: LocalLauncher
    gpus: int
    described: dict[str, Any]
    outputs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def spec(self, index: Index) -> dict[str, Any]:
        """Return what the catalog keeps of the request."""
        same = {key: value for key, value in self.described.items() if key != "typed"}
        return {SAME: same | {INPUT_KEY: index.sha256}, "typed": self.described["typed"]}


def _same_before(row: JobRow) -> dict[str, Any]:
    """Return what made an earlier run the same; there was no --dedupe always."""
    return {DEDUPE_KEY: False, **row.spec[SAME]}


def _nothing_missing(index: int) -> tuple[bytes | None, str, str]:
    raise AssertionError(f"record {index} of a completed job has no result")


def output_path(request: RunRequest) -> Path:
    """Return where the output goes, links followed; raise UserError for one that could never be written."""
    shown = request.output
    with refusing(f"cannot write the output {shown!r}", "choose another name for -o"):
        shown.encode()  # A name that is not UTF-8 could not be passed on to the database.
        output = Path(os.path.realpath(shown))
        if not shown or shown.endswith("/") or output.is_dir():
            raise UserError(f"the output {shown!r} is a folder", "name a file, as in -o out.jsonl")
        if os.path.lexists(output) and not output.is_file():
            raise UserError(f"the output {shown} is not a regular file", "name a file, as in -o out.jsonl")
        folder = output.parent
        if not folder.is_dir():
            raise UserError(f"the folder of the output {shown} does not exist", f"make it first: mkdir -p {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"cannot write to the folder of the output {shown}", "choose another folder for -o")
        if len(os.fsencode(output)) > MOST_OUTPUT_PATH:
            raise UserError(f"the path of the output {shown} is too long", f"{MOST_OUTPUT_PATH} bytes are possible")
        source = Path(request.file)
        if request.file != "-" and output.exists() and source.exists() and output.samefile(source):
            raise UserError(f"the output {shown} is the input file itself", "name another output")
        return output
