"""Jobs of the service as they lie on disk: putting them in the queue, opening them, closing them."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec

from freight.control.below import FileBelow
from freight.control.context import Context
from freight.control.destination import Destination, FileAt
from freight.control.dispatcher import Dispatcher
from freight.control.inputs import InputFile
from freight.control.intake import Index
from freight.control.jobrun import JobOptions, JobRun, launch_of
from freight.control.placing import gpus_of, need_of
from freight.control.resolve import ENV_IDENTITY, NO_ENV, env_digest
from freight.control.twins import count_twins
from freight.control.waiting import WaitingJob
from freight.core.device import Device
from freight.core.facility import FACILITY, INPUT_FILE, OUTPUT_FOLDER, file_names, folder_name
from freight.core.job import Totals, running_s
from freight.core.model import ModelSpec
from freight.core.view import JobRequest
from freight.errors import FreightError, OperationError, UserError
from freight.store.database import STORAGE_ERRORS, Sharing
from freight.store.rows import JobRow

# In what is kept of a job: the granted root that its results go below.
OUTPUT_ROOT: Final = "output_root"


def spec_of(
    request: JobRequest,
    model: ModelSpec,
    sha256: str,
    size: int,
    most_records: int | None = None,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what the catalog keeps of a request, whose input may have `most_records`; `more` is what its API adds."""
    limit = {} if most_records is None else {"most_records": most_records}
    return limit | {
        **({"more": more} if more else {}),
        "request": asdict(request) | {"upload": ""},
        "model": kept_model(model),
        "input": {"bytes": size, "sha256": sha256},
    }


def kept_model(model: ModelSpec) -> dict[str, Any]:
    """Return a model as the catalog keeps it: without the values of its variables, which may be secrets."""
    return msgspec.to_builtins(msgspec.structs.replace(model, entry=msgspec.structs.replace(model.entry, env={})))


def more_of(row: JobRow) -> dict[str, Any]:
    """Return what the API that a job came by keeps about it."""
    return row.spec.get("more", {})


def request_of(row: JobRow) -> JobRequest:
    """Return what a job was asked for by."""
    return JobRequest(**row.spec["request"])


def model_of(row: JobRow) -> ModelSpec:
    """Return the model that a job runs on, as it was when the job was submitted, but for its entry's variables."""
    return msgspec.convert(row.spec["model"], ModelSpec)


def options_of(row: JobRow, model: ModelSpec, devices: Sequence[Device]) -> JobOptions:
    """Return how a job is to be run on a machine with these devices."""
    request = request_of(row)
    gpus = gpus_of(model, request.gpus, devices)
    return JobOptions(
        request.workers,
        request.timeout_s,
        request.record_timeout_s,
        request.concurrency,
        gpus,
        request.order,
        request.dedupe,
    )


def output_of(row: JobRow) -> Path | None:
    """Return where a job's results file goes at its end, None where it stays here until it is fetched."""
    if row.api == FACILITY:
        more = more_of(row)
        folder = folder_name(more[INPUT_FILE], request_of(row).model or "", row.id)
        return Path(more[OUTPUT_FOLDER]) / folder / file_names(more[INPUT_FILE], row.created_at)[0]
    output = request_of(row).output
    return Path(output) / results_name(row.name or "") if output else None


def results_name(job: str) -> str:
    """Return what the results file of a job of that name is called."""
    return f"{job}-results.jsonl"


def progress_of(row: JobRow) -> Path | None:
    """Return where a job's progress file is, None for a job that has none."""
    output = output_of(row) if row.api == FACILITY else None
    return output.with_name(file_names(more_of(row)[INPUT_FILE], row.created_at)[1]) if output else None


