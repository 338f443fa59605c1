"""Reading the inputs of submitted jobs: every line is checked, and the job goes into the queue or is refused."""

import asyncio
import logging
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import msgspec

from freight.control.batchterms import Faults, check_read, rules_for, with_refusal
from freight.control.checks import intake_limits, intake_rules, listing
from freight.control.context import Checking, Context
from freight.control.inputs import InputFile
from freight.control.intake import Index, Problem, Wishes, scan
from freight.control.jobrun import counts_of
from freight.control.shelf import Shelf, model_of, request_of
from freight.core.job import Event, State, Totals
from freight.errors import FreightError, Interrupted, OperationError, UserError
from freight.store.database import Sharing, StorageFull
from freight.store.rows import JobRow

log = logging.getLogger("freight.service")

_FULL_RETRY_S: Final = 5.0


class Reading:
    """Reads inputs, each by a task of its own."""

    def __init__(self, context: Context, shelf: Shelf) -> None:
        self._context = context
        self._shelf = shelf
        self._reading: set[asyncio.Task[None]] = set()

    def begin(self, row: JobRow, again: bool = False) -> Checking:
        """Begin to read the input of a job that is in VALIDATING; `again`: nobody waits for the outcome."""
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
        faults = Faults()

        def keep(problems: list[Problem]) -> None:
            if request.strict:
                strict.extend(problems)
            else:
                context.writer.submit(results.put, [problem.line() for problem in problems], 0).result()
            faults.add(problems)

        file = None
        try:
            file = InputFile(context.folder.input(row.id), request.file or "the input")
            rules = rules_for(row, intake_rules(config, model_of(row)))
            limits = replace(intake_limits(config), records=row.spec.get("most_records"))
            wishes = Wishes(request.order == "auto", request.dedupe)
            index = scan(file, rules, limits, keep, context.stopping.is_set, wishes)
            if strict:
                raise UserError(listing(file.shown, strict), "correct these lines, or leave out --strict")
            check_read(row, index, faults)
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
                await self._keep_refusal(checking, error)
                await context.plane.apply.happened(checking, Event.REFUSED, error.message)
            else:
                await context.plane.apply.happened(checking, Event.WORKERS_GONE)

    async def _keep_refusal(self, checking: Checking, error: FreightError) -> None:
        """Keep what an input was refused for where its API tells more about that than the reason."""
        spec = with_refusal(checking.row, error)
        if spec is not None:
            with suppress(StorageFull):  # The reason is told all the same.
                await self._context.write(self._context.catalog.set_spec, checking.row.id, spec)
            checking.row = msgspec.structs.replace(checking.row, spec=spec)


async def outcome_of(checking: Checking) -> None:
    """Wait until an input was checked; raise what it was refused for."""
    await checking.ended.wait()
    if checking.refused is not None:
        raise checking.refused


async def _pause(stopping: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
    raise Interrupted("the service is ending")
