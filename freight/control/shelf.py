"""Jobs of the service as they lie on disk: putting them in the queue, opening them, closing them."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from freight.control.context import Context
from freight.control.dispatcher import Dispatcher
from freight.control.inputs import InputFile
from freight.control.intake import Index
from freight.control.jobrun import JobOptions, JobRun, launch_of
from freight.control.placing import gpus_of, need_of
from freight.control.resolve import ENV_IDENTITY, NO_ENV, env_digest
from freight.control.waiting import WaitingJob
from freight.core.device import Device
from freight.core.job import Totals, running_s
from freight.core.model import ModelSpec
from freight.core.view import JobRequest
from freight.errors import FreightError, OperationError, UserError
from freight.store.catalog import JobRow
from freight.store.database import STORAGE_ERRORS, Sharing


def spec_of(request: JobRequest, model: ModelSpec, sha256: str, size: int) -> dict[str, Any]:
    """Return what the catalog keeps of a request."""
    return {
        "request": asdict(request) | {"upload": ""},
        "model": kept_model(model),
        "input": {"bytes": size, "sha256": sha256},
    }


def kept_model(model: ModelSpec) -> dict[str, Any]:
    """Return a model as the catalog keeps it: without the values of its variables, which may be secrets."""
    return msgspec.to_builtins(msgspec.structs.replace(model, entry=msgspec.structs.replace(model.entry, env={})))


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
    return JobOptions(request.workers, request.timeout_s, request.record_timeout_s, request.concurrency, gpus)


def output_of(row: JobRow) -> Path | None:
    """Return where a job's results file goes at its end, None where it stays here until it is fetched."""
    folder = request_of(row).output
    return Path(folder) / f"{row.name}-results.jsonl" if folder else None


class Shelf:
    """Takes jobs from the disk to the control plane's queue and back."""

    def __init__(self, context: Context) -> None:
        self._context = context

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
                waiting.left = index.records - int(results.settled(index.records, row.retried).sum())
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
            context.folder.job(row.id), output_of(row), False, waiting.ran_s,
        )  # fmt: skip

    async def close(self, job: JobRun) -> None:
        """Close the files of a job that has come to a final state."""
        job.file.close()
        await self._context.write(job.results.close)
