"""Making a job of an upload: checks before anything is kept, the job's entry, and the reading of its input."""

import asyncio
import hashlib
import logging
import os
import random
import tempfile
import time
import traceback
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from freight.config import Config
from freight.control.checks import check_models, intake_limits, intake_rules, listing
from freight.control.context import Checking, Context
from freight.control.inputs import InputFile, inspect
from freight.control.intake import Index, Problem, scan
from freight.control.jobrun import counts_of
from freight.control.naming import check_name, readable_name
from freight.control.placing import check_place
from freight.control.resolve import choose_model, resolve
from freight.control.shelf import Shelf, kept_model, model_of, request_of, spec_of
from freight.control.uploads import Uploads
from freight.core.job import Event, State, Totals
from freight.core.model import ModelSpec
from freight.core.view import JobRequest
from freight.errors import Conflict, FreightError, Interrupted, OperationError, UserError, refusing
from freight.store.catalog import JobRow
from freight.store.database import Sharing, StorageFull, is_full
from freight.store.files import sync_folder

log = logging.getLogger("freight.service")

# An endpoint that does not answer is asked this often before a submission is refused.
_ENDPOINT_TRIES: Final = 3
_ENDPOINT_PAUSE_S: Final = 1.0
_FULL_RETRY_S: Final = 5.0
_SHOWN: Final = frozenset({"file", "typed"})
_RANGES: Final = {
    "workers": (1, 10_000),
    "gpus": (0, 10_000),
    "concurrency": (0, 65_536),
    "timeout_s": (0, 1e9),
    "record_timeout_s": (0, 1e9),
    "priority": (-1000, 1000),
}


