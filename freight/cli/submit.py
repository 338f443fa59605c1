"""`freight batch submit`: a file becomes a job of the service."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from freight.cli.parameters import job_options, json_option, model_option, service_options
from freight.cli.service import Service
from freight.cli.text import counted
from freight.client.calls import NAME_RULE, ConnectionLost, JobOptions, check_key, is_name, job_request
from freight.core.view import JobRequest, Submitted
from freight.errors import Interrupted, OperationError, UserError, refusing

if TYPE_CHECKING:
    from freight.client.sync import Client
    from freight.control.inputs import InputFile


@click.command()
@click.argument("file", type=click.Path())
@model_option(
    "A registered model, a .gguf file, or the URL of a server that runs. "
    "[default: the first record's, if it is registered, or the default model]"
)
@click.option("--name", metavar="N", help="The job's name. [default: a readable one is made]")
@click.option("--pool", default="local", metavar="P", help="Where its workers run. [default: local]")
@job_options(workers="1")
@click.option("--priority", type=int, default=0, metavar="N", help="Higher goes first in the queue. [default: 0]")
@click.option(
    "--output", type=click.Path(), metavar="DIR", help="A folder of the service's machine for the results file, too."
)
@click.option("--notify", metavar="URL", help="The service tells this URL of the job's end, by a webhook.")
@click.option("--wait", is_flag=True, help="Wait until the job has ended, and exit as `wait` does.")
@click.option("--fail-on-errors", is_flag=True, help="With --wait: exit with 6 when any record failed.")
@click.option("--idempotency-key", metavar="K", help="Asking again with the same key gives the first job back.")
@click.option("-q", "--quiet", is_flag=True, help="Print the job's name alone.")
@json_option
@service_options(starts=True)
def submit(
    file: str, wait: bool, fail_on_errors: bool, idempotency_key: str | None, quiet: bool, as_json: bool,
    service: Service, **options: Any,
) -> int:  # fmt: skip
    """Send FILE (JSON Lines; - for standard input) to the service and make a job of it; print the job's name.

    The first twenty records are checked before anything is sent, the whole file by the service before the job
    is made. Without --wait the job goes on by itself.

    Exit status: 0 the job is made; 2 refused, and nothing was made. With --wait that of `freight batch wait`:
    1 the job failed, was cancelled or timed out; 6 records failed and --fail-on-errors; 130 interrupted.
    """
    _check_usage(options["name"], idempotency_key, quiet and as_json, fail_on_errors and not wait)
    say = _silent if quiet else _note
    with ExitStack() as stack:
        source = _Input(file, stack, say)
        request = job_request("", source.shown, _job_options(options))
        client = stack.enter_context(service.connect())
        submitted = _submit(client, source, request, idempotency_key)
        _report(submitted, source.said, quiet, as_json, wait)
        if not wait:
            return 0
        from freight.cli.waiting import wait_and_report

        return wait_and_report(client, submitted.job.id, None, fail_on_errors)


def _check_usage(name: str | None, key: str | None, is_quiet_json: bool, fails_without_wait: bool) -> None:
    if is_quiet_json:
        raise UserError("--json and --quiet do not go together", "leave one out")
    if fails_without_wait:
        raise UserError("--fail-on-errors has no effect without --wait", "add --wait, or leave it out")
    check_key(key)
    if name is not None and not is_name(name):
        raise UserError(f"--name {name!r} cannot name a job", f"use {NAME_RULE}")


def _job_options(options: dict[str, Any]) -> JobOptions:
    given: dict[str, Any] = {key: value for key, value in options.items() if not key.endswith("timeout")}
    given |= {"workers": options["workers"] or 1}
    for key in ("timeout", "record_timeout"):
        given[f"{key}_s"] = options[key] or 0.0
    return JobOptions(**given)


class _Input:
    """What is sent, its first records looked at."""

    def __init__(self, file: str, stack: ExitStack, say: Callable[[str], None]) -> None:
        # Imported here, so that --help stays fast.
        from freight.cli.settings import settings
        from freight.cli.spool import Spool
        from freight.control.inputs import InputFile, is_stream

        limit: int = settings()["limits.record_bytes"]
        self.shown = "standard input" if file == "-" else file
        # The note on the first records, "" for none.
        self.said = ""
        self.file: InputFile | None = None
        self._spool: Spool | None = None
        if file != "-" and not is_stream(Path(file)):
            if not file:
                raise UserError("the input has no name", "name a JSON Lines file, or - for standard input")
            self.file = InputFile(Path(file), file)
            stack.callback(self.file.close)
            self.said = _look(self.file, limit, say)
            return
        source = sys.stdin.fileno() if file == "-" else _open_stream(file, stack)
        if os.isatty(source):
            _note("reading records from the terminal; end with Ctrl-D")
        with refusing(f"cannot read {self.shown}", "name a JSON Lines file, or - for standard input"):
            try:
                self._spool = Spool(source)
            except KeyboardInterrupt:
                raise Interrupted(f"interrupted while {self.shown} was read; nothing was submitted") from None
        with self._spool.sample(self.shown) as head:
            if head is not None:
                self.said = _look(head, limit, say)

    @property
    def size(self) -> int | None:
        """How many bytes there are; None for a stream."""
        return self.file.size if self.file else None

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes; raise OperationError when the file is no longer what it was."""
        if self._spool is not None:
            yield from self._spool.chunks()
        elif self.file is not None:
            from freight.client.outgoing import pieces

            try:
                yield from pieces(self.file.reader(), self.file.size)
            except OperationError:
                self.check_unchanged()  # That it changed says more than that it is short.
                raise

    def check_unchanged(self) -> None:
        """Raise OperationError when the file is no longer what it was."""
        if self.file is None:
            return
        try:
            self.file.check_unchanged()
        except OperationError as error:
            raise OperationError(
                f"{self.shown} changed while it was sent; nothing was submitted", "submit it again"
            ) from error


