"""`freight batch cancel`, `resume`, `retry` and `delete`."""

import sys

import click

from freight.cli.parameters import job_argument, service_options
from freight.cli.service import Service
from freight.cli.text import counted
from freight.core.job import FINAL, State
from freight.core.view import JobStatus
from freight.errors import OperationError, UserError, WrongState


@click.command()
@job_argument
@service_options(starts=True)
def cancel(name: str, service: Service) -> None:
    """Stop the job NAME. Results so far are kept; to do it again changes nothing.

    Returns at once. The job is CANCELLING until none of its requests runs and its workers have ended.

    Exit status: 1 the job has ended; 3 no such job.
    """
    with service.connect() as client:
        job = client.cancel(name)
    state, option = ("cancelled", "") if job.state == State.CANCELLED else ("cancelling", " --partial")
    click.echo(f"{job.name}: {state}; results so far are kept: freight batch results {job.name}{option}", err=True)


@click.command()
@job_argument
@service_options(starts=True)
def resume(name: str, service: Service) -> None:
    """Go on with the job NAME, which was cancelled, failed or timed out: only its unfinished records run.

    Exit status: 1 the job's state does not allow it; 3 no such job.
    """
    with service.connect() as client:
        _say_goes_on(client.resume(name))


@click.command()
@job_argument
@service_options(starts=True)
def retry(name: str, service: Service) -> None:
    """Run those records of the job NAME again that ended in an error; answers stay as they are.

    Records that were refused at intake stay so, too.

    Exit status: 1 the job has not ended, or no record failed; 3 no such job.
    """
    with service.connect() as client:
        _say_goes_on(client.retry(name))


@click.command()
@job_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@service_options(starts=True)
def delete(name: str, yes: bool, service: Service) -> None:
    """Delete the finished job NAME, with its input and results. Files that were written out stay.

    Exit status: 1 the job has not ended; 2 no -y where nobody can be asked; 3 no such job.
    """
    if not yes and not sys.stdin.isatty():
        raise UserError(f"to delete job {name} needs a yes, and there is no terminal to ask on", "use -y")
    with service.connect() as client:
        job = client.job(name)
        if job.state not in FINAL:
            raise WrongState(
                f"job {job.name} is {job.state}; only a job that has ended can be deleted",
                f"freight batch cancel {job.name}, and wait until it has ended",
            )
        what = f"job {job.name} ({job.state}), its input of {job.bytes} bytes and {counted(job.done, 'result')}"
        if not yes and not click.confirm(f"delete {what}?", err=True):
            raise OperationError("nothing was deleted")
        client.delete(job.id)
    click.echo(f"deleted {what}", err=True)


def _say_goes_on(job: JobStatus) -> None:
    left = f", {counted(job.records - job.done, 'record')} to run" if job.records is not None else ""
    click.echo(f"{job.name}: {job.state}{left}; wait for it with: freight batch wait {job.name}", err=True)