@dataclass(frozen=True, slots=True)
class Made:
    """A job that was made, or found by its key, and what is worth saying about it."""

    id: str
    notes: tuple[str, ...] = ()
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A request whose model was found, and the input that it is about."""

    request: JobRequest
    model: ModelSpec
    upload: Path
    sha256: str
    notes: tuple[str, ...]


class Submission:
    """Takes jobs in."""

    def __init__(self, context: Context, shelf: Shelf, uploads: Uploads) -> None:
        self._context = context
        self._shelf = shelf
        self._uploads = uploads
        # Held from looking whether a name or key is taken until it is.
        self._entering = asyncio.Lock()
        self._reading: set[asyncio.Task[None]] = set()

    async def submit(self, request: JobRequest, key: str | None) -> Made:
        """Make a job and return it once its input was checked; with the `key` of an earlier request, return that job.

        Raises UserError for what is refused, which leaves no job.
        """
        _check_options(request)
        upload, sha256 = self._uploads.find(request.upload)
        digest = _digest(request, sha256)
        earlier = await self._earlier(key, digest)
        if earlier is not None:
            return await self._found(earlier, request.upload)
        resolved = await self._resolve(request, upload, sha256)
        async with self._entering:
            earlier = await self._earlier(key, digest)
            row = earlier or await self._enter(resolved, key, digest)
            checking = self._context.checking.get(row.id) or (None if earlier else self.read(row))
        if earlier is not None:
            return await self._found(earlier, request.upload)
        assert checking is not None
        await _outcome(checking)
        return Made(row.id, resolved.notes)

    async def _found(self, earlier: JobRow, upload: str) -> Made:
        """Return the job that an earlier request with the same key made, once its input was checked."""
        checking = self._context.checking.get(earlier.id)
        if checking is not None:
            await _outcome(checking)
        self._uploads.drop(upload)
        return Made(earlier.id, is_new=False)

    async def _earlier(self, key: str | None, digest: str) -> JobRow | None:
        row = await self._context.write(self._context.catalog.requested, key) if key else None
        if row is not None and row.request_digest != digest:
            raise Conflict(
                f"idempotency key {key!r} was used for another request, which made job {row.name}",
                "use a new key for a new request, or send the same one again",
            )
        return row

    async def _resolve(self, request: JobRequest, upload: Path, sha256: str) -> _Resolved:
        """Check all that can be checked without reading the whole input."""
        config = self._context.settings()
        file = await self._context.in_thread(InputFile, upload, request.file or "the input")
        try:
            sample = await self._context.in_thread(inspect, file, config["limits.record_bytes"])
        finally:
            file.close()
        name, why = choose_model(request.model, next(iter(sample.models), None), config)
        model = await _model(name, request, config)
        await self._context.in_thread(check_place, "the job", model, request.gpus, self._context.devices)
        check_models(file.shown, model, sample)
        notes = tuple(note for note in (why, sample.budget_note()) if note)
        return _Resolved(request, model, upload, sha256, notes)

    async def renewed(self, row: JobRow) -> dict[str, Any]:
        """Return a job's spec for going on, with its model's entry as it is now, unless that would mix answers.

        Where the entry is gone, or now means something that may answer otherwise, a job that has answers keeps the
        entry that it was submitted with.
        """
        request, before = request_of(row), model_of(row)
        try:
            model = await _model(request.model or before.name, request, self._context.settings())
            await self._context.in_thread(check_place, "the job", model, request.gpus, self._context.devices)
            if model.identity != before.identity and await self._context.in_thread(self._has_answers, row.id):
                return row.spec
        except FreightError:
            return row.spec
        return {**row.spec, "model": kept_model(model)}

    def _has_answers(self, job: str) -> bool:
        results = self._context.folder.open_results(job, Sharing.READER)
        try:
            return results.has_answers()
        finally:
            results.close()

    async def _enter(self, resolved: _Resolved, key: str | None, digest: str) -> JobRow:
        """Give the job its entry; its input is in its folder before that, so that no entry is without one."""
        context, request = self._context, resolved.request
        names = set(await context.write(context.catalog.names))
        name = request.name or readable_name(random.choice, names.__contains__)
        if name in names:
            raise Conflict(
                f"there is a job named {name} already",
                f"choose another name, or delete that one: freight batch delete {name}",
            )
        request = replace(request, name=name)
        if request.output:
            _check_output(Path(request.output), f"{name}-results.jsonl")
        job = str(uuid.uuid4())
        try:
            await context.in_thread(self._move_in, job, resolved.upload)
        except OSError as error:
            context.folder.forget(job)
            if is_full(error):
                raise StorageFull(
                    "no space left for the job", "free some space where the service keeps its data"
                ) from error
            raise OperationError(f"the job cannot be kept: {error.strerror}", "see freight doctor") from error
        spec = spec_of(request, resolved.model, resolved.sha256, context.folder.input(job).stat().st_size)
        try:
            return await context.write(
                lambda: context.catalog.add(
                    job, spec, None, None, time.time(), name=name, model=resolved.model.name,
                    priority=request.priority, request_key=key, request_digest=digest if key else None,
                )
            )  # fmt: skip
        except FreightError:
            context.folder.forget(job)
            raise

    def _move_in(self, job: str, upload: Path) -> None:
        target = self._context.folder.input(job)
        if not upload.exists():
            raise UserError("the upload was used by another job", "send the input again; one upload makes one job")
        target.parent.mkdir(mode=0o700)
        upload.rename(target)
        sync_folder(target.parent)
        sync_folder(target.parent.parent)

    def read(self, row: JobRow, again: bool = False) -> Checking:
        """Begin to read the input of a job that is in VALIDATING; `again`: nobody waits for it any more."""
        checking = self._context.checking[row.id] = Checking(row)
        task = asyncio.create_task(self._read(checking, again))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        return checking

    async def join(self) -> None:
        """Wait until no input is being read."""
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def _read(self, checking: Checking, again: bool) -> None:
        job = checking.row.id
        try:
            await self._check_in(checking, again)
        except Interrupted:
            checking.refused = OperationError(
                f"the service is ending; job {checking.row.name} is kept and goes on at its next start"
            )
        except FreightError as error:
            checking.refused = error
            await self._refuse(checking, error, again)
        except Exception as error:
            # Without the error's own words, which may quote a record.
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("job %s: a bug in reading its input: %s\n%s", job, type(error).__name__, frames)
            checking.refused = error
            await self._refuse(checking, OperationError(f"a bug: {type(error).__name__}"), again)
        finally:
            del self._context.checking[job]
            checking.ended.set()

    async def _check_in(self, checking: Checking, again: bool) -> None:
        """Read the input, and put the job into the queue."""
        context = self._context
        while True:
            try:
                scanning = asyncio.get_running_loop().run_in_executor(context.scanners, self._scan, checking.row)
                index = await scanning
                totals = await context.in_thread(self._totals, checking.row.id)
                outcome: dict[str, Any] = {"outputs": [], **counts_of(totals)}
                await context.write(context.catalog.set_records, checking.row.id, index.records, outcome)
                break
            except StorageFull:
                if not again:
                    raise
                await _pause(context.stopping, _FULL_RETRY_S)
        waiting = await self._shelf.waiting(
            msgspec.structs.replace(checking.row, records=index.records, outcome=outcome)
        )
        async with context.plane.deciding:
            checking.row = msgspec.structs.replace(checking.row, records=index.records, outcome=outcome)
            if checking.row.state == State.VALIDATING:
                await context.plane.apply.happened(checking, Event.ACCEPTED)
            # It may have been cancelled meanwhile: the planner sees to that.
            waiting.row = checking.row
            self._shelf.put(waiting)

    def _scan(self, row: JobRow) -> Index:
        context, config = self._context, self._context.settings()
        request = request_of(row)
        results = context.writer.submit(context.folder.open_results, row.id, Sharing.WRITER).result()
        strict: list[Problem] = []

        def keep(problems: list[Problem]) -> None:
            if request.strict:
                strict.extend(problems)
            else:
                context.writer.submit(results.put, [problem.line() for problem in problems], 0).result()

        file = None
        try:
            file = InputFile(context.folder.input(row.id), request.file or "the input")
            rules = intake_rules(config, model_of(row))
            index = scan(file, rules, intake_limits(config), keep, context.stopping.is_set)
            if strict:
                raise UserError(listing(file.shown, strict), "correct these lines, or leave out --strict")
            index.save(context.folder.index(row.id))
            return index
        finally:
            if file is not None:
                file.close()
            context.writer.submit(results.close).result()

    def _totals(self, job: str) -> Totals:
        results = self._context.folder.open_results(job, Sharing.READER)
        try:
            return results.totals()
        finally:
            results.close()

    async def _refuse(self, checking: Checking, error: FreightError, again: bool) -> None:
        """Leave no job of a refused input; where nobody waits for the answer any more, a failed one that says why."""
        context, job = self._context, checking.row.id
        async with context.plane.deciding:
            if not again:
                await context.write(context.catalog.delete, job)
                await context.in_thread(context.folder.forget, job)
            elif checking.row.state == State.VALIDATING:
                await context.plane.apply.happened(checking, Event.REFUSED, error.message)
            else:
                await context.plane.apply.happened(checking, Event.WORKERS_GONE)


async def _outcome(checking: Checking) -> None:
    """Wait until an input was checked; raise what it was refused for."""
    await checking.ended.wait()
    if checking.refused is not None:
        raise checking.refused


async def _model(name: str, request: JobRequest, config: Config) -> ModelSpec:
    """Return the model that `name` stands for now, with the user's own word for it among those that records may use."""
    model = await resolve(name, config, request.ignore_record_model, _Patience())
    if request.typed:
        fits = model.fits if model.fits is None else model.fits | {request.typed}
        model = msgspec.structs.replace(model, typed=request.typed, fits=fits)
    return model


