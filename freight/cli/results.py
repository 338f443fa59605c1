"""`freight batch results`: a job's results, into a file."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from freight.cli.parameters import job_argument, service_options
from freight.cli.service import Service
from freight.cli.text import TerminalText, counted
from freight.client.saving import writable_path
from freight.core.job import FINAL
from freight.core.view import JobStatus
from freight.errors import UserError, WrongState

if TYPE_CHECKING:
    from freight.client.sync import Client


@click.command()
@job_argument
@click.option("-o", "--output", metavar="FILE", help="Where to write them. [default: NAME-results.jsonl]")
@click.option("--stdout", "to_stdout", is_flag=True, help="Print them instead.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@click.option("--only", type=click.Choice(["ok", "failed"]), help="Only answered, or only failed records.")
@click.option("--partial", is_flag=True, help="Of a job that has not ended, what there is so far.")
@service_options(starts=True)
def results(
    name: str, output: str | None, to_stdout: bool, force: bool, only: str | None, partial: bool, service: Service
) -> None:
    """Write the results of the job NAME to a file, one line a record, in the order sent.

    The file appears whole or not at all.

    Exit status: 1 the job has not ended, or the transfer broke; 2 the file exists; 3 no such job.
    """
    if to_stdout and (output is not None or force):
        raise UserError("--stdout writes no file, so that -o and --force have no effect", "leave one out")
    if output == "-":
        raise UserError("-o - : this would be a file named '-'", "use --stdout to print the results")
    if output is not None:
        writable_path(output, force)  # What can be refused at once is.
    with service.connect() as client:
        job = client.job(name)
        if job.state not in FINAL and not partial:
            raise WrongState(
                f"job {job.name} is {job.state}: {_count(job)} done",
                f"freight batch wait {job.name}, or --partial for what there is so far",
            )
        if to_stdout:
            _print(client, job, only, partial)
        else:
            path = output or f"{job.name}-results.jsonl"
            done = client.save_results(job.id, path, only=only, partial=partial, force=force)
            click.echo(f"wrote {path}: {_what(job, done, only, partial)}", err=True)


def _print(client: "Client", job: JobStatus, only: str | None, partial: bool) -> None:
    with client.results(job.id, only, partial) as stream:
        if partial and job.state not in FINAL:
            click.echo(_what(job, stream.done, only, partial), err=True)
        shown: Iterator[bytes] = stream.chunks()
        if sys.stdout.isatty():
            shown = TerminalText().cleaned(shown)
        for chunk in shown:
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def _what(job: JobStatus, done: int, only: str | None, partial: bool) -> str:
    kind = f"; of these, those that {'failed' if only == 'failed' else 'were answered'}" if only else ""
    if partial and job.state not in FINAL:
        return f"{done} of {'?' if job.records is None else job.records} records so far{kind}"
    failed = f", {job.failed} failed" if job.failed else ""
    return f"{counted(job.records or 0, 'record')}{failed}{kind}"


def _count(job: JobStatus) -> str:
    return f"{job.done} of {job.records} records" if job.records is not None else "no record"