class Shelf:
    """Takes jobs from the disk to the control plane's queue and back."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # One for each job, so that all who write there know of each other.
        self._below: WeakValueDictionary[str, FileBelow] = WeakValueDictionary()

    def destination(self, row: JobRow) -> Destination | None:
        """Return where a job's results file goes, None where it stays here."""
        output, root = output_of(row), more_of(row).get(OUTPUT_ROOT)
        if output is None:
            return None
        if root is None:
            return FileAt(output, output.with_name(f".{output.name}.{row.id[:8]}.partial"))
        found = self._below.get(row.id)
        if found is None:
            progress = progress_of(row)
            mode = int(self._context.settings()["facility.output_mode"], 8)
            beside = progress.name if progress else ""
            found = FileBelow(Path(root), output.parent, output.name, beside, mode, row.id)
            self._below[row.id] = found
        return found

    async def enqueue(self, row: JobRow) -> None:
        """Put a job that is in no final state into the queue; what cannot be read is left to fail there."""
        self.put(await self.waiting(row))

    def put(self, waiting: WaitingJob) -> None:
        """Put a job into the queue."""
        self._context.plane.roster.waiting[waiting.row.id] = waiting
        self._context.plane.changed()

    async def waiting(self, row: JobRow) -> WaitingJob:
        """Return a job as it stands in the queue."""
        events = await self._context.look(self._context.reader.events, row.id)
        ran_s = running_s([(e.at, e.event, e.state) for e in events], time.time())
        return await self._context.in_thread(self._waiting, row, ran_s)

    def _waiting(self, row: JobRow, ran_s: float) -> WaitingJob:
        model = model_of(row)
        options = options_of(row, model, self._context.devices)
        need = need_of(model, options.gpus)
        waiting = WaitingJob(row, model, options, "", Totals(), row.records or 0, ran_s, self.open, need)
        try:
            waiting.model = model = self._with_variables(model)
        except FreightError as error:
            waiting.failure = error.message
            return waiting
        try:
            index = Index.load(self._context.folder.index(row.id))
            waiting.launch = launch_of(model, index.endpoints_used(), options.concurrency, options.gpus)
            results = self._context.folder.open_results(row.id, Sharing.READER)
            try:
                waiting.totals = results.totals(row.retried)
                left = ~results.settled(index.records, row.retried)
                waiting.left, waiting.twins = int(left.sum()), count_twins(index.firsts, left)
            finally:
                results.close()
        except (OperationError, *STORAGE_ERRORS) as error:
            waiting.failure = f"the job's files cannot be read: {error}"
        return waiting

    def _with_variables(self, model: ModelSpec) -> ModelSpec:
        """Return a model with its entry's variables, which are never kept here; raise UserError when they changed."""
        digest = model.identity.get(ENV_IDENTITY, NO_ENV)
        if digest == NO_ENV:
            return model
        entry = self._context.settings().models.get(model.name)
        if entry is None or env_digest(entry.env) != digest:
            raise UserError(
                f"the variables (env) of model {model.name} are not those that the job was submitted with",
                "put them back and resume the job, or submit it anew",
            )
        return msgspec.structs.replace(model, entry=msgspec.structs.replace(model.entry, env=entry.env))

    async def open(self, waiting: WaitingJob) -> JobRun:
        """Return a job ready to be worked on."""
        return await self._context.in_thread(self._open, waiting)

    def _open(self, waiting: WaitingJob) -> JobRun:
        context, row = self._context, waiting.row
        request = request_of(row)
        index = Index.load(context.folder.index(row.id))
        file = InputFile(context.folder.input(row.id), request.file or "the input")
        if not context.folder.has_results(row.id):
            raise OperationError(f"the results of job {row.name} are gone from {context.folder.job(row.id)}")
        results = context.folder.open_results(row.id, Sharing.WRITER)
        try:
            dispatcher = Dispatcher(file, index, results, row, context.writer, context.threads)
        except BaseException:
            file.close()
            results.close()
            raise
        return JobRun(
            row, file, index, results, dispatcher, waiting.model, waiting.options, context.limits,
            context.folder.job(row.id), self.destination(row), False, waiting.ran_s,
        )  # fmt: skip

    async def close(self, job: JobRun) -> None:
        """Close the files of a job that has come to a final state."""
        await job.dispatcher.close()
        job.file.close()
        await self._context.write(job.results.close)