def _digest(request: JobRequest, sha256: str) -> str:
    """Return what tells a request from another that would make a different job; what is for showing counts not."""
    asked = asdict(request)
    default = asdict(JobRequest(upload=""))
    given = {key: value for key, value in sorted(asked.items()) if value != default[key] and key not in _SHOWN}
    return hashlib.sha256(msgspec.json.encode([given | {"upload": sha256}])).hexdigest()


class _Patience:
    """Waits for an endpoint a few times, then gives up."""

    def __init__(self) -> None:
        self._tries = 0

    async def __call__(self, problem: str) -> None:
        self._tries += 1
        if self._tries >= _ENDPOINT_TRIES:
            raise OperationError(f"the model's server does not answer: {problem}", "start it, then submit again")
        await asyncio.sleep(_ENDPOINT_PAUSE_S)


async def _pause(stopping: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
    raise Interrupted("the service is ending")


def _check_options(request: JobRequest) -> None:
    for field, value in asdict(request).items():
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise UserError(f"{field} is not valid Unicode", "correct the request") from None
    if request.name is not None:
        check_name(request.name)
    if request.output is not None and not Path(request.output).is_absolute():
        raise UserError(f"the output folder {request.output} is not absolute", "name it from / on")
    if request.pool != "local":
        raise UserError(f"there is no pool {request.pool}", "pools: local")
    for name, (least, most) in _RANGES.items():
        value = getattr(request, name)
        if value is not None and not least <= value <= most:
            raise UserError(f"{name} is {value}", f"{name} must be from {least:g} to {most:g}")


def _check_output(folder: Path, name: str) -> None:
    """Raise UserError for a folder into which the results file could not go."""
    with refusing(f"cannot write results into {folder}", "choose another folder for --output"):
        if not folder.is_dir():
            raise UserError(f"the output folder {folder} does not exist", f"make it first: mkdir -p {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"cannot write to the output folder {folder}", "choose another for --output")
        with tempfile.TemporaryFile(dir=folder):
            pass  # Some folders that may be written to take no file all the same.
        if os.path.lexists(folder / name):
            raise UserError(f"{folder / name} exists", "move it away, or choose another folder or name")