def _open_stream(file: str, stack: ExitStack) -> int:
    with refusing(f"cannot read the input {file}", "name a JSON Lines file, or - for standard input"):
        source = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, source)
    return source


def _look(file: "InputFile", limit: int, say: Callable[[str], None]) -> str:
    """Refuse a file that is not worth sending; say what is worth noting of its first records, and return it."""
    from freight.control.inputs import inspect

    note = inspect(file, limit).budget_note()
    if note:
        say(note)
    return note


def _submit(client: "Client", source: _Input, request: JobRequest, key: str | None) -> Submitted:
    try:
        upload = client.upload(source.chunks(), source.size)
        try:
            source.check_unchanged()
        except OperationError:
            client.drop_upload(upload.id)
            raise
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted while {source.shown} was sent; nothing was submitted") from None
    except ConnectionLost as error:
        raise OperationError(f"{error.message}; nothing was submitted", "submit it again") from error
    try:
        return client.create(replace(request, upload=upload.id), idempotency_key=key)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted while the service checked the input; it may make the job all the same", "freight batch list"
        ) from None


def _report(submitted: Submitted, said: str, quiet: bool, as_json: bool, waits: bool) -> None:
    job = submitted.job
    if as_json:
        from freight.cli.tables import print_json

        print_json(submitted)
    else:
        click.echo(job.name)
    sys.stdout.flush()
    if quiet:
        return
    for text in submitted.notes:
        if text != said:  # The service looks at the records, too.
            _note(text)
    found = "" if submitted.is_new else " (made before, with the same idempotency key)"
    records = f", {counted(job.records, 'record')}" if job.records is not None else ""
    what_next = "" if waits else f"; wait for it with: freight batch wait {job.name}"
    _note(f"{job.name}: {job.state}{records}{found}{what_next}")


def _note(text: str) -> None:
    from freight.cli.text import printable

    click.echo(printable(text), err=True)


def _silent(text: str) -> None:
    pass
